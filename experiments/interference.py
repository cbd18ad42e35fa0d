"""``pdserve experiment interference`` and ``chunked-prefill``: long prompts beside requests that decode.

Every arm gets the same traffic (`experiments.neighbours`). A chunk size is a setting of the service; so there is one
service per chunk size, measured in two passes of opposite order.

*Interference* compares three ways to serve both on the same workers: on one worker with whole prompts, on one worker
with prompts in chunks, and apart. The disaggregated arms run on the service with the largest chunks: its prefill worker
has no decoding neighbours, which chunks would protect. Two controls tell what of the disaggregated ITL is due to
disaggregation. In `ALONE_BUSY` the long prompts want a single token: they keep the prefill worker as busy, and nothing
of them reaches the decode worker. In `ALONE_IDLE` there are none.

*Chunked prefill* asks which chunk size suits one worker that prefills and decodes. Small chunks let decoding requests
go on after a short step, and make a prompt wait for more steps, each of which has its own cost. Large chunks do the
opposite. The token budget of a step is the largest chunk and the decoding requests in all arms. So a chunk size of at
least the prompt's length computes prompts whole, as ``off`` does."""

from __future__ import annotations

import itertools
import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, PositiveInt

from experiments.experiment import Bench, Cell, Experiment, Options, option
from experiments.neighbours import (
    LONG,
    Arm,
    Traffic,
    WindowData,
    arm_summary,
    best_chunk,
    measure_window,
    passes,
    windows_by_arm,
)
from experiments.report.drawing import (
    ARM_LOOKS,
    DASHED,
    FAINT,
    INK,
    MARKERS,
    PALETTE,
    Look,
    Mark,
    Panel,
    Picture,
    Rule,
    TableBlock,
    cumulative,
    table,
    tail_marks,
)
from experiments.report.page import Report, setup_of
from experiments.run_folder import RunData
from experiments.statistics import percentile
from experiments.warm_up import warm_up
from pdserve.client.async_client import AsyncClient
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import InvalidRequest
from pdserve.core.interval import MIN_VALUES, Interval, apart, median_interval
from pdserve.core.request import Mode, counted_requests

CALIBRATION = "calibration"
"""The cell that times a long prompt, from which the rate of arrivals follows."""
OFF, AS_CONFIGURED = "off", "as-configured"
"""Chunk sizes besides numbers: prompts are never split, and the unknown one of a running service."""
PD, ALONE_BUSY, ALONE_IDLE = "pd", "alone-busy", "alone-idle"
_APART = (Arm(PD, Mode.PD), Arm(ALONE_BUSY, Mode.PD, 1), Arm(ALONE_IDLE, Mode.PD, 0))
_AIM = 1.3
_LATE_MS = 20.0
_CALIBRATIONS = 4  # of which the first is left out

_LOOKS: Mapping[str, Look] = {
    PD: {"color": ARM_LOOKS["pd"]["color"]},
    ALONE_BUSY: {"color": PALETTE[4], "linestyle": DASHED},
    ALONE_IDLE: {"color": FAINT, "linestyle": DASHED},
}
_CHUNKED = ("#cc79a7", "#56b4e9", "#0072b2", "#009e73", "#88a020", "#6a3d9a")


class NeighbourOptions(Options):
    """Options that both questions have."""

    prompt_len: int = Field(1024, ge=1, description="length of the long prompts, in tokens")
    output_len: int = Field(8, ge=2, description="output of the long prompts, in tokens")
    decoding: int = Field(4, ge=1, description="requests that decode all the time")
    load: float = Field(0.5, gt=0, le=2, description="arrivals of long prompts, as a share of what a worker computes")
    rate: float | None = Field(None, gt=0, description="arrivals of long prompts per second, instead of --load")
    arrive_s: float = Field(6.0, gt=0, le=600, description="seconds of a window in which prompts arrive")
    throughput_share: float = Field(
        0.95, gt=0, le=1, description="a chunk size qualifies as best with this share of the highest throughput"
    )
    chunk_sizes: tuple[PositiveInt, ...] = Field((), description="chunk sizes in tokens")
    repeats: int = option(6, ge=1, description="windows per arm", quick=2)

    def traffic(self, prompt_s: float) -> Traffic:
        """The traffic of a window, if a long prompt takes a worker ``prompt_s`` seconds."""
        rate = self.load / prompt_s if self.rate is None else self.rate
        arrivals = max(1, round(rate * self.arrive_s))
        return Traffic(self.decoding, arrivals, self.arrive_s, self.prompt_len, self.output_len, self.seed)


class LongPrompts(Experiment):
    """What both questions do: a calibration, then the windows of the arms of each chunk size."""

    options: NeighbourOptions
    mode: ClassVar[Mode]
    """Of the calibration."""
    prefix: ClassVar[str] = ""
    """Of the names of cells, before the chunk size."""

    @abstractmethod
    def chunks(self) -> list[str]:
        """The chunk sizes of the services, in the order of the first pass."""

    @abstractmethod
    def service(self, chunk: str) -> dict[str, Any]:
        """The settings of the service with a chunk size."""

    @abstractmethod
    def arms(self, chunk: str) -> list[Arm]:
        """The arms that run on it."""

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """A calibration, then one cell per chunk size and pass. For a running service: as it is configured."""
        chunks = self.chunks() if attached is None else [AS_CONFIGURED]
        if attached is not None:
            self.options.traffic(1.0).check_fits(attached)
        return [
            Cell(CALIBRATION, {}, self.service(chunks[0])),
            *(
                Cell(
                    f"{self.prefix}{chunk}/pass-{number + 1}",
                    {"chunk": chunk, "repeats": list(repeats)},
                    self.service(chunk),
                    len(repeats) * len(self.arms(chunk)),
                )
                for number, repeats in enumerate(passes(self.options.repeats))
                for chunk in (chunks if number % 2 == 0 else chunks[::-1])
            ),
        ]

    async def measure(self, bench: Bench) -> None:
        """Time a long prompt on the idle service, or measure the windows of a cell."""
        async with AsyncClient(bench.target) as client:
            status = await client.status()
            bench.facts["cores"] = {worker.worker_id: worker.cores for worker in status.workers}
            bench.facts["workers"] = len(status.workers)
            calibrating = bench.cell.name == CALIBRATION
            arms = [Arm("", self.mode)] if calibrating else self.arms(str(bench.cell.parameters["chunk"]))
            prompt_s = 1.0 if calibrating else float(bench.earlier[CALIBRATION]["long_prompt_s"])
            traffic = self.options.traffic(prompt_s)
            traffic.check_fits(status)
            prompts = ((traffic.prompt(status.vocab_size, LONG, -2, index), 4) for index in itertools.count())
            await warm_up(bench, client, prompts, dict.fromkeys(arm.mode for arm in arms))
            if calibrating:
                await bench.settle(client, CALIBRATION)
                bench.facts["long_prompt_s"] = await self._long_prompt_s(client, traffic, status.vocab_size)
                bench.advance(1)
                return
            bench.facts["arrivals"] = traffic.arrivals
            for repeat in bench.cell.parameters["repeats"]:
                for arm in arms if repeat % 2 == 0 else arms[::-1]:
                    await measure_window(bench, client, traffic, arm, repeat)
                    bench.advance(1)

    async def _long_prompt_s(self, client: AsyncClient, traffic: Traffic, vocab_size: int) -> float:
        """Seconds that one long prompt takes on the idle service, to its first token."""
        times_ms = []
        for index in range(_CALIBRATIONS):
            prompt, salt = traffic.prompt(vocab_size, LONG, -1, index), f"calibration/{random.random()}"
            done = await client.generate(prompt, mode=self.mode, max_tokens=1, ignore_eos=True, salt=salt).result()
            times_ms.append(done.ttft_ms)
        return sorted(times_ms[1:])[(_CALIBRATIONS - 1) // 2] / 1e3

    def traffic_summary(self, run: RunData) -> dict[str, Any]:
        """``traffic`` of the summary; what was not measured yet is None."""
        names = ("decoding", "prompt_len", "output_len", "arrive_s")
        facts = {key: _first_fact(run, key) for key in ("arrivals", "long_prompt_s")}
        return {**{name: getattr(self.options, name) for name in names}, **facts}

    def best(self, arms: Mapping[str, Mapping[str, Any]]) -> int | None:
        """The best chunk size of the arms, which are named by them."""
        return best_chunk(
            {int(name): arm for name, arm in arms.items() if name.isdecimal()}, self.options.throughput_share
        )


def _first_fact(run: RunData, key: str) -> Any:
    """The fact ``key`` of the first cell that has it; None if none has."""
    return next((cell.facts[key] for cell in run.cells if key in cell.facts), None)


def _failures_of(arms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What makes a run fail: arms with failed requests."""
    failing = ((name, arm["errors"], arm["error"]) for name, arm in arms.items())
    return [f"{name}: {counted_requests(count)} failed, first with {error}" for name, count, error in failing if count]


def _stall_text(arm: Mapping[str, Any]) -> str:
    """The median of the longest gaps beside long prompts, in parentheses; empty if there were none."""
    return f" (longest gap beside a long prompt: {arm['stall_ms']['p50']:.0f} ms)" if arm["stall_ms"] else ""


def _arrivals_text(traffic: Mapping[str, Any]) -> str:
    return (
        f"{traffic['decoding']} requests decode all the time; in each window {traffic['arrivals']} prompts of "
        f"{traffic['prompt_len']} tokens (output {traffic['output_len']}) arrive within {traffic['arrive_s']:g} s at "
        "the times of a Poisson process"
    )


def _caveats(arms: Sequence[Mapping[str, Any]], name: str, *own: str) -> list[str]:
    """The question's ``own`` caveats, and those on how ``arms``, called ``name``, were measured."""
    caveats = [
        *own,
        "A prompt that is computed whole makes one long gap for each decoding request. Where such gaps are fewer than "
        "1 % of all, p99 does not show them; the longest gap beside each long prompt and the tail of the distribution "
        "do.",
    ]
    if any(arm["windows"] < MIN_VALUES for arm in arms):
        caveats.append(f"{name} with fewer than {MIN_VALUES} windows have no intervals.")
    late_ms = max((arm["late_ms"] for arm in arms), default=0.0)
    if late_ms > _LATE_MS:
        caveats.append(
            f"The load generator sent a prompt up to {late_ms:.0f} ms late; TTFT counts from when it was due."
        )
    return caveats


class InterferenceOptions(NeighbourOptions):
    """Options of `Interference`."""

    chunk_sizes: tuple[PositiveInt, ...] = option(
        (64, 128, 256, 512),
        description="chunk sizes of the colocated arms, in tokens",
        quick=[256],
    )
    prompt_len: int = option(1024, ge=1, description="length of the long prompts, in tokens", quick=512)
    arrive_s: float = option(6.0, gt=0, le=600, description="seconds of a window in which prompts arrive", quick=3.0)


class Interference(LongPrompts):
    """See the module."""

    name: ClassVar[str] = "interference"
    question: ClassVar[str] = "What do long prompts do to requests that decode meanwhile, colocated and disaggregated?"
    options_type: ClassVar[type[Options]] = InterferenceOptions
    mode = Mode.PD
    prefix = "chunks-"

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """As of both questions; a running service has to be able to disaggregate."""
        if attached is not None and not any(worker.links for worker in attached.workers):
            raise InvalidRequest("target: the service has no linked pair of prefill and decode workers")
        return super().cells(attached)

    def chunks(self) -> list[str]:
        """Whole prompts first."""
        if not self.options.chunk_sizes:
            raise InvalidRequest("--chunk-sizes: give at least one")
        return [OFF, *map(str, sorted(self.options.chunk_sizes))]

    def service(self, chunk: str) -> dict[str, Any]:
        """Prefill and decode workers as configured."""
        return {} if chunk == AS_CONFIGURED else {"engine.chunk_tokens": chunk}

    def arms(self, chunk: str) -> list[Arm]:
        """Colocated, and with the largest chunks those that run apart."""
        if chunk == AS_CONFIGURED:
            return [Arm("colocated", Mode.COLOCATED), *_APART]
        largest = str(max(self.options.chunk_sizes))
        return [Arm(f"colocated-{chunk}", Mode.COLOCATED), *(_APART if chunk == largest else ())]

    def summarise(self, run: RunData) -> dict[str, Any]:
        """``traffic``: the decoding requests, lengths, arrivals, and the calibrated ``long_prompt_s``.

        ``arms`` by name: ``windows``, ``errors``, ``late_ms`` (the latest that a prompt was sent); ``itl_ms`` of the
        decoding requests over all windows; ``itl_p99_ms``, the mean over windows of their p99; ``stall_ms``, over the
        long prompts, of the longest gap between a prompt's arrival and its first token; ``long_ttft_ms`` from when
        prompts were due; ``output_tokens_per_s`` and ``tokens_per_s``, means over windows.

        ``best_chunk`` (null with a target) and the ``throughput_share`` that it had to reach. ``p99_itl_ratio``:
        ``pd`` over ``alone-busy``, of all gaps; ``p99_itl_ratio_interval``: the median of the ratios of the repeats;
        ``p99_itl_ratio_idle`` and its interval: over ``alone-idle``. ``one_core_per_role``: whether every worker had
        exactly one core of its own."""
        windows = _windows(run)
        arms = {name: arm_summary(each, self.options.seed) for name, each in windows.items()}
        busy, paired_busy = _ratio(windows, ALONE_BUSY)
        idle, paired_idle = _ratio(windows, ALONE_IDLE)
        return {
            "experiment": self.name,
            "traffic": self.traffic_summary(run),
            "arms": arms,
            "best_chunk": self.best({name.removeprefix("colocated-"): arm for name, arm in arms.items()}),
            "throughput_share": self.options.throughput_share,
            "p99_itl_ratio": busy,
            "p99_itl_ratio_interval": paired_busy,
            "p99_itl_ratio_idle": idle,
            "p99_itl_ratio_idle_interval": paired_idle,
            "one_core_per_role": all(
                _one_core_each(cell.facts["cores"]) for cell in run.cells if "cores" in cell.facts
            ),
            "failed": _failures_of(arms),
        }

    def report(self, run: RunData, summary: Mapping[str, Any]) -> Report:
        """The trade, the gaps over time, their distributions, and a table."""
        windows, best = _windows(run), summary["best_chunk"]
        arms = {name: arm for name, arm in summary["arms"].items() if arm["itl_ms"]}
        caveats = [
            "No arm is best in everything: colocated requests share all workers, so that a long prompt finds twice as "
            "many that can compute it, and decoding requests are spread over twice as many; disaggregation keeps one "
            "worker for each. Which figure matters is a matter of the service's objectives.",
            "The gaps are the client's own: they include gateway and client, which share the machine with the engines.",
        ]
        if best is not None:
            caveats.append(
                f"The best chunk size is the one with the lowest p99 ITL among those with at least "
                f"{summary['throughput_share']:.0%} of the highest throughput (prompt and output tokens per second)."
            )
        if not summary["one_core_per_role"]:
            caveats.append(
                "The workers do not have exactly one core of their own each; the ratio's aim is stated for that."
            )
        report = Report(
            title="Long prompts beside decoding requests",
            question=self.question,
            answer=_interference_answer(summary),
            setup=setup_of(
                run,
                f"{_arrivals_text(summary['traffic'])}, the same in all arms; arms are interleaved A B B A; intervals "
                "are 95 % bootstrap over windows",
            ),
            caveats=_caveats(list(summary["arms"].values()), "Arms", *caveats),
            failures=summary["failed"],
        )
        if arms:
            labels = {name: _arm_label(name, best) for name in arms}
            served = {name: arm for name, arm in arms.items() if arm["long_ttft_ms"] and name != ALONE_BUSY}
            headline = [name for name in _compared(summary) if name in arms]
            report.blocks = [
                _trade_picture(served, labels),
                *_gap_pictures(windows, headline, labels),
                _table(
                    "All arms",
                    arms,
                    labels,
                    "ITL of the decoding requests over all windows. In the arm with a busy neighbour the long prompts "
                    "want one token and never reach the decode worker; their prompts count as tokens all the same.",
                ),
            ]
        return report


def _ratio(windows: Mapping[str, Sequence[WindowData]], control: str) -> tuple[float | None, dict[str, Any] | None]:
    """The p99 ITL of the disaggregated arm over that of a control: of all gaps, and the interval over repeats."""
    of_pd, alone = ({each.repeat: each for each in windows.get(name, ())} for name in (PD, control))
    both = sorted(of_pd.keys() & alone.keys())
    above, below = (
        percentile([gap_ms for repeat in both for gap_ms in arm[repeat].itl_ms], 99) for arm in (of_pd, alone)
    )
    paired = median_interval(
        [
            over / under
            for repeat in both
            if (over := percentile(of_pd[repeat].itl_ms, 99)) and (under := percentile(alone[repeat].itl_ms, 99))
        ]
    )
    ratio = round(above / below, 4) if above and below else None
    return ratio, None if paired is None else paired.to_dict()


def _windows(run: RunData) -> dict[str, list[WindowData]]:
    """The windows of each arm: whole prompts, ascending chunks, and what runs apart."""

    def place(arm: str) -> tuple[int, int]:
        chunk = arm.removeprefix("colocated-")
        if arm.startswith("colocated"):
            return 0, int(chunk) if chunk.isdecimal() else -1
        return 1, (PD, ALONE_BUSY, ALONE_IDLE).index(arm)

    found = windows_by_arm(run)
    return {name: found[name] for name in sorted(found, key=place)}


def _one_core_each(cores: Mapping[str, str]) -> bool:
    return all(each.isdecimal() for each in cores.values()) and len(set(cores.values())) == len(cores)


def _arm_label(arm: str, best: int | None) -> str:
    chunk = arm.removeprefix("colocated-")
    if chunk.isdecimal():
        return f"colocated, chunks of {chunk}{' (best)' if int(chunk) == best else ''}"
    return {
        f"colocated-{OFF}": "colocated, whole prompts",
        "colocated": "colocated, as configured",
        PD: "disaggregated",
        ALONE_BUSY: "decode alone, neighbour busy",
        ALONE_IDLE: "decode alone, neighbour idle",
    }[arm]


def _compared(summary: Mapping[str, Any]) -> list[str]:
    """The arms that the answer compares."""
    return ["colocated", f"colocated-{OFF}", f"colocated-{summary['best_chunk']}", PD]


def _interference_answer(summary: Mapping[str, Any]) -> str:
    arms, traffic = summary["arms"], summary["traffic"]
    parts = [
        f"{_arm_label(name, None)}: p99 ITL {arm['itl_ms']['p99']:.0f} ms{_stall_text(arm)}, median TTFT of the "
        f"long prompts {arm['long_ttft_ms']['p50']:.0f} ms, {arm['output_tokens_per_s']['mean']:.0f} output tokens/s"
        for name in _compared(summary)
        if (arm := arms.get(name)) and arm["itl_ms"] and arm["long_ttft_ms"]
    ]
    if not parts:
        return "No window was measured."
    answer = (
        f"With {traffic['decoding']} decoding requests and prompts of {traffic['prompt_len']} tokens arriving: "
        f"{'; '.join(parts)}."
    )
    ratio, interval = summary["p99_itl_ratio"], summary["p99_itl_ratio_interval"]
    if ratio is not None and interval is not None:
        over = Interval.from_dict(interval)
        told = f"is {ratio:.2f} times" if over.lo > 1 or over.hi < 1 else "could not be told from"
        answer += (
            f" The disaggregated p99 ITL {told} that of a decode worker left alone beside a busy neighbour (ratio "
            f"{over.text('', '.2f')}, aim: at most {_AIM})."
        )
    return answer


class ChunkedPrefillOptions(NeighbourOptions):
    """Options of `ChunkedPrefill`."""

    chunk_sizes: tuple[PositiveInt, ...] = option(
        (64, 128, 256, 512, 1024, 2048),
        description="chunk sizes in tokens; off is always measured too",
        quick=[64, 256],
    )
    prompt_len: int = option(2048, ge=1, description="length of the long prompts, in tokens", quick=512)
    load: float = Field(0.3, gt=0, le=2, description="arrivals of long prompts, as a share of what the worker computes")
    arrive_s: float = option(8.0, gt=0, le=600, description="seconds of a window in which prompts arrive", quick=3.0)


class ChunkedPrefill(LongPrompts):
    """See the module."""

    name: ClassVar[str] = "chunked-prefill"
    question: ClassVar[str] = (
        "Which chunk size suits one worker that prefills and decodes: TTFT of long prompts, gaps of their neighbours, "
        "throughput?"
    )
    options_type: ClassVar[type[Options]] = ChunkedPrefillOptions
    mode = Mode.COLOCATED

    def chunks(self) -> list[str]:
        """Whole prompts last."""
        return [*map(str, sorted(self.options.chunk_sizes)), OFF]

    def service(self, chunk: str) -> dict[str, Any]:
        """A single worker, which serves colocated requests only."""
        if chunk == AS_CONFIGURED:
            return {}
        return {
            "cluster.prefill": 1,
            "cluster.decode": 0,
            "engine.max_num_batched_tokens": max((*self.options.chunk_sizes, 512)) + self.options.decoding,
            "engine.chunk_tokens": chunk,
        }

    def arms(self, chunk: str) -> list[Arm]:
        """One, with the chunk size's name."""
        return [Arm(chunk, Mode.COLOCATED)]

    def summarise(self, run: RunData) -> dict[str, Any]:
        """See docs/experiments/chunked-prefill.md."""
        arms = {name: arm_summary(each, self.options.seed) for name, each in _by_chunk(run).items()}
        return {
            "experiment": self.name,
            "traffic": self.traffic_summary(run),
            "workers": _first_fact(run, "workers"),
            "chunks": arms,
            "best_chunk": self.best(arms),
            "throughput_share": self.options.throughput_share,
            "failed": _failures_of(arms),
        }

    def report(self, run: RunData, summary: Mapping[str, Any]) -> Report:
        """Every figure over the chunk size, the gaps over time, their distributions, and a table."""
        windows, best, workers = _by_chunk(run), summary["best_chunk"], summary["workers"]
        arms = {name: arm for name, arm in summary["chunks"].items() if arm["itl_ms"] and arm["long_ttft_ms"]}
        caveats = [
            "The best chunk size is that of this model, machine and load; a longer prompt or more decoding requests "
            "move it. It does not regard the TTFT, which the first picture shows beside it.",
            "Decoding requests go on as fast as they can. So their rate falls with the time that prompts take from "
            "them, and throughput counts prompt and output tokens together.",
        ]
        if AS_CONFIGURED in summary["chunks"]:
            caveats.append("A running service keeps its chunk size: nothing was compared.")
        report = Report(
            title="Chunk size",
            question=self.question,
            answer=_chunk_answer(summary, arms),
            setup=setup_of(
                run,
                f"{workers} worker{'s' if workers != 1 else ''}, all requests colocated; "
                f"{_arrivals_text(summary['traffic'])}, the same for all chunk sizes; chunk sizes ascend in the first "
                "pass and descend in the second; intervals are 95 % bootstrap over windows",
            ),
            caveats=_caveats(list(summary["chunks"].values()), "Chunk sizes", *caveats),
            failures=summary["failed"],
        )
        if arms:
            labels = {name: _chunk_label(name, best) for name in arms}
            report.blocks = [
                _chunk_picture(arms),
                *_gap_pictures({name: windows[name] for name in arms}, _told(summary, arms), labels),
                _table("All chunk sizes", arms, labels, "ITL of the decoding requests over all windows."),
            ]
        return report


def _by_chunk(run: RunData) -> dict[str, list[WindowData]]:
    """The windows of each chunk size, ascending; ``off`` last."""
    found = windows_by_arm(run)
    order = sorted(found, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0))
    return {name: found[name] for name in order}


def _chunk_label(chunk: str, best: int | None) -> str:
    if chunk in (OFF, AS_CONFIGURED):
        return "whole prompts (off)" if chunk == OFF else "as configured"
    return f"chunks of {chunk}{' (best)' if int(chunk) == best else ''}"


def _told(summary: Mapping[str, Any], arms: Mapping[str, Any]) -> list[str]:
    """The smallest, the best, and whole prompts; what there is."""
    first = next(iter(arms))
    return list(dict.fromkeys(name for name in (first, str(summary["best_chunk"]), OFF) if name in arms))


def _chunk_answer(summary: Mapping[str, Any], arms: Mapping[str, Mapping[str, Any]]) -> str:
    if not arms:
        return "No window was measured."
    traffic = summary["traffic"]
    figures = "; ".join(
        f"{_chunk_label(name, None)}: p99 ITL {arms[name]['itl_ms']['p99']:.0f} ms{_stall_text(arms[name])}, median "
        f"TTFT {arms[name]['long_ttft_ms']['p50']:.0f} ms, {arms[name]['tokens_per_s']['mean']:.0f} tokens/s"
        for name in _told(summary, arms)
    )
    best = summary["best_chunk"]
    chosen = ""
    if best is not None:
        p99_ms, least = arms[str(best)]["itl_p99_ms"], summary["throughput_share"]
        most = max(arm["tokens_per_s"]["mean"] for arm in arms.values())
        others = [arm for name, arm in arms.items() if name.isdecimal() and name != str(best)]
        rivals = [arm for arm in others if arm["tokens_per_s"]["mean"] >= least * most]
        lowest = f"Chunks of {best} tokens have the lowest p99 ITL"
        if any(apart(arm["itl_p99_ms"], p99_ms) <= 0 for arm in rivals):
            lowest = f"No lowest p99 ITL could be told; that of chunks of {best} tokens is the lowest measured"
        chosen = f"{lowest} at no less than {least:.0%} of the highest throughput. "
    load = f"{traffic['decoding']} decoding requests and prompts of {traffic['prompt_len']} tokens"
    return f"{chosen}With {load}: {figures}."


def _looks(arms: Sequence[str]) -> dict[str, Look]:
    """A colour for each arm: fixed for whole prompts and for those that run apart, in turn for chunk sizes."""
    chunked = [name for name in arms if name not in _LOOKS and not name.endswith(OFF)]
    colors = (ARM_LOOKS["colocated"]["color"],) if len(chunked) == 1 else _CHUNKED
    turns = {name: {"color": colors[number % len(colors)]} for number, name in enumerate(chunked)}
    return {name: turns.get(name, _LOOKS.get(name, {"color": INK})) for name in arms}


def _trade_picture(arms: Mapping[str, Mapping[str, Any]], labels: Mapping[str, str]) -> Picture:
    """p99 ITL, longest gap beside a long prompt, TTFT of the long prompts, and output rate of every arm, side by
    side."""
    looks = {name: {**look, "marker": "o", "linestyle": ""} for name, look in _looks(list(arms)).items()}
    records = [{"arm": name, **arm} for name, arm in arms.items()]
    p99s_ms = [arm["itl_p99_ms"]["mean"] for arm in arms.values()]
    wide = max(p99s_ms) > 5 * min(p99s_ms)
    rows: dict[str, Any] = {"rows": list(arms), "row_names": [labels[name] for name in arms]}

    def dots(key: str) -> list[Mark]:
        return [Mark(records, key, "arm", by="arm", looks=looks, kind="points")]

    return Picture(
        "trade",
        "The trade",
        "From left to right: the 99th percentile of the gaps between tokens, mean over windows with its 95 % interval; "
        "the longest gap of a decoding request while a long prompt waits for its first token; how long the long "
        "prompts wait for it; output tokens per second of all requests, with its interval. Lower is better, and of the "
        "last one higher.",
        [
            Panel(dots("itl_p99_ms"), x="p99 ITL, ms", title="gaps of decoding requests", log="x" if wide else "",
                  xlim=(None if wide else 0, None), **rows),
            *(
                Panel(marks, x=x, title=title, xlim=(0, None), **rows)
                for marks, x, title in (
                    (tail_marks(records, "stall_ms", "arm", looks), "longest gap, ms (dot: median, bar: p99)",
                     "beside a long prompt"),
                    (tail_marks(records, "long_ttft_ms", "arm", looks), "TTFT, ms (dot: median, bar: p99)",
                     "long prompts"),
                    (dots("output_tokens_per_s"), "output tokens per second", "throughput"),
                )
            ),
        ],
        columns=4,
        share={"sharey": True},
    )  # fmt: skip


def _gap_pictures(
    windows: Mapping[str, Sequence[WindowData]], headline: Sequence[str], labels: Mapping[str, str]
) -> list[Picture]:
    """Every gap of one window of each arm of the headline, with the arrivals: the first repeat that all of them have;
    and the distributions of all gaps of all arms, with their tails."""
    repeat = min(set.intersection(*({each.repeat for each in windows[name]} for name in headline)), default=0)
    shown = {name: each for name in headline for each in windows[name] if each.repeat == repeat}
    looks = _looks(list(shown))
    shortest = _shown_from([gap_ms for window in shown.values() for gap_ms in window.itl_ms])
    over_time = [
        Panel(
            [
                Mark(
                    [{"s": at_s, "ms": max(gap_ms, shortest)} for at_s, gap_ms in window.gaps],
                    "s", "ms", kind="points",
                    look={"color": looks[name]["color"], "marker": "o", "markersize": 2.5, "alpha": 0.6},
                ),
                *(Rule("x", at_s) for at_s in window.arrivals_s),
            ],
            x="" if number < len(shown) - 1 else "seconds since the window began",
            y="gap, ms",
            title=labels[name],
            log="y",
            xlim=(0, None),
        )
        for number, (name, window) in enumerate(shown.items())
    ]  # fmt: skip
    gaps = {labels[name]: [gap_ms for window in windows[name] for gap_ms in window.itl_ms] for name in labels}
    lines = {labels[name]: look for name, look in _looks(list(labels)).items()}
    first = min((_shown_from(each) for each in gaps.values() if each), default=1.0)
    tail = cumulative(gaps, longer=True)
    panels = [
        Panel(
            [Mark(shares, "value", "share", by="series", looks=lines, kind="steps"), *rules],
            x="gap, ms (logarithmic)",
            y=f"share of gaps that are {what}",
            title=title,
            log=log,
            xlim=(max(0.1, 0.8 * first), None),
            ylim=ylim,
        )
        for shares, rules, what, title, log, ylim in (
            (cumulative(gaps), [], "at most as long", "distribution", "x", (0, 1.02)),
            (tail, [Rule("y", 0.01, "p99")], "longer", "tail", "xy",
             (max(0.8 * min((each["share"] for each in tail), default=1.0), 1e-5), 1.1)),
        )
    ]  # fmt: skip
    return [
        Picture(
            "itl_over_time",
            "Gaps between tokens over time",
            f"Each dot is the gap before one token of a decoding request (window {repeat + 1} of each arm; "
            "logarithmic). Gaps of tokens that arrived in a burst are drawn at the lower edge. Dashed lines mark the "
            "arrivals of long prompts, which are the same in all arms.",
            over_time,
            height_in=1.55 * len(shown) + 0.7,
            share={"sharex": True, "sharey": True},
        ),
        Picture(
            "itl_distribution",
            "Distribution of the gaps",
            "All gaps of the decoding requests in all windows. Left: cumulative distribution. Right: the same from "
            "above with a logarithmic share, which shows the tail; a curve crosses the dashed line at its p99.",
            panels,
            columns=2,
            height_in=5.0,
            legend=True,
        ),
    ]


def _shown_from(values: Sequence[float]) -> float:
    """The shortest gap for which a logarithmic axis has room: half the 5th percentile. Tokens that arrive in a burst
    have gaps of next to nothing, to which most of the axis would go."""
    return float(np.percentile(values, 5)) / 2 if values else 1.0


def _chunk_picture(arms: Mapping[str, Mapping[str, Any]]) -> Picture:
    """TTFT of the long prompts, gaps of their neighbours, and throughput over the chunk size; ``off`` comes last."""
    records = [{"chunk": name, **arm} for name, arm in arms.items()]

    def lines(**named: str) -> list[Mark]:
        return [
            Mark(records, "chunk", key.replace("__", "."),
                 look={"label": label, "color": PALETTE[number], "marker": MARKERS[number]})
            for number, (key, label) in enumerate(named.items())
        ]  # fmt: skip

    panels = [
        Panel(marks, x="chunk size, tokens", y=y, title=title, columns=list(arms), log=log, legend=legend,
              ylim=(None if log else 0, None))
        for marks, y, title, log, legend in (
            (lines(long_ttft_ms__p50="median", long_ttft_ms__p99="p99"), "TTFT, ms", "long prompts", "", "best"),
            (lines(itl_ms__p50="median", itl_ms__p99="p99", itl_ms__max="longest"), "gap, ms (logarithmic)",
             "gaps of neighbours", "y", "best"),
            (lines(tokens_per_s="prompt and output", output_tokens_per_s="output"), "tokens per second", "throughput",
             "", "lower left"),
        )
    ]  # fmt: skip
    return Picture(
        "over_chunk",
        "Over the chunk size",
        "Left: how long the long prompts wait for their first token. Middle: the gaps between tokens of the requests "
        "that decode meanwhile. Right: throughput, the mean over windows with its 95 % interval. Off: prompts are "
        "computed whole.",
        panels,
        columns=3,
        height_in=3.9,
    )


def _table(title: str, arms: Mapping[str, Mapping[str, Any]], labels: Mapping[str, str], caption: str) -> TableBlock:
    """All figures of each arm."""
    columns = (
        "arm",
        "windows",
        "ITL p50, ms | itl_ms.p50:.1f",
        "p90 | itl_ms.p90:.1f",
        "p99 | itl_ms.p99:.1f",
        "max | itl_ms.max:.1f",
        "p99 by window, ms | itl_p99_ms:.1f",
        "longest gap beside a long prompt, p50, ms | stall_ms.p50:.1f",
        "long TTFT p50, ms | long_ttft_ms.p50:.0f",
        "p99 | long_ttft_ms.p99:.0f",
        "output tokens/s | output_tokens_per_s:.1f",
        "prompt + output tokens/s | tokens_per_s:.1f",
    )
    return table(title, [{"arm": labels[name], **arm} for name, arm in arms.items()], columns, caption)
