"""Connections of strangers, until it is ended: `python -m benchmarks.strangers_client COUNT ADDRESS...`.

Each connection sends nothing, or random bytes, after the opening of one of the service's protocols or none, and stays
open. One that the server closes is opened again, `PACE_S` after it was opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time

from kv_transfer.transports.socket_proof import MAGIC

PACE_S = 5.0
BYTES = 4096
OPENINGS = (b"", MAGIC, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n")


async def stranger(address: str, seed: int) -> None:
    """Keep one connection."""
    chance = random.Random(seed)
    host, _, port = address.rpartition(":")
    await asyncio.sleep(chance.uniform(0.0, PACE_S))
    while True:
        began_s = time.monotonic()
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                if chance.random() < 0.8:
                    writer.write(chance.choice(OPENINGS) + chance.randbytes(BYTES))
                while await reader.read(2**16):
                    continue
            finally:
                writer.transport.abort()
        await asyncio.sleep(max(0.0, began_s + PACE_S - time.monotonic()))


async def main(count: int, addresses: list[str]) -> None:
    """Keep ``count`` connections, spread over the addresses."""
    await asyncio.gather(*(stranger(addresses[number % len(addresses)], number) for number in range(count)))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2:]))
