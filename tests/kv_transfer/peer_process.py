"""The other process of `test_transport_processes`: echoes what it is sent, or receives a hand-off."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict

from kv_transfer.factory import create_transport
from kv_transfer.memory import HostMemory
from kv_transfer.protocol import checksum
from kv_transfer.receiver import KVReceiver
from pdserve.core.clock import MonotonicClock
from pdserve.core.handoff import KVPeer
from pdserve.core.kv_layout import KVLayout, Region
from tests.host_pool import HostPool


def say(**values: object) -> None:
    """Tell the test something."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


async def echo(transport_name: str) -> None:
    """Answer every message with itself, until killed or left."""
    transport = create_transport(transport_name, HostMemory.create(2**23))
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


async def receive(transport_name: str, blocks: int) -> None:
    """Receive one hand-off and say what came."""
    layout = KVLayout.uniform("model", "float32", block_size=64, num_layers=2, num_kv_heads=2, head_dim=64)
    store, clock = HostPool(layout, blocks), MonotonicClock()
    transport = create_transport(transport_name, store.memory)
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
    asyncio.run(echo(sys.argv[2]) if sys.argv[1] == "echo" else receive(sys.argv[2], int(sys.argv[3])))
