"""Links whose messages arrive whole: a queue of received messages, and the error with which the link ended."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

from kv_transfer.base import KVLink, Message
from kv_transfer.fetch import Fetch
from kv_transfer.memory import Memory
from pdserve.core.errors import TransferError
from pdserve.core.kv_layout import Region

if TYPE_CHECKING:
    import torch

Content: TypeAlias = "bytes | memoryview | torch.Tensor"
"""A payload that arrived whole, on the host or on a device (one dimension, uint8)."""
Arrived: TypeAlias = "tuple[bytes, Content]"
"""A received message: its header and its payload."""

WINDOW_BYTES = 8 * 2**20
"""The limit on queued bytes in one direction of a link. One larger message may be queued alone."""


def again(error: TransferError) -> TransferError:
    """A copy of an error, to raise. A raised error keeps the frames it passed, and therefore must not be stored in an
    object that these frames refer to."""
    return type(error)(*error.args)


class InboxLink(KVLink):
    """A link whose messages arrive whole in their own memory. `fetch` copies them. Belongs to one event loop."""

    def __init__(self, transport: str, memory: Memory) -> None:
        super().__init__(memory)
        self.transport = transport
        self.ended: TransferError | None = None
        """The error with which the link ended."""
        self._messages: deque[Arrived] = deque()
        self._waiting_bytes = 0
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._payload: Content = b""

    async def recv(self) -> Message:
        """The next message. After the last one, raises the error with which the link ended."""
        self._payload = b""
        while not self._messages:
            if self.ended is not None:
                raise again(self.ended)
            self._arrived.clear()
            await self._arrived.wait()
        header, self._payload = self._messages.popleft()
        size = len(self._payload)
        self._waiting_bytes -= size
        self._room.set()
        return Message(header, size)

    async def _move(self, fetch: Fetch) -> None:
        """Copy the last message's payload."""
        payload, self._payload = self._payload, b""
        if isinstance(payload, bytes | memoryview):
            fetch.write(memoryview(payload))
        else:
            fetch.write_on_device(lambda region: payload[region.offset : sum(region)], [Region(0, len(payload))])

    def _push(self, message: Arrived) -> None:
        """Add a message at once. Ignored after `_end`."""
        if self.ended is None:
            self._messages.append(message)
            self._waiting_bytes += len(message[1])
            self._arrived.set()

    async def _put(self, message: Arrived) -> None:
        """Add a message when there is room for it. Raises the error of `_end`."""
        while self.ended is None and self._waiting_bytes and self._waiting_bytes + len(message[1]) > WINDOW_BYTES:
            self._room.clear()
            await self._room.wait()
        if self.ended is not None:
            raise again(self.ended)
        self._push(message)

    def _end(self, error: TransferError, *, discard: bool = False) -> None:
        """Take no more messages. The first ``error`` is kept; ``discard`` drops messages that were not read."""
        if discard:
            self._messages.clear()
            self._waiting_bytes = 0
        self.ended = self.ended or error
        self._arrived.set()
        self._room.set()
