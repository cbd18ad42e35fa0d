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
from typing import Any, ClassVar, Literal

import msgspec
from pydantic import Field

from checkpoints.source import resolve_model
from experiments.engine_alone.arithmetic import Cost, ModelArithmetic
from experiments.engine_alone.program import WITH, WITHOUT, Rates, Sample, Task, measure_alone
from experiments.engine_alone.steps import STEPS, WARM_STEPS, StepCase
from experiments.experiment import Bench, Cell, Experiment, Options, option
from experiments.fit import fitted
from experiments.report.drawing import (
    DASHED,
    DOTTED,
    FAINT,
    INK,
    PALETTE,
    Mark,
    Panel,
    Picture,
    Rule,
    TableBlock,
    short,
    table,
)
from experiments.report.page import Report, setup_of
from experiments.run_folder import FinishedCell, RunData
from experiments.statistics import plain_mean
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import InvalidRequest, ModelError
from pdserve.core.interval import MIN_VALUES, Interval, interval_text

PUBLISHED_S = {"cache": {WITH: 0.334, WITHOUT: 4.05}, "profile": {"prefill": 0.077, "decode": 2.11}}
PUBLISHED_ON = "a T4 GPU"
_METHOD = (
    "the engine's model runner alone, {0.repeats} repeats after one that is not counted; order reversed with each "
    "repeat; product rate and read rate measured before each; intervals are 95 % bootstrap"
)


class PrimerOptions(Options):
    """Options of `Primer`."""

    device: Literal["cpu", "cuda"] = Field("cpu", description="device of the engine: one core, or the first GPU")
    core: int | None = Field(None, ge=0, description="the core to measure on (default: the first allowed one)")
    repeats: int = option(6, ge=1, description="how often everything is measured", quick=6)
    cache_prompt_len: int = option(
        64, ge=1, description="prompt length of the comparison with and without a KV cache",
        quick=32,
    )  # fmt: skip
    cache_output_len: int = option(128, ge=2, description="tokens generated in that comparison", quick=32)
    profile_prompt_len: int = option(
        512, ge=1, description="prompt length of the profile of prefill and decode", quick=256
    )
    profile_output_len: int = option(64, ge=2, description="tokens generated in that profile", quick=32)
    prefill_lens: tuple[int, ...] = option(
        (4, 16, 64, 128, 256, 512, 1024),
        description="prompt lengths of the prefills",
        quick=[4, 16, 64, 256],
    )
    batches: tuple[int, ...] = option(
        (1, 2, 4, 8, 16, 32, 64),
        description="batch sizes of the decode steps",
        quick=[1, 4, 16, 64],
    )
    contexts: tuple[int, ...] = option(
        (64, 256, 1024),
        description="tokens before those of the decode steps",
        quick=[64, 256],
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
        parts: dict[str, dict[str, Any]] = {
            f"{part}/{prompt}+{output}": {"part": part, "prompt_len": prompt, "output_len": output}
            for part, prompt, output in (
                ("cache", options.cache_prompt_len, options.cache_output_len),
                ("profile", options.profile_prompt_len, options.profile_output_len),
            )
        }
        parts["prefill"] = {"part": "prefill", "lengths": list(options.prefill_lens)}
        for context in options.contexts:
            parts[f"decode/{context}"] = {"part": "decode", "context": context, "batches": list(options.batches)}
        common = {"model": options.model, "device": options.device}
        return [Cell(name, {**common, **part}, None, self._task(part).measurements) for name, part in parts.items()]

    def _task(self, parameters: Mapping[str, Any]) -> Task:
        options = self.options
        core = min(os.sched_getaffinity(0)) if options.core is None else options.core
        return Task(
            model=options.model,
            device=options.device,
            core=core if options.device == "cpu" else None,
            repeats=options.repeats,
            seed=options.seed,
            cases=(
                *(StepCase(1, tokens) for tokens in parameters.get("lengths", ())),
                *(StepCase(batch, 1, parameters["context"]) for batch in parameters.get("batches", ())),
            ),
            arms={"cache": (WITH, WITHOUT), "profile": (WITH,)}.get(parameters["part"], ()),
            prompt_len=parameters.get("prompt_len", 0),
            output_len=parameters.get("output_len", 0),
        )

    def _check(self) -> None:
        """InvalidRequest for options that no engine of this model can run."""
        options = self.options
        for flag, values in (
            ("--prefill-lens", options.prefill_lens),
            ("--batches", options.batches),
            ("--contexts", options.contexts),
        ):
            if not values or min(values) < 1 or len(set(values)) < len(values):
                raise InvalidRequest(f"{flag}: give positive whole numbers, each once")
        if 1 not in options.batches:
            raise InvalidRequest("--batches: 1 has to be among them: the ridge is where a step takes twice as long")
        try:
            limit = resolve_model(options.model).shape.max_position_embeddings
        except ModelError as error:
            raise InvalidRequest(f"--model: {error}") from None
        for flag, most in (
            ("--cache-prompt-len", options.cache_prompt_len + options.cache_output_len),
            ("--profile-prompt-len", options.profile_prompt_len + options.profile_output_len),
            ("--prefill-lens", max(options.prefill_lens)),
            ("--contexts", max(options.contexts) + WARM_STEPS + STEPS),
        ):
            if most > limit:
                raise InvalidRequest(f"{flag}: {most} tokens exceed the model's context of {limit}")
        allowed = sorted(os.sched_getaffinity(0))
        if options.core is not None and options.core not in allowed:
            raise InvalidRequest(f"--core: {options.core} is none of the cores this process may use: {allowed}")

    async def measure(self, bench: Bench) -> None:
        """Run the cell's task in an engine process, and keep what it writes as facts: ``engine``, ``ceilings``,
        ``samples``."""
        task = self._task(bench.cell.parameters)
        facts: dict[str, Any] = {"ceilings": [], "samples": []}

        def take(message: Rates | Sample) -> None:
            if isinstance(message, Rates):
                facts["ceilings"].append(msgspec.structs.asdict(message))
                return
            bench.advance(1)
            values = message.values
            if "case" in values:
                case = task.cases[values["case"]]
                values = {"tokens": case.tokens, "batch": case.batch, "time_s": values["time_s"]}
            elif bench.cell.parameters["part"] == "profile":
                values = {"prefill_s": values["times_s"][0], "decode_s": sum(values["times_s"][1:])}
            if message.repeat >= 0:
                facts["samples"].append({"repeat": message.repeat, **values})

        built = await measure_alone(task, take)
        bench.facts |= {"engine": msgspec.to_builtins(built), **facts}

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
        figures = _Figures(run.cells, self.options.seed)
        parts: dict[str, list[FinishedCell]] = {}
        for cell in run.cells:
            parts.setdefault(cell.parameters["part"], []).append(cell)
        decode = sorted(parts.get("decode", []), key=lambda cell: int(cell.parameters["context"]))
        return {
            "experiment": self.name,
            "machine": figures.machine,
            "kv_cache": next(map(figures.kv_cache, parts.get("cache", ())), None),
            "profile": next(map(figures.profile, parts.get("profile", ())), None),
            "prefill": [point for cell in parts.get("prefill", ()) for point in figures.steps(cell)],
            "decode": [point for cell in decode for point in figures.steps(cell)],
            "ridge": [figures.ridge(cell) for cell in decode],
            "failed": [],
        }

    def report(self, run: RunData, summary: Mapping[str, Any]) -> Report:
        """With and without a cache, prefill beside decode, step times, tokens per second, roofline, and tables."""
        report = Report(
            title="Prefill, decode and the KV cache on this machine",
            question=self.question,
            answer=_answer(summary),
            setup=[*setup_of(run, _METHOD.format(self.options)), *_engine_rows(summary["machine"])],
            caveats=_caveats(summary),
            failures=summary["failed"],
        )
        if summary["kv_cache"] is not None:
            report.blocks.append(_cache_picture(summary["kv_cache"]))
        if summary["profile"] is not None:
            report.blocks.append(_phases_picture(summary["profile"]))
        if summary["decode"]:
            report.blocks += [_step_time_picture(summary), _saturation_picture(summary)]
        if summary["prefill"] or summary["decode"]:
            report.blocks += [_roofline_picture(summary), _steps_table(summary)]
        if summary["ridge"]:
            report.blocks.append(_ridge_table(summary["ridge"]))
        return report


class _Figures:
    """The figures of cells. ``machine`` has the rates that all of them measured, which are the roofs of steps."""

    def __init__(self, cells: Sequence[FinishedCell], seed: int) -> None:
        engine = cells[0].facts["engine"]
        self._seed, self._chunk = seed, int(engine["chunk"])
        self._arithmetic = msgspec.convert(engine["arithmetic"], ModelArithmetic)
        rates = [each for cell in cells for each in cell.facts["ceilings"]]
        flops, read = (self._mean(each[key] / 1e9 for each in rates) for key in ("flops_per_s", "bytes_per_s"))
        self._flops_per_s, self._bytes_per_s = flops["mean"] * 1e9, read["mean"] * 1e9
        self.machine = {
            **{key: engine[key] for key in ("device", "dtype", "core", "threads", "chunk", "last_cache_bytes")},
            "weight_bytes": self._arithmetic.weight_bytes,
            "peak_gflops": flops,
            "read_gbs": read,
            "ridge_flops_per_byte": round(flops["mean"] / read["mean"], 3),
            "ridge_batch": round(self._arithmetic.ridge_batch(flops["mean"], read["mean"]), 3),
        }

    def _mean(self, values: Any) -> Any:
        return plain_mean(list(values), self._seed)

    def _decode_cost(self, cell: FinishedCell) -> Cost:
        """Of all tokens of a generation but the first."""
        costs = (self._arithmetic.decode(1, context) for context in range(*_lengths(cell)))
        return sum(costs, start=Cost(0.0, 0.0))

    def kv_cache(self, cell: FinishedCell) -> dict[str, Any]:
        arms: dict[str, dict[int, Mapping[str, Any]]] = {WITH: {}, WITHOUT: {}}
        for sample in cell.facts["samples"]:
            arms[sample["arm"]][sample["repeat"]] = sample
        both = sorted(arms[WITH].keys() & arms[WITHOUT])
        times = {arm: [samples[repeat]["times_s"] for repeat in both] for arm, samples in arms.items()}
        pairs = [(arms[WITH][repeat]["token_ids"], arms[WITHOUT][repeat]["token_ids"]) for repeat in both]
        prompt, last = _lengths(cell)
        prefills = [self._arithmetic.prefill(length, self._chunk).flops for length in range(prompt, last + 1)]
        gflop = {WITH: prefills[0] + self._decode_cost(cell).flops, WITHOUT: sum(prefills)}
        return {
            "prompt_len": prompt,
            "output_len": int(cell.parameters["output_len"]),
            "total_s": {arm: self._mean(map(sum, each)) for arm, each in times.items()},
            "speedup": self._mean(sum(b) / sum(a) for a, b in zip(times[WITH], times[WITHOUT], strict=True)),
            "token_ms": {
                arm: [round(1e3 * statistics.fmean(token), 4) for token in zip(*each, strict=True)]
                for arm, each in times.items()
            },
            "gflop": {arm: round(flops / 1e9, 4) for arm, flops in gflop.items()},
            "tokens_equal_pct": round(100 * statistics.fmean(itertools.starmap(_equal_part, pairs)), 2),
            "published_s": PUBLISHED_S["cache"],
        }

    def profile(self, cell: FinishedCell) -> dict[str, Any]:
        prompt, output = int(cell.parameters["prompt_len"]), int(cell.parameters["output_len"])
        costs = {"prefill": self._arithmetic.prefill(prompt, self._chunk), "decode": self._decode_cost(cell)}
        tokens = {"prefill": prompt, "decode": output - 1}
        times = {phase: [float(sample[f"{phase}_s"]) for sample in cell.facts["samples"]] for phase in costs}
        return {
            "prompt_len": prompt,
            "output_len": output,
            "total_s": {phase: self._mean(each) for phase, each in times.items()},
            "token_ms": {phase: self._mean(1e3 * s / tokens[phase] for s in each) for phase, each in times.items()},
            "phases": {phase: self._against_roof(cost, times[phase]) for phase, cost in costs.items()},
            "published_s": PUBLISHED_S["profile"],
        }

    def steps(self, cell: FinishedCell) -> list[dict[str, Any]]:
        """Prefills by ``tokens``, or decode steps of a context by ``batch``."""
        context = cell.parameters.get("context")
        key = "tokens" if context is None else "batch"
        by_count: dict[int, list[float]] = {}
        for sample in cell.facts["samples"]:
            by_count.setdefault(int(sample[key]), []).append(float(sample["time_s"]))
        points = []
        for count, times_s in sorted(by_count.items()):
            place, cost = {key: count}, self._arithmetic.prefill(count, self._chunk)
            if context is not None:
                place, cost = {key: count, "context": int(context)}, self._arithmetic.decode(count, int(context))
            points.append(
                {
                    **place,
                    "time_ms": self._mean(1e3 * each for each in times_s),
                    "tokens_per_s": self._mean(count / each for each in times_s),
                    **self._against_roof(cost, times_s),
                }
            )
        return points

    def _against_roof(self, cost: Cost, times_s: Sequence[float]) -> dict[str, Any]:
        """FLOPs, bytes and intensity; the rates that were reached; the time at the roof, and without overlap."""
        time_s, rates = statistics.fmean(times_s), (self._flops_per_s, self._bytes_per_s)
        return {
            "gflop": round(cost.flops / 1e9, 6),
            "megabytes": round(cost.num_bytes / 1e6, 6),
            "intensity": round(cost.intensity, 4),
            "reached_gflops": round(cost.flops / time_s / 1e9, 4),
            "reached_gbs": round(cost.num_bytes / time_s / 1e9, 4),
            "roof_ms": round(1e3 * cost.roof_s(*rates), 5),
            "added_ms": round(1e3 * cost.added_s(*rates), 5),
            "of_roof_pct": round(100 * cost.roof_s(*rates) / time_s, 2),
            "bound": "compute" if cost.intensity > self._flops_per_s / self._bytes_per_s else "memory",
        }

    def ridge(self, cell: FinishedCell) -> dict[str, Any]:
        context, batches = int(cell.parameters["context"]), cell.parameters["batches"]
        by_repeat: dict[int, dict[int, float]] = {}
        for sample in cell.facts["samples"]:
            by_repeat.setdefault(sample["repeat"], {})[sample["batch"]] = float(sample["time_s"])
        rounds = [times for times in by_repeat.values() if len(times) == len(batches)]
        doubling = [at for times in rounds if (at := doubling_batch(times)) is not None]
        lines = [line for times in rounds if (line := fitted_line(times)) is not None]
        predicted = self._arithmetic.doubling_batch(context, self._flops_per_s, self._bytes_per_s)
        return {
            "context": context,
            "formula_batch": self.machine["ridge_batch"],
            "predicted_doubling_batch": round(predicted, 3),
            # If some rounds end before their step doubles, the mean of the others would be too small.
            "doubling_batch": self._mean(doubling) if len(doubling) == len(rounds) else None,
            "largest_batch": max(batches),
            "half_saturation_batch": self._mean(fixed / each for fixed, each in lines),
            "fixed_ms": self._mean(1e3 * fixed for fixed, _ in lines),
            "each_ms": self._mean(1e3 * each for _, each in lines),
            "saturated_tokens_per_s": self._mean(1 / each for _, each in lines),
        }


def _lengths(cell: FinishedCell) -> tuple[int, int]:
    """Of the sequence before the first token of a generation, and before its last one."""
    prompt, output = int(cell.parameters["prompt_len"]), int(cell.parameters["output_len"])
    return prompt, prompt + output - 1


def _equal_part(a: Sequence[int], b: Sequence[int]) -> float:
    """The part of the tokens before the first one that differs."""
    same = next((number for number, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return same / len(a)


def doubling_batch(times_s: Mapping[int, float]) -> float | None:
    """The batch at which the time is twice that of batch 1, by linear interpolation; None if it never is."""
    target_s = 2 * times_s[1]
    for (below, below_s), (above, above_s) in itertools.pairwise(sorted(times_s.items())):
        if above_s >= target_s:
            return below + (above - below) * (target_s - below_s) / (above_s - below_s)
    return None


def fitted_line(times_s: Mapping[int, float]) -> tuple[float, float] | None:
    """``fixed`` and ``each`` of the line ``time = fixed + each · batch``, in seconds. None with fewer than two batches,
    or if the time does not grow."""
    if len(times_s) < 2:
        return None
    fixed, each = fitted([(1.0, batch) for batch in times_s], list(times_s.values()))
    return (fixed, each) if fixed > 0 and each > 0 else None


def _engine_rows(machine: Mapping[str, Any]) -> list[tuple[str, str]]:
    place = f"core {machine['core']}, {machine['threads']} thread" if machine["core"] is not None else machine["device"]
    return [
        ("engine", f"{place}, {machine['dtype']}, {machine['weight_bytes'] / 1e6:.1f} MB of weights per step"),
        (
            "device",
            f"products at {interval_text(machine['peak_gflops'], short)} GFLOP/s, reading at "
            f"{interval_text(machine['read_gbs'], short)} GB/s: ridge at {machine['ridge_flops_per_byte']:.1f} FLOP "
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
            f"{interval_text(cache['total_s'][WITHOUT], short)} s without a KV cache and "
            f"{interval_text(cache['total_s'][WITH], short)} s with it, {less}."
        )
    if profile is not None:
        (prefill, prefill_ms), (decode, decode_ms) = (
            (profile["phases"][phase], profile["token_ms"][phase]["mean"]) for phase in ("prefill", "decode")
        )
        sentences.append(
            f"Per token, prefill takes {prefill_ms:.2f} ms (intensity {short(prefill['intensity'])} FLOP per byte, "
            f"bound by {prefill['bound']}) and decode of one request {decode_ms:.2f} ms "
            f"({short(decode['intensity'])} FLOP per byte, bound by {decode['bound']})."
        )
    if ridges:
        ridge = ridges[0]
        measured = f"with none of the measured batches (up to {ridge['largest_batch']})"
        if ridge["doubling_batch"] is not None:
            measured = f"from a batch of {interval_text(ridge['doubling_batch'], short)} on"
        sentences.append(
            f"At a context of {ridge['context']} a decode step takes twice as long as with one request {measured}; the "
            f"formula (product rate ÷ read rate) puts the ridge at {short(ridge['formula_batch'])}."
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


def _totals_panel(rows: Sequence[tuple[str, str, Mapping[str, Any], float]]) -> Panel:
    """Measured and published seconds of each row of name, colour, interval and published seconds."""
    records = [
        {
            "row": name,
            "s": total,
            "note": f"{total['mean']:.3g} s",
            "published": at,
            "published_note": f"{at:g} s on {PUBLISHED_ON}",
        }
        for name, _, total, at in rows
    ]
    looks = {name: {"color": color, "marker": "o", "markersize": 8, "label": None} for name, color, *_ in rows}
    published = {"color": FAINT, "marker": "|", "markersize": 26}
    seconds = [each for _, _, total, at in rows for each in (total["mean"], at)]
    return Panel(
        [
            Mark(records, "s", "row", by="row", looks=looks, kind="points", text="note", note=(0, 9)),
            Mark(records, "published", "row", kind="points", look=published, text="published_note", note=(0, -22)),
        ],
        x="seconds (logarithmic)",
        title="in all",
        log="x",
        rows=[name for name, *_ in rows],
        xlim=(min(seconds) / 3, max(seconds) * 3),
    )


def _cache_picture(cache: Mapping[str, Any]) -> Picture:
    """Seconds of the whole generation beside the published ones, and the time of each token."""
    arms = {WITHOUT: ("without KV cache", PALETTE[1]), WITH: ("with KV cache", PALETTE[0])}
    tokens = [
        {"arm": name, "before": cache["prompt_len"] + place, "ms": ms}
        for arm, (name, _) in arms.items()
        for place, ms in enumerate(cache["token_ms"][arm])
    ]
    looks = {name: {"color": color, "markersize": 3} for name, color in arms.values()}
    each = Panel(
        [Mark(tokens, "before", "ms", by="arm", looks=looks)],
        x="tokens before this one",
        y="time of one token, ms",
        title="each token",
        ylim=(0, None),
        legend="best",
    )
    totals = [(*look, cache["total_s"][arm], cache["published_s"][arm]) for arm, look in arms.items()]
    return Picture(
        "kv_cache",
        f"Generation with and without a KV cache ({cache['prompt_len']} + {cache['output_len']} tokens)",
        "Left: the whole generation, mean of the repeats with 95 % intervals (often smaller than the mark), beside the "
        "published figures. Right: mean time of each token. Without a cache every token computes the whole sequence "
        f"before it; with a cache only the first one does. Together {cache['gflop']['without']:.1f} GFLOP against "
        f"{cache['gflop']['with']:.1f}.",
        [_totals_panel(totals), each],
        columns=2,
        height_in=3.8,
    )


def _phases_picture(profile: Mapping[str, Any]) -> Picture:
    """Seconds of prefill and decode beside the published ones, and the time per token of each."""
    colors = {"prefill": PALETTE[2], "decode": PALETTE[3]}
    names = {
        "prefill": f"prefill of {profile['prompt_len']} tokens",
        "decode": f"decode of {profile['output_len'] - 1} tokens",
    }
    totals = [
        (names[phase], color, profile["total_s"][phase], profile["published_s"][phase])
        for phase, color in colors.items()
    ]
    tokens = [{"phase": phase, "ms": ms, "note": f"{ms['mean']:.3g} ms"} for phase, ms in profile["token_ms"].items()]
    means = [each["ms"]["mean"] for each in tokens]
    looks = {phase: {"color": color} for phase, color in colors.items()}
    mark = Mark(tokens, "ms", "phase", by="phase", looks=looks, look={"markersize": 8}, kind="points", text="note",
                note=(0, 9))  # fmt: skip
    per_token = Panel([mark], x="time per token, ms (logarithmic)", title="per token", log="x", rows=list(names),
                      xlim=(min(means) / 3, max(means) * 3))  # fmt: skip
    return Picture(
        "phases",
        f"Prefill and decode of one request ({profile['prompt_len']} + {profile['output_len']} tokens)",
        "Mean with 95 % intervals (often smaller than the mark). Left: both phases beside the published figures. "
        "Right: the same per token. Prefill computes many tokens with each weight that it reads; decode reads all "
        "weights for one token.",
        [_totals_panel(totals), per_token],
        columns=2,
        height_in=3.8,
    )


def _decode_points(summary: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]], list[int]]:
    """The decode steps with the series of their context, the colours of the contexts, and the batches."""
    colors = {ridge["context"]: {"color": PALETTE[n % len(PALETTE)]} for n, ridge in enumerate(summary["ridge"])}
    points = [{**point, "series": f"context {point['context']}"} for point in summary["decode"]]
    return points, colors, sorted({point["batch"] for point in points})


def _step_time_picture(summary: Mapping[str, Any]) -> Picture:
    """Time of a decode step over batch size and context."""
    points, colors, batches = _decode_points(summary)
    contexts = list(colors)
    shown = batches[:: -(-len(batches) // 4)]
    over_context = [{**point, "series": f"batch {point['batch']}"} for point in points if point["batch"] in shown]
    first_ms = {point["context"]: point["time_ms"]["mean"] for point in reversed(points)}
    stars = [
        {"batch": ridge["doubling_batch"]["mean"], "ms": 2 * first_ms[ridge["context"]], "context": ridge["context"]}
        for ridge in summary["ridge"]
        if ridge["doubling_batch"] is not None
    ]
    roofs, starred = (
        {context: {**look, "label": label if context == named else None} for context, look in colors.items()}
        for label, named in (
            ("least time (roofline)", contexts[0]),
            ("twice batch 1", stars[0]["context"] if stars else None),
        )
    )
    roof = {"linestyle": DASHED, "linewidth": 1.0, "marker": ""}
    star = {"marker": "*", "markersize": 13, "markeredgecolor": "white"}
    return Picture(
        "step_time",
        "Time of a decode step over batch size and context",
        "Mean of the repeats (each the median of several steps) with 95 % intervals. Left: as long as reading the "
        "weights takes longest, a further request costs little; stars mark where the step takes twice as long as "
        "with one request. Dashed: the least time that the measured product and read rates allow. Right: the same "
        "points over the context, whose keys and values every step reads.",
        [
            Panel(
                [
                    Mark(points, "batch", "time_ms", by="series"),
                    Mark(points, "batch", "roof_ms", by="context", looks=roofs, look=roof),
                    Mark(stars, "batch", "ms", by="context", looks=starred, kind="points", look=star),
                ],
                x="batch size, requests (logarithmic)",
                y="time of a decode step, ms",
                log="xy",
                ticks=batches,
                legend="best",
            ),
            Panel(
                [Mark(over_context, "context", "time_ms", by="series")],
                x="context, tokens (logarithmic)",
                log="xy",
                ticks=contexts,
                xlim=(contexts[0] / 2, contexts[0] * 2) if len(contexts) == 1 else (None, None),
                legend="best",
            ),
        ],
        columns=2,
        share={"sharey": True},
    )


def _saturation_picture(summary: Mapping[str, Any]) -> Picture:
    """Tokens per second over batch size, with what they approach."""
    points, colors, batches = _decode_points(summary)
    formula = summary["machine"]["ridge_batch"]
    saturated = [
        Rule("y", ridge["saturated_tokens_per_s"]["mean"], "1 ÷ time per further request" if number == 0 else "",
             {**colors[ridge["context"]], "linestyle": DASHED})
        for number, ridge in enumerate(summary["ridge"])
        if ridge["saturated_tokens_per_s"] is not None
    ]  # fmt: skip
    rates = Panel(
        [
            Mark(points, "batch", "tokens_per_s", by="series"),
            *saturated,
            Rule("x", formula, f"ridge by formula: {formula:.1f}", {"linestyle": DOTTED}),
        ],
        x="batch size, requests (logarithmic)",
        y="tokens per second",
        log="x",
        ticks=batches,
        ylim=(0, None),
        legend="above",
    )
    return Picture(
        "saturation",
        "Tokens per second over batch size",
        "Mean with 95 % intervals. Dashed: what the rate approaches by the line time = fixed + each · batch. "
        "Dotted: the ridge batch by the formula, product rate ÷ read rate × bytes of a number ÷ 2.",
        [rates],
    )


def _roofline_picture(summary: Mapping[str, Any]) -> Picture:
    """Reached FLOP/s over intensity, below the roofs of the device."""
    machine = summary["machine"]
    peak, read, ridge = machine["peak_gflops"], machine["read_gbs"], machine["ridge_flops_per_byte"]
    noted = min((point["context"] for point in summary["decode"]), default="–")
    points = [
        *(
            {**point, "series": f"decode, context {point['context']}",
             "note": str(point["batch"]) if point["context"] == noted else ""}
            for point in summary["decode"]
        ),
        *({**point, "series": "prefill", "note": str(point["tokens"])} for point in summary["prefill"]),
    ]  # fmt: skip
    intensities = [ridge, *(point["intensity"] for point in points)]
    low, high = min(intensities) * 0.5, max(intensities) * 2
    lowest = min([*(point["reached_gflops"] for point in points), low * read["mean"]]) / 2
    roofs = []
    for edge, look in (("mean", {}), *((edge, {"linewidth": 0.8, "alpha": 0.4}) for edge in ("lo", "hi"))):
        if peak[edge] is not None and read[edge] is not None:
            corner = peak[edge] / read[edge]
            line = [{"x": low, "y": low * read[edge]}, {"x": corner, "y": peak[edge]}, {"x": high, "y": peak[edge]}]
            roofs.append(Mark(line, "x", "y", look={"color": INK, "marker": "", **look}))
    rates = f"products: {peak['mean']:.0f} GFLOP/s; reading: {read['mean']:.1f} GB/s"
    return Picture(
        "roofline",
        "Roofline",
        "Points are steps of the engine: FLOPs and bytes from the model's shape, the time measured. Numbers are the "
        f"batch of a decode step (at context {noted}) and the tokens of a prefill. No step "
        "can be above the roofs, which are the device's measured read rate times the intensity, and its measured "
        "product rate (thin lines: 95 % intervals).",
        [
            Panel(
                [
                    *roofs,
                    Mark(points, "intensity", "reached_gflops", by="series", kind="points", text="note", note=(6, -11)),
                    Rule("y", peak["mean"], rates, {"linewidth": 0}),
                    Rule("x", ridge, f"ridge {ridge:.1f}", {"linestyle": DOTTED}),
                ],
                x="intensity, FLOP per byte (logarithmic)",
                y="reached, GFLOP/s (logarithmic)",
                log="xy",
                xlim=(low, high),
                ylim=(lowest, peak["mean"] * 2),
                legend="lower right",
            )
        ],
        height_in=5.0,
    )


def _steps_table(summary: Mapping[str, Any]) -> TableBlock:
    steps = [{**point, "step": f"prefill of {point['tokens']}"} for point in summary["prefill"]]
    steps += [{**point, "step": f"decode of {point['batch']} at {point['context']}"} for point in summary["decode"]]
    columns = (
        "step",
        "time, ms | time_ms:short",
        "tokens/s | tokens_per_s.mean:short",
        "GFLOP | gflop:short",
        "MB | megabytes:short",
        "FLOP per byte | intensity:short",
        "GFLOP/s | reached_gflops:short",
        "GB/s | reached_gbs:short",
        "roof, ms | roof_ms:short",
        "of the roof, % | of_roof_pct:.0f",
        "bound by | bound",
    )
    caption = (
        "GFLOP and MB from the model's shape; GFLOP/s and GB/s are these over the measured time. The roof is the least "
        "time that the measured product and read rates allow."
    )
    return table("All steps", steps, columns, caption)


def _ridge_table(ridges: Sequence[Mapping[str, Any]]) -> TableBlock:
    records = [{**ridge, "doubling_batch": ridge["doubling_batch"] or f"> {ridge['largest_batch']}"}
               for ridge in ridges]  # fmt: skip
    columns = (
        "context",
        "doubling batch | doubling_batch:short",
        "predicted | predicted_doubling_batch:short",
        "half-saturation batch | half_saturation_batch:short",
        "fixed, ms | fixed_ms:short",
        "per request, ms | each_ms:short",
        "saturated tokens/s | saturated_tokens_per_s:short",
        "formula | formula_batch:short",
    )
    caption = (
        "Formula: product rate ÷ read rate × bytes of a number ÷ 2 (312 TFLOP/s ÷ 1.5 TB/s ≈ 208 on an A100). "
        "Doubling: the step takes twice as long as with one request; the prediction has attention's work for this "
        "context in it. Fixed and per request are the line through all batches; their ratio is the half-saturation "
        "batch."
    )
    return table("Where decode leaves the memory roof", records, columns, caption)
