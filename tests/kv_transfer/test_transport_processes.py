"""The network transports between two processes, and what is left when one of them is killed."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kv_transfer.base import KVLink
from kv_transfer.memory import HostMemory
from kv_transfer.protocol import checksum
from kv_transfer.sender import KVSender
from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import PeerLost, TransferTimeout
from pdserve.core.handoff import KVEndpoint, KVPeer
from pdserve.core.kv_layout import KVLayout, Region
from tests.host_pool import HostPool, inline
from tests.loopback import create_transport

ROOT = Path(__file__).parents[2]
NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")
)
NETWORK = pytest.mark.parametrize("transport_name", ["shm", "tcp", "grpc_stream", "torch_dist", NIXL])


@contextlib.asynccontextmanager
async def peer(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`peer_process` with these arguments, killed in the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("peer_process.py")),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def line_of(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """The next thing it says."""
    assert process.stdout is not None
    async with asyncio.timeout(30):
        values: dict[str, Any] = json.loads(await process.stdout.readline())
    return values


@contextlib.asynccontextmanager
async def echoing(
    transport_name: str, timeout_s: float = 20.0
) -> AsyncIterator[tuple[asyncio.subprocess.Process, KVLink]]:
    """A process that echoes, and a link to it."""
    transport = create_transport(transport_name, HostMemory.create(2**23), timeout_s=timeout_s)
    async with peer("echo", transport_name) as process:
        link = await transport.connect(KVEndpoint(transport_name, (await line_of(process))["address"]), 10.0)
        try:
            await link.send(b"hello")
            assert (await link.recv()).header == b"hello"
            yield process, link
        finally:
            await transport.aclose()


async def flood(link: KVLink) -> None:
    """Send without end."""
    while True:
        await link.send(b"h", inline(bytes(2**20)))


async def drain(link: KVLink) -> None:
    """Take everything that comes."""
    while True:
        await link.recv()


@NETWORK
async def test_messages_come_back_from_another_process(transport_name: str) -> None:
    async with echoing(transport_name) as (_, link):
        memory, into = link.memory, Region(2**22, 3 * 2**20)
        assert isinstance(memory, HostMemory)
        memory.view(Region(0, into.size))[:] = content = random.Random(2).randbytes(into.size)
        for i in range(5):
            await link.send(b"%d" % i, await link.payload([Region(0, 2**20), Region(2**20, 2**21)]))
            message = await link.recv()
            assert (message.header, message.size) == (b"%d" % i, into.size)
            memory.view(into)[:] = bytes(into.size)
            await link.fetch([into])
            assert memory.view(into) == content


@NETWORK
@pytest.mark.parametrize("doing", ["receiving", "sending"])
async def test_a_killed_peer_is_noticed_promptly(transport_name: str, doing: str) -> None:
    async with echoing(transport_name) as (process, link):
        work = asyncio.create_task(flood(link) if doing == "sending" else link.recv())
        await asyncio.sleep(0.2)
        assert not work.done()
        start = time.monotonic()
        process.kill()
        with pytest.raises(PeerLost):
            await work
        with pytest.raises(PeerLost):
            await drain(link)
        assert time.monotonic() - start < 8


@NETWORK
async def test_a_stopped_peer_holds_a_sender_for_the_timeout_only(transport_name: str) -> None:
    async with echoing(transport_name, timeout_s=1.0) as (process, link):
        process.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(TransferTimeout):
            await flood(link)
        assert time.monotonic() - start < 15


@NETWORK
async def test_a_hand_off_to_another_process(transport_name: str) -> None:
    layout = KVLayout.uniform("model", "float32", block_size=64, num_layers=2, num_kv_heads=2, head_dim=64)
    store, clock = HostPool(layout, 32), MonotonicClock()
    store.data[:] = random.Random(3).randbytes(len(store.data))
    transport = create_transport(transport_name, store.memory)
    sender = KVSender(
        store,
        [transport],
        worker_id="p",
        checksum=True,
        message_bytes=2**20,
        max_inflight_bytes=2**23,
        clock=clock,
        lease_s=5.0,
        connect_timeout_s=10.0,
    )
    async with peer("receive", transport_name, "32") as process:
        receiver = msgspec.convert(await line_of(process), KVPeer)
        sender.push("r", receiver, 32, clock.now() + 20)
        sender.send_blocks("r", 0, range(32), last=True, trailer=b"token 1")
        await sender.wait("r")
        said = await line_of(process)
        assert said == {
            "kv_bytes": layout.expected_bytes(32 * 64),
            "content": checksum([store.data], b""),
            "trailer": "token 1",
        }
        sender.push("late", receiver, 32, clock.now() + 20)
        process.kill()
        start = time.monotonic()
        with pytest.raises(PeerLost):
            await sender.wait("late")
        assert time.monotonic() - start < 8
        assert sender.links() == ()
    await sender.aclose()
    await transport.aclose()
