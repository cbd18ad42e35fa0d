"""What the scheduler does with cached blocks, case by case. `pdserve simulate` proves that no request sees another
content than its own."""

from __future__ import annotations

import pytest

from contract.engine import Computed, KVRole, Progress, Reserved
from pdserve.core.handoff import FirstToken
from tests.engine.test_scheduler import EOS, Rig, parts_of

PUSH, RECEIVE = KVRole.PUSH, KVRole.RECEIVE


def warm(budget: int = 64) -> Rig:
    """A rig of blocks of 4 tokens that has computed 10 tokens of the one prompt there is: two blocks."""
    rig = Rig(prefix_caching=True, budget=budget)
    rig.submit("warm", 10, 1)
    while rig.busy():
        rig.step(EOS)
    assert rig.load().cached_blocks == 2
    return rig


@pytest.mark.parametrize(
    ("prompt", "cached", "blocks"),
    [(11, 8, [0, 1, 2]), (8, 4, [0, 2])],  # of a prompt that is held in full the last block is computed again
)
def test_a_later_prompt_computes_only_what_is_new(prompt: int, cached: int, blocks: list[int]) -> None:
    rig = warm()
    rig.submit("a", prompt, 4)
    output, step = rig.step()
    (part,) = output.seqs
    assert (part.start, list(part.token_ids), part.sample) == (cached, list(range(1000 + cached, 1000 + prompt)), True)
    assert list(part.block_ids) == blocks
    assert rig.take_events() == []
    assert step.tokens[0].cached_tokens == cached
    load = rig.load()
    assert (load.prompt_tokens_looked_up, load.prompt_tokens_cached, load.cached_blocks) == (10 + prompt, cached, 2)
    assert [token.cached_tokens for token in rig.step()[1].tokens] == [0], "only the first token tells"


def test_without_prefix_caching_nothing_is_looked_up() -> None:
    rig = Rig(prefix_caching=False)
    for _ in range(2):
        rig.submit("a", 10, 1)
        assert rig.parts() == {"a": 10}
    load = rig.load()
    assert (load.prompt_tokens_looked_up, load.prompt_tokens_cached, load.cached_blocks) == (0, 0, 0)


def test_blocks_of_a_running_request_are_found_once_their_step_is_done() -> None:
    rig = Rig(prefix_caching=True, budget=16)
    rig.submit("a", 10, 9)
    rig.submit("b", 10, 9)  # in the same step: computes its own
    assert rig.parts() == {"a": 10, "b": 6}
    rig.submit("c", 10, 9)
    output, _ = rig.step()
    assert parts_of(output) == {"a": 1, "b": 4, "c": 2}
    assert list(output.seqs[2].block_ids[:2]) == list(output.seqs[0].block_ids[:2])


def test_push_reports_the_blocks_it_found_with_its_first_progress() -> None:
    rig = warm(budget=4)
    rig.submit("p", 15, 4, PUSH)
    output = rig.scheduler.schedule()
    assert rig.take_events() == [Computed([Progress("p", 8, [0, 1])])]
    rig.finish(output)
    assert rig.progress == [Progress("p", 12, [0, 1, 2, 3])]
    first = FirstToken(rig.next_token, ends_here=False)
    rig.step()
    assert rig.progress == [Progress("p", 15, [0, 1, 2, 3], first_token=first)]


@pytest.mark.parametrize(("prompt", "blocks"), [(15, [0, 1, 2, 3]), (8, [0, 1])])
def test_a_reservation_says_how_many_blocks_are_held(prompt: int, blocks: list[int]) -> None:
    """Maybe all of them."""
    rig = warm()
    assert rig.submit("r", prompt, 4, RECEIVE) == [Reserved("r", blocks, 2, rig.now)]
    rig.kv_ready("r", 50)
    assert rig.load().cached_blocks == prompt // 4
    (part,) = rig.step()[0].seqs
    assert (part.start, list(part.token_ids)) == (prompt, [50])


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    rig = Rig(prefix_caching=True, block_size=2, num_blocks=8)
    rig.submit("a", 3, 9, salt="a")
    rig.submit("b", 6, 9, salt="b")
    while "b" not in rig.step()[0].preempted:
        pass
    rig.abort("a")
    (part,) = rig.step()[0].seqs
    assert part.attempt_id == "b"
    assert part.start > 0
    assert rig.load().prompt_tokens_cached == 0  # its prompt was looked up once


def test_a_request_without_a_block_to_give_is_not_preempted() -> None:
    """All blocks of the junior are a held PUSH's as well."""
    rig = Rig(prefix_caching=True, block_size=2, num_blocks=5)
    rig.submit("p", 4, 1, PUSH)
    rig.step()
    for name in ("r", "s"):
        assert rig.submit(name, 4, 5, RECEIVE) == [Reserved(name, [0, 1], 2, rig.now)]
    rig.submit("x", 3, 1, PUSH, salt="x")
    rig.step()
    for name in ("r", "s"):
        rig.kv_ready(name, 50)
    for _ in range(2):
        assert rig.parts() == {"r": 1}
    assert rig.free == 0
    assert not rig.busy()
    assert rig.scheduler.schedule().preempted == []
    rig.release("p")  # still shared by both
    assert not rig.busy()
    rig.release("x")
    assert rig.parts() == {"r": 1, "s": 1}


# --- prefixes that come from another engine, or go to one ------------------------------------------------------------


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("arrived", [12, 8, 0])
def test_a_prefix_is_awaited_and_the_rest_is_computed(cached: bool, arrived: int) -> None:
    """Less of it may come than was hoped for. What is cached here is not forgotten if nothing comes."""
    rig = warm() if cached else Rig(prefix_caching=True)
    reserved = Reserved("a/prefix", [0, 1, 2, 3], 2 * cached, rig.now)
    assert rig.submit("a", 15, 4, prefix_tokens=12) == [reserved]
    rig.submit("b", 3, 4)
    assert rig.parts() == {"b": 3}, "others run meanwhile"
    rig.kv_ready("a", None, arrived)
    known = max(arrived, 8 * cached)
    assert rig.load().cached_blocks == known // 4
    output, step = rig.step()
    assert parts_of(output) == {"a": 15 - known, "b": 1}
    assert (step.tokens[0].attempt_id, step.tokens[0].cached_tokens) == ("a", known)
    assert rig.load().prompt_tokens_cached == known


def test_a_prefix_is_pushed_on_as_soon_as_it_is_there() -> None:
    rig = warm()
    reserved, found = rig.submit("p", 15, 4, PUSH, prefix_tokens=12)
    assert reserved == Reserved("p/prefix", [0, 1, 2, 3], 2, rig.now)
    assert found == Computed([Progress("p", 8, [0, 1])])
    rig.kv_ready("p", None, 12)
    assert rig.take_events() == [Computed([Progress("p", 12, [0, 1, 2, 3])])]
    rig.step()
    assert [(told.num_computed_tokens, told.first_token is None) for told in rig.progress] == [(15, False)]
