"""What the scheduler decides, case by case."""

from __future__ import annotations

from typing import Literal

import pytest

from engine.messages import (
    Computed,
    Finished,
    KVEvent,
    KVRole,
    Load,
    Progress,
    Rejected,
    Reserved,
    Step,
    TokenOut,
)
from engine.scheduling.baselines import ChunkTokens, scheduler_class
from engine.scheduling.batch import SampledToken
from engine.scheduling.kv_connector import TransferConnector
from engine.scheduling.scheduler import SchedulerConfig, SchedulerEvent, SchedulerOutput
from pdserve.core.clock import FakeClock
from pdserve.core.errors import CapacityExceeded, InvalidRequest, from_wire
from pdserve.core.handoff import FirstToken
from pdserve.core.request import AGED_S, EngineStatus
from pdserve.core.sampling import SamplingParams
from tests.engine.harness import submit
from tests.engine.integrity import check_scheduler

LOCAL, PUSH, RECEIVE = KVRole.LOCAL, KVRole.PUSH, KVRole.RECEIVE
EOS = 99


class Rig:
    """A scheduler under a fake clock; each step takes one second and samples 1, 2, 3, … unless told otherwise."""

    def __init__(
        self,
        *,
        budget: int = 64,
        max_seqs: int = 8,
        max_len: int = 256,
        block_size: int = 4,
        num_blocks: int = 32,
        prefix_caching: bool = False,
        batching: Literal["continuous", "static"] = "continuous",
        chunk_tokens: ChunkTokens = None,
    ) -> None:
        self.clock = FakeClock(10.0)
        chunk = None if chunk_tokens == "off" else chunk_tokens
        config = SchedulerConfig(budget, max_seqs, max_len, block_size, num_blocks, (EOS,), prefix_caching, chunk)
        self.scheduler = scheduler_class(batching, chunk_tokens)(config, self.clock, TransferConnector(self.clock))
        self.kv_ready, self.release, self.abort = self.scheduler.kv_ready, self.scheduler.release, self.scheduler.abort
        self.load = self.scheduler.load
        self.progress: list[Progress] = []  # that the last step told of
        self._events: list[SchedulerEvent | KVEvent] = []
        self.next_token = 1

    def submit(
        self,
        name: str,
        prompt: int,
        max_tokens: int,
        role: KVRole = LOCAL,
        stop: tuple[int, ...] = (),
        ignore_eos: bool = False,
        salt: str = "",
        priority: int = 0,
        prefix_tokens: int = 0,
    ) -> list[SchedulerEvent | KVEvent]:
        """Submit ``prompt`` tokens 1000, 1001, …, and tell what events that made."""
        tokens = list(range(1000, 1000 + prompt))
        self.scheduler.submit(
            submit(
                name,
                role,
                tokens,
                max_tokens,
                temperature=0.5,
                top_k=3,
                top_p=0.9,
                seed=7,
                stop_token_ids=stop,
                ignore_eos=ignore_eos,
                salt=salt,
                priority=priority,
                prefix_tokens=prefix_tokens,
            )
        )
        return self.take_events()

    def take_events(self) -> list[SchedulerEvent | KVEvent]:
        """What scheduler and connector have to tell since the last call, but for steps' `progress`."""
        self._events += self.scheduler.connector.take_events()
        self._events += self.scheduler.take_events()
        events, self._events = self._events, []
        return events

    def schedule(self) -> tuple[SchedulerOutput, dict[str, int]]:
        """A step's plan, and its parts as ``{request: number of tokens}``."""
        output = self.scheduler.schedule()
        return output, {part.attempt_id: len(part.token_ids) for part in output.seqs}

    def finish(self, output: SchedulerOutput, token: int | None = None) -> Step:
        """Bring a step to its end; all its parts sample ``token``."""
        self.clock.advance(1.0)
        if not output.seqs:
            return Step(self.clock.now(), output.started_s)
        sampled_token = SampledToken(self.next_token if token is None else token)
        sampled = {part.attempt_id: sampled_token for part in output.seqs if part.sample}
        self.next_token += 1
        self._events += self.scheduler.connector.take_events()
        step = self.scheduler.update(output, sampled, self.clock.now())
        self.progress = []
        for event in self.scheduler.connector.take_events():
            if isinstance(event, Computed):
                self.progress += event.progress
            else:
                self._events.append(event)
        check_scheduler(self.scheduler)
        return step

    def step(self, token: int | None = None) -> tuple[dict[str, int], Step]:
        """A whole step: its parts as ``{request: number of tokens}`` and what it did."""
        output, parts = self.schedule()
        return parts, self.finish(output, token)

    def parts(self) -> dict[str, int]:
        """The parts of a whole step."""
        return self.step()[0]

    @property
    def now(self) -> float:
        return self.clock.now()

    def busy(self) -> bool:
        return self.scheduler.has_work

    def knows(self, name: str) -> bool:
        return name in self.scheduler._seqs

    @property
    def free(self) -> int:
        return self.scheduler.load().free_blocks


# --- one request -----------------------------------------------------------------------------------------------------


def test_a_local_request_runs_to_completion() -> None:
    rig = Rig()
    assert rig.submit("a", 5, 3) == []
    output, _ = rig.schedule()
    (part,) = output.seqs
    assert (part.token_ids, part.start, part.sample) == ([1000, 1001, 1002, 1003, 1004], 0, True)
    assert part.params == SamplingParams(max_tokens=3, temperature=0.5, top_k=3, top_p=0.9, seed=7)
    assert list(part.block_ids) == [0, 1]
    assert rig.finish(output) == Step(11.0, 10.0, [TokenOut("a", 1, "", 10.0)])
    output, _ = rig.schedule()
    (part,) = output.seqs
    assert (part.token_ids, part.start, part.sample) == ([1], 5, True)
    assert rig.finish(output) == Step(12.0, 11.0, [TokenOut("a", 2, "", 10.0)])
    assert rig.step()[1] == Step(13.0, 12.0, [TokenOut("a", 3, "length", 10.0)])
    assert rig.load() == Load(32, 0, 0, 0)
    assert not rig.busy()


def test_a_long_prompt_is_chunked_and_samples_only_at_its_end() -> None:
    rig = Rig(budget=4)
    rig.submit("a", 10, 2)
    for start, length, sample in ((0, 4, False), (4, 4, False), (8, 2, True)):
        output, _ = rig.schedule()
        (part,) = output.seqs
        assert (part.start, len(part.token_ids), part.sample) == (start, length, sample)
        assert len(rig.finish(output).tokens) == sample


def test_blocks_grow_with_the_output_and_are_the_live_list() -> None:
    rig = Rig(block_size=2)
    rig.submit("a", 2, 4)
    output, _ = rig.schedule()
    blocks = output.seqs[0].block_ids
    assert list(blocks) == [0]
    rig.finish(output)
    output, _ = rig.schedule()
    assert output.seqs[0].block_ids is blocks
    assert list(blocks) == [0, 1]


def test_first_scheduled_is_the_first_chunks_step_not_the_submission() -> None:
    rig = Rig(budget=4)
    rig.clock.advance(5.0)
    rig.submit("a", 8, 2)
    rig.clock.advance(2.0)
    assert rig.step()[1].tokens == []
    assert rig.step()[1].tokens == [TokenOut("a", 2, "", 17.0)]


@pytest.mark.parametrize(
    ("token", "stop", "ignore_eos", "max_tokens", "reason"),
    [
        (EOS, (), False, 5, "stop"),
        (EOS, (), False, 1, "stop"),
        (EOS, (), True, 5, ""),
        (EOS, (), True, 1, "length"),
        (EOS, (EOS,), True, 5, "stop"),
        (7, (7,), False, 5, "stop"),
        (7, (7,), True, 5, "stop"),
        (8, (7,), False, 5, ""),
        (8, (7,), False, 1, "length"),
    ],
)
@pytest.mark.parametrize("role", [LOCAL, PUSH])
def test_finish_reasons(
    role: KVRole, token: int, stop: tuple[int, ...], ignore_eos: bool, max_tokens: int, reason: str
) -> None:
    rig = Rig()
    rig.submit("a", 3, max_tokens, role, stop, ignore_eos)
    _, step = rig.step(token)
    # A PUSH request makes one token here, whatever it wants in all.
    assert [out.finish_reason for out in step.tokens] == [reason or ("length" if role is PUSH else "")]
    assert rig.busy() == (role is LOCAL and not reason)


# --- batching --------------------------------------------------------------------------------------------------------


def test_the_budget_goes_to_decodes_first_then_to_chunks_then_to_the_waiting() -> None:
    rig = Rig(budget=8)
    rig.submit("a", 4, 20)
    rig.step()
    rig.submit("b", 20, 20)
    rig.submit("c", 4, 20)
    assert rig.parts() == {"a": 1, "b": 7}
    assert rig.parts() == {"a": 1, "b": 7}
    assert rig.parts() == {"a": 1, "b": 6, "c": 1}
    assert rig.parts() == {"a": 1, "b": 1, "c": 3}
    assert rig.parts() == {"a": 1, "b": 1, "c": 1}


def test_a_decode_that_joined_after_a_prefill_is_not_held_up_by_its_chunks() -> None:
    rig = Rig(budget=8)
    rig.submit("long", 40, 2)
    rig.step()
    rig.submit("r", 4, 5, RECEIVE)
    rig.kv_ready("r", 50)
    assert rig.parts() == {"long": 7, "r": 1}


def test_the_budget_may_change_between_steps_but_not_beyond_that_of_the_start() -> None:
    rig = Rig(budget=8)
    rig.submit("a", 40, 2)
    assert rig.parts() == {"a": 8}
    rig.scheduler.set_token_budget(3)
    assert rig.parts() == {"a": 3}
    rig.scheduler.set_token_budget(100)
    assert rig.parts() == {"a": 8}
    rig.scheduler.set_token_budget(0)
    assert rig.parts() == {"a": 1}


def test_a_senior_prefill_gets_a_token_even_if_decodes_fill_the_budget() -> None:
    rig = Rig(budget=2, max_seqs=4)
    rig.submit("long", 6, 1)
    rig.step()
    for name in ("r", "s"):
        rig.submit(name, 4, 20, RECEIVE)
        rig.kv_ready(name, 50)
    for _ in range(4):
        parts, _ = rig.step()
        assert parts == {"long": 1, "r": 1}
    assert rig.parts() == {"r": 1, "s": 1}


def test_no_more_requests_in_a_step_than_allowed() -> None:
    rig = Rig(max_seqs=2)
    for name in "abc":
        rig.submit(name, 4, 2)
    assert rig.parts() == {"a": 4, "b": 4}
    assert rig.load() == Load(30, 2, 1, 0)
    assert rig.parts() == {"a": 1, "b": 1}
    assert rig.parts() == {"c": 4}


def test_received_requests_beyond_the_limit_take_turns_by_seniority() -> None:
    rig = Rig(max_seqs=2)
    for name in "abc":
        rig.submit(name, 4, 3, RECEIVE)
    for name in "cba":
        rig.kv_ready(name, 50)
    assert rig.parts() == {"a": 1, "b": 1}
    assert rig.parts() == {"a": 1, "b": 1}
    assert rig.parts() == {"c": 1}


def test_first_come_first_served_even_if_a_later_one_would_fit() -> None:
    rig = Rig(num_blocks=8)
    rig.submit("a", 16, 8)
    rig.step()
    rig.submit("big", 20, 4)
    rig.submit("small", 4, 4)
    assert rig.parts() == {"a": 1}
    rig.abort("a")
    assert rig.parts() == {"big": 20, "small": 4}


def test_the_watermark_is_kept_while_others_run_and_only_then() -> None:
    rig = Rig(num_blocks=4)
    rig.submit("a", 8, 4)
    rig.step()
    rig.submit("b", 8, 1)
    assert rig.parts() == {"a": 1}
    rig.abort("a")
    assert rig.parts() == {"b": 8}
    rig.submit("all", 15, 1)
    assert rig.parts() == {"all": 15}


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "role", "kind", "words"),
    [
        (0, 4, LOCAL, InvalidRequest, "prompt_token_ids: the prompt is empty"),
        (4, 0, LOCAL, InvalidRequest, "max_tokens: 0 is below 1"),
        (30, 11, LOCAL, CapacityExceeded, "exceed max_model_len 40"),
        (40, 11, PUSH, CapacityExceeded, "exceed max_model_len 40"),
        (30, 4, LOCAL, CapacityExceeded, "need 9 KV blocks of 4 tokens, the pool has 8"),
        (30, 4, RECEIVE, CapacityExceeded, "need 9 KV blocks of 4 tokens, the pool has 8"),
        (33, 3, PUSH, CapacityExceeded, "need 9 KV blocks"),
    ],
)
def test_refusals_say_why(prompt: int, max_tokens: int, role: KVRole, kind: type[Exception], words: str) -> None:
    rig = Rig(max_len=40, num_blocks=8)
    (event,) = rig.submit("a", prompt, max_tokens, role)
    assert isinstance(event, Rejected)
    error = from_wire(event.kind, event.message)
    assert type(error) is kind
    assert words in str(error)
    assert rig.take_events() == []
    assert rig.load() == Load(8, 0, 0, 0)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "role"), [(30, 3, LOCAL), (30, 3, RECEIVE), (32, 1, LOCAL), (31, 9, PUSH), (32, 8, PUSH)]
)
def test_what_just_fits_is_taken(prompt: int, max_tokens: int, role: KVRole) -> None:
    rig = Rig(max_len=40, num_blocks=8)
    assert not any(isinstance(event, Rejected) for event in rig.submit("a", prompt, max_tokens, role))


def test_an_id_in_use_is_refused_and_the_first_goes_on() -> None:
    rig = Rig()
    rig.submit("a", 4, 1)
    (event,) = rig.submit("a", 8, 9)
    assert isinstance(event, Rejected)
    assert (event.kind, event.attempt_id) == ("InvalidRequest", "a")
    assert "in use" in event.message
    assert rig.parts() == {"a": 4}
    assert rig.submit("a", 4, 1) == []  # the id is free again


# --- PUSH ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 9])
def test_push_stops_after_one_token_and_holds_its_blocks(max_tokens: int) -> None:
    rig = Rig(budget=4, num_blocks=8)
    rig.submit("a", 10, max_tokens, PUSH)
    rig.step()
    assert rig.progress == [Progress("a", 4, [0, 1, 2])]
    rig.step()
    assert rig.progress == [Progress("a", 8, [0, 1, 2])]
    step = rig.step()[1]
    assert rig.progress == [Progress("a", 10, [0, 1, 2], first_token=FirstToken(3, ends_here=False))]
    assert step.tokens == [TokenOut("a", 3, "length", 10.0)]
    assert rig.load() == Load(5, 0, 0, 0)
    assert not rig.busy()
    rig.release("a")
    assert rig.free == 8
    rig.release("a")
    check_scheduler(rig.scheduler)


def test_push_released_early_holds_nothing_once_it_has_its_token() -> None:
    rig = Rig(budget=4, num_blocks=8)
    rig.submit("a", 6, 4, PUSH)
    rig.step()
    rig.release("a")
    assert rig.free == 6
    assert rig.step()[1].tokens == [TokenOut("a", 2, "length", 10.0)]
    assert rig.free == 8


def test_release_of_other_or_unknown_requests_is_ignored() -> None:
    rig = Rig()
    rig.submit("a", 4, 4)
    rig.step()
    rig.release("a")
    rig.release("unknown")
    assert rig.parts() == {"a": 1}


def test_push_is_never_preempted() -> None:
    rig = Rig(budget=4, block_size=2, num_blocks=8)
    rig.submit("a", 2, 9)
    rig.step()
    rig.submit("p", 10, 4, PUSH)  # 5 blocks; a has 1, and the watermark of 1 is kept
    output, parts = rig.schedule()
    assert parts == {"a": 1, "p": 3}
    rig.finish(output)
    for expected in ({"a": 1, "p": 3}, {"a": 1, "p": 3}, {"a": 1, "p": 1}):
        output, parts = rig.schedule()
        assert parts == expected
        assert output.preempted == []
        rig.finish(output)
    assert rig.free == 0
    assert not rig.busy()  # a's blocks are full, all others are held
    assert rig.schedule()[1] == {}
    rig.release("p")
    assert rig.busy()
    assert rig.parts() == {"a": 1}


# --- RECEIVE ---------------------------------------------------------------------------------------------------------


def test_receive_is_reserved_at_once_and_decodes_from_its_first_token() -> None:
    rig = Rig()
    assert rig.submit("r", 6, 3, RECEIVE) == [Reserved("r", [0, 1], 0, rig.now)]
    assert rig.load() == Load(30, 0, 1, 0)
    assert not rig.busy()
    assert rig.schedule()[1] == {}
    rig.clock.advance(5.0)
    rig.kv_ready("r", 50)
    assert rig.busy()
    output, _ = rig.schedule()
    (part,) = output.seqs
    assert (part.token_ids, part.start, part.sample, list(part.block_ids)) == ([50], 6, True, [0, 1])
    assert rig.finish(output).tokens == [TokenOut("r", 1, "", 15.0)]
    assert rig.step()[1].tokens == [TokenOut("r", 2, "length", 15.0)]
    assert rig.free == 32


@pytest.mark.parametrize(("max_tokens", "first", "reason"), [(1, 50, "length"), (5, EOS, "stop"), (5, 7, "stop")])
def test_receive_whose_first_token_is_its_last_is_finished_at_once_and_says_so(
    max_tokens: int, first: int, reason: str
) -> None:
    rig = Rig()
    rig.submit("r", 6, max_tokens, RECEIVE, stop=(7,))
    rig.kv_ready("r", first)
    assert rig.take_events() == [Finished("r", reason)]
    assert not rig.busy()
    assert rig.load() == Load(32, 0, 0, 0)
    check_scheduler(rig.scheduler)


def test_kv_ready_is_ignored_unless_awaited() -> None:
    rig = Rig()
    rig.submit("a", 4, 4)
    rig.kv_ready("a", 50)
    rig.kv_ready("unknown", 50)
    rig.submit("r", 4, 4, RECEIVE)
    rig.abort("r")
    rig.kv_ready("r", EOS)
    assert rig.take_events() == []
    assert rig.parts() == {"a": 4}
    assert rig.parts() == {"a": 1}


def test_a_big_reservation_waits_at_the_head_and_is_made_when_blocks_are_freed() -> None:
    rig = Rig(num_blocks=8)
    rig.submit("a", 16, 2)
    rig.step()
    assert rig.submit("big", 20, 4, RECEIVE) == []
    assert rig.submit("small", 2, 2, RECEIVE) == []
    assert rig.step()[1].tokens[0].finish_reason == "length"
    assert rig.take_events() == [
        Reserved("big", [0, 1, 2, 3, 4], 0, rig.now),
        Reserved("small", [5], 0, rig.now),
    ]


@pytest.mark.parametrize("how", ["release", "abort held", "abort waiting head", "abort reserved"])
def test_reservations_follow_every_way_in_which_room_is_made(how: str) -> None:
    rig = Rig(num_blocks=8)
    if how.startswith("abort waiting"):
        rig.submit("running", 20, 4)
        rig.step()
        rig.submit("x", 16, 1, RECEIVE)
        assert rig.submit("r", 4, 2, RECEIVE) == []
    elif how == "abort reserved":
        rig.submit("x", 28, 1, RECEIVE)
        assert rig.submit("r", 4, 2, RECEIVE) == []
    else:
        rig.submit("x", 32, 1, PUSH)
        rig.step()
        assert rig.submit("r", 4, 2, RECEIVE) == []
    if how == "release":
        rig.release("x")
    else:
        rig.abort("x")
    (event,) = rig.take_events()
    assert isinstance(event, Reserved)
    assert event.attempt_id == "r"


def test_a_reservation_behind_a_local_request_waits_for_its_turn() -> None:
    rig = Rig()
    rig.submit("a", 4, 4)
    assert rig.submit("r", 4, 4, RECEIVE) == []
    reserved_s = rig.now  # as soon as the step is scheduled
    rig.step()
    assert rig.take_events() == [Reserved("r", [1], 0, reserved_s)]


def test_a_reservation_needs_no_place_in_the_batch() -> None:
    rig = Rig(max_seqs=1)
    rig.submit("a", 4, 9)
    rig.step()
    assert rig.submit("r", 4, 4, RECEIVE) == [Reserved("r", [1], 0, rig.now)]


# --- preemption ------------------------------------------------------------------------------------------------------


def test_growth_preempts_the_last_that_came_and_it_computes_its_own_tokens_anew() -> None:
    rig = Rig(block_size=2, num_blocks=7)
    for name in "abc":
        rig.submit(name, 3, 8)
    assert rig.parts() == {"a": 3, "b": 3, "c": 3}
    assert rig.parts() == {"a": 1, "b": 1, "c": 1}
    output, parts = rig.schedule()
    assert parts == {"a": 1, "b": 1}
    assert output.preempted == ["c"]
    rig.finish(output)
    assert rig.load() == Load(1, 2, 1, 1)
    assert rig.submit("d", 1, 1, RECEIVE) == []  # c goes first
    rig.abort("a")
    output, _ = rig.schedule()
    part = output.seqs[-1]
    assert (part.attempt_id, part.token_ids, part.start, part.sample) == ("c", [1000, 1001, 1002, 1, 2], 0, True)
    assert [out.token_id for out in rig.finish(output, 77).tokens] == [77, 77]
    part = rig.schedule()[0].seqs[-1]
    assert (part.attempt_id, part.token_ids, part.start) == ("c", [77], 5)


def test_growth_preempts_the_lowest_priority_first_though_it_came_first() -> None:
    rig = Rig(block_size=2, num_blocks=7)
    for name, priority in (("a", 1), ("b", 0), ("c", 0)):
        rig.submit(name, 3, 8, priority=priority)
    assert rig.parts() == {"a": 3, "b": 3, "c": 3}
    assert rig.parts() == {"a": 1, "b": 1, "c": 1}
    output, parts = rig.schedule()
    assert parts == {"b": 1, "c": 1}
    assert output.preempted == ["a"]
    rig.finish(output)
    # A request that came later, of a higher priority, is admitted before the preempted one.
    rig.submit("d", 1, 1, priority=-1)
    rig.abort("c")
    output, parts = rig.schedule()
    assert list(parts) == ["b", "d"]
    rig.finish(output)
    assert rig.load().preemptions == 1


def test_waiting_requests_are_admitted_by_priority_then_by_arrival() -> None:
    rig = Rig(max_seqs=1)
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", -3), ("e", 5), ("f", 0)):
        rig.submit(name, 2, 1, priority=priority)
    assert [list(rig.parts()) for _ in range(6)] == [["d"], ["a"], ["c"], ["f"], ["b"], ["e"]]


def test_a_request_that_has_waited_long_is_not_overtaken_any_more() -> None:
    """Also one whose prompt is computed chunk by chunk, and one that was preempted."""
    rig = Rig(max_seqs=1)
    rig.submit("late", 2, 1, priority=5)
    rig.submit("later", 2, 1, priority=6)
    order: list[str] = []
    for number in range(20):  # steps of a second
        rig.submit(f"early-{number}", 2, 1)
        order += rig.parts()
    early = [f"early-{number}" for number in range(18)]
    assert order == [*early[:10], "late", "later", *early[10:]]

    rig = Rig(budget=4, max_seqs=2, max_len=1024, num_blocks=512)
    rig.submit("late", 40, 1, priority=5)
    rig.step()
    for number in range(40):
        rig.submit(f"early-{number}", 4, 1)
        computed = rig.parts()
        if number > AGED_S + 1:
            assert computed.get("late", 0) > 0 or not rig.knows("late")
    assert not rig.knows("late")


def test_a_preempted_request_is_overtaken_for_a_while_only() -> None:
    rig = Rig(block_size=2, num_blocks=7)
    rig.submit("late", 3, 8, priority=1)
    rig.step()
    rig.submit("a", 3, 8)
    rig.submit("b", 3, 8)
    while not rig.load().preemptions:
        rig.step()
    for number in range(60):
        rig.submit(f"early-{number}", 3, 4)
        rig.step()
        if not rig.knows("late"):
            break
    assert AGED_S < number < 40


def test_room_for_received_kv_is_made_by_priority() -> None:
    rig = Rig(block_size=2, num_blocks=4)
    rig.submit("a", 6, 2)
    rig.step()
    assert rig.submit("low", 4, 3, RECEIVE, priority=1) == []
    assert rig.submit("high", 4, 3, RECEIVE) == []
    rig.abort("a")
    assert [event.attempt_id for event in rig.take_events() if isinstance(event, Reserved)] == ["high"]


def test_a_preempted_request_keeps_its_first_scheduled_time() -> None:
    rig = Rig(block_size=2, num_blocks=4)
    rig.submit("a", 3, 5)
    rig.step()
    rig.submit("b", 1, 4)
    first = {"a": 10.0, "b": 11.0}
    reasons: dict[str, str] = {}
    for _ in range(20):
        for token in rig.step()[1].tokens:
            assert token.first_scheduled_s == first[token.attempt_id]
            reasons[token.attempt_id] = token.finish_reason
    assert reasons == {"a": "length", "b": "length"}
    assert rig.load().preemptions > 0


def test_a_received_request_that_is_preempted_is_computed_here() -> None:
    rig = Rig(block_size=2, num_blocks=5)
    rig.submit("a", 3, 6)
    rig.step()
    assert rig.submit("r", 4, 4, RECEIVE) == [Reserved("r", [2, 3], 0, rig.now)]
    rig.kv_ready("r", 50)
    assert rig.parts() == {"a": 1, "r": 1}
    output, parts = rig.schedule()
    assert (parts, output.preempted) == ({"a": 1}, ["r"])
    rig.finish(output)
    assert rig.take_events() == []
    rig.abort("a")
    assert rig.take_events() == []  # no second reservation
    assert rig.parts() == {"r": 6}


def test_a_junior_in_want_of_a_block_waits_with_what_it_has() -> None:
    rig = Rig(block_size=2, num_blocks=4)
    rig.submit("p", 4, 1, PUSH)
    rig.submit("a", 1, 4)
    rig.step()
    rig.submit("r", 1, 1, RECEIVE)
    rig.step()
    assert rig.free == 1
    assert rig.parts() == {"a": 1}
    assert rig.free == 0
    rig.step()
    assert not rig.busy()


def test_nothing_is_admitted_in_the_step_that_preempts() -> None:
    rig = Rig(block_size=1, num_blocks=8)
    rig.submit("a", 2, 5)
    rig.submit("b", 5, 3)
    rig.step()
    assert rig.free == 1
    rig.step(50)
    output, parts = rig.schedule()
    assert output.preempted == ["b"]
    assert parts == {"a": 1}
    assert rig.free == 4


def test_a_push_behind_a_stuck_request_is_not_starved_of_budget_or_turns() -> None:
    """The only ones that run are a decode in want of a block and a prefill that has all of its own."""
    rig = Rig(budget=1, max_seqs=1, block_size=2, num_blocks=4)
    assert rig.submit("r", 2, 4, RECEIVE) == [Reserved("r", [0], 0, rig.now)]
    rig.submit("p", 4, 1, PUSH)
    assert rig.parts() == {"p": 1}
    rig.submit("s", 1, 1, RECEIVE)
    rig.kv_ready("r", 50)
    assert rig.parts() == {"r": 1}
    assert rig.parts() == {"r": 1}
    assert rig.free == 0
    for left in (3, 2, 1):
        assert rig.busy()
        parts, step = rig.step()
        assert parts == {"p": 1}
        assert len(step.tokens) == (left == 1)
    assert not rig.busy()
    rig.release("p")
    assert rig.parts() == {"r": 1}


# --- abort -----------------------------------------------------------------------------------------------------------


def test_abort_in_every_state_frees_all() -> None:
    for status in EngineStatus:
        rig = Rig(block_size=2, num_blocks=7)
        if status is EngineStatus.WAITING:
            rig.submit("x", 4, 4)
        elif status is EngineStatus.WAITING_FOR_KV:
            rig.submit("x", 4, 4, RECEIVE)
        elif status is EngineStatus.RUNNING:
            rig.submit("x", 4, 4)
            rig.step()
        elif status is EngineStatus.FINISHED:
            rig.submit("x", 4, 4, PUSH)
            rig.step()
        else:
            rig.submit("a", 3, 8)
            rig.submit("b", 3, 8)
            rig.submit("x", 3, 8)
            rig.step()
            rig.step()
            assert rig.parts().keys() == {"a", "b"}
        assert rig.scheduler._seqs["x"].status is status
        for name in ("x", "a", "b"):
            rig.abort(name)
        check_scheduler(rig.scheduler)
        load = rig.load()
        assert (load.free_blocks, load.running, load.waiting) == (7, 0, 0)
        assert not rig.busy()
        assert rig.take_events() == [] or status is EngineStatus.WAITING_FOR_KV


def test_a_request_aborted_while_its_step_runs_keeps_its_blocks_until_that_is_over() -> None:
    rig = Rig(num_blocks=1)
    rig.submit("a", 2, 2, PUSH)
    rig.submit("b", 2, 2, RECEIVE)
    output, _ = rig.schedule()
    rig.abort("a")
    check_scheduler(rig.scheduler)
    assert rig.free == 0
    assert rig.take_events() == []
    step = rig.finish(output)
    assert (step.tokens, rig.progress) == ([], [])
    assert rig.take_events() == [Reserved("b", [0], 0, rig.now)]


def test_the_same_id_again_is_not_taken_for_the_aborted_one() -> None:
    rig = Rig()
    rig.submit("a", 4, 4)
    output, _ = rig.schedule()
    rig.abort("a")
    rig.submit("a", 6, 2)
    assert rig.finish(output).tokens == []
    assert rig.parts() == {"a": 6}
    assert rig.step()[1].tokens[0].finish_reason == "length"
    assert rig.free == 32


# --- the contract of schedule and update -----------------------------------------------------------------------------


def test_too_many_steps_in_flight_are_a_bug_and_say_so() -> None:
    rig = Rig()
    rig.submit("a", 4, 4)
    rig.submit("b", 4, 4)
    rig.schedule()
    second, parts = rig.schedule()
    assert parts == {"a": 1, "b": 1}
    with pytest.raises(AssertionError, match="while 2 steps are in flight"):
        rig.scheduler.schedule()
    with pytest.raises(AssertionError, match="another step than the oldest"):
        rig.scheduler.update(second, {}, 1.0)


def test_a_missing_sample_is_a_bug_and_says_so() -> None:
    rig = Rig()
    rig.submit("a", 4, 4)
    output, _ = rig.schedule()
    with pytest.raises(KeyError, match="a"):
        rig.scheduler.update(output, {}, 1.0)


def test_a_resumed_request_knows_its_outputs() -> None:
    rig = Rig()
    rig.scheduler.submit(submit("a", LOCAL, [1, 2], 3, outputs=[2, 3], presence_penalty=1.0))
    output, _ = rig.schedule()
    history = output.seqs[0].history
    assert history is not None
    assert (list(history.seen_ids), list(history.output_ids), list(history.output_counts)) == (
        [1, 2, 3],
        [2, 3],
        [1, 1],
    )
    rig.finish(output, token=3)
    assert (list(history.output_ids), list(history.output_counts)) == ([2, 3], [1, 2])
    rig.submit("b", 4, 2)
    output, _ = rig.schedule()
    assert [part.history is None for part in output.seqs] == [False, True]


def test_outputs_cannot_be_the_whole_prompt() -> None:
    rig = Rig()
    rig.scheduler.submit(submit("a", LOCAL, [], 3, outputs=[1, 2]))
    (event,) = rig.take_events()
    assert isinstance(event, Rejected)
    assert event.message.startswith("prompt_token_ids: ")


def test_an_empty_step_needs_no_update() -> None:
    rig = Rig()
    assert rig.scheduler.schedule() == SchedulerOutput([], 10.0, [])
    assert rig.scheduler.schedule() == SchedulerOutput([], 10.0, [])
