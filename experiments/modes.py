"""The same requests disaggregated and colocated: pairs on an idle service, two arms under the same load, and what
differs between them. `experiments.matrix` makes questions of it.

Under load each round sends the same conversations at the same times (a Poisson process) in both arms, in the order
A B B A over the rounds. Every arm begins when the service is idle again, so that no arm measures the other one's queue.
Every latency of a load counts from when the request was due (`RequestRow.since_due`), and a request that was due and
never sent misses the SLO: a load generator that falls behind hides nothing."""

from __future__ import annotations

import itertools
import math
import re
import secrets
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self, get_args

import numpy as np
from pydantic import Field

from checkpoints.source import resolve_model
from experiments.experiment import Bench, Options, option
from experiments.run_folder import Figures, FinishedCell, RequestRow
from experiments.statistics import percentile
from experiments.warm_up import requests_of, warm_up
from experiments.workloads.arrivals import random_arrivals
from experiments.workloads.conversation import Workload
from ops.doctor.handoff_prediction import HandoffPart, LinkRate, Overlap, handoff_parts, hiding_gbs, predict
from ops.machine_load import BESIDE_CORES
from pdserve.client.async_client import AsyncClient
from pdserve.client.request import Prompt
from pdserve.client.status import ServiceStatus
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import InvalidRequest, ModelError, PdserveError
from pdserve.core.interval import CONFIDENCE, MIN_VALUES, Interval, median_interval
from pdserve.core.kv_layout import FP8, KVLayout
from pdserve.core.request import Mode
from pdserve.core.timeline import Figure
from pdserve.core.worker import Role

PD, COLOCATED = ARMS = (Mode.PD.value, Mode.COLOCATED.value)
"""The arms, which are named after the mode of their requests."""

Pair = tuple[RequestRow, RequestRow]
"""A disaggregated and a colocated request with the same prompt."""


ENOUGH_SHARE = 0.05
"""An interval is narrow if its half width is at most this share of the added time."""
CHECK_PAIRS = 4
"""Whether the intervals are narrow is checked each time that so many pairs were added."""
SPARE = "spare_pairs_s"
"""The fact of a cell of pairs: seconds for pairs that it and the cells before it had and did not need."""
MARGINS = "margins"
"""The fact of a cell of pairs: by pair whose tokens differ, how far apart its two likeliest tokens are at least."""
_WARM_UP_PAIRS = 2
_MAX_FAILED = 10
"""Requests that fail in a row after which no more pairs are sent: the service is gone."""
_DISTURBED_S = 0.03


class PairOptions(Options):
    """Options of experiments that compare pairs on an idle service."""

    pairs_s: float = option(
        40.0,
        ge=0,
        le=86_400,
        description="seconds per idle cell within which pairs are added until the intervals are narrow; what a cell "
        "does not need, the next ones have",
        quick=45.0,
    )
    narrow_ms: float = Field(
        2.0, gt=0, description="half width of a narrow interval, in ms; 5 % of the added time are narrow as well"
    )

    def enough(self, pairs: int, least: int, differences_ms: Sequence[Sequence[float]]) -> bool:
        """Whether so many pairs, with these differences of each figure, have narrow intervals. It is asked for at
        multiples of `CHECK_PAIRS` alone: who looks more often stops more often by chance, at an interval that is too
        narrow."""
        return (
            pairs >= least
            and pairs % CHECK_PAIRS == 0
            and all(
                added is not None and added.half_width <= max(self.narrow_ms, ENOUGH_SHARE * abs(added.value))
                for added in map(median_interval, differences_ms)
            )
        )


async def _least_margin(client: AsyncClient, prompt: Prompt, output_len: int) -> float | None:
    """How far apart the log-probabilities of the two likeliest tokens are where they are closest, generated once more
    on one worker; None if that fails. In bfloat16, another batch may round a small margin away."""
    options: dict[str, Any] = {"mode": Mode.COLOCATED, "max_tokens": output_len, "ignore_eos": True, "logprobs": 2}
    try:
        tokens = (await client.generate(prompt, **options).result()).tokens
    except PdserveError:
        return None
    likeliest = [token.top_logprobs[:2] for token in tokens]
    return round(min([first.logprob - second.logprob for first, second in likeliest]), 4)


async def send_pairs(
    bench: Bench, client: AsyncClient, requests: Iterator[tuple[Prompt, int]], options: PairOptions
) -> None:
    """Send two rounds or more of ``requests`` (prompts and output lengths) to all workers without rows, then pairs in
    the order A B B A, whose requests get rows: at least as many as the cell has steps, and further ones until the
    intervals of both figures are narrow, or ``options.pairs_s`` and what earlier cells had to spare are over; no more
    after `_MAX_FAILED` failures in a row. No prefix cache helps, as every request has a salt of its own."""
    await warm_up(bench, client, requests, ARMS, rounds=_WARM_UP_PAIRS)
    await bench.settle(client, "pairs")
    spare_s = next((facts[SPARE] for facts in reversed(bench.earlier.values()) if SPARE in facts), 0.0)
    end_s, least = bench.elapsed_s + options.pairs_s + spare_s, bench.cell.work
    rows: list[RequestRow] = []
    for number in itertools.count():
        differences_ms = [_differences_ms(pairs_of(rows), each) for each in Figure]
        if options.enough(number, least, differences_ms) or (number >= least and bench.elapsed_s >= end_s):
            break
        prompt, output_len = next(requests)
        for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
            place: dict[str, Any] = {"arm": arm, "repeat": 0, "index": number, "mode": arm}
            salt = f"pairs/{secrets.token_hex(8)}"
            rows.append(await bench.send(client, prompt, max_tokens=output_len, salt=salt, **place))
        if any(pd.token_hash != colocated.token_hash for pd, colocated in pairs_of(rows[-len(ARMS) :])):
            bench.facts.setdefault(MARGINS, {})[str(number)] = await _least_margin(client, prompt, output_len)
        if len(rows) >= _MAX_FAILED and all(row.error is not None for row in rows[-_MAX_FAILED:]):
            break
        if number < least:
            bench.advance(1)
    if options.pairs_s:
        bench.facts[SPARE] = round(max(0.0, end_s - bench.elapsed_s), 3)


def pairs_of(rows: Sequence[RequestRow]) -> list[Pair]:
    """The pairs of a cell of which both requests succeeded."""
    by_place: dict[tuple[int, int, int], dict[str, RequestRow]] = {}
    for row in rows:
        if row.error is None:
            by_place.setdefault((row.repeat, row.index, row.turn), {})[row.arm] = row
    return [(arms[PD], arms[COLOCATED]) for arms in by_place.values() if len(arms) == 2]


def _differences_ms(pairs: Sequence[Pair], figure: Figure) -> list[float]:
    """The figure disaggregated minus colocated, of the pairs that have it."""
    return [
        pd_ms - colocated_ms
        for pd, colocated in pairs
        if (pd_ms := pd.figure_ms(figure)) is not None and (colocated_ms := colocated.figure_ms(figure)) is not None
    ]


def added_ms(pairs: Sequence[Pair], figure: Figure) -> dict[str, Any] | None:
    """What disaggregation adds to the figure, over the pairs that have it: the ``median`` of the differences with its
    interval (`median_interval`), their ``mean``, all of them (``differences_ms``), and ``disturbed``, the places of
    those pairs beside which other processes used the machine (`disturbed`). Milliseconds; None without any pair."""
    having = [pair for pair in pairs if _differences_ms([pair], figure)]
    differences_ms = _differences_ms(having, figure)
    interval = median_interval(differences_ms)
    if interval is None:
        return None
    marks = [disturbed(pair) for pair in having]
    return {
        **interval.to_dict(),
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


def added_text(token: str, added: Figures) -> str:
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


def chunk_tokens(config: PdserveConfig, prompt_len: int) -> int:
    """The most tokens of a prompt that one step of the service computes."""
    chosen, budget = config.engine.chunk_tokens, config.engine.token_budget(config.cluster.device, Role.PREFILL)
    if chosen == "off":
        return prompt_len
    return budget if chosen is None else min(chosen, budget)


def layout_facts(status: ServiceStatus) -> dict[str, Any]:
    """The geometry of the model's KV, as facts of a cell: ``block_size`` in tokens, and ``layout`` if the model's shape
    is known on this host."""
    facts: dict[str, Any] = {"block_size": status.block_size}
    try:
        shape = resolve_model(status.model).shape
    except ModelError:
        return facts
    layout = {"num_layers": shape.num_layers, "num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
    numbers = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim  # per token; of one byte each in FP8
    return {**facts, "layout": {**layout, "dtype": FP8 if status.kv_bytes_per_token == numbers else status.dtype}}


@dataclass(frozen=True, slots=True)
class LinkModel:
    """Predicts the exposed time of a prompt of ``prompt_tokens``, whose prefill takes ``prefill_ms``. ``layout`` has
    num_layers, num_kv_heads, head_dim and dtype; ``chunk_tokens``, ``layer_groups`` and ``max_inflight_bytes`` are the
    service's settings."""

    layout: Mapping[str, Any]
    block_size: int
    prompt_tokens: int
    chunk_tokens: int
    layer_groups: int
    max_inflight_bytes: int
    prefill_ms: float

    @classmethod
    def of(cls, cell: FinishedCell, prompt_tokens: int, prefill_ms: float) -> LinkModel | None:
        """The model of a cell, with the settings of its service; None if the model's layers were unknown."""
        if cell.facts.get("layout") is None:
            return None
        transfer, chunk = cell.config.transfer, chunk_tokens(cell.config, prompt_tokens)
        settings = chunk, transfer.layer_groups, transfer.max_inflight_bytes
        return cls(cell.facts["layout"], cell.facts["block_size"], prompt_tokens, *settings, prefill_ms)

    def _parts(self, overlap: Overlap) -> tuple[HandoffPart, ...]:
        shape = self.layout
        layout = KVLayout.uniform(
            "", shape["dtype"], self.block_size, shape["num_layers"], shape["num_kv_heads"], shape["head_dim"]
        )
        return handoff_parts(layout, self.prompt_tokens, self.chunk_tokens, overlap, self.layer_groups)

    def exposed_ms(self, overlap: Overlap, gbs: float, rtt_ms: float = 0.0) -> float:
        """The exposed time on a link of ``gbs`` (10^9 bytes per second), without the fixed cost. Nothing is sent before
        decode's announcement has come, half a round trip after both workers began."""
        link = LinkRate(gbs, rtt_ms / 1e3, self.max_inflight_bytes)
        announced = rtt_ms / 2 / self.prefill_ms if self.prefill_ms > 0 else 0.0
        parts = [HandoffPart(max(part.ready, announced), part.num_bytes) for part in self._parts(overlap)]
        return 1e3 * predict(parts, link, self.prefill_ms / 1e3).exposed_s

    @property
    def phi_gbs(self) -> float:
        """Φ, in 10^9 bytes per second."""
        return hiding_gbs(self._parts("none"), self.prefill_ms / 1e3)

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


OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)
CALIBRATION_TOKENS = 2
"""Length of the prompts that measure the fixed cost of a hand-off: their KV is one block."""


def overlap_of(cell: FinishedCell) -> Overlap:
    """The overlap mode of a cell; that of the service's configuration where it is as configured."""
    chosen = cell.parameters.get("overlap")
    return next((each for each in OVERLAPS if each == chosen), cell.config.transfer.overlap)


def fixed_ms(cell: FinishedCell, gbs: float, rtt_ms: float = 0.0) -> float:
    """The fixed cost of a hand-off: what prompts of one block expose beyond the arithmetic of the link, in the
    median."""
    beyond_ms = [
        each["exposed_ms"] - model.exposed_ms(overlap_of(cell), gbs, rtt_ms)
        for each in cell.facts.get("calibrations", ())
        if (model := LinkModel.of(cell, CALIBRATION_TOKENS, each["prefill_ms"])) is not None
    ]
    return max(0.0, statistics.median(beyond_ms)) if beyond_ms else float(cell.facts.get("fixed_ms", 0.0))


ATTAINMENT = 0.9
"""An arm sustains a load if this share of its requests meets the SLO."""
SLO_FACTOR = 2.0
"""An automatic SLO allows this multiple of what an idle colocated service does."""
REQUEST_TIMEOUT_S = 60.0
"""Deadline of each request under load. One that exceeds it is a failed request, which misses every SLO."""


KEYS = ("ttft", "ttft_decode", "itl", "tpot", "e2e")
"""Figures that an SLO can limit, and that a report has: ``e2e`` is the time from the call to the end of the answer."""


@dataclass(frozen=True, slots=True)
class SLO:
    """A service-level objective: limits in milliseconds by figure. ``itl`` limits the 99th percentile of a request's
    own gaps, ``tpot`` their mean. Figures that a request does not have (a single token has no gaps) count as met."""

    limits_ms: Mapping[str, float]

    @classmethod
    def parse(cls, text: str, option: str = "slo") -> SLO:
        """Parse ``ttft=200,itl=50`` (milliseconds; ``200ms`` and ``0.2s`` are accepted); `InvalidRequest`, which names
        ``option``, otherwise."""
        limits_ms: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            key, _, value = (piece.strip() for piece in part.partition("="))
            if key not in KEYS:
                raise InvalidRequest(f"{option}: {key!r} is none of {', '.join(KEYS)}")
            number, factor = (value[:-1], 1e3) if re.search(r"[^m]s$", value) else (value.removesuffix("ms"), 1.0)
            try:
                limits_ms[key] = float(number) * factor
            except ValueError:
                limits_ms[key] = 0.0
            if not 0 < limits_ms[key] < math.inf:
                raise InvalidRequest(
                    f"{option}: {part!r} has no positive limit; write, for example, ttft=200,itl=50 (milliseconds)"
                )
        if not limits_ms:
            raise InvalidRequest(f"{option}: is empty; write, for example, ttft=200,itl=50")
        return cls(limits_ms)

    @classmethod
    def chosen(cls, text: str, idle: Sequence[RequestRow], percent: float = 50.0) -> SLO | None:
        """The SLO that ``text`` names. For ``auto``: `SLO_FACTOR` times the percentile of TTFT, and times the median
        gap between tokens, of the colocated requests of ``idle`` (measured one at a time); None without any."""
        if text != "auto":
            return cls.parse(text)
        rows = [row for row in idle if row.arm == COLOCATED]
        values = {
            "ttft": percentile([row.ttft_ms for row in rows if row.ttft_ms is not None], percent),
            "itl": percentile([gap for row in rows for gap in row.itl_ms], 50.0),
        }
        if values["ttft"] is None:
            return None
        return cls({key: round(SLO_FACTOR * value, 3) for key, value in values.items() if value is not None})

    @property
    def text(self) -> str:
        """What `parse` reads."""
        return ",".join(f"{key}={limit:g}" for key, limit in self.limits_ms.items())

    def met_by(self, row: RequestRow) -> bool:
        """Whether a request succeeded and met every limit."""
        return self.factor_for(row) <= 1.0

    def factor_for(self, row: RequestRow) -> float:
        """By what the limits have to be multiplied for a request to just meet them; infinite if it failed."""
        if row.error is not None:
            return math.inf
        itl = float(np.percentile(row.itl_ms, 99)) if row.itl_ms else None
        values = {"itl": itl, **{key: getattr(row, f"{key}_ms") for key in KEYS if key != "itl"}}
        return max((values[key] or 0.0) / limit for key, limit in self.limits_ms.items())


def slo_text(limits_ms: Mapping[str, float]) -> str:
    """``TTFT ≤ 120 ms and p99 ITL ≤ 30 ms``."""
    names = {"itl": "a request's p99 ITL"}
    return " and ".join(f"{names.get(key, key.upper())} ≤ {limit:.4g} ms" for key, limit in limits_ms.items())


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

    async def send(self, bench: Bench, client: AsyncClient, workload: Workload, vocab_size: int) -> None:
        """Warm both arms up, send the rounds, write a row per request, and note in the fact ``loads`` how each load
        went. ``workload`` has to fit the service."""
        await warm_up(bench, client, requests_of(workload, self.seed - 1, vocab_size), ARMS)
        loads: list[dict[str, Any]] = []
        for repeat in range(self.rounds):
            for arm in ARMS if repeat % 2 == 0 else ARMS[::-1]:
                load = await bench.load(
                    client,
                    workload.conversations(1_000_000, self.seed + repeat, vocab_size),
                    self._times(repeat),
                    arm=arm,
                    repeat=repeat,
                    settle_s=2 * REQUEST_TIMEOUT_S,
                    mode=Mode(arm),
                    duration_s=self.duration_s,
                    timeout_s=REQUEST_TIMEOUT_S,
                )
                loads.append({"arm": arm, "repeat": repeat, "duration_s": self.duration_s, "took_s": load.duration_s,
                              "unsent": load.unsent, "lag": asdict(load.lag) if load.lag else None})  # fmt: skip
        bench.facts["loads"] = loads


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
