"""The engine without its process: commands in, events out. Clock and runner are injected.

`engine.process.loop` runs it on a real device; a simulation runs it on a virtual clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from engine.messages import Abort, EngineEvent, KVEvent, KVReady, Load, Release, Step, Submit
from engine.scheduling.batch import LayerHook, SampledToken, ScheduledSeq
from engine.scheduling.scheduler import Scheduler
from pdserve.core.clock import Clock

RequestCommand = Submit | KVReady | Release | Abort


class Runner(Protocol):
    """Computes steps (`engine.model.runner.ModelRunner`)."""

    def execute(self, seqs: Sequence[ScheduledSeq], hook: LayerHook | None) -> Mapping[str, list[SampledToken]]:
        """The next tokens, at least one, of each part with ``sample``, by request id. Calls ``hook`` as layers are
        computed."""
        ...


class Outbox(Protocol):
    """Receives the events of an engine (`engine.process.loop.WorkerPipe`)."""

    def send(self, *events: EngineEvent) -> None:
        """Send events about requests."""
        ...

    def send_kv(self, *events: KVEvent) -> None:
        """Send events about blocks; some are sent while a step runs."""
        ...


class EngineCore:
    """Applies commands to a scheduler, runs the steps that it plans, and sends all events to ``outbox``."""

    def __init__(self, scheduler: Scheduler, runner: Runner, clock: Clock, outbox: Outbox) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._outbox = outbox
        self._load: Load | None = None

    def take(self, command: RequestCommand) -> None:
        """Apply a command. Its events are sent by the next `step`."""
        match command:
            case Submit():
                self.scheduler.submit(command)
            case KVReady():
                self.scheduler.kv_ready(command.attempt_id, command.first_token_id)
            case Release():
                self.scheduler.release(command.attempt_id)
            case Abort():
                self.scheduler.abort(command.attempt_id)

    def step(self) -> bool:
        """Run one step. Returns False if there is nothing to compute until the next command."""
        output = self.scheduler.schedule() if self.scheduler.has_work else None
        self.report()  # `Reserved` must not wait for the step
        if output is None or not output.seqs:
            return False
        hook = self.scheduler.connector.layer_hook(output.seqs, self._outbox.send_kv)
        sampled = self._runner.execute(output.seqs, hook)
        step = self.scheduler.update(output, sampled, self._clock.now())
        if step.tokens:
            self._outbox.send(Step(step.sampled_s, step.started_s, step.tokens))
        self.report()
        return True

    def report(self) -> None:
        """Send the events since the last report, and the load if it changed."""
        if kv_events := self.scheduler.connector.take_events():
            self._outbox.send_kv(*kv_events)
        events: list[EngineEvent] = [*self.scheduler.take_events()]
        load = self.scheduler.load()
        if load != self._load:
            self._load = load
            events.append(load)
        if events:
            self._outbox.send(*events)
