"""Static batches, and prompts that are cut small or not at all."""

from __future__ import annotations

import pytest

from engine.messages import KVRole
from engine.scheduling.baselines import ChunkTokens, scheduler_class
from engine.scheduling.scheduler import Scheduler
from tests.engine.test_scheduler import EOS, Rig

LOCAL, PUSH, RECEIVE = KVRole.LOCAL, KVRole.PUSH, KVRole.RECEIVE


# --- static ----------------------------------------------------------------------------------------------------------


def test_no_request_joins_a_static_batch_until_all_of_it_has_ended() -> None:
    rig = Rig(batching="static")
    rig.submit("a", 4, 3)
    rig.submit("b", 4, 2)
    assert rig.parts() == {"a": 4, "b": 4}
    rig.submit("c", 4, 1)
    assert rig.parts() == {"a": 1, "b": 1}
    assert rig.parts() == {"a": 1}
    assert rig.parts() == {"c": 4}


def test_a_static_batch_is_admitted_whole_even_if_its_prompts_exceed_one_step() -> None:
    rig = Rig(batching="static", budget=8, max_seqs=3)
    for name in "abcd":
        rig.submit(name, 6, 2)
    assert rig.parts() == {"a": 6, "b": 2}
    assert rig.load().running == 3
    assert rig.parts() == {"a": 1, "b": 4, "c": 3}
    assert rig.parts() == {"b": 1, "c": 3}
    assert rig.parts() == {"c": 1}
    assert rig.parts() == {"d": 6}


def test_received_requests_stand_by_for_the_next_static_batch() -> None:
    rig = Rig(batching="static", max_seqs=2)
    rig.submit("a", 4, 3)
    rig.step()
    for name in "rst":
        rig.submit(name, 4, 2, RECEIVE)
        rig.kv_ready(name, 50)
    assert (rig.load().running, rig.load().waiting) == (1, 3)
    assert rig.parts() == {"a": 1}
    assert rig.parts() == {"a": 1}
    assert rig.parts() == {"r": 1, "s": 1}
    assert rig.parts() == {"t": 1}
    assert not rig.busy()


def test_who_stands_by_gives_way_to_the_batch_even_if_it_came_first() -> None:
    """Else the batch would wait for its blocks, and it for the batch."""
    rig = Rig(batching="static", block_size=2, num_blocks=4)
    rig.submit("r", 4, 3, RECEIVE)
    rig.submit("a", 2, 4)
    assert rig.parts() == {"a": 2}
    rig.kv_ready("r", 50)
    assert rig.parts() == {"a": 1}
    rig.step()
    output, parts = rig.schedule()
    assert (parts, output.preempted) == ({"a": 1}, ["r"])
    rig.finish(output, EOS)
    assert rig.parts() == {"r": 5}


def test_an_aborted_batch_makes_room_for_the_next() -> None:
    rig = Rig(batching="static")
    rig.submit("a", 4, 9)
    rig.submit("p", 4, 1, PUSH)
    rig.step()
    rig.submit("b", 4, 9)
    assert rig.parts() == {"a": 1}
    rig.abort("a")
    assert rig.parts() == {"b": 4}
    rig.release("p")
    assert rig.load().free_blocks == 31


# --- chunks ----------------------------------------------------------------------------------------------------------


def test_a_chunk_is_no_larger_than_told_and_leaves_the_rest_to_others() -> None:
    rig = Rig(budget=8, chunk_tokens=3)
    rig.submit("a", 7, 1)
    rig.submit("b", 7, 1)
    rig.submit("c", 7, 1)
    assert rig.parts() == {"a": 3, "b": 3, "c": 2}
    assert rig.parts() == {"a": 3, "b": 3, "c": 2}


def test_prompts_that_are_not_cut_run_beside_decodes_as_far_as_they_fit() -> None:
    rig = Rig(budget=8, chunk_tokens="off")
    rig.submit("a", 4, 9)
    rig.submit("b", 4, 9)
    rig.submit("c", 6, 9)
    assert rig.parts() == {"a": 4, "b": 4}
    assert rig.parts() == {"a": 1, "b": 1, "c": 6}


def test_a_prompt_beyond_the_budget_gets_a_step_of_its_own_and_every_second_one_at_most() -> None:
    rig = Rig(budget=8, chunk_tokens="off")
    rig.submit("a", 4, 9)
    rig.step()
    rig.submit("b", 20, 9)
    rig.submit("c", 20, 9)
    assert rig.parts() == {"b": 20}
    assert rig.parts() == {"a": 1, "b": 1}
    assert rig.parts() == {"c": 20}
    assert rig.parts() == {"a": 1, "b": 1, "c": 1}


def test_a_prompt_that_only_the_decodes_keep_out_does_not_wait_for_their_end() -> None:
    rig = Rig(budget=4, chunk_tokens="off")
    for name in "ab":
        rig.submit(name, 2, 50)
    rig.step()
    rig.submit("c", 4, 2)
    assert rig.parts() == {"c": 4}


def test_a_static_batch_of_whole_prompts() -> None:
    rig = Rig(budget=4, batching="static", chunk_tokens="off")
    for name in "abc":
        rig.submit(name, 6, 2)
    steps = [rig.parts() for _ in range(6)]
    assert steps == [{"a": 6}, {"a": 1}, {"b": 6}, {"b": 1}, {"c": 6}, {"c": 1}]
    assert not rig.busy()


@pytest.mark.parametrize("chunk_tokens", [None, 3])
def test_the_serving_scheduler_is_the_default(chunk_tokens: ChunkTokens) -> None:
    assert scheduler_class("continuous", chunk_tokens) is Scheduler
