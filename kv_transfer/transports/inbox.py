"""Links whose messages arrive whole: a queue of received messages, and the error with which the link ended."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kv_transfer.base import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, KVLink, Message
from kv_transfer.fetch import Fetch, Payload
from kv_transfer.memory import Memory
from pdserve.core.errors import TransferError
from pdserve.core.kv_layout import Region

if TYPE_CHECKING:
    import torch

Content: TypeAlias = "bytes | memoryview | torch.Tensor"
"""A payload that arrived whole, on the host or on a device (one dimension, uint8)."""

WINDOW_BYTES = 8 * 2**20
"""The limit on queued bytes in one direction of a link. One larger message may be queued alone."""


def check_sizes(header: bytes, payload: Payload) -> int:
    """The payload's bytes. ValueError if the payload or the header is too large for a message."""
    size = payload.size
    if size > MAX_PAYLOAD_BYTES or len(header) > MAX_HEADER_BYTES:
        raise ValueError(
            f"a message of {len(header)} + {size} bytes; the limit is {MAX_HEADER_BYTES} + {MAX_PAYLOAD_BYTES}"
        )
    return size


def again(error: TransferError) -> TransferError:
    """A copy of an error, to raise. A raised error keeps the frames it passed, and therefore must not be stored in an
    object that these frames refer to."""
    return type(error)(*error.args)


class Arrived(NamedTuple):
    """A received message with its payload, and how long the payload took to arrive, in seconds, as seen here."""

    header: bytes
    payload: Content
    arrival_s: float = 0.0


class Inbox:
    """The received messages of one link, for one reading task. Belongs to one event loop."""

    def __init__(self) -> None:
        self._messages: deque[Arrived] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self.ended: TransferError | None = None

    def push(self, message: Arrived) -> None:
        """Add a message at once. Ignored after `end`."""
        if self.ended is None:
            self._messages.append(message)
            self._bytes += len(message.payload)
            self._changed.set()

    async def put(self, message: Arrived) -> None:
        """Add a message when there is room for it. Raises the error of `end`."""
        while self.ended is None and self._bytes and self._bytes + len(message.payload) > WINDOW_BYTES:
            self._room.clear()
            await self._room.wait()
        if self.ended is not None:
            raise again(self.ended)
        self.push(message)

    async def get(self) -> Arrived:
        """Wait for the next message. After the last one, raises the error of `end`."""
        while not self._messages:
            if self.ended is not None:
                raise again(self.ended)
            self._changed.clear()
            await self._changed.wait()
        message = self._messages.popleft()
        self._bytes -= len(message.payload)
        self._room.set()
        return message

    def end(self, error: TransferError, *, discard: bool = False) -> None:
        """Take no more messages. The first ``error`` is kept; ``discard`` drops messages that were not read."""
        if discard:
            self._messages.clear()
            self._bytes = 0
        self.ended = self.ended or error
        self._changed.set()
        self._room.set()


class InboxLink(KVLink):
    """A link whose messages arrive whole in their own memory. `fetch` copies them."""

    def __init__(self, transport: str, memory: Memory, inbox: Inbox) -> None:
        super().__init__(memory)
        self.transport = transport
        self._inbox = inbox
        self._payload: Content = b""

    async def recv(self) -> Message:
        """The next message."""
        self._payload = b""
        header, self._payload, self.arrival_s = await self._inbox.get()
        return Message(header, len(self._payload))

    async def _move(self, fetch: Fetch) -> None:
        """Copy the last message's payload."""
        payload, self._payload = self._payload, b""
        if isinstance(payload, bytes | memoryview):
            fetch.write(memoryview(payload))
        else:
            fetch.write_on_device(lambda region: payload[region.offset : sum(region)], [Region(0, len(payload))])
