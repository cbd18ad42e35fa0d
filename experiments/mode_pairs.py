"""The same prompts disaggregated and colocated: pairs on an idle service, and what differs between the two arms."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from checkpoints.source import resolve_model
from experiments.experiment import Bench, Options
from experiments.machine_load import BESIDE_CORES, beside_text
from experiments.request_row import RequestRow, unexpected_bytes
from experiments.run_folder import RunData
from experiments.warm_up import warm_up as warm_up_workers
from pdserve.client.async_client import AsyncClient
from pdserve.client.generation import Generation
from pdserve.client.status import ServiceStatus
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import ModelError
from pdserve.core.interval import CONFIDENCE, MIN_VALUES, Interval, median_interval
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
_DISTURBED_S = 0.03


class PairOptions(Options):
    """Options of experiments that compare pairs on an idle service."""

    pairs_s: float = Field(
        40.0,
        ge=0,
        le=86_400,
        description="seconds per idle cell within which pairs are added until the intervals are narrow",
        json_schema_extra={"quick": 18.0},
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

    async def send(self, prompt_len: int, pairs: int, options: PairOptions, *, warm_up: int) -> None:
        """Send at least ``warm_up`` rounds to all workers without rows, then pairs in the order A B B A, whose requests
        get rows: at least ``pairs``, and further ones until the intervals of both figures are narrow, or
        ``options.pairs_s`` are over."""
        draw = random.Random(f"{self._seed}/{self._bench.cell.name}/warm-up")
        prompts = ((self._prompt(prompt_len, draw), self._output_len) for _ in itertools.count())
        await warm_up_workers(self._bench, self._client, prompts, (PD, COLOCATED), rounds=warm_up)
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
