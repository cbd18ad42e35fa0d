"""Only an engine that neither answers nor computes is taken for hung."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from core.clock import MonotonicClock
from engine.messages import Command
from worker.watchdog import Watchdog

BUSY, IDLE = "while True: pass", "import time; time.sleep(60)"


class Engine:
    """A process that is no engine: it never answers a ping."""

    def __init__(self, code: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", code])
        self.pid = self.process.pid

    def send(self, command: Command) -> None:
        """Nobody reads it."""


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.process.kill()
        engine.process.wait()


def start(engines: list[Engine], code: str) -> tuple[Engine, Watchdog]:
    engine = Engine(code)
    engines.append(engine)
    return engine, Watchdog(engine, "decode-0", MonotonicClock(), timeout_s=0.6)  # type: ignore[arg-type]


async def test_a_silent_idle_engine_is_killed(engines: list[Engine]) -> None:
    engine, watchdog = start(engines, IDLE)
    os.kill(engine.pid, signal.SIGSTOP)
    async with asyncio.timeout(10):
        await watchdog.run()
    assert engine.process.wait(5) == -signal.SIGKILL


async def test_a_silent_busy_engine_is_left_alone(engines: list[Engine]) -> None:
    """A long step answers late, but it computes."""
    engine, watchdog = start(engines, BUSY)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(watchdog.run(), 2.0)
    assert engine.process.poll() is None


async def test_an_idle_engine_that_answers_is_left_alone(engines: list[Engine]) -> None:
    engine, watchdog = start(engines, IDLE)
    running = asyncio.create_task(watchdog.run())
    for _ in range(20):
        await asyncio.sleep(0.1)
        watchdog.pong()
    assert not running.done()
    running.cancel()
    assert engine.process.poll() is None
