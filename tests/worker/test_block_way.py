"""The number of pdserve's functions that a block passes between the engine that computes it and the one that uses
it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from contract.engine import Command, Computed, KVEvent, KVReady, Progress, Reserved, encode
from decode_worker.receive import ReceiveHandoff
from engine.process.client import EventReader
from pdserve.core.clock import MonotonicClock
from pdserve.core.config import TransferConfig
from pdserve.core.handoff import FirstToken, KVPeer
from pdserve.core.kv_layout import KVLayout
from pdserve.core.request import Request
from pdserve.core.sampling import SamplingParams
from prefill_worker.push import PushHandoff
from tests.host_pool import HostPool
from tests.loopback import create_transport
from worker.kv import KVThread

ROOT = Path(__file__).parents[2]
MAX_FUNCTIONS = 25
STATIONS = {
    "SendTransfer.add": "prefill's KV thread queues it",
    "SocketStream.write": "it is sent",
    "SocketStream.write_now": "it is sent",
    "Fetch.advance": "it is in decode's pool",
    "ReceiveTransfer.accept": "it is verified",
    "Engine.send": "decode's engine is told",
}
"""The functions at which a block is passed on."""
LAYOUT = KVLayout.uniform("model", "float32", block_size=4, num_layers=2, num_kv_heads=2, head_dim=8)
TRANSFER = TransferConfig(lease_s=600.0)  # no heartbeat falls into the trace


class Engine:
    """An engine's pipes: its KV events as it writes them, and the commands it gets."""

    def __init__(self) -> None:
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._reads, False)
        self.told: list[Command] = []
        self.ready = threading.Event()

    def take_kv_events(self) -> EventReader[KVEvent]:
        """The reading end."""
        return EventReader(self._reads, KVEvent)  # type: ignore[arg-type]  # a union

    def say(self, event: KVEvent) -> None:
        """Write an event."""
        os.write(self._writes, encode(event))

    def send(self, command: Command) -> None:
        """Get a command."""
        self.told.append(command)
        if isinstance(command, KVReady):
            trace.stop()
            self.ready.set()

    def close(self) -> None:
        """Close the writing end."""
        os.close(self._writes)


class Trace:
    """Collects the functions of ours on the stack, in any thread, when a function of ``STATIONS`` is called."""

    def __init__(self) -> None:
        self.functions: dict[str, None] = {}
        self.stations: set[str] = set()
        self._on = False

    def start(self) -> None:
        """Begin to collect."""
        self._on = True

    def stop(self) -> None:
        """Stop collecting."""
        self._on = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """See `sys.setprofile`."""
        name = frame.f_code.co_qualname
        is_release = name == "Engine.send" and not isinstance(frame.f_locals["command"], KVReady)
        if self._on and event == "call" and name in STATIONS and not is_release:
            self.stations.add(STATIONS[name])
            at: FrameType | None = frame
            while at is not None:
                code, at = at.f_code, at.f_back
                path = Path(code.co_filename)
                if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] not in ("tests", ".venv"):
                    self.functions[f"{path.relative_to(ROOT)}:{code.co_qualname}"] = None


trace = Trace()


@contextlib.asynccontextmanager
async def end(name: str, transport: str) -> AsyncIterator[tuple[KVThread, Engine, HostPool, KVPeer]]:
    """A KV thread over a pool, its engine, and what the other one is told of it."""
    engine, pool = Engine(), HostPool(LAYOUT, 8)
    anything: Any = engine
    kv = KVThread(
        pool,
        [create_transport(transport, pool.memory)],
        TRANSFER,
        anything,
        worker_id=name,
        epoch="e",
        clock=MonotonicClock(),
        eos_token_ids=(),
    )
    try:
        yield kv, engine, pool, KVPeer(name, "e", await kv.start("127.0.0.1"))
    finally:
        await kv.aclose()
        engine.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_block_passes_few_functions(transport: str) -> None:
    """Those that hand it on: they are on the stack where it changes hands, from the event of prefill's engine that it
    is computed to the command to decode's engine that its KV is there."""
    deadline_s = MonotonicClock().now() + 60
    request = Request("r", tuple(range(8)), SamplingParams(4), attempt_id="r")
    trace.functions.clear()
    trace.stations.clear()
    threading.setprofile(trace)
    try:
        async with end("p", transport) as prefill, end("d", transport) as decode:
            to_decode, to_prefill = decode[3], prefill[3]
            await prefill[0].connect(to_decode)
            push = PushHandoff(request, to_decode, LAYOUT, deadline_s, early=True)
            receive = ReceiveHandoff("r", to_prefill, deadline_s, vocab_size=100)
            async with prefill[0].begin(push) as pushing, decode[0].begin(receive) as receiving:
                decode[1].say(Reserved("r", [5, 3], 0, 0.0))
                prefill[1].say(Computed([Progress("r", 4, [1, 2])]))
                await asyncio.sleep(0.3)  # the first block has arrived, and every link is at rest
                trace.start()
                prefill[1].say(Computed([Progress("r", 8, [], first_token=FirstToken(7, ends_here=False))]))
                assert await asyncio.to_thread(decode[1].ready.wait, 20)
                assert (await receiving.done).first_token.token_id == 7
                await pushing.done
    finally:
        trace.stop()
        threading.setprofile(None)
        sys.setprofile(None)
    assert trace.stations == set(STATIONS.values())
    assert len(trace.functions) <= MAX_FUNCTIONS, "\n".join(trace.functions)
