"""``pdserve experiment primer``: what textbooks say about KV caches, prefill and decode, measured on this machine.

Every cell drives the engine's model runner directly, in a process of its own on one core or one GPU
(`experiments.engine_alone`). FLOPs and bytes come from the model's shape (`experiments.engine_alone.arithmetic` has the
formulas); the device's product rate and read rate are measured between the samples of every cell.

The ridge batch is measured in two ways. The *doubling batch* is where a decode step takes twice as long as with one
request, interpolated between the measured batches. The *half-saturation batch* comes from the line
``time = fixed + each · batch`` through all batches: at ``fixed ÷ each`` requests the tokens per second are half of what
they approach, ``1 ÷ each``. If reading the weights and computing do not overlap, both are the ridge batch."""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
from pydantic import Field

from checkpoints.source import resolve_model
from experiments.engine_alone.arithmetic import Cost, ModelArithmetic
from experiments.engine_alone.process import measurements
from experiments.engine_alone.program import STEPS, WARM_STEPS, WITH, WITHOUT, Built, Rates, Task, Warm
from experiments.experiment import Bench, Cell, Experiment, Options
from experiments.plots import primer as plots
from experiments.report.page import Report, TableBlock
from experiments.report.setup import setup_of
from experiments.run_folder import FinishedCell, RunData
from experiments.statistics import plain_mean
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import InvalidRequest, ModelError
from pdserve.core.interval import MIN_VALUES, Interval, interval_text

PUBLISHED_CACHE_S = {WITH: 0.334, WITHOUT: 4.05}
PUBLISHED_PROFILE_S = {"prefill": 0.077, "decode": 2.11}
PUBLISHED_ON = "a T4 GPU"
_A100 = "312 TFLOP/s ÷ 1.5 TB/s ≈ 208 on an A100"


class PrimerOptions(Options):
    """Options of `Primer`."""

    device: Literal["cpu", "cuda"] = Field("cpu", description="device of the engine: one core, or the first GPU")
    core: int | None = Field(None, ge=0, description="the core to measure on (default: the first allowed one)")
    repeats: int = Field(6, ge=1, description="how often everything is measured", json_schema_extra={"quick": 6})
    cache_prompt_len: int = Field(
        64, ge=1, description="prompt length of the comparison with and without a KV cache",
        json_schema_extra={"quick": 32},
    )  # fmt: skip
    cache_output_len: int = Field(
        128, ge=2, description="tokens generated in that comparison", json_schema_extra={"quick": 32}
    )
    profile_prompt_len: int = Field(
        512, ge=1, description="prompt length of the profile of prefill and decode", json_schema_extra={"quick": 256}
    )
    profile_output_len: int = Field(
        64, ge=2, description="tokens generated in that profile", json_schema_extra={"quick": 32}
    )
    prefill_lens: tuple[int, ...] = Field(
        (4, 16, 64, 128, 256, 512, 1024),
        description="prompt lengths of the prefills",
        json_schema_extra={"quick": [4, 16, 64, 256]},
    )
    batches: tuple[int, ...] = Field(
        (1, 2, 4, 8, 16, 32, 64),
        description="batch sizes of the decode steps",
        json_schema_extra={"quick": [1, 4, 16, 64]},
    )
    contexts: tuple[int, ...] = Field(
        (64, 256, 1024),
        description="tokens before those of the decode steps",
        json_schema_extra={"quick": [64, 256]},
    )


class Primer(Experiment):
    """See the module."""

    name: ClassVar[str] = "primer"
    question: ClassVar[str] = "What does a KV cache save, and what bounds prefill and decode, on this machine?"
    options_type: ClassVar[type[Options]] = PrimerOptions
    options: PrimerOptions

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """With and without a cache; prefill and decode of one request; prefills; decode steps, one cell per context."""
        options = self.options
        if attached is not None:
            raise InvalidRequest(
                "--target: primer measures an engine of its own on this machine and uses no service; leave it out"
            )
        self._check()
        common = {"model": options.model, "device": options.device}
        cache = {"part": "cache", "prompt_len": options.cache_prompt_len, "output_len": options.cache_output_len}
        profile = {
            "part": "profile",
            "prompt_len": options.profile_prompt_len,
            "output_len": options.profile_output_len,
        }
        repeats = options.repeats + 1  # the warm-up shows as well
        return [
            Cell(f"cache/{cache['prompt_len']}+{cache['output_len']}", {**common, **cache}, None, 2 * repeats),
            Cell(f"profile/{profile['prompt_len']}+{profile['output_len']}", {**common, **profile}, None, repeats),
            Cell(
                "prefill",
                {**common, "part": "prefill", "lengths": list(options.prefill_lens)},
                None,
                len(options.prefill_lens) * repeats,
            ),
            *(
                Cell(
                    f"decode/{context}",
                    {**common, "part": "decode", "context": context, "batches": list(options.batches)},
                    None,
                    len(options.batches) * repeats,
                )
                for context in options.contexts
            ),
        ]

    def _check(self) -> None:
        """InvalidRequest for options that no engine of this model can run."""
        options = self.options
        for option, values in (
            ("--prefill-lens", options.prefill_lens),
            ("--batches", options.batches),
            ("--contexts", options.contexts),
        ):
            if not values or min(values) < 1 or len(set(values)) < len(values):
                raise InvalidRequest(f"{option}: give positive whole numbers, each once")
        if 1 not in options.batches:
            raise InvalidRequest("--batches: 1 has to be among them: the ridge is where a step takes twice as long")
        try:
            limit = resolve_model(options.model).shape.max_position_embeddings
        except ModelError as error:
            raise InvalidRequest(f"--model: {error}") from None
        for option, most in (
            ("--cache-prompt-len", options.cache_prompt_len + options.cache_output_len),
            ("--profile-prompt-len", options.profile_prompt_len + options.profile_output_len),
            ("--prefill-lens", max(options.prefill_lens)),
            ("--contexts", max(options.contexts) + WARM_STEPS + STEPS),
        ):
            if most > limit:
                raise InvalidRequest(f"{option}: {most} tokens exceed the model's context of {limit}")
        allowed = sorted(os.sched_getaffinity(0))
        if options.core is not None and options.core not in allowed:
            raise InvalidRequest(f"--core: {options.core} is none of the cores this process may use: {allowed}")

    async def measure(self, bench: Bench) -> None:
        """Run the cell's task in an engine process, and keep what it writes as facts: ``engine``, ``ceilings``,
        ``samples``."""
        options = self.options
        core = min(os.sched_getaffinity(0)) if options.core is None else options.core
        task = msgspec.convert(
            {
                **bench.cell.parameters,
                "core": core if options.device == "cpu" else None,
                "repeats": options.repeats,
                "seed": options.seed,
            },
            Task,
        )
        facts: dict[str, Any] = {"ceilings": [], "samples": []}
        async with aclosing(measurements(task)) as messages:
            async for message in messages:
                match message:
                    case Built():
                        facts["engine"] = msgspec.structs.asdict(message)
                    case Rates():
                        facts["ceilings"].append(msgspec.structs.asdict(message))
                    case Warm():
                        bench.advance(1)
                    case _:
                        facts["samples"].append(msgspec.structs.asdict(message))
                        bench.advance(1)
        bench.facts |= facts

    def summarise(self, run: RunData) -> dict[str, Any]:
        """``machine``: ``device``, ``dtype``, ``core``, ``threads``, ``chunk`` (tokens of a prompt per step),
        ``weight_bytes`` (read by each step), ``last_cache_bytes``, ``peak_gflops``, ``read_gbs``,
        ``ridge_flops_per_byte``, ``ridge_batch``.

        ``kv_cache``: ``prompt_len``, ``output_len``; by arm (``with``, ``without``) ``total_s``, ``token_ms``,
        ``gflop``; ``speedup``; ``tokens_equal_pct`` (before the first that differs); ``published_s``. ``profile``:
        the same lengths; by phase ``total_s``, ``token_ms`` and the fields of a step.

        ``prefill`` and ``decode``, one per step: ``tokens``, or ``batch`` and ``context``; ``time_ms``,
        ``tokens_per_s``; ``gflop``, ``megabytes``, ``intensity``; ``reached_gflops``, ``reached_gbs``; ``roof_ms``
        (least time), ``added_ms`` (time without overlap), ``of_roof_pct``, ``bound``.

        ``ridge``, one per ``context``: ``formula_batch``, ``predicted_doubling_batch``, ``doubling_batch`` (null if a
        repeat did not double up to ``largest_batch``), ``half_saturation_batch``, ``fixed_ms``, ``each_ms``,
        ``saturated_tokens_per_s`` (null without a rising line).

        A part whose cell is missing in an interrupted run is null or empty."""
        seed = self.options.seed
        machine = _machine(run.cells, seed)
        arithmetic = ModelArithmetic.from_dict(run.cells[0].facts["engine"]["arithmetic"])
        parts: dict[str, list[FinishedCell]] = {}
        for cell in run.cells:
            parts.setdefault(cell.parameters["part"], []).append(cell)
        cache, profile, prefill = (parts.get(part, [None])[0] for part in ("cache", "profile", "prefill"))
        decode = sorted(parts.get("decode", []), key=lambda cell: int(cell.parameters["context"]))
        kv_cache = None if cache is None else _kv_cache(cache, arithmetic, seed)
        return {
            "experiment": self.name,
            "machine": machine,
            "kv_cache": kv_cache,
            "profile": None if profile is None else _profile(profile, arithmetic, machine, seed),
            "prefill": [] if prefill is None else _prefills(prefill, arithmetic, machine, seed),
            "decode": [point for cell in decode for point in _decodes(cell, arithmetic, machine, seed)],
            "ridge": [_ridge(cell, arithmetic, machine, seed) for cell in decode],
            "failed": [],
        }

    def report(self, run: RunData, summary: Mapping[str, Any]) -> Report:
        """With and without a cache, prefill beside decode, step times, tokens per second, roofline, and tables."""
        report = Report(
            title="Prefill, decode and the KV cache on this machine",
            question=self.question,
            answer=_answer(summary),
            setup=[*setup_of(run, _method(self.options)), *_engine_rows(summary)],
            caveats=_caveats(summary),
            failures=summary["failed"],
        )
        if summary["kv_cache"] is not None:
            report.blocks.append(plots.with_and_without(summary["kv_cache"]))
        if summary["profile"] is not None:
            report.blocks.append(plots.phases(summary["profile"]))
        if summary["decode"]:
            report.blocks += [plots.step_time(summary), plots.saturation(summary)]
        if summary["prefill"] or summary["decode"]:
            report.blocks += [plots.roofline(summary), _steps_table(summary)]
        if summary["ridge"]:
            report.blocks.append(_ridge_table(summary))
        return report


def _machine(cells: Sequence[FinishedCell], seed: int) -> dict[str, Any]:
    engine = cells[0].facts["engine"]
    arithmetic = ModelArithmetic.from_dict(engine["arithmetic"])
    ceilings = [each for cell in cells for each in cell.facts["ceilings"]]
    flops, read = (plain_mean([each[key] / 1e9 for each in ceilings], seed) for key in ("flops_per_s", "bytes_per_s"))
    return {
        "device": engine["device"],
        "dtype": engine["dtype"],
        "core": engine["core"],
        "threads": engine["threads"],
        "chunk": engine["chunk"],
        "weight_bytes": arithmetic.weight_bytes,
        "last_cache_bytes": engine["last_cache_bytes"],
        "peak_gflops": flops,
        "read_gbs": read,
        "ridge_flops_per_byte": round(flops["mean"] / read["mean"], 3),
        "ridge_batch": round(arithmetic.ridge_batch(flops["mean"], read["mean"]), 3),
    }


def _kv_cache(cell: FinishedCell, arithmetic: ModelArithmetic, seed: int) -> dict[str, Any]:
    arms: dict[str, dict[int, Mapping[str, Any]]] = {WITH: {}, WITHOUT: {}}
    for sample in cell.facts["samples"]:
        arms[sample["arm"]][sample["repeat"]] = sample
    pairs = [(arms[WITH][repeat], arms[WITHOUT][repeat]) for repeat in sorted(arms[WITH].keys() & arms[WITHOUT])]
    prompt, output = int(cell.parameters["prompt_len"]), int(cell.parameters["output_len"])
    chunk = cell.facts["engine"]["chunk"]
    cached = arithmetic.prefill(prompt, chunk)
    for context in range(prompt, prompt + output - 1):
        cached += arithmetic.decode(1, context)
    uncached = Cost(0.0, 0.0)
    for length in range(prompt, prompt + output):
        uncached += arithmetic.prefill(length, chunk)
    return {
        "prompt_len": prompt,
        "output_len": output,
        "total_s": {
            arm: plain_mean([sum(pair[index]["times_s"]) for pair in pairs], seed)
            for index, arm in enumerate((WITH, WITHOUT))
        },
        "speedup": plain_mean([sum(b["times_s"]) / sum(a["times_s"]) for a, b in pairs], seed),
        "token_ms": {
            arm: [
                round(1e3 * statistics.fmean(times), 4)
                for times in zip(*(pair[index]["times_s"] for pair in pairs), strict=True)
            ]
            for index, arm in enumerate((WITH, WITHOUT))
        },
        "gflop": {WITH: round(cached.flops / 1e9, 4), WITHOUT: round(uncached.flops / 1e9, 4)},
        "tokens_equal_pct": round(100 * statistics.fmean(_equal_part(a, b) for a, b in pairs), 2),
        "published_s": PUBLISHED_CACHE_S,
    }


def _equal_part(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """The part of the tokens before the first one that differs."""
    pairs = list(zip(a["token_ids"], b["token_ids"], strict=True))
    same = next((number for number, (x, y) in enumerate(pairs) if x != y), len(pairs))
    return same / len(pairs)


def _profile(cell: FinishedCell, arithmetic: ModelArithmetic, machine: Mapping[str, Any], seed: int) -> dict[str, Any]:
    samples = cell.facts["samples"]
    prompt, output = int(cell.parameters["prompt_len"]), int(cell.parameters["output_len"])
    prefill = arithmetic.prefill(prompt, cell.facts["engine"]["chunk"])
    decode = Cost(0.0, 0.0)
    for context in range(prompt, prompt + output - 1):
        decode += arithmetic.decode(1, context)
    prefill_s, decode_s = ([float(sample[key]) for sample in samples] for key in ("prefill_s", "decode_s"))
    return {
        "prompt_len": prompt,
        "output_len": output,
        "total_s": {"prefill": plain_mean(prefill_s, seed), "decode": plain_mean(decode_s, seed)},
        "token_ms": {
            "prefill": plain_mean([1e3 * each / prompt for each in prefill_s], seed),
            "decode": plain_mean([1e3 * each / (output - 1) for each in decode_s], seed),
        },
        "phases": {
            "prefill": _against_roof(prefill, statistics.fmean(prefill_s), machine),
            "decode": _against_roof(decode, statistics.fmean(decode_s), machine),
        },
        "published_s": PUBLISHED_PROFILE_S,
    }


def _prefills(
    cell: FinishedCell, arithmetic: ModelArithmetic, machine: Mapping[str, Any], seed: int
) -> list[dict[str, Any]]:
    points = []
    for tokens, times_s in _by(cell, "tokens").items():
        cost = arithmetic.prefill(tokens, cell.facts["engine"]["chunk"])
        points.append(
            {
                "tokens": tokens,
                "time_ms": plain_mean([1e3 * each for each in times_s], seed),
                "tokens_per_s": plain_mean([tokens / each for each in times_s], seed),
                **_against_roof(cost, statistics.fmean(times_s), machine),
            }
        )
    return points


def _decodes(
    cell: FinishedCell, arithmetic: ModelArithmetic, machine: Mapping[str, Any], seed: int
) -> list[dict[str, Any]]:
    context = int(cell.parameters["context"])
    return [
        {
            "batch": batch,
            "context": context,
            "time_ms": plain_mean([1e3 * each for each in times_s], seed),
            "tokens_per_s": plain_mean([batch / each for each in times_s], seed),
            **_against_roof(arithmetic.decode(batch, context), statistics.fmean(times_s), machine),
        }
        for batch, times_s in _by(cell, "batch").items()
    ]


def _against_roof(cost: Cost, time_s: float, machine: Mapping[str, Any]) -> dict[str, Any]:
    """FLOPs, bytes and intensity; the rates that were reached; the time at the roof, and without overlap."""
    flops_per_s, bytes_per_s = machine["peak_gflops"]["mean"] * 1e9, machine["read_gbs"]["mean"] * 1e9
    return {
        "gflop": round(cost.flops / 1e9, 6),
        "megabytes": round(cost.num_bytes / 1e6, 6),
        "intensity": round(cost.intensity, 4),
        "reached_gflops": round(cost.flops / time_s / 1e9, 4),
        "reached_gbs": round(cost.num_bytes / time_s / 1e9, 4),
        "roof_ms": round(1e3 * cost.roof_s(flops_per_s, bytes_per_s), 5),
        "added_ms": round(1e3 * cost.added_s(flops_per_s, bytes_per_s), 5),
        "of_roof_pct": round(100 * cost.roof_s(flops_per_s, bytes_per_s) / time_s, 2),
        "bound": "compute" if cost.intensity > flops_per_s / bytes_per_s else "memory",
    }


def _ridge(cell: FinishedCell, arithmetic: ModelArithmetic, machine: Mapping[str, Any], seed: int) -> dict[str, Any]:
    context = int(cell.parameters["context"])
    by_repeat: dict[int, dict[int, float]] = {}
    for sample in cell.facts["samples"]:
        by_repeat.setdefault(sample["repeat"], {})[sample["batch"]] = float(sample["time_s"])
    rounds = [times for times in by_repeat.values() if len(times) == len(cell.parameters["batches"])]
    doubling = [at for times in rounds if (at := doubling_batch(times)) is not None]
    lines = [line for times in rounds if (line := fitted_line(times)) is not None]
    largest = max(cell.parameters["batches"])
    return {
        "context": context,
        "formula_batch": machine["ridge_batch"],
        "predicted_doubling_batch": round(
            arithmetic.doubling_batch(context, machine["peak_gflops"]["mean"] * 1e9, machine["read_gbs"]["mean"] * 1e9),
            3,
        ),
        # If some rounds end before their step doubles, the mean of the others would be too small.
        "doubling_batch": plain_mean(doubling, seed) if rounds and len(doubling) == len(rounds) else None,
        "largest_batch": largest,
        "half_saturation_batch": plain_mean([fixed / each for fixed, each in lines], seed) if lines else None,
        "fixed_ms": plain_mean([1e3 * fixed for fixed, _ in lines], seed) if lines else None,
        "each_ms": plain_mean([1e3 * each for _, each in lines], seed) if lines else None,
        "saturated_tokens_per_s": plain_mean([1 / each for _, each in lines], seed) if lines else None,
    }


def doubling_batch(times_s: Mapping[int, float]) -> float | None:
    """The batch at which the time is twice that of batch 1, by linear interpolation; None if it never is."""
    target_s = 2 * times_s[1]
    measured = sorted(times_s.items())
    for (below, below_s), (above, above_s) in itertools.pairwise(measured):
        if above_s >= target_s:
            return below + (above - below) * (target_s - below_s) / (above_s - below_s)
    return None


def fitted_line(times_s: Mapping[int, float]) -> tuple[float, float] | None:
    """``fixed`` and ``each`` of the line ``time = fixed + each · batch``, in seconds, with the least squares of the
    relative errors. None with fewer than two batches, or if the time does not grow."""
    if len(times_s) < 2:
        return None
    batches, times = np.array(list(times_s), float), np.array(list(times_s.values()), float)
    columns = np.stack([1 / times, batches / times], axis=1)
    (fixed, each), *_ = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)
    return (float(fixed), float(each)) if fixed > 0 and each > 0 else None


def _by(cell: FinishedCell, key: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for sample in cell.facts["samples"]:
        found.setdefault(int(sample[key]), []).append(float(sample["time_s"]))
    return dict(sorted(found.items()))


def _short(value: float) -> str:
    """Three significant digits without an exponent."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _method(options: PrimerOptions) -> str:
    return (
        f"the engine's model runner alone, {options.repeats} repeats after one that is not counted; order reversed "
        "with each repeat; product rate and read rate measured before each; intervals are 95 % bootstrap"
    )


def _engine_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine = summary["machine"]
    place = f"core {machine['core']}, {machine['threads']} thread" if machine["core"] is not None else machine["device"]
    return [
        ("engine", f"{place}, {machine['dtype']}, {machine['weight_bytes'] / 1e6:.1f} MB of weights per step"),
        (
            "device",
            f"products at {interval_text(machine['peak_gflops'], _short)} GFLOP/s, reading at "
            f"{interval_text(machine['read_gbs'], _short)} GB/s: ridge at {machine['ridge_flops_per_byte']:.1f} FLOP "
            "per byte",
        ),
    ]


def _answer(summary: Mapping[str, Any]) -> str:
    sentences = []
    cache, profile, ridges = summary["kv_cache"], summary["profile"], summary["ridge"]
    if cache is not None:
        speedup = Interval.from_dict(cache["speedup"])
        less = f"{speedup.value:.1f} times less" if speedup.lo > 1 else "not measurably less"
        sentences.append(
            f"Generating {cache['output_len']} tokens after {cache['prompt_len']} takes "
            f"{interval_text(cache['total_s'][WITHOUT], _short)} s without a KV cache and "
            f"{interval_text(cache['total_s'][WITH], _short)} s with it, {less}."
        )
    if profile is not None:
        prefill, decode = profile["phases"]["prefill"], profile["phases"]["decode"]
        sentences.append(
            f"Per token, prefill takes {profile['token_ms']['prefill']['mean']:.2f} ms (intensity "
            f"{_short(prefill['intensity'])} FLOP per byte, bound by {prefill['bound']}) and decode of one request "
            f"{profile['token_ms']['decode']['mean']:.2f} ms ({_short(decode['intensity'])} FLOP per byte, bound by "
            f"{decode['bound']})."
        )
    if ridges:
        ridge = ridges[0]
        measured = (
            f"from a batch of {interval_text(ridge['doubling_batch'], _short)} on"
            if ridge["doubling_batch"] is not None
            else f"with none of the measured batches (up to {ridge['largest_batch']})"
        )
        sentences.append(
            f"At a context of {ridge['context']} a decode step takes twice as long as with one request {measured}; the "
            f"formula (product rate ÷ read rate) puts the ridge at {_short(ridge['formula_batch'])}."
        )
    return " ".join(sentences) or "No cell was completed."


def _caveats(summary: Mapping[str, Any]) -> list[str]:
    machine, cache = summary["machine"], summary["kv_cache"]
    caveats = [
        f"The published figures were taken on {PUBLISHED_ON} with a model and lengths of their own: compare the ratio "
        "of two published figures with the ratio measured here, not the seconds.",
        "FLOPs and bytes are counted from the model's shape. Activations, norms and the sampler are not counted, and "
        "so appear as distance from the roof.",
    ]
    if 0 < machine["weight_bytes"] <= machine["last_cache_bytes"]:
        caveats.append(
            f"The weights ({machine['weight_bytes'] / 1e6:.1f} MB) fit into the processor's last-level cache "
            f"({machine['last_cache_bytes'] / 2**20:.0f} MiB): steps may read them faster than memory, and the memory "
            "roof does not hold for them."
        )
    if cache is not None and cache["tokens_equal_pct"] < 100:
        caveats.append(
            f"On average the first {cache['tokens_equal_pct']:.0f} % of the tokens are equal with and without a cache. "
            f"In {machine['dtype']} a product is rounded differently when it has another number of rows, and greedy "
            "sampling turns a near tie into another token. The amount of work is the same."
        )
    if machine["peak_gflops"]["n"] < MIN_VALUES or (cache is not None and cache["speedup"]["n"] < MIN_VALUES):
        caveats.append(f"Fewer than {MIN_VALUES} repeats: there are no intervals.")
    return caveats


def _steps_table(summary: Mapping[str, Any]) -> TableBlock:
    header = ("step", "time, ms", "tokens/s", "GFLOP", "MB", "FLOP per byte", "GFLOP/s", "GB/s", "roof, ms",
              "of the roof, %", "bound by")  # fmt: skip
    steps = [(f"prefill of {point['tokens']}", point) for point in summary["prefill"]]
    steps += [(f"decode of {point['batch']} at {point['context']}", point) for point in summary["decode"]]
    rows = [
        (
            name,
            interval_text(point["time_ms"], _short),
            _short(point["tokens_per_s"]["mean"]),
            _short(point["gflop"]),
            _short(point["megabytes"]),
            _short(point["intensity"]),
            _short(point["reached_gflops"]),
            _short(point["reached_gbs"]),
            _short(point["roof_ms"]),
            f"{point['of_roof_pct']:.0f}",
            point["bound"],
        )
        for name, point in steps
    ]
    return TableBlock(
        "All steps",
        header,
        rows,
        "GFLOP and MB from the model's shape; GFLOP/s and GB/s are these over the measured time. The roof is the least "
        "time that the measured product and read rates allow.",
    )


def _ridge_table(summary: Mapping[str, Any]) -> TableBlock:
    header = ("context", "doubling batch", "predicted", "half-saturation batch", "fixed, ms", "per request, ms",
              "saturated tokens/s", "formula")  # fmt: skip
    rows = [
        (
            str(ridge["context"]),
            f"> {ridge['largest_batch']}"
            if ridge["doubling_batch"] is None
            else interval_text(ridge["doubling_batch"], _short),
            _short(ridge["predicted_doubling_batch"]),
            *(
                "–" if ridge[key] is None else interval_text(ridge[key], _short)
                for key in ("half_saturation_batch", "fixed_ms", "each_ms", "saturated_tokens_per_s")
            ),
            _short(ridge["formula_batch"]),
        )
        for ridge in summary["ridge"]
    ]
    return TableBlock(
        "Where decode leaves the memory roof",
        header,
        rows,
        f"Formula: product rate ÷ read rate × bytes of a number ÷ 2 ({_A100}). Doubling: the step takes twice as long "
        "as with one request; the prediction has attention's work for this context in it. Fixed and per request are "
        "the line through all batches; their ratio is the half-saturation batch.",
    )
