"""Static batches, and prompts that are cut small or not at all."""

from __future__ import annotations

from contract.engine import KVRole
from tests.engine.test_scheduler import Rig

# --- static ----------------------------------------------------------------------------------------------------------


def test_no_request_joins_a_static_batch_until_all_of_it_has_ended() -> None:
    """Also none whose KV comes meanwhile."""
    rig = Rig(batching="static", max_seqs=2)
    rig.submit("a", 4, 3)
    rig.submit("b", 4, 2)
    assert rig.parts() == {"a": 4, "b": 4}
    for name in "rst":
        rig.submit(name, 4, 2, KVRole.RECEIVE)
        rig.kv_ready(name, 50)
    rig.submit("c", 4, 1)
    assert rig.parts() == {"a": 1, "b": 1}
    assert (rig.load().running, rig.load().waiting) == (1, 4)
    assert rig.parts() == {"a": 1}
    assert [rig.parts() for _ in range(2)] == [{"r": 1, "s": 1}, {"t": 1, "c": 4}]


def test_a_static_batch_is_admitted_whole_even_if_its_prompts_exceed_one_step() -> None:
    rig = Rig(batching="static", budget=8, max_seqs=3)
    for name in "abcd":
        rig.submit(name, 6, 2)
    assert rig.parts() == {"a": 6, "b": 2}
    assert rig.load().running == 3
    assert rig.parts() == {"a": 1, "b": 4, "c": 3}
    assert [rig.parts() for _ in range(3)] == [{"b": 1, "c": 3}, {"c": 1}, {"d": 6}]


# --- chunks ----------------------------------------------------------------------------------------------------------


def test_a_chunk_is_no_larger_than_told_and_leaves_the_rest_to_others() -> None:
    rig = Rig(budget=8, chunk_tokens=3)
    for name in "abc":
        rig.submit(name, 7, 1)
    for _ in range(2):
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
    for name in "bc":
        rig.submit(name, 20, 9)
    steps = [rig.parts() for _ in range(4)]
    assert steps == [{"b": 20}, {"a": 1, "b": 1}, {"c": 20}, {"a": 1, "b": 1, "c": 1}]


def test_a_prompt_that_only_the_decodes_keep_out_does_not_wait_for_their_end() -> None:
    rig = Rig(budget=4, chunk_tokens="off")
    for name in "ab":
        rig.submit(name, 2, 50)
    rig.step()
    rig.submit("c", 4, 2)
    assert rig.parts() == {"c": 4}
