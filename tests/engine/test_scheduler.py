"""What the scheduler decides, case by case. `test_random_schedules` and `pdserve simulate` prove that tokens, blocks
and ends are right whatever it decides."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from contract.engine import Computed, KVEvent, KVRole, Load, Progress, Rejected, Reserved, Step, TokenOut
from engine.scheduling.baselines import ChunkTokens, scheduler_class
from engine.scheduling.batch import SampledToken
from engine.scheduling.kv_connector import KVConnector
from engine.scheduling.scheduler import OVERTAKEN_S, SchedulerConfig, SchedulerEvent, SchedulerOutput
from pdserve.core.clock import FakeClock
from pdserve.core.errors import CapacityExceeded, InvalidRequest, from_wire
from pdserve.core.request import AGED_S
from pdserve.core.sampling import SamplingParams
from tests.engine.harness import submit
from tests.engine.integrity import check_scheduler

LOCAL, PUSH, RECEIVE = KVRole.LOCAL, KVRole.PUSH, KVRole.RECEIVE
EOS = 99


class Rig:
    """A scheduler under a fake clock; each step takes ``step_s`` and samples 1, 2, 3, … unless told otherwise."""

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
        step_s: float = 1.0,
    ) -> None:
        self.clock, self._step_s = FakeClock(10.0), step_s
        chunk = None if chunk_tokens == "off" else chunk_tokens
        config = SchedulerConfig(budget, max_seqs, max_len, block_size, num_blocks, (EOS,), prefix_caching, chunk)
        self.scheduler = scheduler_class(batching, chunk_tokens)(config, self.clock, KVConnector(self.clock))
        self.kv_ready, self.release, self.abort = self.scheduler.kv_ready, self.scheduler.release, self.scheduler.abort
        self.load = self.scheduler.load
        self.progress: list[Progress] = []  # that the last step told of
        self._events: list[SchedulerEvent | KVEvent] = []
        self.next_token = 1

    def submit(
        self, name: str, prompt: int, max_tokens: int, role: KVRole = LOCAL, **more: Any
    ) -> list[SchedulerEvent | KVEvent]:
        """Submit ``prompt`` tokens 1000, 1001, …, and tell what events that made."""
        self.scheduler.submit(submit(name, role, range(1000, 1000 + prompt), max_tokens, **more))
        return self.take_events()

    def take_events(self) -> list[SchedulerEvent | KVEvent]:
        """What scheduler and connector have to tell since the last call, but for steps' `progress`."""
        self._events += self.scheduler.connector.take_events()
        self._events += self.scheduler.take_events()
        events, self._events = self._events, []
        return events

    def finish(self, output: SchedulerOutput, token: int | None = None) -> Step:
        """Bring a step to its end; all its parts sample ``token``."""
        self.clock.advance(self._step_s)
        if not output.seqs:
            return Step(self.clock.now(), output.started_s)
        sampled_token = SampledToken(self.next_token if token is None else token)
        sampled = {part.attempt_id: [sampled_token] for part in output.seqs if part.sample}
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

    def step(self, token: int | None = None) -> tuple[SchedulerOutput, Step]:
        """A whole step: its plan and what it did."""
        output = self.scheduler.schedule()
        return output, self.finish(output, token)

    def parts(self) -> dict[str, int]:
        """The parts of a whole step, as ``{request: number of tokens}``."""
        return parts_of(self.step()[0])

    @property
    def now(self) -> float:
        return self.clock.now()

    def busy(self) -> bool:
        return self.scheduler.has_work

    @property
    def free(self) -> int:
        return self.scheduler.load().free_blocks


def parts_of(output: SchedulerOutput) -> dict[str, int]:
    """The parts of a step, as ``{request: number of tokens}``."""
    return {part.attempt_id: len(part.token_ids) for part in output.seqs}


def test_a_local_request_runs_to_completion() -> None:
    rig = Rig()
    sampling: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 7}
    assert rig.submit("a", 5, 3, **sampling) == []
    output, step = rig.step()
    (part,) = output.seqs
    assert (part.token_ids, part.start, part.sample) == ([1000, 1001, 1002, 1003, 1004], 0, True)
    assert part.params == SamplingParams(max_tokens=3, **sampling)
    assert step == Step(11.0, 10.0, [TokenOut("a", 1, "", 10.0)])
    output, step = rig.step()
    (part,) = output.seqs
    assert (part.token_ids, part.start, part.sample, list(part.block_ids)) == ([1], 5, True, [0, 1])
    assert step == Step(12.0, 11.0, [TokenOut("a", 2, "", 10.0)])
    assert rig.step()[1] == Step(13.0, 12.0, [TokenOut("a", 3, "length", 10.0)])
    assert rig.load() == Load(32, 0, 0, 0)


# --- batching --------------------------------------------------------------------------------------------------------


def test_the_budget_goes_to_decodes_first_then_to_chunks_then_to_the_waiting() -> None:
    rig = Rig(budget=8)
    rig.submit("a", 4, 20)
    rig.step()
    rig.submit("b", 20, 20)
    assert rig.parts() == {"a": 1, "b": 7}
    rig.submit("r", 4, 20, RECEIVE)
    rig.kv_ready("r", 50)
    rig.submit("c", 4, 20)
    for _ in range(2):
        assert rig.parts() == {"a": 1, "b": 6, "r": 1}, "chunks do not hold up a decode that joined after their prefill"
    assert rig.parts() == {"a": 1, "b": 1, "c": 4, "r": 1}
    assert rig.parts() == {"a": 1, "b": 1, "c": 1, "r": 1}


def test_the_budget_may_change_between_steps_but_not_beyond_that_of_the_start() -> None:
    rig = Rig(budget=8)
    rig.submit("a", 40, 2)
    for budget, expected in ((8, 8), (3, 3), (100, 8), (0, 1)):
        rig.scheduler.set_token_budget(budget)
        assert rig.parts() == {"a": expected}


def test_a_senior_prefill_gets_a_token_even_if_decodes_fill_the_budget() -> None:
    rig = Rig(budget=2, max_seqs=4)
    rig.submit("long", 6, 1)
    rig.step()
    for name in ("r", "s"):
        rig.submit(name, 4, 20, RECEIVE)
        rig.kv_ready(name, 50)
    for _ in range(4):
        assert rig.parts() == {"long": 1, "r": 1}
    assert rig.parts() == {"r": 1, "s": 1}


def test_received_requests_beyond_the_limit_take_turns_by_seniority() -> None:
    rig = Rig(max_seqs=2)
    for name in "abc":
        rig.submit(name, 4, 3, RECEIVE)
    for name in "cba":
        rig.kv_ready(name, 50)
    assert [rig.parts() for _ in range(3)] == [{"a": 1, "b": 1}, {"a": 1, "b": 1}, {"c": 1}]


def test_first_come_first_served_even_if_a_later_one_would_fit() -> None:
    rig = Rig(num_blocks=8)
    rig.submit("a", 16, 8)
    rig.step()
    rig.submit("big", 20, 4)
    rig.submit("small", 4, 4)
    assert rig.submit("r", 4, 4, RECEIVE) == []
    assert rig.parts() == {"a": 1}
    assert rig.load() == Load(3, 1, 3, 0)
    rig.abort("a")
    assert rig.parts() == {"big": 20, "small": 4}
    assert [event.attempt_id for event in rig.take_events() if isinstance(event, Reserved)] == ["r"]


def test_a_reservation_needs_no_place_in_the_batch() -> None:
    rig = Rig(max_seqs=1)
    rig.submit("a", 4, 9)
    rig.step()
    assert rig.submit("r", 4, 4, RECEIVE) == [Reserved("r", [1], 0, rig.now)]


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
    ("prompt", "max_tokens", "more", "kind", "words"),
    [
        (0, 4, {}, InvalidRequest, "prompt_token_ids: the prompt is empty"),
        (0, 3, {"outputs": [1, 2]}, InvalidRequest, "prompt_token_ids: the prompt is empty"),
        (4, 0, {}, InvalidRequest, "max_tokens: 0 is below 1"),
        (30, 11, {}, CapacityExceeded, "exceed max_model_len 40"),
        (30, 4, {}, CapacityExceeded, "need 9 KV blocks of 4 tokens, the pool has 8"),
        *(
            (8, 4, {"prefix_tokens": tokens}, InvalidRequest, "is not a number of whole blocks of 4 tokens below 8")
            for tokens in (-4, 6, 8, 12)
        ),
    ],
)
def test_refusals_say_why(
    prompt: int, max_tokens: int, more: dict[str, Any], kind: type[Exception], words: str
) -> None:
    rig = Rig(max_len=40, num_blocks=8)
    (event,) = rig.submit("a", prompt, max_tokens, **more)
    assert isinstance(event, Rejected)
    error = from_wire(event.kind, event.message)
    assert type(error) is kind
    assert words in str(error)
    assert rig.load() == Load(8, 0, 0, 0)


def test_an_id_in_use_is_refused_and_the_first_goes_on() -> None:
    rig = Rig()
    rig.submit("a", 4, 1)
    (event,) = rig.submit("a", 8, 9)
    assert isinstance(event, Rejected)
    assert (event.kind, event.attempt_id) == ("InvalidRequest", "a")
    assert "in use" in event.message
    assert rig.parts() == {"a": 4}
    assert rig.submit("a", 4, 1) == []  # the id is free again


def test_the_same_id_again_is_not_taken_for_the_aborted_one() -> None:
    rig = Rig()
    rig.submit("a", 4, 4)
    output = rig.scheduler.schedule()
    rig.abort("a")
    rig.submit("a", 6, 2)
    assert rig.finish(output).tokens == []
    assert rig.parts() == {"a": 6}
    assert rig.step()[1].tokens[0].finish_reason == "length"
    assert rig.free == 32


# --- priority and preemption -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("priorities", "victim"), [((0, 0, 0), "c"), ((1, 0, 0), "a")])
def test_growth_preempts_the_lowest_priority_and_of_these_the_last_that_came(
    priorities: tuple[int, ...], victim: str
) -> None:
    rig = Rig(block_size=2, num_blocks=7)
    for name, priority in zip("abc", priorities, strict=True):
        rig.submit(name, 3, 8, priority=priority)
    assert rig.parts() == {"a": 3, "b": 3, "c": 3}
    assert rig.parts() == {"a": 1, "b": 1, "c": 1}
    others = {"a", "b", "c"} - {victim}
    output, _ = rig.step()
    assert (parts_of(output), output.preempted) == (dict.fromkeys(others, 1), [victim])
    assert rig.load() == Load(1, 2, 1, 1)
    # A request that came later, of a higher priority, is admitted before the preempted one.
    rig.submit("d", 1, 1, priority=-1)
    rig.abort("a" if victim == "c" else "c")
    assert list(rig.parts()) == ["b", "d"]
    rig.abort(victim)
    assert (rig.load().running, rig.load().waiting) == (1, 0)


def test_nothing_is_admitted_in_the_step_that_preempts() -> None:
    rig = Rig(block_size=1, num_blocks=8)
    rig.submit("a", 2, 5)
    rig.submit("b", 5, 3)
    rig.step()
    assert rig.free == 1
    rig.step(50)
    output, _ = rig.step()
    assert (parts_of(output), output.preempted, rig.free) == ({"a": 1}, ["b"], 4)


def test_waiting_requests_are_admitted_by_priority_then_by_arrival() -> None:
    rig = Rig(max_seqs=1)
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", -3), ("e", 5), ("f", 0)):
        rig.submit(name, 2, 1, priority=priority)
    assert [list(rig.parts()) for _ in range(6)] == [["d"], ["a"], ["c"], ["f"], ["b"], ["e"]]


def test_room_for_received_kv_is_made_by_priority() -> None:
    rig = Rig(block_size=2, num_blocks=4)
    rig.submit("a", 6, 2)
    rig.step()
    assert rig.submit("low", 4, 3, RECEIVE, priority=1) == []
    assert rig.submit("high", 4, 3, RECEIVE) == []
    rig.abort("a")
    assert [event.attempt_id for event in rig.take_events() if isinstance(event, Reserved)] == ["high"]


def test_a_request_that_has_waited_long_is_not_overtaken_any_more() -> None:
    rig = Rig(max_seqs=1)
    rig.submit("late", 2, 1, priority=5)
    rig.submit("later", 2, 1, priority=6)
    order: list[str] = []
    for number in range(20):  # steps of a second
        rig.submit(f"early-{number}", 2, 1)
        order += rig.parts()
    early = [f"early-{number}" for number in range(18)]
    assert order == [*early[:10], "late", "later", *early[10:]]


@pytest.mark.parametrize("preempted", [False, True])
def test_a_request_that_has_run_is_overtaken_for_a_while_only(preempted: bool) -> None:
    """One whose prompt is computed chunk by chunk, and one that was preempted."""
    if preempted:
        rig = Rig(block_size=2, num_blocks=7)
        rig.submit("late", 3, 8, priority=1)
        rig.step()
        rig.submit("a", 3, 8)
        rig.submit("b", 3, 8)
        while not rig.load().preemptions:
            rig.step()
    else:
        rig = Rig(budget=2, max_len=1024, num_blocks=512)
        rig.submit("late", 20, 1, priority=5)
        rig.step()
        rig.submit("first", 4, 4, RECEIVE)
        rig.kv_ready("first", 50)
    for number in range(60):
        name = f"early-{number}"
        if preempted:
            rig.submit(name, 3, 4)
        else:  # two of them decode at any time, which is the whole budget
            rig.submit(name, 4, 3, RECEIVE)
            rig.kv_ready(name, 50)
        rig.step()
        if "late" not in rig.scheduler._seqs:
            break
    assert AGED_S < number < 40


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
        output, step = rig.step()
        assert parts_of(output) == {"p": 1}
        assert len(step.tokens) == (left == 1)
    assert not rig.busy()
    rig.release("p")
    assert rig.parts() == {"r": 1}


def test_it_is_stalled_while_only_hand_offs_can_free_blocks() -> None:
    rig = Rig(num_blocks=4)
    rig.submit("p", 12, 1, PUSH)
    assert not rig.load().stalled, "its step comes"
    rig.step()
    assert not rig.load().stalled, "nothing waits for the blocks of p"
    assert rig.submit("r", 8, 4, RECEIVE) == []
    assert rig.load().stalled
    rig.release("p")
    assert len(rig.take_events()) == 1, "r has its blocks"
    assert not rig.load().stalled, "r awaits KV, and nothing waits for blocks"


# --- requests ahead, of clients that have few in progress ------------------------------------------------------------


def test_one_ahead_is_computed_before_others_that_wait() -> None:
    """Within its priority."""
    rig = Rig(max_seqs=4, budget=4)
    rig.submit("a", 4, 8)
    rig.submit("b", 4, 8)
    rig.submit("c", 4, 8, ahead=True)
    rig.submit("urgent", 4, 8, priority=-1)
    assert [[*rig.parts()][-1] for _ in range(3)] == ["urgent", "c", "a"]


def test_one_ahead_takes_the_place_of_the_last_of_a_full_step() -> None:
    """Which keeps its blocks, and goes on when a place is free."""
    rig = Rig(max_seqs=2, step_s=0.0)
    for name in "ab":
        rig.submit(name, 4, 3)
    assert [*rig.parts()] == ["a", "b"]
    rig.submit("c", 4, 2, ahead=True)
    rig.submit("d", 4, 8)
    assert [[*rig.parts()] for _ in range(4)] == [["c", "a"], ["c", "a"], ["b", "d"], ["b", "d"]]


def test_one_ahead_overtakes_only_what_came_lately() -> None:
    """So a client with many requests is served as well."""
    rig = Rig(max_seqs=1, step_s=0.0)
    rig.submit("early", 4, 8)
    rig.clock.advance(OVERTAKEN_S)
    rig.submit("late", 4, 8)
    rig.submit("small", 4, 8, ahead=True)
    assert [*dict.fromkeys(next(iter(rig.parts())) for _ in range(24))] == ["early", "small", "late"]


# --- the contract of schedule and update -----------------------------------------------------------------------------


def test_a_resumed_request_knows_its_outputs() -> None:
    rig = Rig()
    rig.scheduler.submit(submit("a", LOCAL, [1, 2], 3, outputs=[2, 3], presence_penalty=1.0))
    rig.submit("b", 4, 2)
    output, _ = rig.step(3)
    history, of_b = (part.history for part in output.seqs)
    assert of_b is None, "without penalties none is kept"
    assert history is not None
    assert list(history.seen_ids) == [1, 2, 3]
    assert (list(history.output_ids), list(history.output_counts)) == ([2, 3], [1, 2])
