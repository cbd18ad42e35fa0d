"""Connections of strangers, until it is ended: `python -m experiments.benchmarks.strangers_client COUNT PACE_S ADDRESS...`.

Each connection sends nothing, or random bytes, after the opening of one of the service's protocols or none, and stays
open. One that the server closes is opened again, PACE_S after it was opened. The process gets the time that others
leave (SCHED_IDLE), because it stands for other machines. When it is ended, it says `Opened`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time

from experiments.messages import Message, say
from kv_transfer.transports.socket_transport import MAGIC

BYTES = 4096
OPENINGS = (b"", MAGIC, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n")

opened = 0


class Opened(Message):
    """How many connections were opened."""

    connections: int


async def stranger(address: str, pace_s: float, seed: int) -> None:
    """Keep one connection."""
    global opened
    chance = random.Random(seed)
    host, _, port = address.rpartition(":")
    await asyncio.sleep(chance.uniform(0.0, pace_s))
    while True:
        began_s = time.monotonic()
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, int(port))
            opened += 1
            try:
                if chance.random() < 0.8:
                    writer.write(chance.choice(OPENINGS) + chance.randbytes(BYTES))
                while await reader.read(2**16):
                    continue
            finally:
                writer.transport.abort()
        await asyncio.sleep(max(0.0, began_s + pace_s - time.monotonic()))


async def main(count: int, pace_s: float, addresses: list[str]) -> None:
    """Keep ``count`` connections, spread over the addresses, until SIGTERM."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    strangers = [
        asyncio.create_task(stranger(addresses[number % len(addresses)], pace_s, number)) for number in range(count)
    ]
    await ended.wait()
    for task in strangers:
        task.cancel()
    say(Opened(opened))


if __name__ == "__main__":
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
