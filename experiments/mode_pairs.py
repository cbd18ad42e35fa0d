"""The same prompts disaggregated and colocated: pairs on an idle service, and what differs between the two arms."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence
from typing import Any

from engine.model.source import resolve_model
from experiments.experiment import Bench
from experiments.request_row import RequestRow, unexpected_bytes
from experiments.statistics import Interval, abba, mean_interval
from experiments.warm_up import warm_up as warm_up_workers
from pdserve.client.async_client import AsyncClient
from pdserve.client.generation import Generation
from pdserve.client.status import ServiceStatus
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import ModelError
from pdserve.core.request import Mode
from pdserve.core.timeline import STAGE_NAMES, Figure
from pdserve.core.worker import Role

PD, COLOCATED = Mode.PD.value, Mode.COLOCATED.value
"""The arms, which are named after the mode of their requests."""

Pair = tuple[RequestRow, RequestRow]
"""A disaggregated and a colocated request with the same prompt."""


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

    async def send(self, prompt_len: int, pairs: int, *, warm_up: int) -> None:
        """Send at least ``warm_up`` rounds to all workers without rows, then ``pairs`` pairs in the order A B B A,
        whose requests get rows."""
        draw = random.Random(f"{self._seed}/{self._bench.cell.name}/warm-up")
        prompts = ((self._prompt(prompt_len, draw), self._output_len) for _ in itertools.count())
        await warm_up_workers(self._bench, self._client, prompts, (PD, COLOCATED), rounds=warm_up)
        await self._bench.settle(self._client, "pairs")
        for number, arms in enumerate(abba(PD, COLOCATED, pairs)):
            prompt = self._prompt(prompt_len, self._draw)
            for arm in arms:
                salt = f"{self._seed}/{self._bench.cell.name}/{number}/{arm}/{self._draw.random()}"
                await self._bench.send(
                    self._client,
                    prompt,
                    arm=arm,
                    repeat=0,
                    index=number,
                    mode=arm,
                    max_tokens=self._output_len,
                    salt=salt,
                )
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


def added_ms(pairs: Sequence[Pair], figure: Figure, seed: int) -> Interval | None:
    """The figure disaggregated minus colocated, in milliseconds, over the pairs that have it; None without any."""
    differences = [
        pd_ms - colocated_ms
        for pd, colocated in pairs
        if (pd_ms := pd.figure_ms(figure)) is not None and (colocated_ms := colocated.figure_ms(figure)) is not None
    ]
    return mean_interval(differences, seed)


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
