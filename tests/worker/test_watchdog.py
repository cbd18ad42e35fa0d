"""An engine hangs only if it neither answers, nor computes, nor waits for a CPU."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from contract.engine import Command
from pdserve.core.clock import MonotonicClock
from tests.virtual_time import IN_VIRTUAL_TIME, LoopClock
from worker.watchdog import EngineProcess, Watchdog

BUSY, IDLE = "while True: pass", "import time; print('asleep', flush=True); time.sleep(600)"


class Engine:
    """An engine that never answers a ping, and its process as the watchdog sees it: ``look`` by seconds of the loop."""

    pid = 0

    def __init__(self, look: Callable[[float], tuple[float, bool, float]] = lambda now_s: (0.0, False, 0.0)) -> None:
        self._look = look
        self.killed = False

    def look(self) -> tuple[float, bool, float]:
        return self._look(asyncio.get_running_loop().time())

    def kill(self) -> None:
        self.killed = True

    def send(self, command: Command) -> None:
        """Drop the command."""


def watchdog_of(engine: Engine, *, on_gpu: bool = False) -> Watchdog:
    return Watchdog(engine, "decode-0", LoopClock(), 6.0, on_gpu=on_gpu, process=engine)  # type: ignore[arg-type]


@IN_VIRTUAL_TIME
@pytest.mark.parametrize(
    ("look", "on_gpu", "killed"),
    [
        (lambda now_s: (0.0, False, 0.0), False, True),
        (lambda now_s: (now_s, False, 0.0), False, False),  # a long step answers late, but it computes
        (lambda now_s: (0.0, True, 0.0), False, False),  # other programs have the CPUs
        (lambda now_s: (0.0, True, 1.0), True, False),  # for all of the second between two looks
        (lambda now_s: (0.0, False, 0.0), True, True),
        (lambda now_s: (now_s, True, 0.0), True, True),  # it spins, and waits for a hung GPU
    ],
    ids=["idle", "busy", "starved", "starved on a GPU", "idle on a GPU", "spins on a GPU"],
)
async def test_a_silent_engine(look: Callable[[float], tuple[float, bool, float]], on_gpu: bool, killed: bool) -> None:
    engine = Engine(look)
    running = asyncio.create_task(watchdog_of(engine, on_gpu=on_gpu).run())
    await asyncio.sleep(9.0)
    assert (engine.killed, running.done()) == (killed, killed)
    running.cancel()


@IN_VIRTUAL_TIME
async def test_steps_prove_life_on_a_gpu() -> None:
    """An engine that has no time for an answer between the steps that it tells of."""
    watchdog = watchdog_of(engine := Engine(), on_gpu=True)
    changes: list[bool] = []
    running = asyncio.create_task(watchdog.run(lambda: changes.append(watchdog.is_silent)))
    for _ in range(20):
        await asyncio.sleep(1.0)
        watchdog.progressed()
    assert (changes, engine.killed) == ([], False)
    await asyncio.sleep(4.5)
    assert changes == [True]
    running.cancel()


@IN_VIRTUAL_TIME
async def test_an_engine_is_silent_before_it_is_killed_and_may_come_back() -> None:
    watchdog = watchdog_of(engine := Engine())
    changes: list[bool] = []
    running = asyncio.create_task(watchdog.run(lambda: changes.append(watchdog.is_silent)))
    await asyncio.sleep(4.5)
    assert changes == [True]
    watchdog.pong()
    await asyncio.sleep(1.5)
    assert changes == [True, False]
    for _ in range(20):
        await asyncio.sleep(1.0)
        watchdog.pong()
    assert not engine.killed
    running.cancel()


# --- real processes --------------------------------------------------------------------------------------------------


@pytest.fixture
def start() -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts processes on one core."""
    started: list[subprocess.Popen[bytes]] = []

    def make(code: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        started.append(process)
        os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
        return process

    yield make
    for process in started:
        process.kill()
        with process:  # waits for it, and closes its pipe
            pass


def test_what_linux_tells_of_a_process(start: Callable[[str], subprocess.Popen[bytes]]) -> None:
    """One that sleeps, and two that want the same core."""
    idle = start(IDLE)
    assert idle.stdout is not None
    assert idle.stdout.readline()
    busy = [EngineProcess(start(BUSY).pid) for _ in range(2)]
    sleeping, waited_s, cpu_s = EngineProcess(idle.pid), [0.0, 0.0], [0.0, 0.0]
    deadline_s = time.monotonic() + 60
    while min(waited_s) == 0.0 or min(cpu_s) == 0.0:
        assert time.monotonic() < deadline_s, (waited_s, cpu_s)
        time.sleep(0.05)
        for index, each in enumerate(busy):
            cpu_s[index], _, more_s = each.look()
            waited_s[index] += more_s
    while (look := sleeping.look())[1]:  # it computes until it sleeps
        assert time.monotonic() < deadline_s
    assert sleeping.look() == (look[0], False, 0.0)


async def test_a_stopped_engine_is_killed(start: Callable[[str], subprocess.Popen[bytes]]) -> None:
    process = start(IDLE)
    process.send_signal(signal.SIGSTOP)
    engine = Engine()
    engine.pid = process.pid
    async with asyncio.timeout(60):
        await Watchdog(engine, "decode-0", MonotonicClock(), 0.6).run()  # type: ignore[arg-type]
    assert process.wait(60) == -signal.SIGKILL
