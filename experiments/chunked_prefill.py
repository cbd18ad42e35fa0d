"""``pdserve experiment chunked-prefill``: which chunk size suits one worker that prefills and decodes.

Small chunks let decoding requests go on after a short step, and make a prompt wait for more steps, each of which has
its own cost. Large chunks do the opposite. Every chunk size gets a service of its own with a single worker, which is
the same apart from it, and the same traffic (`experiments.neighbours`): requests that decode all the time, and long
prompts that arrive. The token budget of a step is the largest chunk and the decoding requests in all arms. So a chunk
size of at least the prompt's length computes prompts whole, as ``off`` does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, PositiveInt

from experiments.experiment import Bench, Cell, Experiment, Options
from experiments.neighbour_experiment import (
    AS_CONFIGURED,
    CALIBRATION,
    OFF,
    WHOLE_PROMPTS,
    NeighbourOptions,
    arrivals_text,
    failures_of,
    first_fact,
    measurement_caveats,
    stall_text,
    windows_by_arm,
)
from experiments.neighbours import Arm, WindowData, arm_summary, best_chunk, measure_window, passes, warm_up_traffic
from experiments.plots import neighbours as plots
from experiments.report.page import Report
from experiments.report.setup import setup_of
from experiments.run_folder import RunData
from pdserve.client.async_client import AsyncClient
from pdserve.client.status import ServiceStatus
from pdserve.core.interval import apart
from pdserve.core.request import Mode


class ChunkedPrefillOptions(NeighbourOptions):
    """Options of `ChunkedPrefill`."""

    chunk_sizes: tuple[PositiveInt, ...] = Field(
        (64, 128, 256, 512, 1024, 2048),
        description="chunk sizes in tokens; off is always measured too",
        json_schema_extra={"quick": [64, 256]},
    )
    prompt_len: int = Field(
        2048, ge=1, description="length of the long prompts, in tokens", json_schema_extra={"quick": 512}
    )
    load: float = Field(0.3, gt=0, le=2, description="arrivals of long prompts, as a share of what the worker computes")
    arrive_s: float = Field(
        8.0, gt=0, le=600, description="seconds of a window in which prompts arrive", json_schema_extra={"quick": 3.0}
    )
    repeats: int = Field(6, ge=1, description="windows per chunk size", json_schema_extra={"quick": 2})


class ChunkedPrefill(Experiment):
    """See the module."""

    name: ClassVar[str] = "chunked-prefill"
    question: ClassVar[str] = (
        "Which chunk size suits one worker that prefills and decodes: TTFT of long prompts, gaps of their neighbours, "
        "throughput?"
    )
    options_type: ClassVar[type[Options]] = ChunkedPrefillOptions
    options: ChunkedPrefillOptions

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """A calibration, then one cell per chunk size and pass. For a running service: its own chunk size."""
        repeats = passes(self.options.repeats)
        if attached is not None:
            self.options.traffic(1.0).check_fits(attached)
            return [Cell(CALIBRATION, {}), *(self._cell(AS_CONFIGURED, n, each) for n, each in enumerate(repeats))]
        chunks = [*map(str, sorted(self.options.chunk_sizes)), OFF]
        settings = [chunks if number % 2 == 0 else chunks[::-1] for number in range(len(repeats))]
        return [
            Cell(CALIBRATION, {}, self._service(chunks[0])),
            *(self._cell(chunk, n, repeats[n]) for n in range(len(repeats)) for chunk in settings[n]),
        ]

    def _cell(self, chunk: str, number: int, repeats: range) -> Cell:
        return Cell(
            f"{chunk}/pass-{number + 1}",
            {"chunk": chunk, "repeats": list(repeats)},
            {} if chunk == AS_CONFIGURED else self._service(chunk),
            len(repeats),
        )

    def _service(self, chunk: str) -> dict[str, Any]:
        """A single worker, which serves colocated requests only."""
        return {
            "cluster.prefill": 1,
            "cluster.decode": 0,
            "engine.max_num_batched_tokens": max((*self.options.chunk_sizes, 512)) + self.options.decoding,
            "engine.chunk_tokens": chunk,
        }

    async def measure(self, bench: Bench) -> None:
        """Time a long prompt on the idle service, or measure the windows of a chunk size."""
        async with AsyncClient(bench.target) as client:
            if bench.cell.name == CALIBRATION:
                await self.options.calibrate(bench, client, Mode.COLOCATED)
                return
            traffic = self.options.calibrated(bench)
            bench.facts["workers"] = len((await client.status()).workers)
            await warm_up_traffic(bench, client, traffic, (Mode.COLOCATED,))
            arm = Arm(str(bench.cell.parameters["chunk"]), Mode.COLOCATED)
            for repeat in bench.cell.parameters["repeats"]:
                await measure_window(bench, client, traffic, arm, repeat)
                bench.advance(1)

    def summarise(self, run: RunData) -> dict[str, Any]:
        """``traffic``, ``workers``; ``chunks`` by chunk size (``off`` and ``as-configured`` too), with the keys of an
        arm of `experiments.interference.Interference.summarise`; ``best_chunk``: the size with the lowest p99 ITL
        among those with at least ``throughput_share`` of the highest throughput."""
        arms = {name: arm_summary(each, self.options.seed) for name, each in _windows(run).items()}
        return {
            "experiment": self.name,
            "traffic": self.options.traffic_summary(run),
            "workers": first_fact(run, "workers"),
            "chunks": arms,
            "best_chunk": best_chunk(
                {int(name): arm for name, arm in arms.items() if name.isdecimal()}, self.options.throughput_share
            ),
            "throughput_share": self.options.throughput_share,
            "failed": failures_of(arms),
        }

    def report(self, run: RunData, summary: Mapping[str, Any]) -> Report:
        """Every figure over the chunk size, the gaps over time, their distributions, and a table."""
        windows = _windows(run)
        arms = {name: arm for name, arm in summary["chunks"].items() if arm["itl_ms"] and arm["long_ttft_ms"]}
        report = Report(
            title="Chunk size",
            question=self.question,
            answer=_answer(summary, arms),
            setup=setup_of(run, _method(summary)),
            caveats=_caveats(summary),
            failures=summary["failed"],
        )
        if not arms:
            return report
        labels = {name: _label(name, summary["best_chunk"]) for name in arms}
        shown = {name: windows[name] for name in _headline(summary, arms)}
        report.blocks = [
            plots.over_chunk(arms),
            plots.gaps_over_time(shown, labels),
            plots.distribution({name: windows[name] for name in arms}, labels),
            plots.figures_table("All chunk sizes", arms, labels, "ITL of the decoding requests over all windows."),
        ]
        return report


def _windows(run: RunData) -> dict[str, list[WindowData]]:
    """The windows of each chunk size, ascending; ``off`` last."""
    found = windows_by_arm(run)
    order = sorted(found, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0))
    return {name: found[name] for name in order}


def _label(chunk: str, best: int | None) -> str:
    if chunk == OFF:
        return "whole prompts (off)"
    if chunk == AS_CONFIGURED:
        return "as configured"
    return f"chunks of {chunk}{' (best)' if int(chunk) == best else ''}"


def _headline(summary: Mapping[str, Any], arms: Mapping[str, Any]) -> list[str]:
    """The smallest, the best, and whole prompts; what there is."""
    first = next(iter(arms))
    return list(dict.fromkeys(name for name in (first, str(summary["best_chunk"]), OFF) if name in arms))


def _answer(summary: Mapping[str, Any], arms: Mapping[str, Mapping[str, Any]]) -> str:
    if not arms:
        return "No window was measured."
    traffic = summary["traffic"]
    figures = "; ".join(
        f"{_label(name, None)}: p99 ITL {arms[name]['itl_ms']['p99']:.0f} ms{stall_text(arms[name])}, median TTFT "
        f"{arms[name]['long_ttft_ms']['p50']:.0f} ms, {arms[name]['tokens_per_s']['mean']:.0f} tokens/s"
        for name in _headline(summary, arms)
    )
    best = summary["best_chunk"]
    chosen = ""
    if best is not None:
        p99_ms, least = arms[str(best)]["itl_p99_ms"], summary["throughput_share"]
        most = max(arm["tokens_per_s"]["mean"] for arm in arms.values())
        others = [arm for name, arm in arms.items() if name.isdecimal() and name != str(best)]
        rivals = [arm for arm in others if arm["tokens_per_s"]["mean"] >= least * most]
        alike = any(apart(arm["itl_p99_ms"], p99_ms) <= 0 for arm in rivals)
        lowest = f"Chunks of {best} tokens have the lowest p99 ITL"
        if alike:
            lowest = f"No lowest p99 ITL could be told; that of chunks of {best} tokens is the lowest measured"
        chosen = f"{lowest} at no less than {summary['throughput_share']:.0%} of the highest throughput. "
    load = f"{traffic['decoding']} decoding requests and prompts of {traffic['prompt_len']} tokens"
    return f"{chosen}With {load}: {figures}."


def _method(summary: Mapping[str, Any]) -> str:
    workers = summary["workers"]
    return (
        f"{workers} worker{'s' if workers != 1 else ''}, all requests colocated; {arrivals_text(summary['traffic'])}, "
        "the same for all chunk sizes; chunk sizes ascend in the first pass and descend in the second; intervals are "
        "95 % bootstrap over windows"
    )


def _caveats(summary: Mapping[str, Any]) -> list[str]:
    arms = summary["chunks"]
    caveats = [
        "The best chunk size is that of this model, machine and load; a longer prompt or more decoding requests move "
        "it. It does not regard the TTFT, which the first picture shows beside it.",
        WHOLE_PROMPTS,
        "Decoding requests go on as fast as they can. So their rate falls with the time that prompts take from them, "
        "and throughput counts prompt and output tokens together.",
    ]
    if AS_CONFIGURED in arms:
        caveats.append("A running service keeps its chunk size: nothing was compared.")
    return [*caveats, *measurement_caveats(list(arms.values()), "Chunk sizes")]
