"""torch_dist between two processes of which one is killed or stopped, in the middle of a payload or while they join:
over Gloo everywhere, over NCCL where there are two GPUs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from kv_transfer.memory import DeviceMemory
from kv_transfer.pool import Pool
from kv_transfer.send_transfer import SendTransfer
from kv_transfer.sender import KVSender
from kv_transfer.transports.torch_groups import JOIN_S
from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import PdserveError
from pdserve.core.handoff import KVPeer
from pdserve.core.kv_layout import MAX_PROBE_AREA_BYTES
from runtime.cuda import Cuda
from tests.kv_transfer.conftest import sender_of
from tests.kv_transfer.peer_process import LARGE
from tests.loopback import create_transport

ROOT = Path(__file__).parents[2]
LINK_TIMEOUT_S = 4.0
NUM_GPUS = torch.cuda.device_count()


class Devices(NamedTuple):
    """Where the pools are. ``join_s`` bounds a join, ``blocks`` of 1.5 MB are sent at once."""

    source: str
    target: str
    join_s: float
    blocks: int


DEVICES = pytest.mark.parametrize(
    "devices",
    [
        pytest.param(Devices("cpu", "cpu", 10.0, 64), id="gloo"),
        pytest.param(
            Devices("cuda:0", "cuda:1", JOIN_S, 1024),
            id="nccl",
            marks=(
                pytest.mark.cuda2,
                pytest.mark.skipif(NUM_GPUS < 2, reason=f"torch sees {NUM_GPUS} GPUs, NCCL needs two"),
            ),
        ),
    ],
)
SIGNALS = pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])


class Facing(NamedTuple):
    """A sender that has not connected, and the process that receives."""

    sender: KVSender
    process: asyncio.subprocess.Process
    peer: KVPeer
    clock: MonotonicClock

    async def connect(self) -> None:
        """Open the link."""
        await self.sender.connect(self.peer)

    def begin(self, name: str, blocks: int) -> SendTransfer:
        """Begin a hand-off of all blocks at both ends."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name}\n".encode())
        transfer = self.sender.push(name, self.peer, blocks, self.clock.now() + 60)
        transfer.send_blocks(0, list(range(blocks)), last=True)
        return transfer


@contextlib.asynccontextmanager
async def facing(devices: Devices) -> AsyncIterator[Facing]:
    """Both, closed afterwards. No kernel is left spinning on the source's GPU."""
    pool, clock = Pool.create(LARGE, devices.blocks, devices.source, MAX_PROBE_AREA_BYTES), MonotonicClock()
    sending = create_transport("torch_dist", pool.memory, timeout_s=LINK_TIMEOUT_S)
    sender = sender_of(pool, sending, clock=clock, message_bytes=2**22, lease_s=20.0)
    program = str(Path(__file__).with_name("peer_process.py"))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, program, "torch_dist", str(devices.blocks), devices.target),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        peer = msgspec.convert(await said(process), KVPeer)
        yield Facing(sender, process, peer, clock)
    finally:
        if process.returncode is None:
            process.kill()
        await sender.aclose()
        await sending.aclose()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await process.communicate()
    if isinstance(pool.memory, DeviceMemory):
        Cuda().synchronize(pool.memory.index)


async def said(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """The next thing it says."""
    assert process.stdout is not None
    async with asyncio.timeout(60):
        values: dict[str, Any] = json.loads(await process.stdout.readline())
    return values


@DEVICES
@SIGNALS
async def test_a_peer_that_ends_or_stops_mid_send_is_given_up(devices: Devices, signum: signal.Signals) -> None:
    async with facing(devices) as both:
        await both.connect()
        for name in ("whole 1", "whole 2"):
            await both.begin(name, devices.blocks).wait()
            assert (await said(both.process))["kv_bytes"] == devices.blocks * LARGE.block_bytes
        waiting = asyncio.create_task(both.begin("cut", devices.blocks).wait())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        both.process.send_signal(signum)
        async with asyncio.timeout(3 * LINK_TIMEOUT_S):
            with pytest.raises(PdserveError):
                await waiting
        assert both.sender.links() == ()


@DEVICES
@SIGNALS
async def test_a_peer_that_ends_or_stops_during_the_join_is_given_up(devices: Devices, signum: signal.Signals) -> None:
    async with facing(devices) as both:
        both.process.send_signal(signal.SIGSTOP)  # before it answers: the kernel accepts the connection
        connecting = asyncio.create_task(both.connect())
        await asyncio.sleep(0.3)
        assert not connecting.done()
        if signum == signal.SIGKILL:
            both.process.kill()
        async with asyncio.timeout(10.0 if signum == signal.SIGKILL else devices.join_s + 20.0):
            with pytest.raises(PdserveError):
                await connecting
