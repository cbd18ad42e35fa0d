"""A transport that damages what passes through it: changes messages with blocks."""

from __future__ import annotations

from collections import deque
from typing import Literal

from contract.kv import Blocks, Refused, decode
from kv_transfer.base import NOTHING, KVLink, KVTransport, Message
from kv_transfer.fetch import Fetch, Payload
from pdserve.core.errors import ChecksumMismatch
from pdserve.core.handoff import KVEndpoint
from tests.host_pool import inline

Damage = Literal["", "corrupt", "flip"]


class TamperingTransport(KVTransport):
    """Does to the next messages with blocks what `plan` says, one entry for each message ("" leaves it alone):

    - ``corrupt``: sends a copy with one bit changed;
    - ``flip``: changes one bit in the pool itself, after it was hashed, until the receiver complains.
    """

    def __init__(self, transport: KVTransport) -> None:
        self.name = transport.name
        self.plan: deque[Damage] = deque()
        self.links: list[TamperingLink] = []
        self._transport = transport

    @property
    def num_unauthenticated(self) -> int:
        """As it is."""
        return self._transport.num_unauthenticated

    async def listen(self, host: str, port: int = 0) -> KVEndpoint:
        """As it is."""
        return await self._transport.listen(host, port)

    async def accept(self) -> KVLink:
        """As it is."""
        return await self._transport.accept()

    def obstacle(self, endpoint: KVEndpoint) -> str | None:
        """As it is."""
        return self._transport.obstacle(endpoint)

    async def connect(self, endpoint: KVEndpoint, timeout_s: float) -> KVLink:
        """A link that tampers."""
        return TamperingLink(await self._transport.connect(endpoint, timeout_s), self.plan)

    async def aclose(self) -> None:
        """Close it."""
        await self._transport.aclose()


class TamperingLink(KVLink):
    """See `TamperingTransport`."""

    def __init__(self, link: KVLink, plan: deque[Damage]) -> None:
        super().__init__(link.memory)
        self.transport, self.on_device, self.reads_late = link.transport, link.on_device, link.reads_late
        self._link, self._plan = link, plan
        self._flipped: memoryview | None = None

    async def send(self, header: bytes, payload: Payload = NOTHING) -> None:
        """Send it, perhaps damaged."""
        has_blocks = payload.size and isinstance(decode(header), Blocks)
        damage: Damage = self._plan.popleft() if self._plan and has_blocks else ""
        if damage == "corrupt":
            whole = bytearray().join(payload.parts)
            whole[len(whole) // 2] ^= 1
            payload = inline(whole)
        elif damage == "flip":
            self._flipped = payload.parts[0][:1]
            self._flipped[0] ^= 1
        await self._link.send(header, payload)

    async def drained(self) -> None:
        """As it is."""
        await self._link.drained()

    async def recv(self) -> Message:
        """As it came; a complaint undoes a flip."""
        message = await self._link.recv()
        if self._flipped is not None:
            answer = decode(message.header)
            if isinstance(answer, Refused) and answer.kind == ChecksumMismatch.__name__:
                self._flipped[0] ^= 1
                self._flipped = None
        return message

    async def _move(self, fetch: Fetch) -> None:
        """As it came."""
        await self._link._move(fetch)

    def cut(self, why: str) -> None:
        """Cut it."""
        self._link.cut(why)

    async def aclose(self) -> None:
        """Close it."""
        await self._link.aclose()
