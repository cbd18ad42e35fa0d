"""An engine process with planted delays, in place of `engine.process.loop`.

``prefill_queue`` sleeps before the first step of a request that prefills here, ``prefill`` in the step that samples its
first token, ``decode_queue`` before its first decode step (of a RECEIVE request: after `KVReady`), ``first_decode`` in
that step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from contract.engine import Abort, CoreCommand, KVReady, KVRole, Submit
from engine.core import ComputedStep, EngineCore, Outbox, Runner
from engine.process.loop import main
from engine.scheduling.batch import LayerHook, ScheduledSeq
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.structures import Structures
from pdserve.core.clock import Clock
from tests.planted.delays import planted_delays_s


class DelayedCore(EngineCore):
    """An engine core with the delays of this process. It follows requests from submission to their second token and
    sleeps where told."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Clock,
        outbox: Outbox,
        run_ahead: bool = False,
        structures: Structures | None = None,
    ) -> None:
        super().__init__(scheduler, _DelayedRunner(runner, self), clock, outbox, run_ahead, structures)
        self._delay_s = planted_delays_s()
        self._stage: dict[str, str] = {}
        self._roles: dict[str, KVRole] = {}

    def take(self, command: CoreCommand) -> None:
        """Apply a command, and note what it means for its request's stage."""
        if isinstance(command, Submit):
            self._roles[command.attempt_id] = command.kv_role
            if command.kv_role is not KVRole.RECEIVE:
                self._stage[command.attempt_id] = "prefill_queue"
        elif isinstance(command, KVReady):
            self._stage[command.attempt_id] = "decode_queue"
        elif isinstance(command, Abort):
            self._forget(command.attempt_id)
        super().take(command)

    def step(self) -> bool:
        """Sleep once for each kind of request that would get its first step now; then run the step."""
        self.report()
        if self.scheduler.has_work:
            for stage, following in (("prefill_queue", "prefill"), ("decode_queue", "first_decode")):
                waiting = [attempt_id for attempt_id, at in self._stage.items() if at == stage]
                if waiting:
                    time.sleep(self._delay_s.get(stage, 0.0))
                for attempt_id in waiting:
                    self._stage[attempt_id] = following
        return super().step()

    def in_step(self, seqs: Sequence[ScheduledSeq]) -> None:
        """Sleep within the step that has just computed ``seqs``, before its tokens count as sampled."""
        done = [(s.attempt_id, self._stage.get(s.attempt_id)) for s in seqs if s.sample]
        for stage in ("prefill", "first_decode"):
            if any(at == stage for _, at in done):
                time.sleep(self._delay_s.get(stage, 0.0))
        for attempt_id, at in done:
            if at == "prefill" and self._roles.get(attempt_id) is KVRole.LOCAL:
                self._stage[attempt_id] = "decode_queue"
            elif at is not None:
                self._forget(attempt_id)

    def _forget(self, attempt_id: str) -> None:
        self._stage.pop(attempt_id, None)
        self._roles.pop(attempt_id, None)


class _DelayedRunner:
    def __init__(self, runner: Runner, core: DelayedCore) -> None:
        self._runner = runner
        self._core = core

    def launch(self, seqs: Sequence[ScheduledSeq], hook: LayerHook | None) -> ComputedStep:
        step = self._runner.launch(seqs, hook)
        step.sample()
        sampled = step.tokens()
        self._core.in_step(seqs)
        return ComputedStep(sampled)


if __name__ == "__main__":
    main(DelayedCore)
