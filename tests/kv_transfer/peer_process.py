"""The other process of two tests (processes, link rate): echoes what it is sent, or receives hand-offs."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict

import msgspec

from kv_transfer.memory import HostMemory
from kv_transfer.pool import Pool
from kv_transfer.protocol import checksum
from kv_transfer.receiver import KVReceiver
from pdserve.core.clock import MonotonicClock
from pdserve.core.handoff import KVPeer
from pdserve.core.kv_layout import MAX_PROBE_AREA_BYTES, KVLayout, Region
from tests.host_pool import HostPool
from tests.loopback import create_transport

LARGE = KVLayout.uniform("model", "bfloat16", block_size=64, num_layers=30, num_kv_heads=3, head_dim=64)
"""Blocks of 1.5 MB."""


def say(**values: object) -> None:
    """Tell the test something."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


async def echo(name: str) -> None:
    """Answer every message with itself, until killed or left."""
    transport = create_transport(name, HostMemory.create(2**23))
    say(address=(await transport.listen("127.0.0.1")).address)
    link = await transport.accept()
    hello = await link.recv()
    link.introduced()
    await link.send(hello.header)
    while True:
        message = await link.recv()
        whole = [Region(0, message.size)]
        await link.fetch(whole)
        await link.send(message.header, await link.payload(whole))


async def receive_many(name: str, blocks: int, device: str = "cpu") -> None:
    """Receive one hand-off of all blocks per line of the input, and say its proof."""
    pool, clock = Pool.create(LARGE, blocks, device, MAX_PROBE_AREA_BYTES), MonotonicClock()
    receiver = KVReceiver(
        pool,
        [create_transport(name, pool.memory)],
        worker_id="d",
        epoch="e",
        checksum=True,
        clock=clock,
        lease_s=10.0,
    )
    say(**asdict(KVPeer("d", "e", await receiver.start("127.0.0.1"))))
    while attempt_id := (await asyncio.to_thread(sys.stdin.readline)).strip():
        receiver.announce(attempt_id, "p", range(blocks), 0, clock.now() + 60)
        say(**msgspec.structs.asdict((await receiver.wait(attempt_id)).proof))


async def receive(name: str, blocks: int) -> None:
    """Receive one hand-off and say what came."""
    layout = KVLayout.uniform("model", "float32", block_size=64, num_layers=2, num_kv_heads=2, head_dim=64)
    store, clock = HostPool(layout, blocks), MonotonicClock()
    transport = create_transport(name, store.memory)
    receiver = KVReceiver(
        store,
        [transport],
        worker_id="d",
        epoch="e",
        checksum=True,
        clock=clock,
        lease_s=5.0,
    )
    endpoints = await receiver.start("127.0.0.1")
    receiver.announce("r", "p", range(blocks), 0, clock.now() + 20)
    say(**asdict(KVPeer("d", "e", endpoints)))
    received = await receiver.wait("r")
    say(kv_bytes=received.proof.kv_bytes, content=checksum([store.data], b""), trailer=received.trailer.decode())
    await asyncio.sleep(60)  # until killed: the last answer must be on its way


if __name__ == "__main__":
    role, transport_name, *rest = sys.argv[1:]
    if role == "echo":
        asyncio.run(echo(transport_name))
    elif role == "receive":
        asyncio.run(receive(transport_name, int(rest[0])))
    else:
        asyncio.run(receive_many(transport_name, int(rest[0]), *rest[1:]))
