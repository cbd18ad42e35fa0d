"""Block tables that are kept from step to step are those of the step."""

from __future__ import annotations

import random

import numpy as np

from engine.kernels.cuda_graphs import BlockTables
from engine.scheduling.batch import ScheduledSeq
from tests.engine.harness import GREEDY

MAX_BLOCKS = 12


def part(attempt_id: str, block_ids: list[int]) -> ScheduledSeq:
    return ScheduledSeq(attempt_id, [0], 0, block_ids, True, GREEDY)


def test_tables_grow_and_a_preempted_request_gets_another_one() -> None:
    tables = BlockTables(MAX_BLOCKS)
    first, other = [5, 6], [7]
    assert tables.of([part("a", first), part("b", other)], 3).tolist() == [[5, 6, 0], [7, 0, 0]]
    first.append(9)
    assert tables.of([part("b", other), part("a", first)], 3).tolist() == [[7, 0, 0], [5, 6, 9]]
    assert tables.of([part("a", [3])], 2).tolist() == [[3, 0]]


def test_any_requests_that_come_and_go() -> None:
    draw, tables = random.Random(5), BlockTables(MAX_BLOCKS)
    live: dict[str, list[int]] = {}
    for step in range(400):
        for _ in range(draw.randrange(6)):
            live.setdefault(f"r{draw.randrange(500)}", [draw.randrange(1000)])
        for name in draw.sample(sorted(live), min(len(live), draw.randrange(6) if step % 100 else len(live))):
            if draw.random() < 0.5:
                del live[name]
            else:
                live[name] = [draw.randrange(1000)]  # preempted and admitted again
        for block_ids in live.values():
            if len(block_ids) < MAX_BLOCKS and draw.random() < 0.3:
                block_ids.append(draw.randrange(1000))
        chosen = draw.sample(sorted(live), draw.randrange(len(live) + 1))
        found = tables.of([part(name, live[name]) for name in chosen], MAX_BLOCKS)
        expected = np.zeros((len(chosen), MAX_BLOCKS), dtype=np.int32)
        for row, name in enumerate(chosen):
            expected[row, : len(live[name])] = live[name]
        assert np.array_equal(found, expected)
    assert len(tables._rows) <= len(tables._array)
    many = {f"m{number}": [number] for number in range(200)}
    assert tables.of([part(*each) for each in many.items()], 1)[:, 0].tolist() == list(range(200))
