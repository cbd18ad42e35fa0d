"""An engine without its process: commands and steps in, events out. Time and the device are injected.

`engine.process.loop` runs it between pipes over a real device. A simulator or a test runs it under a virtual clock,
with a runner that only takes time.
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
    """What computes a step: `engine.model.runner.ModelRunner`, or a stand-in."""

    def execute(self, seqs: Sequence[ScheduledSeq], hook: LayerHook | None) -> Mapping[str, list[SampledToken]]:
        """The next tokens, one or more, of each part that wants any, by request id; ``hook`` is told of layers."""
        ...


class Outbox(Protocol):
    """Where an engine's events go: `engine.process.loop.WorkerPipe`, or lists."""

    def send(self, *events: EngineEvent) -> None:
        """Events that concern requests."""
        ...

    def send_kv(self, *events: KVEvent) -> None:
        """Events that concern blocks; some come while a step runs."""
        ...


class EngineCore:
    """Applies commands to a scheduler, and runs the steps that it plans. Everything it says goes to ``outbox``."""

    def __init__(self, scheduler: Scheduler, runner: Runner, clock: Clock, outbox: Outbox) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._outbox = outbox
        self._load: Load | None = None

    def take(self, command: RequestCommand) -> None:
        """Apply a command. What it brings about is told with the next `step`."""
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
        """Run one step, if there is anything to compute; False if not, and then only a command can change that."""
        output = self.scheduler.schedule() if self.scheduler.has_work else None
        self.report()  # reservations must not wait for the step
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
        """Send the events since the last report, and the load if it has changed."""
        if kv_events := self.scheduler.connector.take_events():
            self._outbox.send_kv(*kv_events)
        events: list[EngineEvent] = [*self.scheduler.take_events()]
        load = self.scheduler.load()
        if load != self._load:
            self._load = load
            events.append(load)
        if events:
            self._outbox.send(*events)
