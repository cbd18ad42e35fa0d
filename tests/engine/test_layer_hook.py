"""Within a step, layers are told of when their KV is in place: what is read then is what is there in the end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from contract.engine import Computed, KVRole, Progress
from engine.scheduling.batch import LayerHook, ScheduledSeq
from engine.scheduling.kv_connector import WORTH_BYTES, KVConnector
from engine.scheduling.sequence import Sequence
from pdserve.core.clock import FakeClock
from pdserve.core.kv_layout import KVLayout
from tests.engine.harness import BLOCK, GREEDY, make_runner, submit
from tests.random_models import save_random_model

LAYOUT = KVLayout.uniform("m", "bfloat16", block_size=64, num_layers=30, num_kv_heads=3, head_dim=64)  # 1.4 MiB a block


def part(name: str, start: int, tokens: int, blocks: list[int]) -> ScheduledSeq:
    return ScheduledSeq(name, [1] * tokens, start, blocks, False, GREEDY)


def hook_of(
    groups: int, parts: list[ScheduledSeq], pushed: tuple[str, ...] = ("a",)
) -> tuple[LayerHook | None, list[Computed]]:
    """The hook of a step that computes ``parts``, of which ``pushed`` travel, and what it tells."""
    connector = KVConnector(FakeClock(), LAYOUT, groups)
    for name in ("a", "b"):
        role = KVRole.PUSH if name in pushed else KVRole.LOCAL
        connector.allocate(Sequence.from_submit(submit(name, role, [1] * 4096, 9), 0, 0.0, ()), 0)
    told: list[Computed] = []
    return connector.layer_hook(parts, told.append), told


def test_a_chunk_is_told_of_in_groups_of_layers_and_what_it_computes_only_once() -> None:
    hook, told = hook_of(4, [part("a", 0, 512, [1, 2]), part("b", 9, 1, [3])])
    assert hook is not None
    assert sorted(hook.after) == [7, 15, 22]
    for layers in (7, 15, 22):
        hook.done(layers)
    assert told == [
        Computed([Progress("a", 512, [1, 2], num_layers=7)]),
        Computed([Progress("a", 512, [], num_layers=15)]),
        Computed([Progress("a", 512, [], num_layers=22)]),
    ]


def test_groups_are_worth_their_messages() -> None:
    assert LAYOUT.block_bytes > 5 * WORTH_BYTES
    hook, _ = hook_of(30, [part("a", 64, 1, [1, 2])])
    assert hook is not None
    assert len(hook.after) + 1 == LAYOUT.block_bytes // WORTH_BYTES
    hook, _ = hook_of(256, [part("a", 0, 4096, [1, 2])])
    assert hook is not None
    assert hook.after == frozenset(range(1, 30)), "at most one group per layer"


@pytest.mark.parametrize("groups", [0, 1])
def test_nothing_is_told_where_it_is_not_wanted(groups: int) -> None:
    assert hook_of(groups, [part("a", 0, 512, [1])])[0] is None
    assert hook_of(8, [part("a", 0, 512, [1])], pushed=())[0] is None
    assert hook_of(8, [part("a", 0, 512, [1])], pushed=("b",))[0] is None


def test_a_layer_that_was_told_of_does_not_change_any_more(tmp_path: Path) -> None:
    runner = make_runner(save_random_model(tmp_path, "gqa"))
    pool = runner._pool.tensor
    layers = pool.shape[1]
    copies: dict[int, torch.Tensor] = {}
    hook = LayerHook(frozenset(range(1, layers)), lambda n: copies.__setitem__(n, pool[:4, :n].clone()))
    runner.execute([ScheduledSeq("r", list(range(3 * BLOCK)), 0, [0, 1, 2], False, GREEDY)], hook)
    assert sorted(copies) == list(range(1, layers))
    for n, copy in copies.items():
        assert torch.equal(copy, pool[:4, :n])
    copies.clear()
    runner.execute([ScheduledSeq("r", list(range(BLOCK)), 3 * BLOCK, [0, 1, 2, 3], True, GREEDY)], hook)
    for n, copy in copies.items():
        assert torch.equal(copy, pool[:4, :n])
        assert copy[3].any()
