"""``pdserve experiment primer``: what textbooks say about KV caches, prefill and decode, measured on this machine.

Every cell drives the engine's model runner directly, in a process of its own on one core or one GPU
(`experiments.engine_alone`). FLOPs and bytes come from the model's shape (`checkpoints.arithmetic` has the
formulas); the device's product rate and read rate are measured between the samples of every cell.

The ridge batch is measured in two ways. The *doubling batch* is where a decode step takes twice as long as with one
request, interpolated between the measured batches. The *half-saturation batch* comes from the line
``time = fixed + each · batch`` through all batches: at ``fixed ÷ each`` requests the tokens per second are half of what
they approach, ``1 ÷ each``. If reading the weights and computing do not overlap, both are the ridge batch."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
from pydantic import Field

from checkpoints.arithmetic import Cost, ModelArithmetic
from checkpoints.source import resolve_model
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
    Records,
    Rule,
    TableBlock,
    frame_of,
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
    needs_own: ClassVar[str] = "primer measures an engine of its own on this machine and uses no service"
    options: PrimerOptions

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """With and without a cache; prefill and decode of one request; prefills; decode steps, one cell per context."""
        options = self.options
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
        options, lists = self.options, ("prefill_lens", "batches", "contexts")
        for values, flag in ((getattr(options, name), f"--{name.replace('_', '-')}") for name in lists):
            if not values or min(values) < 1 or len(set(values)) < len(values):
                raise InvalidRequest(f"{flag}: give positive whole numbers, each once")
        if 1 not in options.batches:
            raise InvalidRequest("--batches: 1 has to be among them: the ridge is where a step takes twice as long")
        try:
            limit = resolve_model(options.model).shape.max_position_embeddings
        except ModelError as error:
            raise InvalidRequest(f"--model: {error}") from None
        for flag, most in {
            "--cache-prompt-len": options.cache_prompt_len + options.cache_output_len,
            "--profile-prompt-len": options.profile_prompt_len + options.profile_output_len,
            "--prefill-lens": max(options.prefill_lens),
            "--contexts": max(options.contexts) + WARM_STEPS + STEPS,
        }.items():
            if most > limit:
                raise InvalidRequest(f"{flag}: {most} tokens exceed the model's context of {limit}")
        allowed = sorted(os.sched_getaffinity(0))
        if options.core not in (None, *allowed):
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
        cells = sorted(run.cells, key=lambda cell: int(cell.parameters.get("context", 0)))
        parts = {
            part: [cell for cell in cells if cell.parameters["part"] == part]
            for part in ("cache", "profile", "prefill", "decode")
        }
        return {
            "experiment": self.name,
            "machine": figures.machine,
            "kv_cache": next(map(figures.kv_cache, parts["cache"]), None),
            "profile": next(map(figures.profile, parts["profile"]), None),
            "prefill": [point for cell in parts["prefill"] for point in figures.steps(cell)],
            "decode": [point for cell in parts["decode"] for point in figures.steps(cell)],
            "ridge": [figures.ridge(cell) for cell in parts["decode"]],
            "failed": [],
        }

    def report(self, run: RunData, summary: Mapping[str, Any]) -> Report:
        """With and without a cache, prefill beside decode, step times, tokens per second, roofline, and tables."""
        blocks = (
            ("kv_cache", _cache_picture),
            ("profile", _phases_picture),
            ("decode", _step_time_picture),
            ("decode", _saturation_picture),
            ("steps", _roofline_picture),
            ("steps", _steps_table),
            ("ridge", _ridge_table),
        )
        shown = {**summary, "steps": [*summary["prefill"], *summary["decode"]]}
        return Report(
            title="Prefill, decode and the KV cache on this machine",
            question=self.question,
            answer=_answer(summary),
            setup=[*setup_of(run, _METHOD.format(self.options)), *_engine_rows(summary["machine"])],
            blocks=[draw(shown) for part, draw in blocks if shown[part]],
            caveats=_caveats(summary),
            failures=summary["failed"],
        )


class _Figures:
    """The figures of cells. ``machine`` has the rates that all of them measured, which are the roofs of steps."""

    def __init__(self, cells: Sequence[FinishedCell], seed: int) -> None:
        engine = cells[0].facts["engine"]
        self._seed, self._chunk = seed, int(engine["chunk"])
        self._arithmetic = ModelArithmetic.from_dict(engine["arithmetic"])
        rates = frame_of([each for cell in cells for each in cell.facts["ceilings"]])
        flops, read = (self._mean(rates[key] / 1e9) for key in ("flops_per_s", "bytes_per_s"))
        self._rates = flops["mean"] * 1e9, read["mean"] * 1e9
        self.machine = {
            **{key: engine[key] for key in ("device", "dtype", "core", "threads", "chunk", "last_cache_bytes")},
            "weight_bytes": self._arithmetic.weight_bytes,
            "peak_gflops": flops,
            "read_gbs": read,
            "ridge_flops_per_byte": round(flops["mean"] / read["mean"], 3),
            "ridge_batch": round(self._arithmetic.ridge_batch(*self._rates), 3),
        }

    def _mean(self, values: Any) -> Any:
        return plain_mean([float(value) for value in values], self._seed)

    def _decode_cost(self, prompt: int, output: int) -> Cost:
        """Of all tokens of a generation but the first."""
        costs = (self._arithmetic.decode(1, context) for context in range(prompt, prompt + output - 1))
        return sum(costs, start=Cost(0.0, 0.0))

    def kv_cache(self, cell: FinishedCell) -> dict[str, Any]:
        prompt, output = int(cell.parameters["prompt_len"]), int(cell.parameters["output_len"])
        wide = frame_of(cell.facts["samples"]).pivot(index="repeat", columns="arm").dropna()
        times_s, ids = (  # [repeats, tokens] of each arm
            {arm: np.array(wide[key][arm].tolist()) for arm in (WITH, WITHOUT)} for key in ("times_s", "token_ids")
        )
        total_s = {arm: each.sum(axis=1) for arm, each in times_s.items()}
        prefills = [self._arithmetic.prefill(length, self._chunk).flops for length in range(prompt, prompt + output)]
        flops = {WITH: prefills[0] + self._decode_cost(prompt, output).flops, WITHOUT: sum(prefills)}
        equal = np.cumprod(ids[WITH] == ids[WITHOUT], axis=1)  # before the first token that differs
        return {
            "prompt_len": prompt,
            "output_len": output,
            "total_s": {arm: self._mean(each) for arm, each in total_s.items()},
            "speedup": self._mean(total_s[WITHOUT] / total_s[WITH]),
            "token_ms": {arm: (1e3 * each.mean(axis=0)).round(4).tolist() for arm, each in times_s.items()},
            "gflop": {arm: round(each / 1e9, 4) for arm, each in flops.items()},
            "tokens_equal_pct": round(100 * float(equal.mean()), 2),
            "published_s": PUBLISHED_S["cache"],
        }

    def profile(self, cell: FinishedCell) -> dict[str, Any]:
        prompt, output = int(cell.parameters["prompt_len"]), int(cell.parameters["output_len"])
        samples = frame_of(cell.facts["samples"])
        phases = {
            "prefill": (prompt, samples.prefill_s, self._arithmetic.prefill(prompt, self._chunk)),
            "decode": (output - 1, samples.decode_s, self._decode_cost(prompt, output)),
        }
        return {
            "prompt_len": prompt,
            "output_len": output,
            "total_s": {phase: self._mean(times_s) for phase, (_, times_s, _) in phases.items()},
            "token_ms": {phase: self._mean(1e3 * times_s / count) for phase, (count, times_s, _) in phases.items()},
            "phases": {phase: self._against_roof(cost, times_s) for phase, (_, times_s, cost) in phases.items()},
            "published_s": PUBLISHED_S["profile"],
        }

    def steps(self, cell: FinishedCell) -> list[dict[str, Any]]:
        """Prefills by ``tokens``, or decode steps of a context by ``batch``."""
        context = cell.parameters.get("context")
        points = []
        for count, times_s in frame_of(cell.facts["samples"]).groupby("batch" if context else "tokens").time_s:
            place, cost = {"tokens": int(count)}, self._arithmetic.prefill(int(count), self._chunk)
            if context:
                place = {"batch": int(count), "context": int(context)}
                cost = self._arithmetic.decode(**place)
            rates = {"time_ms": self._mean(1e3 * times_s), "tokens_per_s": self._mean(count / times_s)}
            points.append({**place, **rates, **self._against_roof(cost, times_s)})
        return points

    def _against_roof(self, cost: Cost, times_s: Any) -> dict[str, Any]:
        """FLOPs, bytes and intensity; the rates that were reached; the time at the roof, and without overlap."""
        time_s, roof_s = float(times_s.mean()), cost.roof_s(*self._rates)
        return {
            "gflop": round(cost.flops / 1e9, 6),
            "megabytes": round(cost.num_bytes / 1e6, 6),
            "intensity": round(cost.intensity, 4),
            "reached_gflops": round(cost.flops / time_s / 1e9, 4),
            "reached_gbs": round(cost.num_bytes / time_s / 1e9, 4),
            "roof_ms": round(1e3 * roof_s, 5),
            "added_ms": round(1e3 * cost.added_s(*self._rates), 5),
            "of_roof_pct": round(100 * roof_s / time_s, 2),
            "bound": "compute" if cost.intensity > self._rates[0] / self._rates[1] else "memory",
        }

    def ridge(self, cell: FinishedCell) -> dict[str, Any]:
        context, batches = int(cell.parameters["context"]), cell.parameters["batches"]
        wide = frame_of(cell.facts["samples"]).pivot(index="repeat", columns="batch", values="time_s").dropna()
        rounds = wide.to_dict("records") if len(wide.columns) == len(batches) else []
        doubling = [at for times_s in rounds if (at := doubling_batch(times_s)) is not None]
        lines = frame_of([
            {"fixed": line[0], "each": line[1]} for times_s in rounds if (line := fitted_line(times_s)) is not None
        ]).reindex(columns=["fixed", "each"])  # fmt: skip
        predicted = self._arithmetic.doubling_batch(context, *self._rates)
        return {
            "context": context,
            "formula_batch": self.machine["ridge_batch"],
            "predicted_doubling_batch": round(predicted, 3),
            # If some rounds end before their step doubles, the mean of the others would be too small.
            "doubling_batch": self._mean(doubling) if len(doubling) == len(rounds) else None,
            "largest_batch": max(batches),
            "half_saturation_batch": self._mean(lines.fixed / lines["each"]),
            "fixed_ms": self._mean(1e3 * lines.fixed),
            "each_ms": self._mean(1e3 * lines["each"]),
            "saturated_tokens_per_s": self._mean(1 / lines["each"]),
        }


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
    if cache := summary["kv_cache"]:
        speedup = Interval.from_dict(cache["speedup"])
        less = f"{speedup.value:.1f} times less" if speedup.lo > 1 else "not measurably less"
        without_s, with_s = (interval_text(cache["total_s"][arm], short) for arm in (WITHOUT, WITH))
        sentences.append(
            f"Generating {cache['output_len']} tokens after {cache['prompt_len']} takes {without_s} s without a KV "
            f"cache and {with_s} s with it, {less}."
        )
    if profile := summary["profile"]:
        prefill, decode = (
            f"{interval_text(profile['token_ms'][name], short)} ms ({short(phase['intensity'])} FLOP per byte, bound "
            f"by {phase['bound']})"
            for name, phase in profile["phases"].items()
        )
        sentences.append(f"Per token, prefill takes {prefill} and decode of one request {decode}.")
    for ridge in summary["ridge"][:1]:
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


def _beside_published(totals: Mapping[str, Any], published: Mapping[str, float], names: Mapping[str, str]) -> Panel:
    """Measured and published seconds of each arm or phase, by its name."""
    rows = [
        {"row": name, "s": totals[key], "note": f"{totals[key]['mean']:.3g} s", "published": published[key],
         "published_note": f"{published[key]:g} s on {PUBLISHED_ON}"}
        for key, name in names.items()
    ]  # fmt: skip
    look = {"color": FAINT, "marker": "|", "markersize": 26}
    return _rows_panel(
        rows, "s", names.values(), "seconds", "in all", published.values(),
        Mark(rows, "published", "row", kind="points", look=look, text="published_note", note=(0, -22)),
    )  # fmt: skip


def _rows_panel(
    rows: Records, key: str, names: Iterable[str], x: str, title: str, also: Iterable[float] = (), *more: Mark
) -> Panel:
    """An interval in each row, on a logarithmic axis that reaches the values of ``also`` as well."""
    mark = Mark(rows, key, "row", by="row", look={"marker": "o", "markersize": 8, "label": None}, kind="points",
                text="note", note=(0, 9))  # fmt: skip
    values = [*(each[key]["mean"] for each in rows), *also]
    return Panel([mark, *more], x=f"{x} (logarithmic)", title=title, log="x", rows=list(names),
                 xlim=(min(values) / 3, max(values) * 3))  # fmt: skip


def _cache_picture(summary: Mapping[str, Any]) -> Picture:
    """Seconds of the whole generation beside the published ones, and the time of each token."""
    cache, names = summary["kv_cache"], {WITHOUT: "without KV cache", WITH: "with KV cache"}
    tokens = [
        {"arm": name, "before": cache["prompt_len"] + place, "ms": ms}
        for arm, name in names.items()
        for place, ms in enumerate(cache["token_ms"][arm])
    ]
    each = Panel(
        [Mark(tokens, "before", "ms", by="arm", look={"markersize": 3})],
        x="tokens before this one",
        y="time of one token, ms",
        title="each token",
        ylim=(0, None),
        legend="best",
    )
    return Picture(
        "kv_cache",
        f"Generation with and without a KV cache ({cache['prompt_len']} + {cache['output_len']} tokens)",
        "Left: the whole generation, mean of the repeats with 95 % intervals (often smaller than the mark), beside the "
        "published figures. Right: mean time of each token. Without a cache every token computes the whole sequence "
        f"before it; with a cache only the first one does. Together {cache['gflop']['without']:.1f} GFLOP against "
        f"{cache['gflop']['with']:.1f}.",
        [_beside_published(cache["total_s"], cache["published_s"], names), each],
        columns=2,
        height_in=3.8,
    )


def _phases_picture(summary: Mapping[str, Any]) -> Picture:
    """Seconds of prefill and decode beside the published ones, and the time per token of each."""
    profile = summary["profile"]
    names = {
        "prefill": f"prefill of {profile['prompt_len']} tokens",
        "decode": f"decode of {profile['output_len'] - 1} tokens",
    }
    tokens = [{"row": phase, "ms": ms, "note": f"{ms['mean']:.3g} ms"} for phase, ms in profile["token_ms"].items()]
    return Picture(
        "phases",
        f"Prefill and decode of one request ({profile['prompt_len']} + {profile['output_len']} tokens)",
        "Mean with 95 % intervals (often smaller than the mark). Left: both phases beside the published figures. "
        "Right: the same per token. Prefill computes many tokens with each weight that it reads; decode reads all "
        "weights for one token.",
        [
            _beside_published(profile["total_s"], profile["published_s"], names),
            _rows_panel(tokens, "ms", names, "time per token, ms", "per token"),
        ],
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
    roof = {"linestyle": DASHED, "linewidth": 1.0, "marker": "", "label": None}
    star = {"marker": "*", "markersize": 13, "markeredgecolor": "white", "label": None}
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
                    Mark(points, "batch", "roof_ms", by="context", looks=colors, look=roof),
                    Mark(stars, "batch", "ms", by="context", looks=colors, kind="points", look=star),
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
        {"series": f"decode, context {point['context']}" if "context" in point else "prefill", **point,
         "note": str(point.get("tokens", point.get("batch"))) if point.get("context", noted) == noted else ""}
        for point in (*summary["decode"], *summary["prefill"])
    ]  # fmt: skip
    intensities = [ridge, *(point["intensity"] for point in points)]
    low, high = min(intensities) * 0.5, max(intensities) * 2
    roofs = []
    for edge, look in (("mean", {}), *((edge, {"linewidth": 0.8, "alpha": 0.4}) for edge in ("lo", "hi"))):
        if peak[edge] is not None and read[edge] is not None:
            ends = [(low, low * read[edge]), (peak[edge] / read[edge], peak[edge]), (high, peak[edge])]
            line = [{"x": x, "y": y} for x, y in ends]
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
                legend="lower right",
            )
        ],
        height_in=5.0,
    )


def _steps_table(summary: Mapping[str, Any]) -> TableBlock:
    steps = [
        {**point, "step": f"prefill of {point['tokens']}" if "tokens" in point
         else f"decode of {point['batch']} at {point['context']}"}
        for point in summary["steps"]
    ]  # fmt: skip
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


def _ridge_table(summary: Mapping[str, Any]) -> TableBlock:
    records = [{**ridge, "doubling_batch": ridge["doubling_batch"] or f"> {ridge['largest_batch']}"}
               for ridge in summary["ridge"]]  # fmt: skip
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
