"""Delays that tests plant in the engine's stages, to prove that the breakdown shows each where it is.

``prefill_queue`` sleeps before the first step of a request that prefills here, ``prefill`` in the step that samples its
first token, ``decode_queue`` before its first decode step (of a RECEIVE request: after `KVReady`), ``first_decode`` in
that step. Without delays nothing is tracked.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from engine.messages import Abort, Command, KVReady, KVRole, Submit
from engine.scheduling.batch import ScheduledSeq


class PlantedDelays:
    """Follows requests from submission to their second token and sleeps where told; ``delay_s`` by stage."""

    def __init__(self, delay_s: Mapping[str, float]) -> None:
        self._delay_s = delay_s
        self._stage: dict[str, str] = {}
        self._roles: dict[str, KVRole] = {}

    def on_command(self, command: Command) -> None:
        """A command that the scheduler is about to get."""
        if not self._delay_s:
            return
        if isinstance(command, Submit):
            self._roles[command.attempt_id] = command.kv_role
            if command.kv_role is not KVRole.RECEIVE:
                self._stage[command.attempt_id] = "prefill_queue"
        elif isinstance(command, KVReady):
            self._stage[command.attempt_id] = "decode_queue"
        elif isinstance(command, Abort):
            self._forget(command.attempt_id)

    def before_schedule(self) -> None:
        """Sleep once for each kind of request that would get its first step now."""
        for stage, following in (("prefill_queue", "prefill"), ("decode_queue", "first_decode")):
            waiting = [attempt_id for attempt_id, at in self._stage.items() if at == stage]
            if waiting:
                time.sleep(self._delay_s.get(stage, 0.0))
            for attempt_id in waiting:
                self._stage[attempt_id] = following

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
