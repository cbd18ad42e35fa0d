"""An engine hangs only if it neither answers, nor computes, nor waits for a CPU."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from contract.engine import Command, KVRole, Pong, Step
from engine.process.client import EngineClient
from engine.spec import EngineSpec
from pdserve.core.clock import Clock, MonotonicClock
from runtime.awake_clock import awake_clock
from tests.engine.harness import submit
from tests.virtual_time import IN_VIRTUAL_TIME, LoopClock
from worker.watchdog import Watchdog

BUSY, IDLE = "while True: pass", "import time; print('asleep', flush=True); time.sleep(600)"
NUM_LOOPS, STARVED_S = 8, 10.0
TOKENS = 100


class Engine:
    """An ordinary process, which never answers a ping."""

    def __init__(self, code: str, core: int | None = None) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        self.pid = self.process.pid
        if core is not None:
            os.sched_setaffinity(self.pid, {core})
        if code == IDLE:  # it computes until it sleeps
            assert self.process.stdout is not None
            assert self.process.stdout.readline()
            while psutil.Process(self.pid).status() != psutil.STATUS_SLEEPING:
                time.sleep(0.01)

    def send(self, command: Command) -> None:
        """Drop the command."""


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    end(made)


def end(engines: list[Engine]) -> None:
    while engines:
        engine = engines.pop()
        engine.process.kill()
        with engine.process:  # waits for it, and closes its pipe
            pass


def starve(pids: list[int], engines: list[Engine]) -> None:
    """Give processes the lowest priority on a core that `NUM_LOOPS` others of niceness 0 keep busy. Their threads then
    get some milliseconds every five seconds."""
    core = max(os.sched_getaffinity(0))
    for thread in (each for pid in pids for each in psutil.Process(pid).threads()):
        os.sched_setaffinity(thread.id, {core})
        os.setpriority(os.PRIO_PROCESS, thread.id, 19)
    engines += [Engine(BUSY, core) for _ in range(NUM_LOOPS)]


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


async def test_engines_that_get_no_cpu_are_left_alone(engines: list[Engine]) -> None:
    """They could compute, but other programs have the core. One is the product's engine: its request is not given up,
    and goes on when the core is free again."""
    client, changes = EngineClient(), list[bool]()

    def watch(watchdog: Watchdog) -> asyncio.Task[None]:
        return asyncio.create_task(watchdog.run(lambda: changes.append(watchdog.is_silent)))

    try:
        await client.start(EngineSpec(model="tiny", num_blocks=64), 120.0)
        watchdog = Watchdog(client, "decode-0", awake_clock(), 2.0)
        plain = [start(engines, BUSY, timeout_s=2.0, on_gpu=on_gpu) for on_gpu in (False, True)]
        num_tokens = 0

        async def follow() -> None:
            nonlocal num_tokens
            async for event in client.events():
                watchdog.progressed()
                if isinstance(event, Pong):
                    watchdog.pong()
                elif isinstance(event, Step):
                    num_tokens += len(event.tokens)

        tasks = [asyncio.create_task(follow()), watch(watchdog), *(watch(each) for _, each in plain)]
        starve([client.pid, *(engine.pid for engine, _ in plain)], engines)
        client.send(submit("a", KVRole.LOCAL, range(100), TOKENS, ignore_eos=True))
        await asyncio.sleep(STARVED_S)
        assert num_tokens < TOKENS, "the engine is not starved"
        assert (changes, client.returncode, [engine.process.poll() for engine, _ in plain]) == ([], None, [None, None])
        for task in tasks[2:]:
            task.cancel()
        end(engines)
        async with asyncio.timeout(120):
            while num_tokens < TOKENS:  # noqa: ASYNC110 - the steps come over a pipe
                await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
    finally:
        await client.stop(5.0)


async def test_an_engine_that_hangs_on_a_busy_host_is_killed(engines: list[Engine]) -> None:
    """It waits for what never comes, and wants no CPU."""
    engine, watchdog = start(engines, IDLE, timeout_s=2.0)
    starve([engine.pid], engines)
    async with asyncio.timeout(60):
        await watchdog.run()
    assert engine.process.wait(60) == -signal.SIGKILL


async def test_an_engine_that_waits_for_a_hung_gpu_is_killed_though_it_spins(engines: list[Engine]) -> None:
    engine, watchdog = start(engines, BUSY, on_gpu=True)
    async with asyncio.timeout(60):
        await watchdog.run()
    assert engine.process.wait(60) == -signal.SIGKILL


@IN_VIRTUAL_TIME
async def test_steps_prove_life_on_a_gpu(engines: list[Engine]) -> None:
    """An engine that has no time for an answer between the steps that it tells of."""
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


@IN_VIRTUAL_TIME
async def test_an_idle_engine_that_answers_is_left_alone(engines: list[Engine]) -> None:
    engine, watchdog = start(engines, IDLE, clock=LoopClock())
    running = asyncio.create_task(watchdog.run())
    for _ in range(20):
        await asyncio.sleep(0.1)
        watchdog.pong()
    assert not running.done()
    running.cancel()
    assert engine.process.poll() is None


@IN_VIRTUAL_TIME
async def test_an_engine_is_silent_before_it_is_killed_and_may_come_back(engines: list[Engine]) -> None:
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
