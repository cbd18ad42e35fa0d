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
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field, PositiveInt

from experiments.experiment import Bench, Cell, Experiment, Options, option
from experiments.neighbours import (
    LONG,
    OUTPUT_LEN,
    Arm,
    NeighbourOptions,
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
    PALETTE,
    Look,
    Looks,
    Mark,
    Panel,
    Picture,
    Rule,
    cumulative,
    rows_picture,
    table,
)
from experiments.report.page import Report, setup_of
from experiments.run_folder import Figures, Parameters, RunData
from experiments.statistics import percentile
from experiments.warm_up import warm_up
from pdserve.client.async_client import AsyncClient
from pdserve.client.status import ServiceStatus
from pdserve.core.chance import SYSTEM
from pdserve.core.errors import InvalidRequest
from pdserve.core.interval import MIN_VALUES, Interval, apart, interval_text, median_interval
from pdserve.core.request import Mode, counted

CALIBRATION = "calibration"
"""The cell that times a long prompt, from which the rate of arrivals follows."""
OFF, AS_CONFIGURED = "off", "as-configured"
"""Chunk sizes besides numbers: prompts are never split, and the unknown one of a running service."""
PD, ALONE_BUSY, ALONE_IDLE = "pd", "alone-busy", "alone-idle"
_APART = {each.name: each for each in (Arm(PD, Mode.PD), Arm(ALONE_BUSY, Mode.PD, 1), Arm(ALONE_IDLE, Mode.PD, 0))}
_COLOCATED = "colocated-"
_AIM = 1.3
_LATE_MS = 20.0
_CALIBRATIONS = 4  # of which the first is left out
_NAMES = {
    OFF: "whole prompts",
    AS_CONFIGURED: "as configured",
    PD: "disaggregated",
    ALONE_BUSY: "decode alone, neighbour busy",
    ALONE_IDLE: "decode alone, neighbour idle",
}


class InterferenceOptions(NeighbourOptions):
    """Options of `Interference`."""

    chunk_sizes: tuple[PositiveInt, ...] = option(
        (64, 128, 256, 512), description="chunk sizes of the colocated arms, in tokens", quick=[256]
    )
    prompt_len: int = option(1024, ge=1, description="length of the long prompts, in tokens", quick=512)
    arrive_s: float = option(6.0, gt=0, le=600, description="seconds of a window in which prompts arrive", quick=3.0)


class Interference(Experiment):
    """See the module. `ChunkedPrefill` differs in its services, its single arm, and what its answer begins with."""

    name = "interference"
    title: ClassVar[str] = "Long prompts beside decoding requests"
    question = "What do long prompts do to requests that decode meanwhile, colocated and disaggregated?"
    options_type: ClassVar[type[Options]] = InterferenceOptions
    fixed_options: ClassVar[Parameters] = {"output_len": OUTPUT_LEN}
    options: NeighbourOptions
    mode = Mode.PD
    """Of the calibration."""
    prefix = "chunks-"
    """Of the names of cells, before the chunk size."""
    method_caveats: ClassVar[Sequence[str]] = (
        "No arm is best in everything: colocated requests share all workers, so that a long prompt finds twice as "
        "many that can compute it, and decoding requests are spread over twice as many; disaggregation keeps one "
        "worker for each. Which figure matters is a matter of the service's objectives.",
        "The gaps are the client's own: they include gateway and client, which share the machine with the engines.",
    )

    def service(self, chunk: str) -> Parameters:
        """The settings of the service with a chunk size: prefill and decode workers as configured."""
        return {"engine.chunk_tokens": chunk}

    def arms(self, chunk: str) -> list[Arm]:
        """The arms that run on it: colocated, and with the largest chunks those that run apart."""
        if chunk == AS_CONFIGURED:
            return [Arm("colocated", Mode.COLOCATED), *_APART.values()]
        largest = chunk == str(max(self.options.chunk_sizes))
        return [Arm(f"{_COLOCATED}{chunk}", Mode.COLOCATED), *(_APART.values() if largest else ())]

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """A calibration, then one cell per chunk size and pass. For a running service: as it is configured; it has to
        be able to disaggregate."""
        chunks = [*map(str, sorted(self.options.chunk_sizes)), OFF]
        if len(chunks) == 1 and self.mode == Mode.PD:
            raise InvalidRequest("--chunk-sizes: give at least one")
        if attached is not None:
            chunks = [AS_CONFIGURED]
            if self.mode == Mode.PD and not any(worker.links for worker in attached.workers):
                raise InvalidRequest("target: the service has no linked pair of prefill and decode workers")
            self.options.check_fits(attached)
        services = {chunk: {} if attached else self.service(chunk) for chunk in chunks}
        cells = [Cell(CALIBRATION, {}, services[chunks[0]])]
        for number, repeats in enumerate(passes(self.options.repeats)):
            for chunk in chunks[:: -1 if number % 2 else 1]:
                name, parameters = f"{self.prefix}{chunk}/pass-{number + 1}", {"chunk": chunk, "repeats": list(repeats)}
                cells.append(Cell(name, parameters, services[chunk], len(repeats) * len(self.arms(chunk))))
        return cells

    async def measure(self, bench: Bench) -> None:
        """Time a long prompt on the idle service, or measure the windows of a cell."""
        options = self.options
        async with AsyncClient(bench.target) as client:
            status = await client.status()
            bench.facts["cores"] = {worker.worker_id: worker.cores for worker in status.workers}
            calibrating = bench.cell.name == CALIBRATION
            arms = [Arm("", self.mode)] if calibrating else self.arms(str(bench.cell.parameters["chunk"]))
            options.check_fits(status)
            prompts = ((options.prompt(status.vocab_size, LONG, -2, index), 4) for index in itertools.count())
            await warm_up(bench, client, prompts, dict.fromkeys(arm.mode for arm in arms))
            if calibrating:
                await bench.settle(client, CALIBRATION)
                bench.facts["long_prompt_s"] = await self._long_prompt_s(client, status.vocab_size)
                bench.advance(1)
                return
            bench.facts["arrivals"] = options.arrivals(bench.earlier[CALIBRATION]["long_prompt_s"])
            for repeat in bench.cell.parameters["repeats"]:
                for arm in arms[:: -1 if repeat % 2 else 1]:
                    await measure_window(bench, client, options, bench.facts["arrivals"], arm, repeat)
                    bench.advance(1)

    async def _long_prompt_s(self, client: AsyncClient, vocab_size: int) -> float:
        """Seconds that one long prompt takes on the idle service, to its first token."""
        times_ms = []
        for index in range(_CALIBRATIONS):
            prompt, salt = self.options.prompt(vocab_size, LONG, -1, index), f"calibration/{SYSTEM.random()}"
            done = await client.generate(prompt, mode=self.mode, max_tokens=1, ignore_eos=True, salt=salt).result()
            times_ms.append(done.ttft_ms)
        return sorted(times_ms[1:])[(_CALIBRATIONS - 1) // 2] / 1e3

    def summarise(self, run: RunData) -> Figures:
        """``traffic``: the decoding requests, lengths, ``arrivals``, and the calibrated ``long_prompt_s``; null until
        measured. ``arms`` by name: `experiments.neighbours.arm_summary`. ``best_chunk`` (null with a target) and the
        ``throughput_share`` that it had to reach. Then what the question has beside that (`found`)."""
        windows, share = _windows(run), self.options.throughput_share
        arms = {name: arm_summary(each, self.options.seed) for name, each in windows.items()}
        return {
            "experiment": self.name,
            "traffic": {
                **{name: getattr(self.options, name) for name in ("decoding", "prompt_len", "arrive_s")},
                **{name: run.fact(name) for name in ("arrivals", "long_prompt_s")},
            },
            "arms": arms,
            "best_chunk": best_chunk({name.removeprefix(_COLOCATED): arm for name, arm in arms.items()}, share),
            "throughput_share": share,
            **self.found(windows, run),
            "failed": [
                f"{name}: {counted(arm['errors'], 'request')} failed, first with {arm['error']}"
                for name, arm in arms.items()
                if arm["errors"]
            ],
        }

    def found(self, windows: Mapping[str, Sequence[WindowData]], run: RunData) -> Figures:
        """``p99_itl_ratio``: ``pd`` over ``alone-busy``, of all gaps; ``p99_itl_ratio_interval``: the median of the
        ratios of the repeats. ``one_core_per_role``: whether every worker had exactly one core of its own."""
        of_pd, alone = ({each.repeat: each.itl_ms for each in windows.get(name, ())} for name in (PD, ALONE_BUSY))
        both = sorted(of_pd.keys() & alone.keys())
        ratios = [_p99_ratio(of_pd[repeat], alone[repeat]) for repeat in both]
        paired = median_interval([ratio for ratio in ratios if ratio is not None])
        ratio = _p99_ratio(*([gap for repeat in both for gap in arm[repeat]] for arm in (of_pd, alone)))
        cores = [list(cell.facts["cores"].values()) for cell in run.cells if "cores" in cell.facts]
        return {
            "p99_itl_ratio": ratio and round(ratio, 4),
            "p99_itl_ratio_interval": paired and paired.to_dict(),
            "one_core_per_role": all(len({*each}) == len(each) and all(map(str.isdecimal, each)) for each in cores),
        }

    def conclusion(self, summary: Figures) -> str:
        """What the answer begins with, empty if nothing could be compared: the ratio to the control."""
        ratio, interval = summary["p99_itl_ratio"], summary["p99_itl_ratio_interval"]
        if ratio is None or interval is None:
            return ""
        over = Interval.from_dict(interval)
        told = f"is {ratio:.2f} times" if over.lo > 1 or over.hi < 1 else "could not be told from"
        return (
            f"The disaggregated p99 ITL {told} that of a decode worker left alone beside a busy neighbour (ratio "
            f"{over.text('', '.2f')}, aim: at most {_AIM}). "
        )

    def report(self, run: RunData, summary: Figures) -> Report:
        """The figures of all arms, the gaps over time, their distributions, and a table."""
        windows, traffic, best = _windows(run), summary["traffic"], summary["best_chunk"]
        arms = {name: {**arm, "arm": _label(name, best)} for name, arm in summary["arms"].items() if arm["itl_ms"]}
        told = [name for name in _told(summary) if arms.get(name, {}).get("long_ttft_ms")]
        answer = "No window was measured."
        if told:
            figures = "; ".join(
                f"{_label(name)}: p99 ITL {arm['itl_ms']['p99']:.0f} ms of {counted(arm['itl_ms']['n'], 'gap')}"
                + (f" (longest of a prompt: {arm['stall_ms']['p50']:.0f} ms, median)" if arm["stall_ms"] else "")
                + f", median TTFT of {counted(arm['long_ttft_ms']['n'], 'long prompt')} "
                f"{arm['long_ttft_ms']['p50']:.0f} ms, {interval_text(arm['output_tokens_per_s'])} output tokens/s"
                for name, arm in ((name, arms[name]) for name in told)
            )
            load = f"{traffic['decoding']} decoding requests and prompts of {traffic['prompt_len']} tokens arriving"
            answer = f"{self.conclusion(summary)}With {load}: {figures}."
        late_ms = max((arm["late_ms"] for arm in summary["arms"].values()), default=0.0)
        caveats = [
            *self.method_caveats,
            not summary.get("one_core_per_role", True)
            and "The workers do not have exactly one core of their own each; the ratio's aim is stated for that.",
            AS_CONFIGURED in arms and "A running service keeps its chunk size: nothing was compared.",
            "A prompt that is computed whole makes one long gap for each decoding request. Where such gaps are fewer "
            "than 1 % of all, p99 does not show them; the longest gap beside each long prompt and the tail of the "
            "distribution do.",
            best is not None
            and "The best chunk size has the lowest p99 ITL among those with at least "
            f"{summary['throughput_share']:.0%} of the highest throughput (prompt and output tokens per second). "
            "It is that of this model, machine and load, and does not regard the TTFT.",
            any(arm["windows"] < MIN_VALUES for arm in summary["arms"].values())
            and f"Arms with fewer than {MIN_VALUES} windows have no intervals.",
            late_ms > _LATE_MS and f"A prompt was sent up to {late_ms:.0f} ms late; TTFT counts from when it was due.",
        ]
        method = (
            f"{traffic['decoding']} requests decode all the time; in each window {traffic['arrivals']} prompts of "
            f"{traffic['prompt_len']} tokens (output {OUTPUT_LEN}) arrive within "
            f"{traffic['arrive_s']:g} s at the times of a Poisson process, the same in all arms; arms are "
            "interleaved A B B A; intervals are 95 % bootstrap over "
            "windows, that of the ratio of p99s from the order of the windows' ratios"
        )
        report = Report(self.title, self.question, answer, setup_of(run, method), [], caveats, summary["failed"])
        if not arms:
            return report
        looks = {arm["arm"]: look for arm, look in zip(arms.values(), _looks(arms), strict=True)}
        if served := [arm for name, arm in arms.items() if arm["long_ttft_ms"] and name != ALONE_BUSY]:
            report.blocks.append(_trade(served, looks))
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
        caption = (
            "ITL of the decoding requests over all windows. Where the neighbour is busy, the long prompts want one "
            "token and never reach the decode worker; their prompts count as tokens all the same."
        )
        shown = {arms[name]["arm"]: windows[name] for name in told or [*arms][:1]}
        gaps = {arm["arm"]: [gap_ms for each in windows[name] for gap_ms in each.itl_ms] for name, arm in arms.items()}
        report.blocks += [
            _over_time(shown, looks),
            _tail(gaps, looks),
            table("All arms", [*arms.values()], columns, caption),
        ]
        return report


def _p99_ratio(gaps_ms: Sequence[float], control_ms: Sequence[float]) -> float | None:
    """The 99th percentile of gaps over that of the control; None if one of them has none."""
    above, below = percentile(gaps_ms, 99), percentile(control_ms, 99)
    return above / below if above and below else None


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


class ChunkedPrefill(Interference):
    """See the module."""

    name = "chunked-prefill"
    title = "Chunk size"
    question = (
        "Which chunk size suits one worker that prefills and decodes: TTFT of long prompts, gaps of their neighbours, "
        "throughput?"
    )
    options_type = ChunkedPrefillOptions
    mode = Mode.COLOCATED
    prefix = ""
    method_caveats = (
        "Decoding requests go on as fast as they can. So their rate falls with the time that prompts take from "
        "them, and throughput counts prompt and output tokens together.",
    )

    def service(self, chunk: str) -> Parameters:
        """A single worker, which serves colocated requests only."""
        budget = max((*self.options.chunk_sizes, 512)) + self.options.decoding
        single = {"cluster.prefill": 1, "cluster.decode": 0, "engine.max_num_batched_tokens": budget}
        return {**super().service(chunk), **single}

    def arms(self, chunk: str) -> list[Arm]:
        """One, with the chunk size's name."""
        return [Arm(chunk, Mode.COLOCATED)]

    def found(self, windows: Mapping[str, Sequence[WindowData]], run: RunData) -> Figures:
        """Nothing."""
        return {}

    def conclusion(self, summary: Figures) -> str:
        """Which chunk size has the lowest p99 ITL, and whether others could be told from it."""
        best, share, arms = summary["best_chunk"], summary["throughput_share"], summary["arms"]
        if best is None:
            return ""
        rates = {name: arm["tokens_per_s"]["mean"] for name, arm in arms.items() if arm["tokens_per_s"]}
        rivals = [
            arms[name]["itl_p99_ms"]
            for name, rate in rates.items()
            if name.isdecimal() and int(name) != best and arms[name]["itl_ms"] and rate >= share * max(rates.values())
        ]
        lowest = f"Chunks of {best} tokens have the lowest p99 ITL"
        if any(apart(p99_ms, arms[str(best)]["itl_p99_ms"]) <= 0 for p99_ms in rivals):
            lowest = f"No lowest p99 ITL could be told; that of chunks of {best} tokens is the lowest measured"
        return f"{lowest} at no less than {share:.0%} of the highest throughput. "


def _windows(run: RunData) -> dict[str, list[WindowData]]:
    """The windows of each arm: ascending chunks, whole prompts, and what runs apart."""

    def place(arm: str) -> tuple[bool, float]:
        chunk = arm.removeprefix(_COLOCATED)
        return arm in _APART, [*_APART].index(arm) if arm in _APART else int(chunk) if chunk.isdecimal() else math.inf

    found = windows_by_arm(run)
    return {name: found[name] for name in sorted(found, key=place)}


def _label(arm: str, best: int | None = None) -> str:
    """What an arm is called, if not by its name."""
    chunk = AS_CONFIGURED if arm == "colocated" else arm.removeprefix(_COLOCATED)
    text = _NAMES.get(chunk) or f"chunks of {chunk}{' (best)' if chunk == str(best) else ''}"
    return f"colocated, {text}" if arm.startswith("colocated") else text


def _told(summary: Figures) -> list[str]:
    """The arms that the answer compares: the smallest chunks, the best, whole prompts, and disaggregated."""
    chunks = [f"{prefix}{chunk}" for prefix in ("", _COLOCATED) for chunk in (summary["best_chunk"], OFF)]
    smallest = [name for name in summary["arms"] if name.isdecimal()][:1]
    return list(dict.fromkeys([*smallest, "colocated", AS_CONFIGURED, *chunks, PD]))


def _looks(arms: Iterable[str]) -> list[Look]:
    """A colour for each arm: fixed for what runs apart and for whole prompts, in turn for others."""
    turns = itertools.cycle(("#0072b2", "#cc79a7", "#56b4e9", "#009e73", "#88a020", "#6a3d9a"))
    fixed: Looks = {
        PD: {"color": ARM_LOOKS["pd"]["color"]},
        ALONE_BUSY: {"color": PALETTE[4], "linestyle": DASHED},
        ALONE_IDLE: {"color": FAINT, "linestyle": DASHED},
        OFF: {"color": INK},
        f"{_COLOCATED}{OFF}": {"color": INK},
    }
    return [fixed[arm] if arm in fixed else {"color": next(turns)} for arm in arms]


def _trade(arms: Sequence[Figures], looks: Looks) -> Picture:
    """What each arm costs decoding requests and long prompts, side by side."""
    return rows_picture(
        "trade",
        "The trade",
        "From left to right: the 99th percentile of the gaps between tokens, mean over windows with its 95 % "
        "interval; the longest gap of a decoding request while a long prompt waits for its first token; how long "
        "the long prompts wait for it; output tokens per second of all requests, with its interval. Lower is "
        "better, and of the last one higher.",
        arms,
        "arm",
        {name: {**look, "marker": "o"} for name, look in looks.items()},
        {
            "itl_p99_ms": "gaps of decoding requests | p99 ITL, ms",
            "stall_ms": "beside a long prompt | longest gap, ms",
            "long_ttft_ms": "long prompts | TTFT, ms",
            "output_tokens_per_s": "throughput | output tokens per second",
        },
    )


def _over_time(windows: Mapping[str, Sequence[WindowData]], looks: Looks) -> Picture:
    """Every gap of one window of each arm, with the arrivals: the first repeat that all of them have."""
    repeat = min(set.intersection(*({each.repeat for each in arm} for arm in windows.values())), default=0)
    shown = {name: each for name, arm in windows.items() for each in arm if each.repeat == repeat}
    shortest = _shown_from([gap_ms for window in shown.values() for gap_ms in window.itl_ms])
    panels: list[Panel] = []
    for name, window in shown.items():
        points = [{"s": at_s, "ms": max(gap_ms, shortest)} for at_s, gap_ms in window.gaps]
        look = {**looks[name], "marker": "o", "markersize": 2.5, "alpha": 0.6}
        dots, arrivals = Mark(points, "s", "ms", look=look, kind="points"), [Rule("x", at) for at in window.arrivals_s]
        x = "seconds since the window began" if len(panels) == len(shown) - 1 else ""
        panels.append(Panel([dots, *arrivals], x, "gap, ms", name, "y", xlim=(0, None)))
    return Picture(
        "itl_over_time",
        "Gaps between tokens over time",
        f"Each dot is the gap before one token of a decoding request (window {repeat + 1} of each arm; "
        "logarithmic). Gaps of tokens that arrived in a burst are drawn at the lower edge. Dashed lines mark the "
        "arrivals of long prompts, which are the same in all arms.",
        panels,
        height_in=1.55 * len(shown) + 0.7,
        share={"sharex": True, "sharey": True},
    )


def _tail(gaps: Mapping[str, Sequence[float]], looks: Looks) -> Picture:
    """The distributions of all gaps of all arms, with their tails."""
    tail = cumulative(gaps, longer=True)
    least = max(0.8 * min((each["share"] for each in tail), default=1.0), 1e-5)
    shortest = min((_shown_from(each) for each in gaps.values() if each), default=1.0)
    panel = Panel(
        [Mark(tail, "value", "share", "series", looks, kind="steps"), Rule("y", 0.01, "p99")],
        "gap, ms (logarithmic)",
        "share of gaps that are longer",
        log="xy",
        xlim=(max(0.1, 0.8 * shortest), None),
        ylim=(least, 1.1),
    )
    return Picture(
        "itl_distribution",
        "Distribution of the gaps",
        "The share of all gaps of the decoding requests, in all windows, that are at least so long. A curve crosses "
        "the dashed line at its p99.",
        [panel],
        height_in=5.0,
        legend=True,
    )


def _shown_from(values: Sequence[float]) -> float:
    """The shortest gap for which a logarithmic axis has room: half the 5th percentile. Tokens that arrive in a burst
    have gaps of next to nothing, to which most of the axis would go."""
    return float(np.percentile(values, 5)) / 2 if values else 1.0
