"""Detects an engine that hangs: its process is alive, but neither answers, nor computes, nor waits for a CPU.

The engine is pinged every second and answers between steps. An engine is *silent* while it owes an answer and tells
nothing, neither a step nor an answer. On a CPU a step may take long, so there it also has to use no processor time. On
a GPU processor time proves nothing, because a thread that waits for a hung GPU spins. After half of ``timeout_s`` the
worker fails the engine's requests, so that they can continue elsewhere. After ``timeout_s`` the engine is killed, and
the worker begins a new incarnation.

Time for which other programs keep the engine from the CPUs is not silence. Linux tells it of each thread, in /proc.
Elsewhere only the engine's processor time is known, and an engine that gets none looks like one that hangs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import psutil

from contract.engine import EnginePort, Ping
from pdserve.core.clock import Clock

log = logging.getLogger(__name__)

PING_EVERY_S = 1.0


class Watchdog:
    """Watches one engine. Call `pong` for each `Pong`, and `progressed` for each other event. ``is_silent`` says
    whether the engine has been silent for half of ``timeout_s``. ``on_gpu``: processor time does not count."""

    def __init__(
        self,
        engine: EnginePort,
        worker_id: str,
        clock: Clock,
        timeout_s: float,
        *,
        on_gpu: bool = False,
        process: Watched | None = None,
    ) -> None:
        self.is_silent = False
        self._on_gpu = on_gpu
        self._engine = engine
        self._worker_id = worker_id
        self._clock = clock
        self._timeout_s = timeout_s
        self._process = process or EngineProcess(engine.pid)
        self._owed = 0
        self._cpu_s = -1.0
        self._silence_s = 0.0
        self._counted_s = clock.now()  # until then, silence is counted

    def pong(self) -> None:
        """Note that the engine has answered."""
        self._owed = 0
        self.progressed()

    def progressed(self) -> None:
        """Note that the engine has told of a step, or of a part of one."""
        self._silence_s, self._counted_s = 0.0, self._clock.now()

    async def run(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Ping until cancelled, or until the engine has ended or was killed. ``on_change`` is called whenever
        `is_silent` has changed."""
        pause_s = min(PING_EVERY_S, self._timeout_s / 6)
        try:
            while (silence_s := self._count_silence()) < self._timeout_s:
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

    def _count_silence(self) -> float:
        """Seconds of silence since the engine last answered or computed, without those for which it waited for a CPU; 0
        while it owes nothing. NoSuchProcess once it has ended."""
        cpu_s, runnable, waited_s = self._process.look()
        computes = not self._on_gpu and (cpu_s != self._cpu_s or runnable)
        self._cpu_s = cpu_s
        if computes or not self._owed:
            self.progressed()
            return 0.0
        now_s = self._clock.now()
        # What was waited before the last look may be known only now, and then corrects what was counted there.
        self._silence_s = max(0.0, self._silence_s + now_s - self._counted_s - waited_s)
        self._counted_s = now_s
        return self._silence_s


class Watched(Protocol):
    """The process of an engine, as the watchdog sees it. Its methods raise psutil.NoSuchProcess after its end."""

    def look(self) -> tuple[float, bool, float]:
        """Its CPU time in seconds, whether a thread computes or waits for a CPU, and the seconds for which one has
        waited since the last call."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


class EngineProcess:
    """The process ``pid`` of this host."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._threads = _Threads(pid)

    def look(self) -> tuple[float, bool, float]:
        """See `Watched`."""
        times = self._process.cpu_times()
        return times.user + times.system, *self._threads.look()

    def kill(self) -> None:
        """See `Watched`."""
        self._process.kill()


class _Thread(NamedTuple):
    """A thread at a look: nanoseconds for which it has run and has waited for a CPU, and when it was first seen able to
    run after it last ran (``able_ns``; None: it sleeps or is stopped)."""

    ran_ns: int
    waited_ns: int
    able_ns: int | None


class _Threads:
    """The threads of the process ``pid`` as the scheduler of Linux sees them."""

    def __init__(self, pid: int) -> None:
        self._folder = Path("/proc", str(pid), "task")
        self._seen: dict[str, _Thread] = {}

    def look(self) -> tuple[bool, float]:
        """Whether a thread computes or waits for a CPU, and the longest time in seconds for which one has waited, as
        far as the last call did not tell of it. Without /proc, and at the end of the process, nothing is known."""
        seen: dict[str, _Thread] = {}
        runnable, longest_ns = False, 0
        for folder in self._listed():
            try:
                state = (folder / "stat").read_bytes().rpartition(b") ")[2][:1]
                ran_ns, waited_ns = (int(each) for each in (folder / "schedstat").read_bytes().split()[:2])
            except (FileNotFoundError, ProcessLookupError):  # the thread has ended, or the kernel has no statistics
                continue
            if not ran_ns:
                continue  # it has just begun, or the kernel keeps no statistics
            now_ns = time.monotonic_ns()
            before = self._seen.get(folder.name, _Thread(ran_ns, waited_ns, None))
            able_ns = None
            if state == b"R":
                able_ns = now_ns if before.able_ns is None or ran_ns != before.ran_ns else before.able_ns
                waited_ns += now_ns - able_ns  # the kernel adds a wait only when it has ended
            seen[folder.name] = _Thread(ran_ns, waited_ns, able_ns)
            runnable |= able_ns is not None
            longest_ns = max(longest_ns, waited_ns - before.waited_ns)
        self._seen = seen
        return runnable, longest_ns / 1e9

    def _listed(self) -> list[Path]:
        try:
            return list(self._folder.iterdir())
        except (FileNotFoundError, ProcessLookupError):
            return []
