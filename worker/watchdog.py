"""Notices an engine that hangs: alive as a process, but neither answering nor computing.

Every few seconds the engine is pinged; it answers between steps. A step may rightly take long, so that a late answer
proves nothing by itself: an engine is taken for hung when it owes an answer *and* has used no processor time for
``timeout_s``. It is killed then, and the worker goes on as after any death of an engine.
"""

from __future__ import annotations

import asyncio
import logging

import psutil

from core.clock import Clock
from engine.client import EngineClient
from engine.messages import Ping

log = logging.getLogger(__name__)

PING_EVERY_S = 2.0


class Watchdog:
    """Watches one engine. ``pong`` is to be called for each `Pong`."""

    def __init__(self, engine: EngineClient, worker_id: str, clock: Clock, timeout_s: float) -> None:
        self._engine = engine
        self._worker_id = worker_id
        self._clock = clock
        self._timeout_s = timeout_s
        self._process = psutil.Process(engine.pid)
        self._owed = 0
        self._cpu_s = -1.0
        self._alive_s = clock.now()

    def pong(self) -> None:
        """The engine has answered."""
        self._owed = 0
        self._alive_s = self._clock.now()

    async def run(self) -> None:
        """Ping until cancelled, or until the engine is gone or had to be killed."""
        pause_s = min(PING_EVERY_S, self._timeout_s / 4)
        try:
            while not self._hangs():
                self._owed += 1
                self._engine.send(Ping())
                await asyncio.sleep(pause_s)
            self._process.kill()
        except psutil.NoSuchProcess:
            return

    def _hangs(self) -> bool:
        times = self._process.cpu_times()
        cpu_s = times.user + times.system
        now_s = self._clock.now()
        if cpu_s != self._cpu_s:
            self._cpu_s, self._alive_s = cpu_s, now_s
        if not self._owed or now_s - self._alive_s < self._timeout_s:
            return False
        log.error("%s: the engine has hung for %.0f s; it is killed", self._worker_id, now_s - self._alive_s)
        return True
