"""Detects an engine that hangs: its process is alive, but neither answers nor computes.

The engine is pinged every second and answers between steps. An engine is *silent* while it owes an answer and tells
nothing, neither a step nor an answer. On a CPU a step may take long, so there it also has to use no processor time. On
a GPU processor time proves nothing, because a thread that waits for a hung GPU spins. After half of ``timeout_s`` the
worker fails the engine's requests, so that they can continue elsewhere. After ``timeout_s`` the engine is killed, and
the worker begins a new incarnation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import psutil

from engine.messages import Ping
from engine.process.client import EngineClient
from pdserve.core.clock import Clock

log = logging.getLogger(__name__)

PING_EVERY_S = 1.0


class Watchdog:
    """Watches one engine. Call `pong` for each `Pong`, and `progressed` for each other event. ``is_silent`` says
    whether the engine has been silent for half of ``timeout_s``. ``on_gpu``: processor time does not count."""

    def __init__(
        self, engine: EngineClient, worker_id: str, clock: Clock, timeout_s: float, *, on_gpu: bool = False
    ) -> None:
        self.is_silent = False
        self._on_gpu = on_gpu
        self._engine = engine
        self._worker_id = worker_id
        self._clock = clock
        self._timeout_s = timeout_s
        self._process = psutil.Process(engine.pid)
        self._owed = 0
        self._cpu_s = -1.0
        self._alive_s = clock.now()

    def pong(self) -> None:
        """Note that the engine has answered."""
        self._owed = 0
        self._alive_s = self._clock.now()

    def progressed(self) -> None:
        """Note that the engine has told of a step, or of a part of one."""
        self._alive_s = self._clock.now()

    async def run(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Ping until cancelled, or until the engine has ended or was killed. ``on_change`` is called whenever
        `is_silent` has changed."""
        pause_s = min(PING_EVERY_S, self._timeout_s / 6)
        try:
            while (silence_s := self._silence_s()) < self._timeout_s:
                if self.is_silent != (silence_s >= self._timeout_s / 2):
                    self.is_silent = not self.is_silent
                    on_change()
                self._owed += 1
                self._engine.send(Ping())
                await asyncio.sleep(pause_s)
            log.error("%s: the engine has hung for %.0f s; it is killed", self._worker_id, silence_s)
            self._process.kill()
        except psutil.NoSuchProcess:
            return

    def _silence_s(self) -> float:
        """Seconds since the engine last answered or computed; 0 while it owes nothing. NoSuchProcess once it has
        ended."""
        times = self._process.cpu_times()
        cpu_s = times.user + times.system
        now_s = self._clock.now()
        if cpu_s != self._cpu_s and not self._on_gpu:
            self._cpu_s, self._alive_s = cpu_s, now_s
        return now_s - self._alive_s if self._owed else 0.0
