"""Two arms under the same open-loop load, one after the other on the same service, and the figures of such a cell.

Each round sends the same conversations at the same times (a Poisson process) in both arms, in the order A B B A over
the rounds. Every arm begins when the service is idle again, so that no arm measures the other one's queue.

Every latency of these figures counts from when the request was due (`RequestRow.since_due`), and a request that was due
and never sent misses the SLO: a load generator that falls behind hides nothing."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experiments.bench.report import SLO
from experiments.experiment import Bench
from experiments.load import Lag, Outcome, run_load
from experiments.mode_pairs import COLOCATED, PD, causes_of, pairs_of
from experiments.report.drawing import ARM_LOOKS, Mark, Panel, Records, Rule
from experiments.request_row import LAG, RequestRow, unexpected_bytes
from experiments.run_folder import FinishedCell
from experiments.statistics import abba, difference_interval, mean_interval, percentile
from experiments.warm_up import requests_of, warm_up
from experiments.workloads.arrivals import random_arrivals
from experiments.workloads.conversation import Workload
from pdserve.client.async_client import AsyncClient
from pdserve.core.errors import InvalidRequest
from pdserve.core.interval import MIN_VALUES, Interval
from pdserve.core.request import Mode
from pdserve.core.timeline import STAGE_NAMES, Figure

ARMS = (PD, COLOCATED)
QUEUES = (LAG, "route", "prefill_queue", "decode_queue")
"""The stages in which a request waits for others."""
ATTAINMENT = 0.9
"""An arm sustains a load if this share of its requests meets the SLO."""
SLO_FACTOR = 2.0
"""An automatic SLO allows this multiple of what an idle colocated service does."""
REQUEST_TIMEOUT_S = 60.0
"""Deadline of each request under load. One that exceeds it is a failed request, which misses every SLO."""
_SETTLE_S = 2 * REQUEST_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """``rate`` requests per second for ``duration_s``, ``rounds`` times in each arm. Round r has the seed
    ``seed + r``."""

    rate: float
    duration_s: float
    rounds: int
    seed: int

    def planned(self) -> int:
        """Number of requests of all rounds and both arms."""
        return len(ARMS) * sum(
            sum(1 for _ in itertools.takewhile(lambda at_s: at_s < self.duration_s, self._times(repeat)))
            for repeat in range(self.rounds)
        )

    @property
    def sending_s(self) -> float:
        """Seconds during which requests are sent; the cell takes longer by the time that queues need to empty."""
        return len(ARMS) * self.rounds * self.duration_s

    def _times(self, repeat: int) -> Iterator[float]:
        return random_arrivals(self.rate, self.seed + repeat)

    async def send(self, bench: Bench, client: AsyncClient, workload: Workload) -> None:
        """Warm both arms up, send the rounds, write a row per request, and note in the fact ``loads`` how each load
        went. ``workload`` has to fit the service."""
        vocab_size = (await client.status()).vocab_size
        await warm_up(bench, client, requests_of(workload, self.seed - 1, vocab_size), ARMS)
        loads: list[dict[str, Any]] = []
        for repeat, arms in enumerate(abba(PD, COLOCATED, self.rounds)):
            for arm in arms:
                await bench.settle(client, arm, _SETTLE_S)
                begun_s = bench.elapsed_s

                def record(outcome: Outcome, arm: str = arm, repeat: int = repeat, begun_s: float = begun_s) -> None:
                    bench.record(
                        outcome.generation,
                        outcome.error,
                        arm=arm,
                        repeat=repeat,
                        index=outcome.index,
                        turn=outcome.turn,
                        scheduled_s=begun_s + outcome.scheduled_s,
                        sent_s=begun_s + outcome.sent_s,
                    )
                    bench.advance(1)

                load = await run_load(
                    client,
                    workload.conversations(1_000_000, self.seed + repeat, vocab_size),
                    self._times(repeat),
                    mode=Mode(arm),
                    duration_s=self.duration_s,
                    timeout_s=REQUEST_TIMEOUT_S,
                    on_done=record,
                )
                loads.append({"arm": arm, "repeat": repeat, "duration_s": self.duration_s, "took_s": load.duration_s,
                              "unsent": load.unsent, "lag": asdict(load.lag) if load.lag else None})  # fmt: skip
        bench.facts["loads"] = loads


def check_slo(text: str) -> None:
    """`InvalidRequest` unless ``text`` is ``auto`` or an SLO."""
    if text != "auto":
        try:
            SLO.parse(text)
        except InvalidRequest as error:
            raise InvalidRequest(f"--{error}") from None


def check_rates(rates: Sequence[float], option: str = "--rates") -> None:
    """`InvalidRequest` unless all rates are positive and finite, and none is given twice."""
    for rate in rates:
        if not 0 < rate < float("inf"):
            raise InvalidRequest(f"{option}: {rate:g} is not a positive number of requests per second")
    if len(set(rates)) != len(rates):
        raise InvalidRequest(f"{option}: a rate is given twice")


def slo_of(text: str, idle: Sequence[RequestRow], percent: float = 50.0) -> SLO | None:
    """The SLO that ``text`` names. For ``auto``: `SLO_FACTOR` times the percentile of TTFT, and times the median gap
    between tokens, of the colocated requests of ``idle`` (measured one at a time); None without any."""
    if text != "auto":
        return SLO.parse(text)
    rows = [row for row in idle if row.arm == COLOCATED and row.ttft_ms is not None]
    ttft_ms = percentile([row.ttft_ms for row in rows if row.ttft_ms is not None], percent)
    gap_ms = percentile([gap for row in rows for gap in row.itl_ms], 50.0)
    if ttft_ms is None:
        return None
    limits = {"ttft": ttft_ms, **({} if gap_ms is None else {"itl": gap_ms})}
    return SLO({key: round(SLO_FACTOR * value, 3) for key, value in limits.items()})


def slo_text(limits_ms: Mapping[str, float]) -> str:
    """``TTFT ≤ 120 ms and p99 ITL ≤ 30 ms``."""
    names = {"ttft": "TTFT", "ttft_decode": "TTFT_DECODE", "itl": "a request's p99 ITL", "tpot": "TPOT", "e2e": "E2E"}
    return " and ".join(f"{names[key]} ≤ {limit:.4g} ms" for key, limit in limits_ms.items())


@dataclass(frozen=True, slots=True)
class ArmLoads:
    """The requests of one arm of a cell: ``rows``, and the cell's facts about its ``loads``."""

    cell: str
    rows: Sequence[RequestRow]
    loads: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, cell: FinishedCell, rows: Sequence[RequestRow], arm: str) -> ArmLoads:
        """Those of ``arm`` among ``rows``, which are those of the cell."""
        loads = [load for load in cell.facts.get("loads", ()) if load["arm"] == arm]
        return cls(cell.cell, [row for row in rows if row.arm == arm], loads)

    @property
    def unsent(self) -> int:
        """Requests that were due, and were not sent before the load ended."""
        return sum(int(load.get("unsent", 0)) for load in self.loads)

    @property
    def offered_rps(self) -> float:
        """Requests that were due per second."""
        sending_s = sum(float(load["duration_s"]) for load in self.loads)
        return (len(self.rows) + self.unsent) / sending_s if sending_s else 0.0

    def met(self, slo: SLO) -> tuple[list[float], list[tuple[str, int]]]:
        """For each request that was due: 1 if it met the SLO, else 0; and its round. Requests that failed or were never
        sent miss it."""
        met = [float(slo.met_by_row(row.since_due())) for row in self.rows]
        rounds = [(self.cell, row.repeat) for row in self.rows]
        never = [(self.cell, int(load["repeat"])) for load in self.loads for _ in range(load.get("unsent", 0))]
        return met + [0.0] * len(never), rounds + never


def summarise_load(cell: FinishedCell, rows: Sequence[RequestRow], slo: SLO | None, seed: int) -> dict[str, Any]:
    """The figures of a cell under load. Every request that was due counts for the attainment; one that failed misses
    the SLO. Goodput is the attainment times the arrivals per second."""
    arms = {arm: ArmLoads.of(cell, rows, arm) for arm in ARMS}
    done = {arm: [row.since_due() for row in each.rows if row.error is None] for arm, each in arms.items()}
    added = {
        figure: difference_interval(
            _values(done[COLOCATED], figure),
            _values(done[PD], figure),
            seed,
            (_rounds(done[COLOCATED], figure), _rounds(done[PD], figure)),
        )
        for figure in Figure
    }
    pairs, _ = pairs_of(rows)
    equal = [pd.token_hash == colocated.token_hash for pd, colocated in pairs]
    figures: dict[str, Any] = {
        "n": min(len(each.rows) for each in arms.values()),
        "rounds": len({row.repeat for row in rows}),
        "errors": {arm: len(each.rows) - len(done[arm]) for arm, each in arms.items()},
        "unsent": {arm: each.unsent for arm, each in arms.items()},
        "slo_ms": None if slo is None else dict(slo.limits_ms),
        "added_ttft_ms": {key.value: None if each is None else each.to_dict() for key, each in added.items()},
        **_causes(done, added[Figure.TTFT_DECODE]),
        "tokens_equal": all(equal) if equal else None,
        "tokens_equal_share": round(statistics.fmean(equal), 4) if equal else None,
        "kv_bytes": sum(row.kv_bytes for row in done[PD]),
        "kv_bytes_expected": sum(row.kv_bytes_expected for row in done[PD]),
        "kv_bytes_equal": unexpected_bytes(rows) is None,
    }
    for key in ("offered_rps", "attainment", "goodput_rps", "arms_ms", "lag"):
        figures[key] = {}
    for arm, each in arms.items():
        met = None
        if slo is not None:
            values, rounds = each.met(slo)
            met = mean_interval(values, seed, rounds)
        figures["offered_rps"][arm] = round(each.offered_rps, 4)
        figures["attainment"][arm] = None if met is None else met.to_dict()
        figures["goodput_rps"][arm] = None if met is None else met.scaled(each.offered_rps).to_dict()
        figures["arms_ms"][arm] = latencies(done[arm])
        lag = Lag.between([row.scheduled_s for row in each.rows], [row.sent_s for row in each.rows])
        figures["lag"][arm] = None if lag is None else {
            **{key: value if key == "behind" else round(value, 4) for key, value in asdict(lag).items()},
            "behind": any((load["lag"] or {}).get("behind", False) for load in each.loads),
        }  # fmt: skip
    return figures


def _causes(done: Mapping[str, Sequence[RequestRow]], added: Interval | None) -> dict[str, Any]:
    """The causes of the added ``ttft_decode``, of which `QUEUES` are waiting; null unless both arms have the figure."""
    if added is None:
        return {"causes_ms": None, "unexplained_ms": None, "explained_pct": None}
    pd, colocated = ([row for row in done[arm] if row.ttft_decode_ms is not None] for arm in ARMS)
    return causes_of(pd, colocated, added.value, (LAG, *STAGE_NAMES))


def _values(rows: Sequence[RequestRow], figure: Figure) -> list[float]:
    return [ms for row in rows if (ms := row.figure_ms(figure)) is not None]


def _rounds(rows: Sequence[RequestRow], figure: Figure) -> list[int]:
    """The round of each request that has the figure: requests of one round share a queue."""
    return [row.repeat for row in rows if row.figure_ms(figure) is not None]


def latencies(rows: Sequence[RequestRow]) -> dict[str, float | None]:
    """Means of the requests' latencies, and the 99th percentiles of TTFT and of all gaps; in milliseconds."""
    figures = {
        "ttft": [row.ttft_ms for row in rows if row.ttft_ms is not None],
        "ttft_decode": [row.ttft_decode_ms for row in rows if row.ttft_decode_ms is not None],
        "tpot": [row.tpot_ms for row in rows if row.tpot_ms is not None],
        "e2e": [row.e2e_ms for row in rows if row.e2e_ms is not None],
    }
    found = {name: round(statistics.fmean(values), 4) if values else None for name, values in figures.items()}
    gaps_ms = [gap for row in rows for gap in row.itl_ms]
    for name, values in (("ttft_p99", figures["ttft"]), ("itl_p99", gaps_ms)):
        value = percentile(values, 99.0)
        found[name] = None if value is None else round(value, 4)
    return found


def sustains(cell: Mapping[str, Any], arm: str) -> bool:
    """Whether at least `ATTAINMENT` of the arm's requests met the SLO."""
    met = cell["attainment"][arm]
    return met is not None and met["mean"] >= ATTAINMENT


def behind(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the cells in which the load generator fell behind its schedule."""
    return [cell["cell"] for cell in cells if any(lag and lag["behind"] for lag in cell["lag"].values())]


def load_caveats(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader has to know about cells under load."""
    caveats = []
    if late := behind(cells):
        caveats.append(
            f"The load generator was behind its schedule in {len(late)} of {len(cells)} cells ({', '.join(late[:4])}"
            f"{', …' if len(late) > 4 else ''}): it shares the machine with the service. Latencies count from when a "
            "request was due, so they contain that wait (stage lag)."
        )
    if unsent := sum(sum(cell["unsent"].values()) for cell in cells):
        caveats.append(
            f"{unsent} requests were due, but the load generator did not come to them before their load ended. They "
            "count as requests that miss the SLO."
        )
    if any(cell["rounds"] < MIN_VALUES for cell in cells):
        caveats.append(
            "Requests of one round share a queue, so the intervals under load resample rounds. With fewer than "
            f"{MIN_VALUES} of them there are none."
        )
    if cells:
        caveats.append(
            "A load lasts for a limited time. Above the capacity of an arm the queue would grow further in a longer "
            "one, and its attainment would fall."
        )
    different = [cell["tokens_equal_share"] for cell in cells if cell["tokens_equal"] is False]
    if different:
        caveats.append(
            f"In {len(different)} of {len(cells)} cells under load, some requests generated other tokens than the same "
            f"prompt in the other arm (at worst {1 - min(different):.0%} of them). The arms batch differently there, "
            "and another batch can round logits differently; pdserve does not promise equal tokens then."
        )
    return caveats


def attainment_panel(points: Records, x: str, looks: Mapping[Any, Mapping[str, Any]] = ARM_LOOKS) -> Panel:
    """The share of requests that met the SLO over the rate: ``points`` have ``rate``, ``arm`` and the interval
    ``met``."""
    rates = sorted({point["rate"] for point in points})
    return Panel(
        [Mark(points, "rate", "met", by="arm", looks=looks, factor=100), Rule("y", 100 * ATTAINMENT)],
        x=x,
        y="requests that meet the SLO, %",
        log="x" if rates[-1] > 8 * rates[0] else "",
        ticks=rates,
        ylim=(-4, 104),
    )
