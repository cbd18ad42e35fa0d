"""Pairs of requests: the same prompt disaggregated and colocated, one request at a time, on an idle service."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

from engine.model.source import resolve_model
from experiments.experiment import Bench
from experiments.request_row import RequestRow
from experiments.statistics import Interval, abba, mean_interval
from experiments.warm_up import warm_up as warm_up_workers
from pdserve.client.async_client import AsyncClient
from pdserve.client.generation import Generation
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import ModelError
from pdserve.core.request import Mode
from pdserve.core.timeline import Figure

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
    by_place: dict[tuple[int, int], dict[str, RequestRow]] = {}
    for row in rows:
        if row.error is None:
            by_place.setdefault((row.repeat, row.index), {})[row.arm] = row
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


def differences_of(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """What makes an experiment fail: cells whose arms generated different tokens, or moved other bytes than
    expected."""
    return [
        f"{cell['cell']}: {what}"
        for cell in cells
        for what, wrong in (
            ("tokens differ between the arms", not cell["tokens_equal"]),
            ("bytes moved differ from bytes expected", cell["kv_bytes"] != cell["kv_bytes_expected"]),
        )
        if wrong
    ]


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
