"""``pdserve experiment batching``: what batches are worth, who joins them, and how memory limits them.

Three parts, each in cells of its own:

- *Steps.* The time of single decode and prefill steps over the batch size, measured on the engine alone.
- *Pool.* Blocks as needed against contiguous reservation. There is no engine without paging here, so this part is a
  simulation: the real scheduler in virtual time, with step times from a cost model that is fitted to the measured steps
  of the same run.
- *Joining.* Continuous against static batching, on services with one worker that are the same apart from it: once with
  open-loop arrivals, for latencies, and once with all requests at the same time, for throughput."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from engine.scheduling.scheduler import SchedulerConfig
from engine.spec import DEFAULT_BLOCK_SIZE
from experiments.engine_alone.program import Rates, Sample, Task, measure_alone
from experiments.engine_alone.steps import StepCase
from experiments.experiment import Bench, Cell, Experiment, Options, option
from experiments.load import Load, run_load
from experiments.neighbours import passes
from experiments.report.drawing import PALETTE, Mark, Panel, Picture, TableBlock, cumulative, rows_picture, table
from experiments.report.page import Report, setup_of
from experiments.run_folder import Figures, Parameters, Rows, RunData, values_of
from experiments.simulated_pool import ARRIVALS, AT_ONCE, POOL, POOL_KINDS, CostModel, PoolLoad, simulate
from experiments.statistics import percentile, plain_mean, tail
from experiments.warm_up import requests_of, warm_up
from experiments.workloads.arrivals import all_at_once, random_arrivals
from experiments.workloads.conversation import Room
from experiments.workloads.synthetic import Lognormal, Synthetic, Uniform
from pdserve.client.async_client import AsyncClient
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import InvalidRequest
from pdserve.core.interval import MIN_VALUES, apart, interval_text
from pdserve.core.request import Mode, counted

STEPS, CAPACITY = "steps", "capacity"
CONTINUOUS, STATIC, AS_CONFIGURED = "continuous", "static", "as-configured"
_FURTHER = (StepCase(1, 1, 1024), StepCase(8, 1, 1024), StepCase(1, 256), StepCase(1, 256, 1024), StepCase(1, 512))
"""For the cost model: decodes with a long context, and chunks with and without tokens before them."""
_POOL_LOAD = PoolLoad(requests=120, prompt_lens=(32, 512), output_mean=96.0, max_tokens=512)
_POOL_CONFIG = SchedulerConfig(512, 64, 2048, DEFAULT_BLOCK_SIZE, 128, eos_token_ids=(1,))
_POOL_SHARE = 0.7  # arrivals, as a share of what the paged pool serves


class BatchingOptions(Options):
    """Options of `Batching`."""

    of_service = frozenset()
    decode_batches: tuple[int, ...] = option(
        (1, 2, 4, 8, 16, 32, 64),
        description="batch sizes of decode steps",
        quick=[1, 4, 16],
    )
    prefill_batches: tuple[int, ...] = option((1, 2, 4, 8), description="batch sizes of prefill steps", quick=[1, 4])
    prefill_tokens: int = Field(128, ge=2, description="tokens of each prompt in a prefill step")
    context: int = Field(256, ge=1, description="context of each request in a decode step, in tokens")
    device: Literal["cpu", "cuda"] = Field("cpu", description="device of the steps: one core, or the first GPU")
    rounds: int = option(7, ge=1, description="how often each step is measured", quick=3)
    pool_seeds: int = Field(6, ge=1, description="loads of the simulated pools")
    requests: int = option(48, ge=2, description="requests of a repeat", quick=16)
    output_median: int = option(
        24,
        ge=2,
        description="median of the outputs' lengths, in tokens (lognormal)",
        quick=12,
    )
    load: float = Field(
        0.6, gt=0, le=2, description="open-loop arrivals, as a share of what continuous batching serves at most"
    )
    max_num_seqs: int = Field(16, ge=1, description="requests in a batch of the services")
    repeats: int = option(6, ge=1, description="repeats of each arm", quick=2)


class Batching(Experiment):
    """See the module."""

    name = "batching"
    question = "What do batches gain, who may join them, and what does paged memory add to that?"
    options_type = BatchingOptions
    options: BatchingOptions

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """Steps, pool, and then both kinds of batching in passes of opposite order. For a running service: its
        latencies and throughput with the batching it has, without a comparison."""
        options = self.options
        if any(batch < 1 for batch in (*options.decode_batches, *options.prefill_batches)):
            raise InvalidRequest("--decode-batches and --prefill-batches: a batch has at least one request")
        if not (options.decode_batches and options.prefill_batches):
            raise InvalidRequest("--decode-batches and --prefill-batches: give at least one each")
        arms: tuple[str, ...] = CONTINUOUS, STATIC
        cells = [
            Cell(STEPS, {}, None, self._steps_task().measurements),
            Cell(POOL, {}, None, options.pool_seeds * len(POOL_KINDS)),
        ]
        # A single worker, which serves colocated requests only.
        single = {"cluster.prefill": 1, "cluster.decode": 0, "engine.max_num_seqs": options.max_num_seqs}
        services: dict[str, Parameters] = {arm: {**single, "engine.batching": arm} for arm in arms}
        if attached is not None:
            workload = self._workload()
            Room.of(attached).check(workload.inputs.longest, workload.outputs.longest, "--output-median")
            arms, cells, services = (AS_CONFIGURED,), [], {AS_CONFIGURED: {}}
        cells.append(Cell(CAPACITY, {}, services[arms[0]]))
        for number, repeats in enumerate(passes(options.repeats)):
            for arm in arms[:: -1 if number % 2 else 1]:
                name, parameters = f"{arm}/pass-{number + 1}", {"batching": arm, "repeats": list(repeats)}
                cells.append(Cell(name, parameters, services[arm], 2 * len(repeats) * options.requests))
        return cells

    def _sweeps(self) -> dict[str, list[StepCase]]:
        """The steps over batch sizes."""
        options = self.options
        return {
            "decode_steps": [StepCase(batch, 1, options.context) for batch in options.decode_batches],
            "prefill_steps": [StepCase(batch, options.prefill_tokens) for batch in options.prefill_batches],
        }

    def _steps_task(self) -> Task:
        options = self.options
        core = min(os.sched_getaffinity(0)) if options.device == "cpu" else None
        cases = tuple(dict.fromkeys([*itertools.chain(*self._sweeps().values()), *_FURTHER]))
        return Task(model=options.model, device=options.device, core=core, repeats=options.rounds, seed=options.seed,
                    cases=cases)  # fmt: skip

    def _workload(self) -> Synthetic:
        median = self.options.output_median
        return Synthetic(Uniform(16, 128), Lognormal(math.log(median), 0.9, 2, 8 * median))

    async def measure(self, bench: Bench) -> None:
        """Measure steps, simulate pools, or send requests to a service."""
        if bench.cell.name == STEPS:
            await self._measure_steps(bench)
        elif bench.cell.name == POOL:
            self._simulate_pools(bench)
        else:
            async with AsyncClient(bench.target) as client:
                await self._measure_service(bench, client)

    async def _measure_steps(self, bench: Bench) -> None:
        task = self._steps_task()
        steps: list[Figures] = [
            {"batch": case.batch, "tokens": case.tokens, "context": case.context, "step_ms": []} for case in task.cases
        ]

        def take(message: Rates | Sample) -> None:
            if isinstance(message, Sample):
                bench.advance(1)
                if message.repeat >= 0:
                    steps[message.values["case"]]["step_ms"].append(message.values["time_s"] * 1e3)

        built = await measure_alone(task, take)
        bench.facts |= {"steps": steps, "device": built.device, "dtype": built.dtype, "core": built.core}

    def _simulate_pools(self, bench: Bench) -> None:
        cost = CostModel.fit(_measured(bench.earlier[STEPS]))
        results = bench.facts.setdefault("pools", [])
        for seed in range(self.options.seed, self.options.seed + self.options.pool_seeds):
            _, paged = simulate("paged", _POOL_CONFIG, cost, _POOL_LOAD, None, seed)
            rate = _POOL_SHARE * _POOL_LOAD.requests / paged["duration_s"]
            for pool in POOL_KINDS:
                for kind, at_rate in ((AT_ONCE, None), (ARRIVALS, rate)):
                    rows, facts = simulate(pool, _POOL_CONFIG, cost, _POOL_LOAD, at_rate, seed)
                    for row in rows:
                        bench.write(row)
                    results.append({"pool": pool, "kind": kind, "seed": seed, "rate": at_rate, **facts})
                bench.advance(1)

    async def _measure_service(self, bench: Bench, client: AsyncClient) -> None:
        vocab_size, runs = (await client.status()).vocab_size, []
        workload, options = self._workload(), self.options

        async def unrecorded(repeat: int) -> Load:
            """Send the requests of a repeat all at once, without rows."""
            await bench.settle(client, AT_ONCE)
            conversations = workload.conversations(options.requests, options.seed * 1000 + repeat, vocab_size)
            return await run_load(client, conversations, all_at_once(), mode=Mode.COLOCATED)

        await warm_up(bench, client, requests_of(workload, options.seed, vocab_size), (Mode.COLOCATED,))
        await unrecorded(-1)  # warms larger batches up
        if bench.cell.name == CAPACITY:
            bench.facts |= _capacity(await unrecorded(-2))
            bench.advance(1)
            return
        rate = options.load * float(bench.earlier[CAPACITY]["requests_per_s"])
        for repeat in bench.cell.parameters["repeats"]:
            seed = options.seed * 1000 + repeat
            for kind, schedule in ((ARRIVALS, random_arrivals(rate, seed)), (AT_ONCE, all_at_once())):
                place: dict[str, Any] = {"arm": str(bench.cell.parameters["batching"]), "repeat": repeat, "kind": kind}
                conversations = workload.conversations(options.requests, seed, vocab_size)
                load = await bench.load(client, conversations, schedule, **place, mode=Mode.COLOCATED)
                runs.append({**place, "duration_s": load.duration_s})
        bench.facts |= {"rate": rate, "runs": runs}

    def summarise(self, run: RunData) -> Figures:
        """``decode_steps`` and ``prefill_steps`` by batch size: ``batch``, ``tokens``, ``step_ms``, ``tokens_per_s``.
        ``cost_model``: its coefficients in milliseconds, and its relative errors on the measured steps.

        ``batching`` by arm (``continuous``, ``static`` or ``as-configured``): ``ttft_ms``, ``itl_ms`` and ``e2e_ms``
        with open-loop arrivals, ``output_tokens_per_s`` with all requests at once, ``repeats``, ``late_ms``,
        ``errors``. ``static_over_continuous``: ratios of throughput, and of mean and p99 of the total time.
        ``rate_per_s``: open-loop arrivals.

        ``pools``, simulated, by kind: ``ttft_ms``, ``tpot_ms``, ``e2e_ms`` with open-loop arrivals; with all requests
        at once ``output_tokens_per_s``, ``running`` requests at a time, ``live`` and ``reserved`` shares of the pool,
        ``scattered`` (share of the free blocks outside the longest run); ``preemptions`` over both."""
        facts = {cell.cell: cell.facts for cell in run.cells}
        arms, times_ms = self._arms(run), _times_ms(facts.get(STEPS, {}))
        failed = {CAPACITY: facts.get(CAPACITY, {}).get("failed", 0)} | {
            name: arm["errors"] for name, arm in arms.items()
        }
        return {
            "experiment": self.name,
            **{
                name: [
                    {
                        "batch": case.batch,
                        "tokens": case.rows,
                        "step_ms": self._mean(times_ms[case]),
                        "tokens_per_s": self._mean(case.rows / ms * 1e3 for ms in times_ms[case]),
                    }
                    for case in sorted({*cases} & times_ms.keys(), key=lambda case: case.batch)
                ]
                for name, cases in self._sweeps().items()
            },
            "cost_model": _cost_model(facts[STEPS]) if STEPS in facts else None,
            "pools": {
                kind: self._pool(kind, facts[POOL]["pools"], run.rows_of(POOL, kind))
                for kind in (POOL_KINDS if POOL in facts else ())
            },
            "pool_is_simulated": True,
            "batching": arms,
            "rate_per_s": run.fact("rate"),
            "static_over_continuous": _ratios(arms.get(STATIC), arms.get(CONTINUOUS)),
            "failed": [f"{name}: {counted(errors, 'request')} failed" for name, errors in failed.items() if errors],
        }

    def _mean(self, values: Any) -> Any:
        return plain_mean(list(values), self.options.seed)

    def _rate(self, rows: Rows, durations_s: Mapping[int, float]) -> Any:
        """Output tokens per second of the repeats with all requests at once."""
        tokens = dict.fromkeys(durations_s, 0)
        for row in rows:
            if row.kind == AT_ONCE:
                tokens[row.repeat] += row.output_tokens
        return self._mean(tokens[repeat] / duration_s for repeat, duration_s in durations_s.items())

    def _pool(self, kind: str, pools: Sequence[Figures], rows: Rows) -> Figures:
        own = [each for each in pools if each["pool"] == kind]
        at_once = [each for each in own if each["kind"] == AT_ONCE]
        return {
            "output_tokens_per_s": self._rate(rows, {each["seed"]: each["duration_s"] for each in at_once}),
            **{key: self._mean(each[key] for each in at_once) for key in ("running", "live", "reserved", "scattered")},
            "preemptions": sum(each["preemptions"] for each in own),
            **_latencies(rows, ("ttft_ms", "e2e_ms", "tpot_ms")),
        }

    def _arms(self, run: RunData) -> Figures:
        """The arms that services were measured for."""
        summary = {}
        for name in (CONTINUOUS, STATIC, AS_CONFIGURED):
            runs = [each for cell in run.cells for each in cell.facts.get("runs", ()) if each["arm"] == name]
            if rows := [row for row in run.rows if row.arm == name]:
                durations_s = {each["repeat"]: each["duration_s"] for each in runs if each["kind"] == AT_ONCE}
                lags_s = [row.sent_s - row.scheduled_s for row in rows if row.kind == ARRIVALS]
                summary[name] = {
                    "repeats": len(durations_s),
                    "output_tokens_per_s": self._rate(rows, durations_s),
                    **_latencies(rows, ("ttft_ms", "itl_ms", "e2e_ms")),
                    "late_ms": round(max(lags_s, default=0.0) * 1e3, 3),
                    "errors": sum(row.error is not None for row in rows),
                }
        return summary

    def report(self, run: RunData, summary: Figures) -> Report:
        """The steps, the kinds of batching, the pools, and tables."""
        options, load, pool = self.options, _POOL_LOAD, _POOL_CONFIG
        rate, arms, pools = summary["rate_per_s"], summary["batching"], summary["pools"]
        arrivals = f", open-loop at {rate:.2f} per second and all at once" if rate else ""
        method = (
            f"steps: median of a few steps on one core (or the GPU), {options.rounds} rounds forwards and backwards; "
            f"services: {options.requests} requests per repeat (prompts of 16 to 128 tokens, outputs lognormal around "
            f"{options.output_median}){arrivals}, the same in both arms, at most {options.max_num_seqs} in a batch, "
            f"arms A B B A; pools: the real scheduler in virtual time, {pool.num_blocks} blocks of {pool.block_size} "
            f"tokens, {load.requests} requests (prompts of {load.prompt_lens[0]} to {load.prompt_lens[1]} tokens, "
            f"outputs of {load.output_mean:.0f} on average, limit {load.max_tokens}), {options.pool_seeds} seeds; "
            "intervals are 95 % bootstrap"
        )
        blocks: list[Picture | TableBlock] = []
        steps = [{"step": name.partition("_")[0], **step} for name in self._sweeps() for step in summary[name]]
        if steps:
            caption = (
                f"One engine step. Decode: one token for each request, after a context of {options.context}. Prefill: "
                f"a prompt of {options.prefill_tokens} tokens each. A decode step reads all weights, however few "
                "requests it has; a prefill step has enough tokens for the arithmetic to take longer than that."
            )
            columns = "step", "requests | batch", "tokens", "time, ms | step_ms:.2f", "tokens/s | tokens_per_s:.1f"
            blocks.append(table("Steps over the batch size", steps, columns, caption))
        if done := [{"arm": name, **arm} for name, arm in arms.items() if arm["e2e_ms"]]:
            rows = [row for row in run.rows if row.kind == ARRIVALS]
            e2e_ms = {arm["arm"]: values_of([row for row in rows if row.arm == arm["arm"]], "e2e_ms") for arm in done}
            shown = (
                "batching | arm",
                "repeats",
                *(f"{name} mean / p50 / p99, ms | {_TAIL.format(key)}"
                  for name, key in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("total time", "e2e_ms"))),
                "output tokens/s | output_tokens_per_s:.1f",
            )  # fmt: skip
            caption = "Latencies with open-loop arrivals; throughput with all requests at once."
            blocks += [_joining_picture(e2e_ms), table("Static and continuous batching", done, shown, caption)]
        if pools:
            first = {each["pool"]: each["timeline"] for each in run.fact("pools")
                     if each["kind"] == AT_ONCE and each["seed"] == options.seed}  # fmt: skip
            blocks += [_timeline_picture(first), *_pools(pools)]
        return Report(
            "Batching", self.question, _answer(summary), setup_of(run, method), blocks, _caveats(summary),
            summary["failed"],
        )  # fmt: skip


def _times_ms(facts: Figures) -> dict[StepCase, list[float]]:
    """The times of the steps that were measured."""
    return {
        StepCase(step["batch"], step["tokens"], step["context"]): step["step_ms"] for step in facts.get("steps", ())
    }


def _measured(facts: Parameters) -> list[tuple[StepCase, float]]:
    """The steps of the fact, each with its median."""
    return [(case, percentile(step_ms, 50) or 0.0) for case, step_ms in _times_ms(dict(facts)).items() if step_ms]


def _cost_model(facts: Figures) -> dict[str, float]:
    measured = _measured(facts)
    model = CostModel.fit(measured)
    errors = [abs(error) for error in model.errors(measured)]
    return {
        "ms_per_step": model.step,
        "ms_per_decoded_token": model.decode_token,
        "ms_per_token_of_decode_context": model.decode_context,
        "ms_per_prompt_token": model.prompt_token,
        "ms_per_prompt_pair": model.prompt_pair,
        "median_error": round(percentile(errors, 50) or 0.0, 4),
        "largest_error": round(max(errors), 4),
    }


def _capacity(load: Load) -> dict[str, float]:
    """The facts of the cell `CAPACITY`: requests answered per second until the last answer, and requests that failed,
    which do not count as served. The first error if none was answered."""
    answered = [each.ended_s for each in load.outcomes if each.error is None]
    errors = [each.error for each in load.outcomes if each.error is not None]
    if errors and not answered:
        raise errors[0]
    return {"requests_per_s": len(answered) / max(answered), "failed": len(errors)}


def _latencies(rows: Rows, figures: Sequence[str]) -> Figures:
    """Mean and percentiles of each figure of open-loop arrivals, since the requests were due."""
    due = [row.since_due() for row in rows if row.kind == ARRIVALS]
    return {figure: tail(values_of(due, figure)) for figure in figures}


def _ratios(static: Figures | None, continuous: Figures | None) -> dict[str, float] | None:
    """Static over continuous: throughput, and mean and p99 of the total time; None unless both have all of them."""
    both = [arm for arm in (static, continuous) if arm and arm["e2e_ms"] and arm["output_tokens_per_s"]["mean"]]
    if len(both) < 2:
        return None
    parts = {"output_tokens_per_s": ("output_tokens_per_s", "mean"), "e2e_mean": ("e2e_ms", "mean"),
             "e2e_p99": ("e2e_ms", "p99")}  # fmt: skip
    return {name: round(both[0][key][part] / both[1][key][part], 4) for name, (key, part) in parts.items()}


def _answer(summary: Figures) -> str:
    parts = []
    if decode := summary["decode_steps"]:
        first, last = decode[0], decode[-1]
        gain = f"{last['tokens_per_s']['mean'] / first['tokens_per_s']['mean']:.1f} times the tokens per second"
        if not apart(last["tokens_per_s"], first["tokens_per_s"]):
            gain = "no difference in tokens per second could be measured"
        parts.append(
            f"A decode step for {counted(last['batch'], 'request')} takes {interval_text(last['step_ms'])} ms, one for "
            f"{first['batch']} {interval_text(first['step_ms'])} ms: {gain}."
        )
    if ratios := summary["static_over_continuous"]:
        rates = [summary["batching"][name]["output_tokens_per_s"] for name in (STATIC, CONTINUOUS)]
        parts.append(
            f"Static batching has {ratios['output_tokens_per_s']:.2f} times the throughput of continuous batching, and "
            f"with the same arrivals {ratios['e2e_mean']:.2f} times its mean time per request "
            f"(p99: {ratios['e2e_p99']:.2f} times)."
            if apart(*rates)
            else "No difference in throughput between static and continuous batching could be measured "
            f"({' and '.join(interval_text(rate, '.0f') for rate in rates)} output tokens/s)."
        )
    if pools := summary["pools"]:
        paged, run = pools["paged"], pools["contiguous-request"]
        parts.append(
            f"In the simulation a paged pool runs {interval_text(paged['running'])} requests at a time and contiguous "
            f"reservation {interval_text(run['running'])}: {interval_text(paged['output_tokens_per_s'])} against "
            f"{interval_text(run['output_tokens_per_s'])} output tokens/s."
        )
    if (arm := summary["batching"].get(AS_CONFIGURED)) and arm["e2e_ms"]:
        parts.append(
            f"As it is configured, the service makes {interval_text(arm['output_tokens_per_s'])} output tokens/s at "
            f"most; {counted(arm['e2e_ms']['n'], 'request')} take {arm['e2e_ms']['mean']:.0f} ms on average (p99: "
            f"{arm['e2e_ms']['p99']:.0f} ms)."
        )
    return " ".join(parts) or "Nothing was measured."


def _caveats(summary: Figures) -> list[str | bool]:
    cost, arms = summary["cost_model"] if summary["pools"] else None, summary["batching"]
    late_ms = max((arm["late_ms"] for arm in arms.values()), default=0.0)
    return [
        cost is not None
        and "Paged against contiguous is simulated: scheduler and block accounts are real, step times come from the "
        f"cost model. Its error on the measured steps is {cost['median_error']:.0%} in the median and "
        f"{cost['largest_error']:.0%} at most. What attention over contiguous memory would save is not in it.",
        cost is not None
        and "Arrivals in the simulation are a share of what the paged pool serves. Where a contiguous pool serves less "
        "than that, its queue grows for as long as the load lasts, and so do its latencies.",
        AS_CONFIGURED in arms
        and "A running service keeps its batching: nothing was compared. Steps and pools are measured without "
        "--target.",
        any(step["step_ms"]["n"] < MIN_VALUES for step in summary["decode_steps"])
        and f"Steps with fewer than {MIN_VALUES} rounds have no intervals.",
        any(arm["repeats"] < MIN_VALUES for arm in arms.values())
        and f"Arms with fewer than {MIN_VALUES} repeats have no intervals.",
        late_ms > 20
        and f"The load generator sent a request up to {late_ms:.0f} ms late; latencies count from when it was due.",
    ]


_ARMS = {CONTINUOUS: {"color": PALETTE[2]}, STATIC: {"color": PALETTE[6]}, AS_CONFIGURED: {"color": PALETTE[0]}}
_POOLS = {
    "paged": ("paged", PALETTE[2]),
    "contiguous-request": ("contiguous: prompt + limit", PALETTE[4]),
    "contiguous-context": ("contiguous: longest request", PALETTE[3]),
}
_TAIL = "{0}.mean:.1f / {0}.p50:.1f / {0}.p99:.1f"


def _joining_picture(e2e_ms: Mapping[str, Sequence[float]]) -> Picture:
    """The distribution of the time per request of the kinds of batching."""
    whole = Panel(
        [Mark(cumulative(e2e_ms), "value", "share", "series", _ARMS, kind="steps")],
        "time from arrival to last token, ms",
        "share of requests",
        xlim=(0, None),
        ylim=(0, 1.02),
        legend="lower right",
    )
    return Picture(
        "joining",
        "Time per request with static and continuous batching",
        "Cumulative distribution of the time per request when they arrive one by one; further left is better. A static "
        "batch lasts as long as its longest output, and who arrives meanwhile waits for its end.",
        [whole],
    )


def _timeline_picture(timelines: Mapping[str, Sequence[Sequence[float]]]) -> Picture:
    """What the pool holds over virtual time, for each way to give out memory."""
    panels = []
    for name, points in timelines.items():
        label, color = _POOLS[name]
        data = [dict(zip(("s", "computed", "reserved"), point, strict=False)) for point in points]
        marks = [
            Mark(data, "s", key, kind="area", factor=100, look={"color": color, "label": text, "alpha": alpha})
            for key, text, alpha in (("reserved", "reserved", 0.3), ("computed", "computed KV", None))
        ]
        limits: dict[str, Any] = {"xlim": (0, None), "ylim": (0, 100)}
        panels.append(Panel(marks, "virtual time, s", "share of the pool, %", label, **limits))
    return Picture(
        "pool_over_time",
        "What the pool holds (simulated)",
        "All requests are there at the start. Dark: tokens whose KV is computed. Light: reserved for requests, but "
        "empty. White: free. Contiguous reservation keeps room for outputs that mostly end earlier.",
        panels,
        columns=len(panels),
        share={"sharex": True, "sharey": True},
        legend=True,
    )


def _pools(pools: Mapping[str, Figures]) -> list[Picture | TableBlock]:
    """Throughput, requests at a time, and latencies of each way to give out memory."""
    records = [{"pool": name, "label": _POOLS[name][0], **pool} for name, pool in pools.items()]
    columns = (
        "pool",
        *(f"{name} mean / p50 / p99, ms | {_TAIL.format(key)}"
          for name, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("total time", "e2e_ms"))),
        "output tokens/s | output_tokens_per_s:.1f",
        "requests at a time | running:.1f",
        "live, % of the pool | live.mean*100:.0f",
        "reserved, % | reserved.mean*100:.0f",
        "of the free, scattered, % | scattered.mean*100:.0f",
        "preemptions",
    )  # fmt: skip
    caption = (
        "Latencies with open-loop arrivals; throughput and shares of the pool with all requests at once. Live: holds "
        "computed KV. Reserved: belongs to a request. Scattered: free, but outside the longest free run, which only "
        "matters for contiguous reservation."
    )
    return [
        rows_picture(
            "pools",
            "Paged against contiguous (simulated)",
            "Throughput and requests at a time when all requests are there at the start, means over seeds with 95 % "
            "intervals; time per request with open-loop arrivals.",
            records,
            "label",
            {name: {"color": color, "marker": "o"} for name, color in _POOLS.values()},
            {
                "output_tokens_per_s": "throughput | output tokens per second",
                "running": "batch | requests at a time",
                "e2e_ms": "time per request | ms",
            },
        ),
        table("Paged and contiguous pools (simulated)", records, columns, caption),
    ]
