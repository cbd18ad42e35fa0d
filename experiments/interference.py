"""``pdserve experiment interference``: what long prompts do to requests that decode meanwhile.

Three ways to serve both on the same workers: on one worker with whole prompts, on one worker with prompts in chunks,
and apart. Every arm gets the same traffic (`experiments.neighbours`). A chunk size is a setting of the service; so
there is one service per chunk size, measured in two passes of opposite order. The disaggregated arms run on the service
with the largest chunks: its prefill worker has no decoding neighbours, which chunks would protect.

Two controls tell what of the disaggregated ITL is due to disaggregation. In `ALONE_BUSY` the long prompts want a single
token: they keep the prefill worker as busy, and nothing of them reaches the decode worker. In `ALONE_IDLE` there are
none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    measurement_caveats,
    stall_text,
    windows_by_arm,
)
from experiments.neighbours import (
    Arm,
    WindowData,
    arm_summary,
    best_chunk,
    in_turn,
    measure_window,
    passes,
    warm_up_traffic,
)
from experiments.plots import neighbours as plots
from experiments.report.page import Report
from experiments.report.setup import setup_of
from experiments.run_folder import RunData
from experiments.statistics import percentile
from pdserve.client.async_client import AsyncClient
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import InvalidRequest
from pdserve.core.interval import Interval, median_interval
from pdserve.core.request import Mode

PD, ALONE_BUSY, ALONE_IDLE = "pd", "alone-busy", "alone-idle"
_APART = (Arm(PD, Mode.PD), Arm(ALONE_BUSY, Mode.PD, 1), Arm(ALONE_IDLE, Mode.PD, 0))
_AIM = 1.3


class InterferenceOptions(NeighbourOptions):
    """Options of `Interference`."""

    chunk_sizes: tuple[PositiveInt, ...] = Field(
        (64, 128, 256, 512),
        description="chunk sizes of the colocated arms, in tokens",
        json_schema_extra={"quick": [256]},
    )
    prompt_len: int = Field(
        1024, ge=1, description="length of the long prompts, in tokens", json_schema_extra={"quick": 512}
    )
    load: float = Field(
        0.5, gt=0, le=2, description="arrivals of long prompts, as a share of what one prefill worker computes"
    )
    arrive_s: float = Field(
        6.0, gt=0, le=600, description="seconds of a window in which prompts arrive", json_schema_extra={"quick": 3.0}
    )
    repeats: int = Field(6, ge=1, description="windows per arm", json_schema_extra={"quick": 2})


class Interference(Experiment):
    """See the module."""

    name: ClassVar[str] = "interference"
    question: ClassVar[str] = "What do long prompts do to requests that decode meanwhile, colocated and disaggregated?"
    options_type: ClassVar[type[Options]] = InterferenceOptions
    options: InterferenceOptions

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """A calibration, then one cell per chunk size and pass. For a running service: as it is configured."""
        repeats = passes(self.options.repeats)
        if attached is not None:
            if not any(worker.links for worker in attached.workers):
                raise InvalidRequest("target: the service has no linked pair of prefill and decode workers")
            self.options.traffic(1.0).check_fits(attached)
            return [Cell(CALIBRATION, {}), *(self._cell(AS_CONFIGURED, n, each) for n, each in enumerate(repeats))]
        chunks = [OFF, *map(str, sorted(self.options.chunk_sizes))]
        if len(chunks) == 1:
            raise InvalidRequest("--chunk-sizes: give at least one")
        settings = [chunks if number % 2 == 0 else chunks[::-1] for number in range(len(repeats))]
        return [
            Cell(CALIBRATION, {}, {"engine.chunk_tokens": chunks[0]}),
            *(self._cell(chunk, n, repeats[n]) for n in range(len(repeats)) for chunk in settings[n]),
        ]

    def _cell(self, chunk: str, number: int, repeats: range) -> Cell:
        service = {} if chunk == AS_CONFIGURED else {"engine.chunk_tokens": chunk}
        return Cell(
            f"chunks-{chunk}/pass-{number + 1}",
            {"chunk": chunk, "repeats": list(repeats)},
            service,
            len(repeats) * len(self._arms(chunk)),
        )

    def _arms(self, chunk: str) -> list[Arm]:
        """The arms that run on a service with this chunk size."""
        if chunk == AS_CONFIGURED:
            return [Arm("colocated", Mode.COLOCATED), *_APART]
        largest = str(max(self.options.chunk_sizes))
        return [Arm(f"colocated-{chunk}", Mode.COLOCATED), *(_APART if chunk == largest else ())]

    async def measure(self, bench: Bench) -> None:
        """Time a long prompt on the idle service, or measure the windows of a cell."""
        async with AsyncClient(bench.target) as client:
            if bench.cell.name == CALIBRATION:
                await self.options.calibrate(bench, client, Mode.PD)
                return
            status = await client.status()
            bench.facts["cores"] = {worker.worker_id: worker.cores for worker in status.workers}
            traffic = self.options.calibrated(bench)
            arms = self._arms(str(bench.cell.parameters["chunk"]))
            await warm_up_traffic(bench, client, traffic, dict.fromkeys(arm.mode for arm in arms))
            for repeat in bench.cell.parameters["repeats"]:
                for arm in in_turn(arms, repeat):
                    await measure_window(bench, client, traffic, arm, repeat)
                    bench.advance(1)

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
        chunked = {
            int(chunk): arm for name, arm in arms.items() if (chunk := name.removeprefix("colocated-")).isdecimal()
        }
        facts = [cell.facts for cell in run.cells]
        busy, paired_busy = self._ratio(windows, ALONE_BUSY)
        idle, paired_idle = self._ratio(windows, ALONE_IDLE)
        return {
            "experiment": self.name,
            "traffic": self.options.traffic_summary(run),
            "arms": arms,
            "best_chunk": best_chunk(chunked, self.options.throughput_share),
            "throughput_share": self.options.throughput_share,
            "p99_itl_ratio": busy,
            "p99_itl_ratio_interval": paired_busy,
            "p99_itl_ratio_idle": idle,
            "p99_itl_ratio_idle_interval": paired_idle,
            "one_core_per_role": all(_one_core_each(each["cores"]) for each in facts if "cores" in each),
            "failed": failures_of(arms),
        }

    def _ratio(
        self, windows: Mapping[str, Sequence[WindowData]], control: str
    ) -> tuple[float | None, dict[str, Any] | None]:
        """The p99 ITL of the disaggregated arm over that of a control: of all gaps, and the interval over repeats."""
        apart, alone = ({each.repeat: each for each in windows.get(name, ())} for name in (PD, control))
        both = sorted(apart.keys() & alone.keys())
        above, below = (
            percentile([gap_ms for repeat in both for gap_ms in arm[repeat].itl_ms], 99) for arm in (apart, alone)
        )
        paired = median_interval(
            [
                over / under
                for repeat in both
                if (over := percentile(apart[repeat].itl_ms, 99)) and (under := percentile(alone[repeat].itl_ms, 99))
            ]
        )
        ratio = round(above / below, 4) if above and below else None
        return ratio, None if paired is None else paired.to_dict()

    def report(self, run: RunData, summary: Mapping[str, Any]) -> Report:
        """The trade, the gaps over time, their distributions, and a table."""
        windows = _windows(run)
        arms = {name: arm for name, arm in summary["arms"].items() if arm["itl_ms"]}
        report = Report(
            title="Long prompts beside decoding requests",
            question=self.question,
            answer=_answer(summary),
            setup=setup_of(run, _method(summary)),
            caveats=_caveats(summary),
            failures=summary["failed"],
        )
        if not arms:
            return report
        labels = {name: _label(name, summary["best_chunk"]) for name in arms}
        served = {name: arm for name, arm in arms.items() if arm["long_ttft_ms"] and name != ALONE_BUSY}
        headline = [name for name in _headline(summary) if name in arms]
        report.blocks = [
            plots.trade(served, labels),
            plots.gaps_over_time({name: windows[name] for name in headline}, labels),
            plots.distribution({name: windows[name] for name in arms}, labels),
            plots.figures_table(
                "All arms",
                arms,
                labels,
                "ITL of the decoding requests over all windows. In the arm with a busy neighbour the long prompts want "
                "one token and never reach the decode worker; their prompts count as tokens all the same.",
            ),
        ]
        return report


def _windows(run: RunData) -> dict[str, list[WindowData]]:
    """The windows of each arm, in the order of the arms."""
    found = windows_by_arm(run)
    return {name: found[name] for name in sorted(found, key=_place)}


def _place(arm: str) -> tuple[int, int]:
    chunk = arm.removeprefix("colocated-")
    if arm.startswith("colocated"):
        return 0, int(chunk) if chunk.isdecimal() else -1
    return 1, (PD, ALONE_BUSY, ALONE_IDLE).index(arm)


def _one_core_each(cores: Mapping[str, str]) -> bool:
    return all(each.isdecimal() for each in cores.values()) and len(set(cores.values())) == len(cores)


def _label(arm: str, best: int | None) -> str:
    chunk = arm.removeprefix("colocated-")
    if arm == f"colocated-{OFF}":
        return "colocated, whole prompts"
    if chunk.isdecimal():
        return f"colocated, chunks of {chunk}{' (best)' if int(chunk) == best else ''}"
    return {
        "colocated": "colocated, as configured",
        PD: "disaggregated",
        ALONE_BUSY: "decode alone, neighbour busy",
        ALONE_IDLE: "decode alone, neighbour idle",
    }[arm]


def _headline(summary: Mapping[str, Any]) -> list[str]:
    """The arms that the answer compares."""
    return ["colocated", f"colocated-{OFF}", f"colocated-{summary['best_chunk']}", PD]


def _answer(summary: Mapping[str, Any]) -> str:
    arms, traffic = summary["arms"], summary["traffic"]
    parts = []
    for name in _headline(summary):
        arm = arms.get(name)
        if arm and arm["itl_ms"] and arm["long_ttft_ms"]:
            parts.append(
                f"{_label(name, None)}: p99 ITL {arm['itl_ms']['p99']:.0f} ms{stall_text(arm)}, median TTFT of the "
                f"long prompts {arm['long_ttft_ms']['p50']:.0f} ms, "
                f"{arm['output_tokens_per_s']['mean']:.0f} output tokens/s"
            )
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


def _method(summary: Mapping[str, Any]) -> str:
    return (
        f"{arrivals_text(summary['traffic'])}, the same in all arms; arms are interleaved A B B A; intervals are 95 % "
        "bootstrap over windows"
    )


def _caveats(summary: Mapping[str, Any]) -> list[str]:
    arms = summary["arms"]
    caveats = [
        "No arm is best in everything: colocated requests share all workers, so that a long prompt finds twice as many "
        "that can compute it, and decoding requests are spread over twice as many; disaggregation keeps one worker for "
        "each. Which figure matters is a matter of the service's objectives.",
        WHOLE_PROMPTS,
        "The gaps are the client's own: they include gateway and client, which share the machine with the engines.",
    ]
    if summary["best_chunk"] is not None:
        caveats.append(
            f"The best chunk size is the one with the lowest p99 ITL among those with at least "
            f"{summary['throughput_share']:.0%} of the highest throughput (prompt and output tokens per second)."
        )
    if not summary["one_core_per_role"]:
        caveats.append(
            "The workers do not have exactly one core of their own each; the ratio's aim is stated for that."
        )
    return [*caveats, *measurement_caveats(list(arms.values()), "Arms")]
