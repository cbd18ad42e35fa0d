"""The engine without its process: commands in, events out. Clock and runner are injected.

`engine.process.loop` runs it on a real device; a simulation runs it on a virtual clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from contract.engine import (
    Abort,
    CacheChanged,
    CoreCommand,
    EngineEvent,
    KVEvent,
    KVReady,
    Load,
    PinPrefix,
    Release,
    SetTokenBudget,
    Submit,
)
from engine.scheduling.batch import LayerHook, SampledToken, ScheduledSeq, StepTooLarge
from engine.scheduling.scheduler import Scheduler, SchedulerOutput
from engine.scheduling.structures import Matcher, Structures
from pdserve.core.clock import Clock
from pdserve.core.errors import CapacityExceeded, InvalidRequest
from pdserve.core.prefix_digests import block_hash, pack

CALM_STEPS = 32
"""Steps after which they may be twice as large again, when one had run out of memory."""

Sampled = Mapping[str, Sequence[SampledToken]]
"""The next token of each part of a step with ``sample``, by request id, and those after each of its drafts."""


class RunningStep(Protocol):
    """A step that a `Runner` has launched. It is on its way until `tokens` has returned."""

    def sample(self) -> None:
        """Launch the sampling of its tokens. Call it when the tokens of the step before have been applied to the
        scheduler, because penalties need them. A second call has no effect. `StepTooLarge` as from `Runner.launch`."""
        ...

    def tokens(self) -> Sampled:
        """Wait until the step has been computed and return its tokens. Call it after `sample`."""
        ...


class Runner(Protocol):
    """Computes steps (`engine.model.runner.ModelRunner`)."""

    def launch(self, seqs: Sequence[ScheduledSeq], hook: LayerHook | None) -> RunningStep:
        """Launch a step, up to its logits. The step before it has been sampled, and may still run. Calls ``hook`` as
        layers are computed: in this call, or in another thread between `RunningStep.sample` and the end of
        `RunningStep.tokens`. `StepTooLarge` if the device lacks memory."""
        ...


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step of a runner that computes it when it is launched."""

    sampled: Sampled

    def sample(self) -> None:
        """Does nothing."""

    def tokens(self) -> Sampled:
        """Its tokens."""
        return self.sampled


class Outbox(Protocol):
    """Receives the events of an engine (`engine.process.loop.WorkerPipe`)."""

    def send(self, *events: EngineEvent) -> None:
        """Send events about requests."""
        ...

    def send_kv(self, *events: KVEvent) -> None:
        """Send events about blocks; some are sent while a step runs."""
        ...


class LayerEvents:
    """The events that a step sends before its end. They are kept back until `release`, which comes after the events of
    the step before."""

    def __init__(self, send: Callable[[KVEvent], None]) -> None:
        self._send = send
        self._kept: list[KVEvent] | None = []

    def send(self, event: KVEvent) -> None:
        """Send an event, or keep it."""
        if self._kept is None:
            self._send(event)
        else:
            self._kept.append(event)

    def release(self) -> None:
        """Send what was kept, and from now on everything at once."""
        for event in self._kept or ():
            self._send(event)
        self._kept = None


class EngineCore:
    """Applies commands to a scheduler, runs the steps that it plans, and sends all events to ``outbox``.

    With ``run_ahead`` the next step is scheduled and launched while the device computes the current one, so that the
    device need not wait for the host. The order of calls is then launch n + 1, tokens n, sample n + 1: nothing is
    waited for between the launches of n and n + 1, and what depends on token ids on the host (ends of requests,
    penalties) depends on those of n when n + 1 is sampled. The layers of n + 1 are announced after the end of n. A step
    for which a draft model computes guesses is scheduled after the end of the one before it.

    A request with structured outputs is submitted to the scheduler when ``structures`` have compiled them, in another
    thread, so that others need not wait for that.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Clock,
        outbox: Outbox,
        run_ahead: bool = False,
        structures: Structures | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._outbox = outbox
        self.max_in_flight = 1 if run_ahead else 0
        """Steps that `step` leaves on their way."""
        self._in_flight: deque[tuple[SchedulerOutput, RunningStep, LayerEvents]] = deque()
        self._num_calm = 0  # steps since one was too large
        self._load: Load | None = None
        self._structures = structures
        self._compiling: dict[str, tuple[Submit, Future[Matcher]]] = {}

    def take(self, command: CoreCommand) -> None:
        """Apply a command. Its events are sent by the next `step`."""
        match command:
            case Submit():
                self._submit(command)
            case KVReady():
                self.scheduler.kv_ready(command.attempt_id, command.first_token_id, command.num_tokens)
            case PinPrefix():
                self.scheduler.pin_prefix(command.attempt_id, command.salt, command.token_ids)
            case Release():
                self.scheduler.release(command.attempt_id)
            case Abort():
                self._compiling.pop(command.attempt_id, None)
                self.scheduler.abort(command.attempt_id)
            case SetTokenBudget():
                self.scheduler.set_token_budget(command.num_tokens)

    def _submit(self, submit: Submit) -> None:
        wanted = submit.request.sampling.structured_outputs
        if wanted is None:
            self.scheduler.submit(submit)
        elif self._structures is None:
            self.scheduler.reject(submit.attempt_id, InvalidRequest("structured_outputs: this engine has none"))
        else:
            matcher = self._structures.match(wanted, submit.request.output_token_ids)
            self._compiling[submit.attempt_id] = submit, matcher

    def _submit_compiled(self) -> None:
        """Submit the requests whose structured outputs have been compiled meanwhile."""
        for attempt_id, (submit, matcher) in list(self._compiling.items()):
            if matcher.done():
                del self._compiling[attempt_id]
                try:
                    self.scheduler.submit(submit, matcher.result())
                except InvalidRequest as error:
                    self.scheduler.reject(attempt_id, error)

    def step(self) -> bool:
        """Launch one step, or wait for one, or both. Returns False if there is nothing to compute until the next
        command, or the next structure is compiled."""
        if self._in_flight and self.scheduler.will_draft:
            self.finish(0)
        began = self.begin()
        if not self._in_flight:
            return began
        self.finish(self.max_in_flight if began else 0)
        return True

    def begin(self) -> bool:
        """Launch a step. Returns whether there was one, even if the device lacked memory for it. Steps that were
        launched before are not waited for."""
        if self._compiling:
            self._submit_compiled()
        output = self.scheduler.schedule() if self.scheduler.has_work else None
        self.report()  # `Reserved` must not wait for the step
        if output is None or not output.seqs:
            return False
        layers = LayerEvents(self._outbox.send_kv)
        if not self._in_flight:
            layers.release()
        hook = self.scheduler.connector.layer_hook(output.seqs, layers.send)
        try:
            self._in_flight.append((output, self._runner.launch(output.seqs, hook), layers))
        except StepTooLarge as error:
            self._give_up(output, error)
        return True

    def _give_up(self, output: SchedulerOutput, error: StepTooLarge) -> None:
        """Undo a step for which memory lacks. The next ones have half its tokens, and more again after a while. The
        requests of a step that cannot be smaller fail."""
        scheduler = self.scheduler
        num_tokens = sum(len(seq.token_ids) for seq in output.seqs)
        smallest = num_tokens == 1 or num_tokens > scheduler.max_step_tokens
        what = f"a step of {num_tokens} token{'s' * (num_tokens > 1)}"
        failure = CapacityExceeded(f"the device lacks memory for {what} ({error}); lower engine.kv_memory_mb")
        scheduler.cancel(output, failure if smallest else None)
        scheduler.max_step_tokens = max(1, min(num_tokens, scheduler.max_step_tokens) // 2)
        self._num_calm = 0
        self.report()

    def _relax(self) -> None:
        """Let steps be larger again, some time after one was too large."""
        scheduler, most = self.scheduler, self.scheduler.config.max_num_batched_tokens
        if scheduler.max_step_tokens < most:
            self._num_calm += 1
            if self._num_calm >= CALM_STEPS:
                scheduler.max_step_tokens, self._num_calm = min(most, 2 * scheduler.max_step_tokens), 0

    def finish(self, max_left: int) -> None:
        """Finish steps, oldest first, until at most ``max_left`` are on their way; all that are left are sampled."""
        while self._in_flight:
            output, running, layers = self._in_flight[0]
            layers.release()
            try:
                running.sample()
            except StepTooLarge as error:  # nothing was launched after it
                self._in_flight.popleft()
                self._give_up(output, error)
                return
            if len(self._in_flight) <= max_left:
                return
            sampled = running.tokens()
            self._in_flight.popleft()
            self._relax()
            self._outbox.send(self.scheduler.update(output, sampled, self._clock.now()))
            self.report()

    def report(self) -> None:
        """Send the events since the last report, and the load and the cached blocks if they changed."""
        if kv_events := self.scheduler.connector.take_events():
            self._outbox.send_kv(*kv_events)
        events: list[EngineEvent] = [*self.scheduler.take_events()]
        if changes := self.scheduler.blocks.take_changes():
            added = pack(block_hash(digest) for digest, is_cached in changes.items() if is_cached)
            removed = pack(block_hash(digest) for digest, is_cached in changes.items() if not is_cached)
            events.append(CacheChanged(added, removed))
        load = self.scheduler.load()
        if load != self._load:
            self._load = load
            events.append(load)
        if events:
            self._outbox.send(*events)
