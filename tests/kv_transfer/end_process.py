"""One end of hand-offs in a process of its own, for `End`: a real sender or receiver over a pool of blocks, told
what to do by a line of JSON each, and answering with one. It ends with its standard input."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from contract.kv import checksum
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import PdserveError, to_wire
from pdserve.core.handoff import KVPeer
from pdserve.core.kv_layout import KVLayout, Region
from tests.host_pool import HostPool
from tests.kv_transfer.conftest import receiver_of, sender_of
from tests.kv_transfer.relay import known_as
from tests.kv_transfer.status import status_of
from tests.loopback import create_transport

LAYOUT = KVLayout.uniform(
    "model", "float32", block_size=16, num_layers=4, num_kv_heads=2, head_dim=64
)  # blocks of 64 KiB
Values = dict[str, Any]


class SlowStore(HostPool):
    """Before a message's payload is moved, the whole process sleeps for ``landing_s``; ``landing_mark`` is a file that
    is there from then on."""

    landing_s = 0.0
    landing_mark = ""

    def regions(
        self, block_ids: Sequence[int], layers: range | None = None, shard: KVLayout | None = None
    ) -> list[Region]:
        """Where the blocks lie, after a while."""
        if self.landing_mark:
            Path(self.landing_mark).touch()
            self.landing_mark = ""
        time.sleep(self.landing_s)
        return super().regions(block_ids, layers, shard)


class Pool:
    """Which blocks are free. A block that is given back is somebody else's: it gets ``pattern``, which must stay."""

    def __init__(self, store: HostPool, pattern: int) -> None:
        self.store = store
        self._pattern = bytes([pattern]) * store.layout.block_bytes
        self._free = deque(range(store.num_blocks))
        for block in self._free:
            self._overwrite(block)

    @property
    def free(self) -> int:
        """How many are free."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Blocks for a hand-off."""
        return [self._free.popleft() for _ in range(count)]

    def give_back(self, blocks: Sequence[int]) -> None:
        """They are free, and have a new owner's content."""
        for block in blocks:
            self._overwrite(block)
        self._free.extend(blocks)

    def intact(self) -> bool:
        """Whether nobody else wrote into the free ones."""
        size = self.store.layout.block_bytes
        return all(self.store.data[block * size : (block + 1) * size] == self._pattern for block in self._free)

    def content(self, blocks: Sequence[int]) -> int:
        """A hash of what blocks hold."""
        return checksum(self.store.views(blocks), b"") if blocks else 0

    def _overwrite(self, block: int) -> None:
        size = self.store.layout.block_bytes
        self.store.data[block * size : (block + 1) * size] = self._pattern


class End:
    """What both kinds of end can be told. A method's keywords are those of its line."""

    kv: KVSender | KVReceiver

    def __init__(self, options: Values, pattern: int) -> None:
        self.clock = MonotonicClock()
        self.store = SlowStore(LAYOUT, options["num_blocks"])
        self.pool = Pool(self.store, pattern)
        self.transport = create_transport(options["transport"], self.store.memory, timeout_s=5.0)
        self.blocks: dict[str, list[int]] = {}
        self.deadlines: dict[str, float] = {}

    async def start_up(self) -> Values:
        """Be ready; what the test has to know."""
        return {}

    async def stats(self) -> Values:
        """What this process holds."""
        links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
        mappings = sum("memfd:pdserve-kv" in line for line in _lines("/proc/self/maps"))
        return {
            "free": self.pool.free,
            "held": {
                "sockets": sum(link.startswith("socket:") for link in links),
                "memory files": sum("memfd:pdserve-kv" in link for link in links),
                "mappings": mappings,
                "threads": threading.active_count(),
                "children": len(multiprocessing.active_children()) + len(_children()),
            },
        }

    async def intact(self) -> Values:
        """Whether blocks that were given back hold what their new owner wrote."""
        return {"intact": self.pool.intact()}

    async def sleep(self, seconds: float) -> Values:
        """Do nothing else at all for a while, right after the answer."""
        asyncio.get_running_loop().call_soon(time.sleep, seconds)
        return {}

    async def slow(self, seconds: float, mark: str = "") -> Values:
        """Sleep before each message is moved, and mark that by a file."""
        self.store.landing_s, self.store.landing_mark = seconds, mark
        return {}

    async def wait(self, request: str) -> Values:
        """Wait for the end of a hand-off."""
        return await self._ended(request, self.kv.wait(request))

    async def abort(self, request: str) -> Values:
        """Give it up."""
        return await self._ended(request, self.kv.abort(request))

    async def status(self, request: str) -> Values:
        """How far it is."""
        return {"status": status_of(self.kv, request)}

    async def _ended(self, request: str, work: Awaitable[Any]) -> Values:
        """Do it; whether it raised or not, the request's blocks are free then."""
        try:
            done: Values = _plain(await work)
            if (blocks := self.blocks.get(request)) is not None:  # else an abort in the same moment gave them back
                done["content"] = self.pool.content(blocks)
        except PdserveError as error:
            kind, message = to_wire(error)
            done = {"error": kind, "message": message}
        done["late_s"] = self.clock.now() - self.deadlines.get(request, self.clock.now())
        self.pool.give_back(self.blocks.pop(request, ()))
        return done


class ReceivingEnd(End):
    """A `KVReceiver`, which can be told to be late."""

    def __init__(self, options: Values) -> None:
        super().__init__(options, 0xA5)
        self.kv = self.receiver = receiver_of(self.store, self.transport, clock=self.clock, **options["end"])

    async def start_up(self) -> Values:
        """Listen."""
        (endpoint,) = await self.receiver.start("127.0.0.1")
        return {"address": endpoint.address}

    async def announce(self, request: str, sender_id: str, count: int, deadline_s: float) -> Values:
        """Take blocks, and announce them to the sender."""
        self.blocks[request] = blocks = self.pool.take(count)
        self.deadlines[request] = self.clock.now() + deadline_s
        self.receiver.announce(request, sender_id, blocks, 0, self.deadlines[request])
        return {}

    async def known_as(self, address: str) -> Values:
        """Peers dial this address, that of a relay, in place of its own."""
        known_as(self.transport, address)
        return {}

    async def links(self) -> Values:
        """From whom there are links."""
        return {"links": list(self.receiver._links)}

    async def refused(self) -> Values:
        """Counts of refusals."""
        return {"refused": self.receiver.refused}

    async def delay(self, seconds: float) -> Values:
        """How long a complete hand-off is not acknowledged."""
        self.receiver.delay_s = seconds
        return {}


class SendingEnd(End):
    """A `KVSender`, which is worker "p"."""

    def __init__(self, options: Values) -> None:
        super().__init__(options, 0x5A)
        self.kv = self.sender = sender_of(self.store, self.transport, clock=self.clock, **options["end"])

    async def unlink(self) -> Values:
        """Close the links."""
        for peer in list(self.sender._peers.values()):
            await peer.aclose()
        return {}

    async def push(self, request: str, peer: Values, count: int, deadline_s: float, seed: int) -> Values:
        """Begin a hand-off of random content, which ``peer`` announces."""
        self.blocks[request] = blocks = self.pool.take(count)
        draw, size = random.Random(seed), self.store.layout.block_bytes
        for block in blocks:
            self.store.data[block * size : (block + 1) * size] = draw.randbytes(size)
        self.deadlines[request] = self.clock.now() + deadline_s
        self.sender.push(request, msgspec.convert(peer, KVPeer), count, self.deadlines[request])
        return {"content": self.pool.content(blocks)}

    async def send(self, request: str, first: int = 0, count: int | None = None, last: bool = False) -> Values:
        """Queue blocks of it, unless it has failed already."""
        if (blocks := self.blocks.get(request)) is None:
            return {}
        queued = blocks[first:] if count is None else blocks[first : first + count]
        self.sender.send_blocks(request, first, queued, last=last)
        return {}


def _plain(outcome: Any) -> Values:
    """What a hand-off's account says."""
    if outcome is None:
        return {}
    return {"bytes": outcome.proof.kv_bytes}


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def _children() -> list[str]:
    pid = os.getpid()
    return "".join(_lines(f"/proc/{pid}/task/{pid}/children")).split()


def _lines(path: str) -> list[str]:
    with open(path, encoding="utf-8") as file:
        return file.readlines()


async def serve(end: End) -> None:
    """Follow what standard input says until it ends. Each line is worked on by itself."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    working: set[asyncio.Task[None]] = set()

    async def follow(order: Values) -> None:
        number, method = order.pop("number"), order.pop("do")
        work: Callable[..., Awaitable[Values]] = getattr(end, method)
        try:
            values = await work(**order)
        except PdserveError as error:
            kind, message = to_wire(error)
            values = {"error": kind, "message": message}
        except Exception as error:  # noqa: BLE001 - the test has to know
            values = {"bug": f"{type(error).__name__}: {error}"}
        _say(number=number, **values)

    _say(number=0, **await end.start_up())
    while line := await reader.readline():
        task = asyncio.create_task(follow(json.loads(line)))
        working.add(task)
        task.add_done_callback(working.discard)
    os._exit(0)


async def _main(options: Values) -> None:
    await serve(ReceivingEnd(options) if options["role"] == "receiver" else SendingEnd(options))


def _say(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_main(json.loads(sys.argv[1])))
