"""What the scheduler does with cached blocks, case by case."""

from __future__ import annotations

from engine.messages import Computed, Finished, KVRole, Progress, Rejected, Reserved
from pdserve.core.handoff import FirstToken
from tests.engine.test_scheduler import EOS, Rig

LOCAL, PUSH, RECEIVE = KVRole.LOCAL, KVRole.PUSH, KVRole.RECEIVE


def warm(budget: int = 64) -> Rig:
    """A rig of blocks of 4 tokens that has computed 10 tokens of the one prompt there is: two blocks."""
    rig = Rig(prefix_caching=True, budget=budget)
    rig.submit("warm", 10, 1)
    while rig.busy():
        rig.step(EOS)
    assert rig.load().cached_blocks == 2
    return rig


def test_a_later_prompt_computes_only_what_is_new() -> None:
    rig = warm()
    rig.submit("a", 11, 4)
    output, _ = rig.schedule()
    (part,) = output.seqs
    assert (part.start, list(part.token_ids), part.sample) == (8, [1008, 1009, 1010], True)
    assert list(part.block_ids) == [0, 1, 2]
    assert rig.take_events() == []
    (token,) = rig.finish(output).tokens
    assert token.cached_tokens == 8
    load = rig.load()
    assert (load.prompt_tokens_looked_up, load.prompt_tokens_cached, load.cached_blocks) == (21, 8, 2)
    assert [token.cached_tokens for token in rig.step()[1].tokens] == [0], "only the first token tells"


def test_of_a_prompt_that_is_held_in_full_the_last_block_is_computed_again() -> None:
    rig = warm()
    rig.submit("a", 8, 4)
    output, _ = rig.schedule()
    (part,) = output.seqs
    assert (part.start, len(part.token_ids), list(part.block_ids)) == (4, 4, [0, 2])
    rig.finish(output)
    assert rig.load().cached_blocks == 2  # the second copy stays unknown


def test_another_salt_finds_nothing_and_its_own_again() -> None:
    rig = warm()
    for found in (0, 8):
        rig.submit("a", 10, 1, salt="tenant")
        (token,) = rig.step(EOS)[1].tokens
        assert token.cached_tokens == found


def test_without_prefix_caching_nothing_is_looked_up() -> None:
    rig = Rig(prefix_caching=False)
    for _ in range(2):
        rig.submit("a", 10, 1)
        assert rig.step(EOS)[0] == {"a": 10}
    load = rig.load()
    assert (load.prompt_tokens_looked_up, load.prompt_tokens_cached, load.cached_blocks) == (0, 0, 0)


def test_blocks_of_a_running_request_are_found_once_their_step_is_done() -> None:
    rig = Rig(prefix_caching=True, budget=16)
    rig.submit("a", 10, 9)
    rig.submit("b", 10, 9)  # in the same step: computes its own
    assert rig.parts() == {"a": 10, "b": 6}
    rig.submit("c", 10, 9)
    output, parts = rig.schedule()
    assert parts == {"a": 1, "b": 4, "c": 2}
    shared = output.seqs[0].block_ids[:2]
    assert list(output.seqs[2].block_ids[:2]) == list(shared)
    rig.finish(output)


def test_a_chunk_that_ends_within_a_block_does_not_publish_it() -> None:
    rig = Rig(prefix_caching=True, budget=6)
    rig.submit("a", 12, 1)
    rig.step()
    assert rig.load().cached_blocks == 1
    rig.step()
    assert rig.load().cached_blocks == 3


def test_output_is_found_as_well() -> None:
    rig = Rig(prefix_caching=True)
    rig.submit("a", 7, 3)
    for token in (1007, 1008, 1009):
        rig.step(token)
    rig.submit("b", 12, 1)  # a's prompt and outputs, and a bit
    assert rig.parts() == {"b": 4}


def test_push_reports_the_blocks_it_found_with_its_first_progress() -> None:
    rig = warm(budget=4)
    rig.submit("p", 15, 4, PUSH)
    output, _ = rig.schedule()
    assert rig.take_events() == [Computed([Progress("p", 8, [0, 1])])]
    rig.finish(output)
    assert rig.progress == [Progress("p", 12, [0, 1, 2, 3])]
    first = FirstToken(rig.next_token, ends_here=False)
    rig.step()
    assert rig.progress == [Progress("p", 15, [0, 1, 2, 3], first_token=first)]
    rig.release("p")
    assert rig.free == 32


def test_a_reservation_says_how_many_blocks_are_held() -> None:
    rig = warm()
    assert rig.submit("r", 15, 4, RECEIVE) == [Reserved("r", [0, 1, 2, 3], 2, rig.now)]
    rig.kv_ready("r", 50)
    assert rig.load().cached_blocks == 3
    assert rig.parts() == {"r": 1}


def test_all_blocks_of_a_reservation_may_be_held() -> None:
    rig = warm()
    assert rig.submit("r", 8, 4, RECEIVE) == [Reserved("r", [0, 1], 2, rig.now)]
    rig.kv_ready("r", 50)
    output, _ = rig.schedule()
    (part,) = output.seqs
    assert (part.start, list(part.token_ids), list(part.block_ids)) == (8, [50], [0, 1, 2])
    rig.finish(output)


def test_a_hand_off_that_fails_leaves_nothing_to_find() -> None:
    rig = Rig(prefix_caching=True)
    rig.submit("r", 8, 4, RECEIVE)
    rig.abort("r")
    assert rig.load().cached_blocks == 0
    assert rig.submit("s", 8, 4, RECEIVE) == [Reserved("s", [0, 1], 0, rig.now)]


def test_a_request_whose_first_token_is_its_last_still_leaves_what_it_received() -> None:
    rig = Rig(prefix_caching=True)
    rig.submit("r", 8, 4, RECEIVE)
    rig.kv_ready("r", EOS)
    assert rig.take_events() == [Finished("r", "stop")]
    assert rig.submit("s", 9, 4, RECEIVE) == [Reserved("s", [0, 1, 2], 2, rig.now)]


def test_what_is_aborted_in_its_step_is_not_published() -> None:
    rig = Rig(prefix_caching=True, budget=8)
    rig.submit("a", 12, 4)
    rig.step()
    output, _ = rig.schedule()
    rig.abort("a")
    rig.finish(output)
    assert rig.load().cached_blocks == 2
    assert rig.free == 32


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    rig = Rig(prefix_caching=True, block_size=2, num_blocks=8)
    rig.submit("a", 3, 9, salt="a")
    rig.submit("b", 6, 9, salt="b")
    rig.step()
    while "b" not in (output := rig.scheduler.schedule()).preempted:
        rig.finish(output)
    rig.finish(output)
    rig.abort("a")
    output, _ = rig.schedule()
    (part,) = output.seqs
    assert part.attempt_id == "b"
    assert part.start > 0
    rig.finish(output)
    assert rig.take_events() == []
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


def test_a_prefix_is_awaited_and_the_rest_is_computed() -> None:
    rig = Rig(prefix_caching=True)
    assert rig.submit("a", 15, 4, prefix_tokens=12) == [Reserved("a/prefix", [0, 1, 2, 3], 0, rig.now)]
    rig.submit("b", 3, 4)
    assert rig.parts() == {"b": 3}, "others run meanwhile"
    rig.kv_ready("a", None, 12)
    assert rig.load().cached_blocks == 3
    output, parts = rig.schedule()
    assert parts == {"a": 3, "b": 1}
    (token, _) = rig.finish(output).tokens
    assert (token.attempt_id, token.cached_tokens) == ("a", 12)
    load = rig.load()
    assert (load.prompt_tokens_looked_up, load.prompt_tokens_cached) == (18, 12)


def test_of_a_prefix_less_may_come_than_was_hoped_for() -> None:
    for arrived, computed in ((12, 3), (8, 7), (0, 15)):
        rig = Rig(prefix_caching=True)
        rig.submit("a", 15, 4, prefix_tokens=12)
        rig.kv_ready("a", None, arrived)
        assert rig.parts() == {"a": computed}


def test_a_prefix_that_is_cached_here_is_not_forgotten_if_nothing_comes() -> None:
    rig = warm()
    assert rig.submit("a", 15, 4, prefix_tokens=12) == [Reserved("a/prefix", [0, 1, 2, 3], 2, rig.now)]
    rig.kv_ready("a", None, 0)
    assert rig.parts() == {"a": 7}


def test_a_prefix_is_pushed_on_as_soon_as_it_is_there() -> None:
    rig = warm()
    reserved, found = rig.submit("p", 15, 4, PUSH, prefix_tokens=12)
    assert reserved == Reserved("p/prefix", [0, 1, 2, 3], 2, rig.now)
    assert found == Computed([Progress("p", 8, [0, 1])])
    rig.kv_ready("p", None, 12)
    assert rig.take_events() == [Computed([Progress("p", 12, [0, 1, 2, 3])])]
    rig.step()
    assert [(told.num_computed_tokens, told.first_token is None) for told in rig.progress] == [(15, False)]
    rig.release("p")
    assert rig.free == 32


def test_a_request_may_be_aborted_while_it_awaits_its_prefix() -> None:
    rig = Rig(prefix_caching=True)
    rig.submit("a", 15, 4, PUSH, prefix_tokens=12)
    rig.abort("a")
    rig.kv_ready("a", None, 12)
    assert (rig.free, rig.busy(), rig.load().cached_blocks) == (32, False, 0)


def test_a_prefix_of_no_whole_blocks_or_all_tokens_is_refused() -> None:
    for prefix_tokens in (-4, 6, 8, 12):
        (event,) = Rig(prefix_caching=True).submit("a", 8, 4, prefix_tokens=prefix_tokens)
        assert isinstance(event, Rejected)
        assert "whole blocks of 4 tokens below 8" in event.message


def test_a_pinned_prefix_is_not_evicted() -> None:
    rig = warm()
    rig.scheduler.pin_prefix("x/prefix", "", range(1000, 1012))
    assert rig.take_events() == [Reserved("x/prefix", [0, 1], 2, rig.now)], "the third block was never cached"
    assert rig.free == 30
    rig.submit("big", 120, 1, salt="other")
    while rig.busy():
        rig.step(EOS)
    rig.scheduler.pin_prefix("y/prefix", "", range(1000, 1008))
    assert rig.take_events() == [Reserved("y/prefix", [0, 1], 2, rig.now)]
    rig.release("x/prefix")
    assert rig.free == 30
    rig.abort("y/prefix")
    rig.release("y/prefix")
    assert rig.free == 32
    assert rig.load().cached_blocks == 32, "they are cached as before"


def test_a_request_that_waits_for_pinned_blocks_gets_them_when_they_are_released() -> None:
    rig = warm()
    rig.scheduler.pin_prefix("x/prefix", "", range(1000, 1008))
    assert rig.take_events()
    assert rig.submit("r", 124, 2, RECEIVE, salt="other") == []
    rig.release("x/prefix")
    (reserved,) = rig.take_events()
    assert isinstance(reserved, Reserved)
    assert len(reserved.block_ids) == 31


def test_what_is_not_cached_is_not_pinned() -> None:
    for rig in (Rig(prefix_caching=True), Rig(prefix_caching=False)):
        rig.scheduler.pin_prefix("x/prefix", "", range(1000, 1008))
        assert rig.take_events() == [Reserved("x/prefix", [], 0, rig.now)]
        rig.release("x/prefix")
        assert rig.free == 32
