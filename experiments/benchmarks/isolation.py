"""Does a busy control server slow the engine down? Part of `python -m experiments.benchmarks.engine`.

A real worker decodes one long request after another, on a core of its engine's own. In turns the other cores are quiet,
or compute something that has nothing to do with it, or a client there sends it pings over several control streams as
fast as they are answered. The times are the engine's own, of every step. What busy neighbours cost (caches, memory, the
host's own sharing) shows in the second kind of turn; what the control server costs beside that, in the third.
``python -m experiments.benchmarks.isolation SPEC CORE...`` is the worker: it says `Serving`, and at the end of its
input `Steps`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

import numpy as np

import worker.incarnation
from checkpoints.source import resolve_model
from contract.control import MAX_CONTROL_BYTES, TO_GATEWAY, Outputs, Ping, Run, encode
from contract.engine import EngineEvent, Step
from decode_worker.receive import HANDLERS
from engine.process.client import EngineClient
from experiments.child_process import ChildProcess
from experiments.messages import Message, say
from pdserve.core.config import PdserveConfig
from pdserve.core.request import Request
from pdserve.core.sampling import SamplingParams
from pdserve.core.worker import Role
from runtime.secret import ServiceSecret
from worker.authentication import CONTROL, Stream, open_stream, stream_channel
from worker.cores import leave_engine_cores
from worker.process import WorkerThread
from worker.spec import WorkerSpec

STREAMS = 4
PINGS_IN_FLIGHT = 16  # of one stream
SETTLE_S = 0.5
_PROMPT_TOKENS, _MOST_TOKENS = 64, 8000  # of a request
_START_S = 120.0
_KINDS = ("quiet", "busy", "hammered")


class Serving(Message):
    """The worker can be reached."""

    control_address: str


class Steps(Message):
    """Begin and end of every step, in the host's monotonic seconds."""

    times_s: list[tuple[float, float]]


def measure_isolation(model: str, cores: Sequence[int], turns: int, turn_s: float) -> dict[str, float]:
    """Percentiles of the engine's step times in milliseconds, and the pings answered per second meanwhile. ``rise`` is
    p99 hammered over p99 quiet, less 1; ``rise_over_busy`` the same over p99 beside an unrelated load.

    Runs on ``cores``, of which the first becomes the engine's; ValueError if there is only one."""
    if len(cores) < 2:
        raise ValueError("a second core is needed: the engine has one of its own, worker and client take the rest")
    tokens = min(_MOST_TOKENS, resolve_model(model).shape.max_position_embeddings - _PROMPT_TOKENS)
    spec = WorkerSpec(
        worker_id="decode-0",
        role=Role.DECODE,
        host="127.0.0.1",
        node="127.0.0.1",
        device="cpu",
        registry_addresses=("127.0.0.1:9",),  # nothing listens there; a worker runs without a gateway
        version="benchmark",
        cores=tuple(cores[:1]),
        config=PdserveConfig.parse({"model": {"path": model, "dtype": "bfloat16"}}),
    )
    secret, mine = ServiceSecret.new(), os.sched_getaffinity(0)
    arguments = [json.dumps(spec.to_wire()), *map(str, cores)]
    module, environment = "experiments.benchmarks.isolation", secret.environment()
    with ChildProcess("the worker", module, *arguments, environment=environment) as child:
        address = child.receive(_START_S, Serving).control_address
        os.sched_setaffinity(0, set(cores[1:]))
        try:
            windows, pings = asyncio.run(_drive(address, secret, tokens, turns, turn_s))
        finally:
            os.sched_setaffinity(0, mine)
        child.end_input()
        steps = child.receive(30.0, Steps).times_s
    found = {
        kind: np.percentile(_steps_within(steps, windows[number :: len(_KINDS)]), (50, 99)).tolist()
        for number, kind in enumerate(_KINDS)
    }
    return {
        **{f"{kind}_p{q}_ms": ms for kind, both in found.items() for q, ms in zip((50, 99), both, strict=True)},
        "rise": found["hammered"][1] / found["quiet"][1] - 1,
        "rise_over_busy": found["hammered"][1] / found["busy"][1] - 1,
        "pings_per_s": pings / (turns * (SETTLE_S + turn_s)),
    }


def _steps_within(steps: Sequence[tuple[float, float]], windows: Sequence[tuple[float, float]]) -> list[float]:
    """Milliseconds of the steps that ran wholly within one of the windows. RuntimeError if there are none."""
    within = [
        (ended_s - started_s) * 1e3
        for started_s, ended_s in steps
        if any(begin_s <= started_s and ended_s <= end_s for begin_s, end_s in windows)
    ]
    if not within:
        raise RuntimeError(f"none of {len(steps)} steps was wholly within a turn: turns have to be longer")
    return within


async def _drive(
    address: str, secret: ServiceSecret, tokens: int, turns: int, turn_s: float
) -> tuple[list[tuple[float, float]], int]:
    """The turns' windows (in the order of `_KINDS`) in the host's monotonic seconds, and the pings answered."""
    windows: list[tuple[float, float]] = []
    pings = 0
    async with stream_channel(address, MAX_CONTROL_BYTES) as channel:
        decoding = _decode_for_ever(partial(open_stream, channel, CONTROL, secret, address), tokens)
        request = asyncio.create_task(decoding)
        await asyncio.sleep(2.0)
        for kind in _KINDS * turns:
            begin_s = time.monotonic()
            end_s = begin_s + SETTLE_S + turn_s
            if kind == "hammered":
                pings += sum(await asyncio.gather(*(_hammer(address, secret, end_s) for _ in range(STREAMS))))
            elif kind == "busy":
                await asyncio.to_thread(_compute, end_s)
            else:
                await asyncio.sleep(SETTLE_S + turn_s)
            windows.append((begin_s + SETTLE_S, end_s))
        if request.done():
            raise RuntimeError("the request ended before the measurement did")
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await request
    return windows, pings


def _compute(until_s: float) -> None:
    numbers = np.ones(2**16)
    while time.monotonic() < until_s:
        numbers = np.sqrt(numbers + 1)


async def _decode_for_ever(open_with: Callable[[AsyncIterator[bytes]], Awaitable[Stream]], tokens: int) -> None:
    """Requests of so many tokens, each followed by the next."""
    ended = asyncio.Event()

    async def calls() -> AsyncIterator[bytes]:
        sampling = SamplingParams(max_tokens=tokens, seed=0, ignore_eos=True)
        for number in itertools.count():
            name = f"long-{number}"
            yield encode(Run(Request(name, (1,) * _PROMPT_TOKENS, sampling, timeout_s=3600.0, attempt_id=name)))
            await ended.wait()
            ended.clear()

    async for data in await open_with(calls()):
        message = TO_GATEWAY.decode(data)
        if isinstance(message, Outputs):
            if message.failures:
                raise RuntimeError(message.failures[0][1].message)
            if any(output.finish_reason is not None for _, output in message.outputs):
                ended.set()


async def _hammer(address: str, secret: ServiceSecret, until_s: float) -> int:
    """Send pings over one stream until the given time; returns the number of answers."""
    answered = 0
    room = asyncio.Semaphore(PINGS_IN_FLIGHT)

    async def calls() -> AsyncIterator[bytes]:
        for call_id in itertools.count(1):
            await room.acquire()
            if time.monotonic() > until_s:
                return
            yield encode(Ping(call_id))

    async with stream_channel(address, MAX_CONTROL_BYTES) as channel:
        async for _ in await open_stream(channel, CONTROL, secret, address, calls()):
            answered += 1
            room.release()
    return answered


# --- the worker ------------------------------------------------------------------------------------------------------

_steps_s: list[tuple[float, float]] = []


class _RecordingClient(EngineClient):
    """Keeps begin and end of every step."""

    async def events(self) -> AsyncIterator[EngineEvent]:
        async for event in super().events():
            if isinstance(event, Step):
                _steps_s.append((event.step_started_s, event.sampled_s))
            yield event


def _serve(spec: WorkerSpec, cores: Sequence[int]) -> None:
    os.sched_setaffinity(0, cores)
    logging.basicConfig(level=logging.ERROR)  # suppresses warnings about the missing gateway
    setattr(worker.incarnation, "EngineClient", _RecordingClient)  # noqa: B010 - it is not the module's to give away
    leave_engine_cores(spec)
    thread = WorkerThread(spec, HANDLERS, ServiceSecret.from_environment())
    say(Serving(thread.wait_ready(_START_S).control_address))
    sys.stdin.read()
    thread.stop()
    say(Steps(_steps_s))


if __name__ == "__main__":
    _serve(WorkerSpec.from_wire(json.loads(sys.argv[1])), [int(core) for core in sys.argv[2:]])
