"""The same requests disaggregated and colocated: pairs on an idle service, two arms under the same load, and what
differs between them.

Under load each round sends the same conversations at the same times (a Poisson process) in both arms, in the order
A B B A over the rounds. Every arm begins when the service is idle again, so that no arm measures the other one's queue.
Every latency of a load counts from when the request was due (`RequestRow.since_due`), and a request that was due and
never sent misses the SLO: a load generator that falls behind hides nothing."""

from __future__ import annotations

import itertools
import math
import random
import re
import statistics
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from pydantic import Field

from checkpoints.source import resolve_model
from experiments.environment import BESIDE_CORES, beside_text
from experiments.experiment import Bench, Experiment, Options, option
from experiments.load import Lag
from experiments.report.drawing import ARM_LOOKS, Mark, Panel, Records, Rule
from experiments.run_folder import LAG, FinishedCell, RequestRow, RunData, failures, unexpected_bytes
from experiments.statistics import abba, difference_interval, mean_interval, percentile
from experiments.warm_up import requests_of, warm_up
from experiments.workloads.arrivals import random_arrivals
from experiments.workloads.conversation import Workload
from ops.doctor.handoff_prediction import HandoffPart, LinkRate, Overlap, handoff_parts, hiding_gbs, predict
from pdserve.client.async_client import AsyncClient
from pdserve.client.generation import Generation
from pdserve.client.status import ServiceStatus
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import InvalidRequest, ModelError
from pdserve.core.interval import CONFIDENCE, MIN_VALUES, Interval, median_interval
from pdserve.core.kv_layout import KVLayout
from pdserve.core.request import Mode
from pdserve.core.timeline import STAGE_NAMES, Figure
from pdserve.core.worker import Role

PD, COLOCATED = Mode.PD.value, Mode.COLOCATED.value
"""The arms, which are named after the mode of their requests."""

Pair = tuple[RequestRow, RequestRow]
"""A disaggregated and a colocated request with the same prompt."""


ENOUGH_SHARE = 0.05
"""An interval is narrow if its half width is at most this share of the added time."""
_CHECK_PAIRS = 4
_WARM_UP_PAIRS = 2
_CALIBRATIONS = 6  # of which the first is left out
_CALIBRATION_TOKENS = 2
_DISTURBED_S = 0.03


class PairOptions(Options):
    """Options of experiments that compare pairs on an idle service."""

    pairs_s: float = option(
        40.0,
        ge=0,
        le=86_400,
        description="seconds per idle cell within which pairs are added until the intervals are narrow",
        quick=42.0,
    )
    narrow_ms: float = Field(
        2.0, gt=0, description="half width of a narrow interval, in ms; 5 % of the added time are narrow as well"
    )

    def narrow(self, added: Interval | None) -> bool:
        """Whether the interval of an added time is narrow enough."""
        return added is not None and added.half_width <= max(self.narrow_ms, ENOUGH_SHARE * abs(added.value))


class PairSender:
    """Sends prompts of random tokens for a cell. No prefix cache helps, as every request has a salt of its own.
    ``output_len`` is the number of tokens that each request generates; prompts follow from ``seed`` and the cell."""

    def __init__(self, bench: Bench, client: AsyncClient, vocab_size: int, output_len: int, seed: int) -> None:
        self._bench, self._client = bench, client
        self._vocab_size, self._output_len, self._seed = vocab_size, output_len, seed
        self._draw = random.Random(f"{seed}/{bench.cell.name}")

    async def unrecorded(self, prompt_len: int, mode: str, output_len: int | None = None) -> Generation:
        """Send one request that gets no row, for calibration. Raises what it fails with."""
        salt = f"calibration/{self._draw.random()}"
        return await self._client.generate(
            self._prompt(prompt_len, self._draw),
            mode=mode,
            max_tokens=output_len or self._output_len,
            ignore_eos=True,
            salt=salt,
        ).result()

    async def send(self, prompt_len: int, pairs: int, options: PairOptions) -> None:
        """Send two rounds or more to all workers without rows, then pairs in the order A B B A, whose requests
        get rows: at least ``pairs``, and further ones until the intervals of both figures are narrow, or
        ``options.pairs_s`` are over."""
        draw = random.Random(f"{self._seed}/{self._bench.cell.name}/warm-up")
        prompts = ((self._prompt(prompt_len, draw), self._output_len) for _ in itertools.count())
        await warm_up(self._bench, self._client, prompts, (PD, COLOCATED), rounds=_WARM_UP_PAIRS)
        await self._bench.settle(self._client, "pairs")
        end_s = self._bench.elapsed_s + options.pairs_s
        rows: list[RequestRow] = []
        for number in itertools.count():
            if number >= pairs:
                if self._bench.elapsed_s >= end_s:
                    break
                sent = pairs_of(rows)[0] if number % _CHECK_PAIRS == 0 else []
                if sent and all(options.narrow(median_interval(_differences_ms(sent, each))) for each in Figure):
                    break
            prompt = self._prompt(prompt_len, self._draw)
            for arm in (PD, COLOCATED) if number % 2 == 0 else (COLOCATED, PD):
                salt = f"{self._seed}/{self._bench.cell.name}/{number}/{arm}/{self._draw.random()}"
                row = await self._bench.send(
                    self._client,
                    prompt,
                    arm=arm,
                    repeat=0,
                    index=number,
                    mode=arm,
                    max_tokens=self._output_len,
                    salt=salt,
                )
                rows.append(row)
            if number < pairs:
                self._bench.advance(1)

    def _prompt(self, tokens: int, draw: random.Random) -> list[int]:
        return [draw.randrange(self._vocab_size) for _ in range(tokens)]


def pairs_of(rows: Sequence[RequestRow]) -> tuple[list[Pair], int]:
    """The pairs of a cell of which both requests succeeded, and the number of failed requests."""
    by_place: dict[tuple[int, int, int], dict[str, RequestRow]] = {}
    for row in rows:
        if row.error is None:
            by_place.setdefault((row.repeat, row.index, row.turn), {})[row.arm] = row
    pairs = [(arms[PD], arms[COLOCATED]) for arms in by_place.values() if len(arms) == 2]
    return pairs, sum(row.error is not None for row in rows)


def _differences_ms(pairs: Sequence[Pair], figure: Figure) -> list[float]:
    """The figure disaggregated minus colocated, of the pairs that have it."""
    return [
        pd_ms - colocated_ms
        for pd, colocated in pairs
        if (pd_ms := pd.figure_ms(figure)) is not None and (colocated_ms := colocated.figure_ms(figure)) is not None
    ]


def added_interval(pairs: Sequence[Pair], figure: Figure) -> dict[str, Any] | None:
    """The median of the differences with its interval; None without any pair."""
    interval = median_interval(_differences_ms(pairs, figure))
    return None if interval is None else interval.to_dict()


def added_ms(pairs: Sequence[Pair], figure: Figure) -> dict[str, Any] | None:
    """What disaggregation adds to the figure, over the pairs that have it: the ``median`` of the differences with its
    interval (`median_interval`), their ``mean``, all of them (``differences_ms``), and ``disturbed``, the places of
    those pairs beside which other processes used the machine (`disturbed`). Milliseconds; None without any pair."""
    having = [pair for pair in pairs if _differences_ms([pair], figure)]
    differences_ms = _differences_ms(having, figure)
    interval = added_interval(having, figure)
    if interval is None:
        return None
    marks = [disturbed(pair) for pair in having]
    return {
        **interval,
        "mean": round(statistics.fmean(differences_ms), 6),
        "differences_ms": [round(each, 4) for each in differences_ms],
        "disturbed": None if None in marks else [place for place, mark in enumerate(marks) if mark],
    }


def disturbed(pair: Pair) -> bool | None:
    """Whether other processes of this host used `BESIDE_CORES` or more while the pair ran; None if that is unknown. The
    kernel counts in ticks of 10 ms, so that less than 30 ms say nothing."""
    used_s = [row.others_cpu_s for row in pair if row.others_cpu_s is not None]
    if len(used_s) < len(pair):
        return None
    took_s = sum(row.e2e_ms or 0.0 for row in pair) / 1e3
    return sum(used_s) >= max(_DISTURBED_S, BESIDE_CORES * took_s)


def middle_pairs(pairs: Sequence[Pair], figure: Figure) -> list[Pair]:
    """The half of the pairs whose differences lie around the median. They stand for it where a mean over pairs is
    wanted, such as that of a stage: the median pair alone has stages as chance made them."""
    ordered = sorted((pair for pair in pairs if _differences_ms([pair], figure)),
                     key=lambda pair: _differences_ms([pair], figure))  # fmt: skip
    cut = len(ordered) // 4
    return ordered[cut : len(ordered) - cut]


def added_text(token: str, added: Mapping[str, Any]) -> str:
    """What disaggregation adds to ``token``, as a clause. It claims nothing if the interval contains 0, or if there are
    too few pairs for one. ± is the end of the interval that is farther from 0."""
    interval = Interval.from_dict(added)
    if not interval.known:
        return (
            f"the median difference of {token} is {interval.value:+.2f} ms over {interval.n} pairs, too few for an "
            f"interval (it takes {MIN_VALUES})"
        )
    if interval.sign == 0:
        widest = interval.written(max(-interval.lo, interval.hi))
        return f"no difference of {token} could be measured (±{widest} ms, {100 * CONFIDENCE:.0f} %)"
    return f"disaggregation adds {interval.text()} ({100 * CONFIDENCE:.0f} %) to {token}"


def unclear_text(added: Sequence[Mapping[str, Any]], run: RunData, cell: str) -> str:
    """Why one of the added times of a cell has no clear sign, and what would help; empty if all of them have one."""
    if all(Interval.from_dict(each).sign for each in added):
        return ""
    machine, service = run.environment.get("machine", {}), run.environment.get("service") or {}
    cores, workers, pairs = machine.get("cores"), len(service.get("workers", ())), max(each["n"] for each in added)
    reasons, helps = [], []
    if marks := max((each["disturbed"] or () for each in added), key=len):
        reasons.append(f"other processes used the machine beside {len(marks)} of {pairs} pairs")
    elif load := next((text for each in run.cells if each.cell == cell and (text := beside_text(each.facts))), ""):
        reasons.append(load.replace("beside other load: ", "other processes used ", 1))
    if reasons:
        helps.append("a quiet machine")
    if cores is not None and cores < workers + 2:
        reasons.append(f"{workers} workers, the gateway and the client share {cores} cores")
        helps.append("more cores")
    reasons.append(f"only {pairs} pairs were measured")
    helps.append("more time for pairs (--pairs-s)")
    return f"Reasons: {'; '.join(reasons)}. What would help: {', '.join(helps)}."


def causes_of(
    pd: Sequence[RequestRow], colocated: Sequence[RequestRow], added_ms: float, stages: Sequence[str] = STAGE_NAMES
) -> dict[str, Any]:
    """Why ``ttft_decode`` differs by ``added_ms`` between two arms: the difference of the means of each of ``stages``
    (``causes_ms``), what is left (``unexplained_ms``), and the share that is explained (``explained_pct``)."""

    def mean_ms(rows: Sequence[RequestRow], stage: str) -> float:
        return statistics.fmean(row.stages_ms.get(Figure.TTFT_DECODE, {}).get(stage, 0.0) for row in rows)

    causes_ms = {stage: mean_ms(pd, stage) - mean_ms(colocated, stage) for stage in stages}
    unexplained_ms = added_ms - sum(causes_ms.values())
    return {
        "causes_ms": {stage: round(value, 4) for stage, value in causes_ms.items()},
        "unexplained_ms": round(unexplained_ms, 4),
        "explained_pct": round(100 * (1 - abs(unexplained_ms) / abs(added_ms)), 2) if added_ms else 100.0,
    }


def differences_of(cell: str, rows: Sequence[RequestRow], *, under_load: bool = False) -> list[str]:
    """What makes an experiment fail in ``rows``, those of ``cell``: arms that generated different tokens, and requests
    that moved other bytes than expected; each with the first request concerned. ``under_load``: the arms batch
    differently, and the product does not promise equal tokens then (docs/experiments.md), only equally many."""
    pairs, _ = pairs_of(rows)
    found = []
    if under_load:
        what = "the number of tokens differs"
        differing = [pair for pair in pairs if pair[0].output_tokens != pair[1].output_tokens]
    else:
        what = "tokens differ"
        differing = [pair for pair in pairs if pair[0].token_hash != pair[1].token_hash]
    if differing:
        ids = " and ".join(row.request_id for row in differing[0])
        found.append(f"{cell}: {what} between the arms in {len(differing)} pairs, first in requests {ids}")
    if wrong := unexpected_bytes(rows):
        found.append(f"{cell}: {wrong}")
    return found


def pair_figures(rows: Sequence[RequestRow], pairs: Sequence[Pair], errors: int) -> dict[str, Any]:
    """What every idle cell has, of its pairs: how many, bytes and tokens."""
    return {
        "n": len(pairs),
        "errors": errors,
        "kv_bytes": sum(pd.kv_bytes for pd, _ in pairs),
        "kv_bytes_expected": sum(pd.kv_bytes_expected for pd, _ in pairs),
        "kv_bytes_equal": unexpected_bytes(rows) is None,
        "tokens_equal": all(pd.token_hash == colocated.token_hash for pd, colocated in pairs),
    }


def chunk_tokens(config: PdserveConfig, prompt_len: int) -> int:
    """The most tokens of a prompt that one step of the service computes."""
    chosen, budget = config.engine.chunk_tokens, config.engine.token_budget(config.cluster.device, Role.PREFILL)
    if chosen == "off":
        return prompt_len
    return budget if chosen is None else min(chosen, budget)


def layout_facts(status: ServiceStatus) -> dict[str, Any]:
    """The geometry of the model's KV, as facts of a cell: ``block_size`` in tokens, ``kv_bytes_per_token``, and
    ``layout`` if the model's shape is known on this host."""
    facts: dict[str, Any] = {"block_size": status.block_size, "kv_bytes_per_token": status.kv_bytes_per_token}
    try:
        shape = resolve_model(status.model).shape
    except ModelError:
        return facts
    layout = {"num_layers": shape.num_layers, "num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
    return {**facts, "layout": {**layout, "dtype": status.dtype}}


@dataclass(frozen=True, slots=True)
class LinkModel:
    """Predicts the exposed time of one prompt. ``layout`` has num_layers, num_kv_heads, head_dim and dtype;
    ``chunk_tokens``, ``layer_groups`` and ``max_inflight_bytes`` are the service's settings."""

    layout: Mapping[str, Any]
    block_size: int
    prompt_tokens: int
    chunk_tokens: int
    layer_groups: int
    max_inflight_bytes: int
    prefill_ms: float

    @classmethod
    def of(cls, cell: FinishedCell, prompt_tokens: int, prefill_ms: float) -> LinkModel:
        """The model of a cell that knows its layout, with the settings of its service."""
        transfer = cell.config.transfer
        return cls(
            cell.facts["layout"],
            cell.facts["block_size"],
            prompt_tokens,
            chunk_tokens(cell.config, prompt_tokens),
            transfer.layer_groups,
            transfer.max_inflight_bytes,
            prefill_ms,
        )

    def _parts(self, overlap: Overlap, tokens: int) -> tuple[HandoffPart, ...]:
        shape = self.layout
        layout = KVLayout.uniform(
            "", shape["dtype"], self.block_size, shape["num_layers"], shape["num_kv_heads"], shape["head_dim"]
        )
        return handoff_parts(layout, tokens, self.chunk_tokens, overlap, self.layer_groups)

    def exposed_ms(
        self,
        overlap: Overlap,
        gbs: float,
        rtt_ms: float = 0.0,
        *,
        tokens: int | None = None,
        prefill_ms: float | None = None,
    ) -> float:
        """The exposed time on a link of ``gbs`` (10^9 bytes per second), without the fixed cost. ``tokens`` and
        ``prefill_ms`` are those of another prompt.

        Nothing is sent before decode's announcement has come, half a round trip after both workers began."""
        whole = self._parts(overlap, self.prompt_tokens if tokens is None else tokens)
        link = LinkRate(gbs, rtt_ms / 1e3, self.max_inflight_bytes)
        prefill_ms = self.prefill_ms if prefill_ms is None else prefill_ms
        announced = rtt_ms / 2 / prefill_ms if prefill_ms > 0 else 0.0
        parts = [HandoffPart(max(part.ready, announced), part.num_bytes) for part in whole]
        return 1e3 * predict(parts, link, prefill_ms / 1e3).exposed_s

    @property
    def phi_gbs(self) -> float:
        """Φ, in 10^9 bytes per second."""
        return hiding_gbs(self._parts("none", self.prompt_tokens), self.prefill_ms / 1e3)

    def rate_of(self, overlap: Overlap, exposed_ms: float, fixed_ms: float) -> float | None:
        """The rate at which so much is exposed, in 10^9 bits per second; None if no rate is fast enough."""
        low, high = 1e-6, 1e6
        if self.exposed_ms(overlap, high / 8) + fixed_ms > exposed_ms:
            return None
        while high / low > 1.0001:
            middle = math.sqrt(low * high)
            if self.exposed_ms(overlap, middle / 8) + fixed_ms > exposed_ms:
                low = middle
            else:
                high = middle
        return high


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


KEYS = ("ttft", "ttft_decode", "itl", "tpot", "e2e")
"""Figures that an SLO can limit, and that a report has: ``e2e`` is the time from the call to the end of the answer."""


@dataclass(frozen=True, slots=True)
class SLO:
    """A service-level objective: limits in milliseconds by figure. ``itl`` limits the 99th percentile of a request's
    own gaps, ``tpot`` their mean. Figures that a request does not have (a single token has no gaps) count as met."""

    limits_ms: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> SLO:
        """Parse ``ttft=200,itl=50`` (milliseconds; ``200ms`` and ``0.2s`` are accepted); `InvalidRequest` otherwise."""
        limits_ms: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            key, _, value = (piece.strip() for piece in part.partition("="))
            if key not in KEYS:
                raise InvalidRequest(f"slo: {key!r} is none of {', '.join(KEYS)}")
            limits_ms[key] = _milliseconds(value, part)
        if not limits_ms:
            raise InvalidRequest("slo: is empty; write, for example, ttft=200,itl=50")
        return cls(limits_ms)

    @property
    def text(self) -> str:
        """What `parse` reads."""
        return ",".join(f"{key}={limit:g}" for key, limit in self.limits_ms.items())

    def met_by(self, row: RequestRow) -> bool:
        """Whether a request succeeded and met every limit."""
        itl = float(np.percentile(row.itl_ms, 99)) if row.itl_ms else None
        values = {"itl": itl, **{key: getattr(row, f"{key}_ms") for key in KEYS if key != "itl"}}
        return row.error is None and all(
            (value := values[key]) is None or value <= limit for key, limit in self.limits_ms.items()
        )


def _milliseconds(value: str, part: str) -> float:
    number, factor = value, 1.0
    if value.endswith("ms"):
        number = value[:-2]
    elif value.endswith("s"):
        number, factor = value[:-1], 1e3
    try:
        limit_ms = float(number) * factor
    except ValueError:
        limit_ms = 0.0
    if not 0 < limit_ms < float("inf"):
        raise InvalidRequest(f"slo: {part!r} has no positive limit; write, for example, ttft=200,itl=50 (milliseconds)")
    return limit_ms


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
                load = await bench.load(
                    client,
                    workload.conversations(1_000_000, self.seed + repeat, vocab_size),
                    self._times(repeat),
                    arm=arm,
                    repeat=repeat,
                    settle_s=_SETTLE_S,
                    mode=Mode(arm),
                    duration_s=self.duration_s,
                    timeout_s=REQUEST_TIMEOUT_S,
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
        met = [float(slo.met_by(row.since_due())) for row in self.rows]
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


class ModeMatrix(Experiment):
    """A question whose cells compare both modes: pairs on an idle service, or, in cells with a ``rate``, the rounds of
    a load."""

    options: PairOptions
    output_len = 3
    """Tokens that the requests of pairs generate."""

    prompt_len = 0
    """Of cells that do not name it."""

    @abstractmethod
    def least_pairs(self) -> int:
        """Pairs of an idle cell."""

    def load(self, rate: float) -> LoadPlan:
        """The rounds of a cell with this rate; for questions that have such cells."""
        raise NotImplementedError

    def workload(self, prompt_len: int) -> Workload:
        """What is sent in them."""
        raise NotImplementedError

    async def measure(self, bench: Bench) -> None:
        """Calibrate the hand-off with prompts of one block, then send the pairs; under load the rounds of both modes.
        Facts: ``calibrations``, and ``fixed_ms``, what of them the bytes at the link's ceiling do not explain."""
        length = int(bench.cell.parameters.get("prompt_len", self.prompt_len))
        async with AsyncClient(bench.target) as client:
            status = await client.status()
            bench.facts |= layout_facts(status)
            sender = PairSender(bench, client, status.vocab_size, self.output_len, self.options.seed)
            calibrations = []
            for _ in range(_CALIBRATIONS):
                done = await sender.unrecorded(_CALIBRATION_TOKENS, PD, 2)
                ceiling_gbs, exposed_ms = done.transfer.ceiling_gbs, done.transfer.exposed_ms
                wire_ms = done.kv_bytes / ceiling_gbs / 1e6 if ceiling_gbs else 0.0
                prefill_ms = done.breakdowns[Figure.TTFT_DECODE].stages_ms.get("prefill", 0.0)
                fixed_ms = max(0.0, exposed_ms - wire_ms)
                calibrations.append({"exposed_ms": exposed_ms, "prefill_ms": prefill_ms, "fixed_ms": fixed_ms})
            bench.facts["calibrations"] = calibrations[1:]
            bench.facts["fixed_ms"] = statistics.median(each["fixed_ms"] for each in calibrations[1:])
            if "rate" in bench.cell.parameters:
                await self.load(bench.cell.parameters["rate"]).send(bench, client, self.workload(length))
            else:
                await sender.send(length, self.least_pairs(), self.options)

    def slo(self, text: str, cell: FinishedCell, run: RunData) -> SLO | None:
        """The SLO of a cell under load; an automatic one comes from the idle cell that is like it otherwise."""
        alike = {**{key: value for key, value in cell.parameters.items() if key != "rate"}, "load": "idle"}
        idle = [row for each in run.cells if each.parameters == alike for row in run.rows_of(each.cell)]
        return slo_of(text, idle)

    def failed(self, run: RunData) -> list[str]:
        """What makes the run fail: arms that differ where they must not, and failed requests on an idle service."""
        found = []
        for cell in run.cells:
            found += differences_of(cell.cell, run.rows_of(cell.cell), under_load="rate" in cell.parameters)
        for cell in run.cells:
            if "rate" not in cell.parameters:
                found += failures(cell.cell, run.rows_of(cell.cell))
        return found


@dataclass(frozen=True, slots=True)
class Split:
    """``prefill`` and ``decode`` workers, written ``2P1D``."""

    prefill: int
    decode: int

    @classmethod
    def parse(cls, text: str, option: str) -> Self:
        """The split that is written like ``2P1D``; InvalidRequest, which names ``option``, otherwise."""
        found = re.fullmatch(r"([1-9]\d{0,3})P([1-9]\d{0,3})D", text, re.IGNORECASE)
        if found is None:
            raise InvalidRequest(f"{option}: {text!r} is not a number of prefill and of decode workers, such as 2P1D")
        return cls(int(found[1]), int(found[2]))

    @classmethod
    def of(cls, status: ServiceStatus) -> Self:
        """The workers of a running service. InvalidRequest if it lacks one of the roles."""
        roles = [worker.role for worker in status.workers if worker.state != "lost"]
        split = cls(roles.count("prefill"), roles.count("decode"))
        if not split.prefill or not split.decode:
            raise InvalidRequest(f"target: the service is {split.name}; both roles are needed")
        return split

    @classmethod
    def all(cls, devices: int) -> list[Self]:
        """Every split of so many devices, the most balanced ones first."""
        splits = [cls(prefill, devices - prefill) for prefill in range(1, devices)]
        return sorted(splits, key=lambda split: (abs(split.prefill - split.decode), -split.prefill))

    @property
    def name(self) -> str:
        """``2P1D``."""
        return f"{self.prefill}P{self.decode}D"

    @property
    def devices(self) -> int:
        """Workers, and so devices, in all."""
        return self.prefill + self.decode

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of a service that has it."""
        return {"cluster.prefill": self.prefill, "cluster.decode": self.decode}
