"""Contiguous reservation: runs of blocks, and a scheduler that never grows a request."""

from __future__ import annotations

from contract.engine import KVRole
from engine.scheduling.baselines import ContiguousReservation
from engine.scheduling.batch import SampledToken
from engine.scheduling.scheduler import SchedulerConfig
from pdserve.core.clock import FakeClock
from tests.engine.harness import submit
from tests.engine.integrity import check_scheduler

EOS = 7


def scheduler(num_blocks: int = 8, whole_context: bool = False, max_model_len: int = 16) -> ContiguousReservation:
    config = SchedulerConfig(64, 8, max_model_len, 4, num_blocks, eos_token_ids=(EOS,))
    return ContiguousReservation(config, FakeClock(), whole_context=whole_context)


def add(engine: ContiguousReservation, name: str, prompt_tokens: int, max_tokens: int) -> None:
    engine.submit(submit(name, KVRole.LOCAL, (1,) * prompt_tokens, max_tokens))


def step(engine: ContiguousReservation, ending: str = "") -> dict[str, list[int]]:
    """One step, after which the requests named in ``ending`` stop; each part's blocks."""
    output = engine.schedule()
    check_scheduler(engine)
    assert not output.preempted
    blocks = {part.attempt_id: list(part.block_ids) for part in output.seqs}
    tokens = {p.attempt_id: [SampledToken(EOS if p.attempt_id in ending else 2)] for p in output.seqs if p.sample}
    engine.update(output, tokens, 0.0)
    check_scheduler(engine)
    return blocks


def test_free_blocks_in_too_short_runs_admit_no_request() -> None:
    engine = scheduler()
    for name in "abcd":
        add(engine, name, 4, 4)
    assert set(step(engine)) == set("abcd")
    add(engine, "e", 4, 8)
    assert set(step(engine, ending="ac")) == set("abcd")
    assert engine.blocks.free_blocks == 4
    assert engine.blocks.longest_run == 2
    assert set(step(engine, ending="b")) == set("bd")
    assert step(engine)["e"] == [0, 1, 2]


def test_whole_context_reserves_for_the_longest_request() -> None:
    engine = scheduler(whole_context=True)
    for name in "abc":
        add(engine, name, 1, 1 if name == "a" else 2)
    assert step(engine) == {"a": [0, 1, 2, 3], "b": [4, 5, 6, 7]}
    assert step(engine) == {"b": [4, 5, 6, 7], "c": [0, 1, 2, 3]}

    # A pool that is smaller is given as a whole.
    engine = scheduler(num_blocks=2, whole_context=True)
    add(engine, "a", 4, 4)
    assert step(engine) == {"a": [0, 1]}
