"""An engine hangs only if it neither answers nor computes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from engine.messages import Command
from pdserve.core.clock import Clock, MonotonicClock
from tests.virtual_time import LoopClock, VirtualTimeLoop
from worker.watchdog import Watchdog

BUSY, IDLE = "while True: pass", "import time; time.sleep(60)"


class Engine:
    """An ordinary process, which never answers a ping."""

    def __init__(self, code: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", code])
        self.pid = self.process.pid

    def send(self, command: Command) -> None:
        """Drop the command."""


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.process.kill()
        engine.process.wait()


def start(
    engines: list[Engine], code: str, *, timeout_s: float = 0.6, clock: Clock | None = None, on_gpu: bool = False
) -> tuple[Engine, Watchdog]:
    engine = Engine(code)
    engines.append(engine)
    watchdog = Watchdog(engine, "decode-0", clock or MonotonicClock(), timeout_s, on_gpu=on_gpu)  # type: ignore[arg-type]
    return engine, watchdog


async def test_a_silent_idle_engine_is_killed(engines: list[Engine]) -> None:
    engine, watchdog = start(engines, IDLE)
    os.kill(engine.pid, signal.SIGSTOP)
    async with asyncio.timeout(60):
        await watchdog.run()
    assert engine.process.wait(60) == -signal.SIGKILL


async def test_a_silent_busy_engine_is_left_alone(engines: list[Engine]) -> None:
    """A long step answers late, but it computes."""
    engine, watchdog = start(engines, BUSY, timeout_s=2.0)  # in which it computes, whatever else this machine does
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(watchdog.run(), 4.5)
    assert engine.process.poll() is None


async def test_an_engine_that_waits_for_a_hung_gpu_is_killed_though_it_spins(engines: list[Engine]) -> None:
    engine, watchdog = start(engines, BUSY, on_gpu=True)
    async with asyncio.timeout(60):
        await watchdog.run()
    assert engine.process.wait(60) == -signal.SIGKILL


def test_steps_prove_life_on_a_gpu(engines: list[Engine]) -> None:
    """An engine that has no time for an answer between the steps that it tells of."""

    async def watch() -> None:
        engine, watchdog = start(engines, BUSY, timeout_s=6.0, clock=LoopClock(), on_gpu=True)
        changes: list[bool] = []
        running = asyncio.create_task(watchdog.run(lambda: changes.append(watchdog.is_silent)))
        for _ in range(20):
            await asyncio.sleep(1.0)
            watchdog.progressed()
        assert (changes, engine.process.poll()) == ([], None)
        await asyncio.sleep(4.5)
        assert changes == [True]
        running.cancel()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(watch())


def test_an_idle_engine_that_answers_is_left_alone(engines: list[Engine]) -> None:
    async def watch() -> None:
        engine, watchdog = start(engines, IDLE, clock=LoopClock())
        running = asyncio.create_task(watchdog.run())
        for _ in range(20):
            await asyncio.sleep(0.1)
            watchdog.pong()
        assert not running.done()
        running.cancel()
        assert engine.process.poll() is None

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(watch())


def test_an_engine_is_silent_before_it_is_killed_and_may_come_back(engines: list[Engine]) -> None:
    async def watch() -> None:
        engine, watchdog = start(engines, IDLE, timeout_s=6.0, clock=LoopClock())
        changes: list[bool] = []
        running = asyncio.create_task(watchdog.run(lambda: changes.append(watchdog.is_silent)))
        await asyncio.sleep(4.5)
        assert changes == [True]
        watchdog.pong()
        await asyncio.sleep(1.5)
        assert changes == [True, False]
        assert engine.process.poll() is None
        running.cancel()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(watch())
