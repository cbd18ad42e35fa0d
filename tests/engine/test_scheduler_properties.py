"""Whatever arrives, in whatever order: every request gets exactly its tokens, and no block is lost.

The engine around the scheduler is played by a `World`: a pool that remembers which token's KV lies in which slot, a
sampler whose draw is a function of all tokens before it, and peers that fill the blocks of RECEIVE requests and of
others' prefixes, and take blocks of PUSH requests and of cached prefixes away. What a slot holds is a token, all tokens
before it and the salt it was computed under, so a request that attends to anything but its own beginning, or to another
tenant's, is noticed at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.engine import Computed, Finished, KVRole, Progress, Rejected, Reserved
from engine.scheduling.baselines import StaticBatching, StaticWholePrompts, WholePrompts
from engine.scheduling.batch import PENDING, SampledToken, ScheduledSeq
from engine.scheduling.kv_connector import TransferConnector
from engine.scheduling.scheduler import Scheduler, SchedulerConfig, SchedulerOutput
from pdserve.core.clock import FakeClock
from pdserve.core.handoff import FirstToken
from pdserve.core.prefix_digests import PrefixDigests
from tests.engine.harness import submit
from tests.engine.integrity import check_scheduler

EOS = 0
VOCABULARY = 13


def draw(seed: int, tokens: Sequence[int]) -> int:
    """The next token after ``tokens``: depends on every one of them and on where it stands."""
    state = seed
    for position, token in enumerate(tokens):
        state = (state * 31 + token * 7 + position) % 1_000_003
    return state % VOCABULARY


@dataclass(frozen=True)
class Plan:
    """A request and how its peers will treat it; ``patience`` is how many ticks they take. Requests of one ``topic``
    have the same tokens as far as they go. KV of its first ``prefix_blocks`` is promised, and that of ``came_blocks``
    comes, if it computes its prompt. When it comes, what is cached of its first ``pin_blocks`` is pinned for others."""

    role: KVRole
    prompt_tokens: int
    max_tokens: int
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    patience: int
    abort_after: int | None
    topic: int = 0
    salt: str = ""
    priority: int = 0
    prefix_blocks: int = 0
    came_blocks: int = 0
    pin_blocks: int = 0

    @property
    def prompt(self) -> list[int]:
        return [(self.topic * 5 + i * 3 + 1) % VOCABULARY for i in range(self.prompt_tokens)]

    def stops_at(self, token: int) -> bool:
        return token in self.stop_token_ids or (token == EOS and not self.ignore_eos)

    def outputs(self) -> list[int]:
        """All its output tokens, by the definition of `Submit`."""
        prompt = self.prompt
        tokens: list[int] = []
        while len(tokens) < (1 if self.role is KVRole.PUSH else self.max_tokens):
            tokens.append(draw(self.topic, prompt + tokens))
            if self.stops_at(tokens[-1]):
                break
        return tokens


@dataclass
class Live:
    """What the world knows of a request."""

    plan: Plan
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    unseen: list[int] = field(default_factory=list)  # sampled by steps in flight
    finish_reason: str = ""
    reserved: list[int] | None = None
    num_cached_blocks: int = 0
    held: list[int] | None = None
    due: int = 0
    computed: int = 0  # told of, of a PUSH request
    prefix_tokens: int = 0
    came_tokens: int = 0
    first_scheduled_s: float | None = None
    over: bool = False


class World:
    """A scheduler with everything around it, one tick at a time. With ``run_ahead`` a step is scheduled before the
    tokens of the one before are told."""

    def __init__(self, config: SchedulerConfig, kind: type[Scheduler] = Scheduler, run_ahead: bool = False) -> None:
        self.config = config
        self.run_ahead = run_ahead
        self.in_flight: deque[tuple[SchedulerOutput, dict[str, SampledToken], set[int]]] = deque()
        self.num_ahead = self.num_dropped = 0
        self._told_s = 0.0
        self.clock = FakeClock(100.0)
        self.scheduler = kind(config, self.clock, TransferConnector(self.clock))
        self.pool: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}  # (block, slot) → salt, tokens up to there
        self.batch: set[str] = set()
        self.live: dict[str, Live] = {}
        self.rejected: dict[str, str] = {}
        self.reserved_order: list[str] = []
        self.pins: dict[str, tuple[Plan, list[int], int]] = {}  # blocks, and the tick from which they are released
        self.num_pinned = self.num_came = 0
        self.ticks = 0

    def submit(self, plan: Plan) -> None:
        size = self.config.block_size
        request = Live(plan, plan.prompt)
        attempt_id = f"r{len(self.live)}"
        self.live[attempt_id] = request
        if plan.role is not KVRole.RECEIVE:
            request.prefix_tokens = min(plan.prefix_blocks, max(0, plan.prompt_tokens - 1) // size) * size
            request.came_tokens = min(plan.came_blocks * size, request.prefix_tokens)
        if plan.pin_blocks:
            self.scheduler.pin_prefix(f"pin-{attempt_id}", plan.salt, plan.prompt[: plan.pin_blocks * size])
        self.scheduler.submit(
            submit(
                attempt_id,
                plan.role,
                request.prompt,
                plan.max_tokens,
                seed=7,
                stop_token_ids=plan.stop_token_ids,
                ignore_eos=plan.ignore_eos,
                salt=plan.salt,
                priority=plan.priority,
                prefix_tokens=request.prefix_tokens,
            )
        )
        self._hear()

    def abort(self, attempt_id: str) -> None:
        request = self.live[attempt_id]
        if request.reserved is not None:  # the transfer breaks off half way: what came is garbage
            self._leave_garbage(request, request.num_cached_blocks)
            request.reserved = None
        self.scheduler.abort(attempt_id)
        request.over = True
        self._hear()

    def tick(self, abort_in_step: Sequence[str] = ()) -> bool:
        """Peers act, then one step runs. Whether anything happened."""
        self.ticks += 1
        self.clock.advance(1.0)
        acted = self._peers_act()
        had_work = self.scheduler.has_work
        if self.in_flight and not had_work:
            for attempt_id in abort_in_step:
                self.abort(attempt_id)
            self._finish_step()
            return True
        senior = self.scheduler._running[0].attempt_id if self.scheduler._running else None
        output = self.scheduler.schedule()
        self._hear()
        if output.preempted and type(self.scheduler) is Scheduler:  # the argument against livelock stands on this
            assert senior not in output.preempted
            assert senior in {part.attempt_id for part in output.seqs}
        # With a step in flight, more blocks may be wanted than there are: then a step may be foretold in vain.
        assert bool(output.seqs) == had_work or (had_work and self.in_flight), "has_work must foretell schedule()"
        assert not (output.preempted and self.in_flight)
        self._check_limits(output)
        self.num_ahead += bool(self.in_flight and output.seqs)
        computed = {part.attempt_id: self._compute(part) for part in output.seqs}
        sampled = {part.attempt_id: computed[part.attempt_id] for part in output.seqs if part.sample}
        if output.seqs:
            self.in_flight.append((output, sampled, {block for part in output.seqs for block in part.block_ids}))
        for attempt_id in abort_in_step:
            self.abort(attempt_id)
            check_scheduler(self.scheduler)
        if not output.seqs and not self.in_flight:
            return acted
        self.clock.advance(0.25)
        if len(self.in_flight) > (self.run_ahead and bool(output.seqs)):
            self._finish_step()
        return True

    def _finish_step(self) -> None:
        """Tell the tokens of the oldest step in flight."""
        output, sampled, _ = self.in_flight.popleft()
        for name in sampled:
            del self.live[name].unseen[0]
        step = self.scheduler.update(output, sampled, self.clock.now())
        assert step.step_started_s == max(output.started_s, self._told_s)
        self._told_s = step.sampled_s
        for part in output.seqs:
            request = self.live[part.attempt_id]
            if request.first_scheduled_s is None:
                request.first_scheduled_s = step.step_started_s
        self.num_dropped += len(set(sampled) - {token.attempt_id for token in step.tokens})
        for token in step.tokens:
            request = self.live[token.attempt_id]
            assert not request.over, "no token after the end"
            assert token.first_scheduled_s == request.first_scheduled_s
            request.tokens.append(token.token_id)
            request.finish_reason = token.finish_reason
            if token.finish_reason and request.plan.role is not KVRole.PUSH:
                request.over = True
        self._hear()
        check_scheduler(self.scheduler)
        self._check_cached()

    def _check_cached(self) -> None:
        """Cached blocks hold what they are found by."""
        size = self.config.block_size
        for block, digest in self.scheduler.blocks._digest_of.items():
            salt, tokens = self.pool[block, size - 1]
            assert PrefixDigests(salt, size).first(len(tokens) // size, tokens)[-1] == digest

    def _peers_act(self) -> bool:
        acted = False
        for attempt_id, request in self.live.items():
            if request.over:
                continue
            if request.plan.abort_after is not None and self.ticks >= request.plan.abort_after:
                self.abort(attempt_id)
                acted = True
            elif request.reserved is not None and request.prefix_tokens and self.ticks >= request.due:
                self._prefix_comes(attempt_id, request)
                acted = True
            elif request.reserved is not None and self.ticks >= request.due:
                start = request.num_cached_blocks * self.config.block_size
                self._check_content(request.plan, request.prompt[:start], request.reserved)
                self._write(request.plan, start, request.prompt, request.reserved)
                request.reserved = None
                request.tokens.append(draw(request.plan.topic, request.prompt))
                self.scheduler.kv_ready(attempt_id, request.tokens[0])
                self._hear()
                assert request.over == (request.plan.outputs() == request.tokens), (
                    "the engine tells the end, or goes on"
                )
                acted = True
            elif request.held is not None and self.ticks >= request.due:
                self._check_content(request.plan, request.prompt, request.held)
                self.scheduler.release(attempt_id)
                request.over = True
                acted = True
            elif request.reserved is not None or request.held is not None:
                acted = True  # it will be, in bounded time
            self._hear()
        for name, (plan, blocks, due) in list(self.pins.items()):
            acted = True
            if self.ticks >= due:
                self._check_content(plan, plan.prompt[: len(blocks) * self.config.block_size], blocks)
                del self.pins[name]
                self.scheduler.release(name)
                self._hear()
        check_scheduler(self.scheduler)
        return acted

    def _prefix_comes(self, attempt_id: str, request: Live) -> None:
        """Some or all blocks of a prefix have come, or none; what did not come may be half written."""
        blocks, size = request.reserved, self.config.block_size
        assert blocks is not None
        start = request.num_cached_blocks * size
        self._check_content(request.plan, request.prompt[:start], blocks)
        arrived = max(start, request.came_tokens)
        self._write(request.plan, start, request.prompt[:arrived], blocks)
        self._leave_garbage(request, arrived // size)
        self.num_came += arrived > start
        request.reserved = None
        self.scheduler.kv_ready(attempt_id, None, request.came_tokens)

    def _leave_garbage(self, request: Live, from_block: int) -> None:
        blocks = request.reserved or []
        end = request.prefix_tokens // self.config.block_size or len(blocks)
        for block in blocks[from_block:end]:
            self._put(block, 0, ("garbage", ()))

    def _hear_progress(self, progress: Progress) -> None:
        """Blocks of a prompt to be pushed were in the cache, or have been computed."""
        request = self.live[progress.attempt_id]
        assert request.plan.role is KVRole.PUSH
        assert progress.num_computed_tokens > request.computed
        request.computed = progress.num_computed_tokens
        self._check_content(request.plan, request.prompt[: request.computed], progress.block_ids)
        assert (progress.first_token is None) == (request.computed < len(request.prompt))
        if progress.first_token is not None:
            (token_id,) = request.tokens
            assert progress.first_token == FirstToken(token_id, request.plan.stops_at(token_id))
            request.held = progress.block_ids
            request.due = self.ticks + request.plan.patience

    def _hear(self) -> None:
        for event in (*self.scheduler.connector.take_events(), *self.scheduler.take_events()):
            if isinstance(event, Computed):
                for progress in event.progress:
                    self._hear_progress(progress)
                continue
            if event.attempt_id.startswith("pin-"):
                assert isinstance(event, Reserved)
                assert len(event.block_ids) == event.num_cached_blocks
                plan = self.live[event.attempt_id.removeprefix("pin-")].plan
                self.pins[event.attempt_id] = plan, event.block_ids, self.ticks + plan.patience
                self.num_pinned += bool(event.block_ids)
                continue
            request = self.live[event.attempt_id.removesuffix("/prefix")]
            if isinstance(event, Rejected):
                self.rejected[event.attempt_id] = event.kind
                request.over = True
            elif isinstance(event, Finished):
                assert request.plan.role is KVRole.RECEIVE
                assert not request.over, "a request ends once"
                request.finish_reason, request.over = event.finish_reason, True
            else:
                assert isinstance(event, Reserved)
                assert (request.plan.role is KVRole.RECEIVE) == (not event.attempt_id.endswith("/prefix"))
                written = event.block_ids[event.num_cached_blocks :]
                for _, _, blocks in self.in_flight:
                    assert not blocks & set(written), "a peer would write where a step still writes"
                assert event.num_cached_blocks * self.config.block_size <= len(request.prompt)
                request.num_cached_blocks = event.num_cached_blocks
                assert len(event.block_ids) == -(-len(request.prompt) // self.config.block_size)
                request.reserved = event.block_ids
                request.due = self.ticks + request.plan.patience
                if request.plan.role is KVRole.RECEIVE:
                    self.reserved_order.append(event.attempt_id)

    def _check_limits(self, output: SchedulerOutput) -> None:
        config = self.config
        assert len(output.seqs) <= config.max_num_seqs
        num_tokens = sum(len(part.token_ids) for part in output.seqs)
        if isinstance(self.scheduler, WholePrompts):
            prompts = [part for part in output.seqs if part.start < len(self.live[part.attempt_id].prompt)]
            assert all(part.sample for part in prompts), "a prompt was cut"
            assert num_tokens <= config.max_num_batched_tokens or len(output.seqs) == 1
        else:
            assert num_tokens <= config.max_num_batched_tokens
            most = config.chunk_tokens or num_tokens
            assert all(len(part.token_ids) <= most for part in output.seqs)
        assert all(part.token_ids for part in output.seqs)
        names = [part.attempt_id for part in output.seqs]
        assert len(set(names)) == len(names)
        assert not set(names) & set(output.preempted)
        assert all(self.live[name].plan.role is not KVRole.PUSH for name in output.preempted)
        if isinstance(self.scheduler, StaticBatching):
            batch = {seq.attempt_id for seq in self.scheduler._batch()}
            assert len(batch) <= config.max_num_seqs
            assert set(names) <= batch
            assert batch <= self.batch or not batch & self.batch, "somebody joined a running batch"
            self.batch = batch

    def _compute(self, part: ScheduledSeq) -> SampledToken:
        request = self.live[part.attempt_id]
        told = request.prompt + request.tokens
        known = told + request.unseen
        pending = [PENDING] * (part.end - max(part.start, len(told)))
        assert list(part.token_ids) == told[part.start : part.end] + pending
        assert part.sample == (part.end == len(known))
        self._write(request.plan, part.start, known[: part.end], part.block_ids)
        self._check_content(request.plan, known[: part.end], part.block_ids)
        token = draw(request.plan.topic, known[: part.end])
        request.unseen += [token] if part.sample else []
        return SampledToken(token)

    def _write(self, plan: Plan, start: int, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """The KV of ``tokens`` from position ``start`` on."""
        size = self.config.block_size
        for position in range(start, len(tokens)):
            self._put(blocks[position // size], position % size, (plan.salt, tuple(tokens[: position + 1])))

    def _put(self, block: int, slot: int, content: tuple[str, tuple[int, ...]]) -> None:
        blocks = self.scheduler.blocks
        assert block not in blocks._digest_of, "a cached block is written"
        assert blocks._owners[block] == 1, "a block of no owner or of several is written"
        self.pool[block, slot] = content

    def _check_content(self, plan: Plan, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        size = self.config.block_size
        for position in range(len(tokens)):
            held = self.pool[blocks[position // size], position % size]
            assert held == (plan.salt, tuple(tokens[: position + 1]))


ROLES = st.sampled_from(KVRole)
SOMETIMES_EMPTY = st.sampled_from([0, *range(1, 11), *range(1, 11)])
PLANS = st.builds(
    Plan,
    role=ROLES,
    prompt_tokens=SOMETIMES_EMPTY,
    max_tokens=st.integers(1, 8),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, VOCABULARY - 1), max_size=1).map(tuple),
    patience=st.integers(0, 6),
    abort_after=st.sampled_from([None] * 5 + [3, 7, 12, 20]),
    topic=st.sampled_from([0, 0, 0, 1]),
    salt=st.sampled_from(["", "", "", "other"]),
    priority=st.sampled_from([0, 0, 0, 0, 1, -1]),
    prefix_blocks=st.sampled_from([0, 0, 1, 2, 8]),
    came_blocks=st.sampled_from([0, 1, 8]),
    pin_blocks=st.sampled_from([0, 0, 0, 1, 8]),
)
CONFIGS = st.builds(
    SchedulerConfig,
    max_num_batched_tokens=st.integers(1, 16),
    max_num_seqs=st.integers(1, 4),
    max_model_len=st.integers(12, 20),
    block_size=st.integers(1, 4),
    num_blocks=st.integers(4, 14),
    eos_token_ids=st.just((EOS,)),
    prefix_caching=st.sampled_from([True, True, True, False]),
    chunk_tokens=st.one_of(st.none(), st.integers(1, 6)),
)
KINDS = st.sampled_from([Scheduler, Scheduler, StaticBatching, WholePrompts, StaticWholePrompts])


def most_ticks(world: World) -> int:
    """A bound on the ticks until all is done: each request alone would need so many, and each of them may have to be
    computed anew once for every other that came before it."""
    alone = [
        2 * (r.plan.prompt_tokens + r.plan.max_tokens) + r.plan.patience + (r.plan.abort_after or 0) + 4
        for r in world.live.values()
    ]
    # Twice: every second step may be a long prompt's own. Twice again: a step is scheduled and told in two ticks.
    return 2 * sum(alone) * (len(alone) + 1) * (1 + world.run_ahead) + 10


def drain(world: World) -> None:
    """Tick until all is over; it must be within the bound, and no tick before may pass without anything happening
    unless an abort is planned."""
    bound = world.ticks + most_ticks(world)
    while world.in_flight or world.pins or not all(request.over for request in world.live.values()):
        happened = world.tick()
        planned = any(r.plan.abort_after is not None and not r.over for r in world.live.values())
        assert happened or planned, "standstill: nothing runs and nothing is awaited"
        assert world.ticks < bound, "livelock"


def check_end(world: World) -> None:
    """All went as `Submit` says, and the scheduler is as good as new."""
    config = world.config
    for name, request in world.live.items():
        is_push = request.plan.role is KVRole.PUSH
        total = request.plan.prompt_tokens + (1 if is_push else request.plan.max_tokens)
        if not request.plan.prompt_tokens:
            assert world.rejected.get(name) == "InvalidRequest"
        elif total > config.max_model_len or -(-(total - 1) // config.block_size) > config.num_blocks:
            assert world.rejected.get(name) == "CapacityExceeded"
        else:
            assert name not in world.rejected
            expected = request.plan.outputs()
            if request.plan.abort_after is None:
                assert request.tokens == expected
                assert request.finish_reason == ("stop" if request.plan.stops_at(expected[-1]) else "length")
            else:
                assert request.tokens == expected[: len(request.tokens)]
    load = world.scheduler.load()
    assert (load.free_blocks, load.running, load.waiting) == (config.num_blocks, 0, 0)
    assert not world.scheduler.has_work
    assert not world.scheduler.schedule().seqs
    check_scheduler(world.scheduler)
    for priority in {request.plan.priority for request in world.live.values()}:
        order = [int(name[1:]) for name in world.reserved_order if world.live[name].plan.priority == priority]
        assert order == sorted(order), "first come first served"


@settings(max_examples=300, deadline=None)
@given(
    CONFIGS,
    st.lists(st.tuples(PLANS, st.integers(0, 3)), min_size=4, max_size=12),
    KINDS,
    st.lists(st.integers(0, 9), max_size=6),
    st.booleans(),
)
def test_everyone_finishes_with_exactly_their_tokens(
    config: SchedulerConfig,
    arrivals: list[tuple[Plan, int]],
    kind: type[Scheduler],
    victims: list[int],
    run_ahead: bool,
) -> None:
    """``victims`` are aborted while a step runs."""
    world = World(config, kind, run_ahead)
    for plan, pause in arrivals:
        world.submit(plan)
        for _ in range(pause):
            world.tick()
    for name in (f"r{victim}" for victim in victims):
        request = world.live.get(name)
        if request is None or request.over:
            world.tick()
        else:
            world.tick([name])
            request.plan = replace(request.plan, abort_after=0)
    drain(world)
    check_end(world)


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("kind", [StaticBatching, StaticWholePrompts])
def test_a_static_batch_gives_way_to_prompts_that_have_its_blocks(kind: type[Scheduler], run_ahead: bool) -> None:
    """The prompts to be pushed got their blocks before the batch needed them, because KV was fetched into them."""
    world = World(SchedulerConfig(8, 1, 12, 1, 6, (EOS,)), kind=kind, run_ahead=run_ahead)
    world.submit(Plan(KVRole.LOCAL, 1, 4, True, (), 0, None))
    world.tick()
    for topic in range(2):
        world.submit(Plan(KVRole.PUSH, 2, 1, True, (), 0, None, topic, prefix_blocks=1))
    drain(world)
    check_end(world)
    assert world.scheduler.load().preemptions == 0


def test_steps_do_run_ahead_and_drop_what_is_beyond_the_end() -> None:
    """Else the test above would show nothing."""
    world = World(SchedulerConfig(32, 4, 64, 4, 32, (EOS,)), run_ahead=True)
    for topic in range(4):
        world.submit(Plan(KVRole.LOCAL, 5, 40, False, (), 0, None, topic))
    drain(world)
    check_end(world)
    ended = sum(request.finish_reason == "stop" for request in world.live.values())
    assert world.num_dropped == ended > 0
    assert world.num_ahead == world.ticks - 2, "all but the first step; the last tick only tells"


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 6),
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from([KVRole.LOCAL, KVRole.RECEIVE]), st.integers(1, 8)), min_size=2, max_size=8),
)
def test_a_pool_just_large_enough_for_one_serves_many(
    num_blocks: int, block_size: int, kinds: list[tuple[KVRole, int]]
) -> None:
    """The tightest pool there is: each request may need all of it, so that growth always costs somebody."""
    room = num_blocks * block_size
    world = World(SchedulerConfig(64, 8, room, block_size, num_blocks, (EOS,)))
    for role, prompt_tokens in kinds:
        prompt_tokens = min(prompt_tokens, room - 1)
        world.submit(Plan(role, prompt_tokens, room - prompt_tokens, True, (), 1, None))
    drain(world)
    assert not world.rejected
    check_end(world)


def test_prefixes_do_come_and_are_pinned() -> None:
    """Else the tests above would show nothing of either."""
    world = World(SchedulerConfig(32, 4, 64, 4, 32, (EOS,)))
    for role in (KVRole.LOCAL, KVRole.PUSH):
        world.submit(Plan(role, 15, 4, True, (), 3, None, prefix_blocks=3, came_blocks=2))
        drain(world)
        world.submit(Plan(KVRole.LOCAL, 15, 4, True, (), 3, None, pin_blocks=2))
        drain(world)
    check_end(world)
    assert (world.num_came, world.num_pinned) == (1, 2)
