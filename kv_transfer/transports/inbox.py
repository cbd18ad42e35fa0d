"""What every link needs in the same way: the messages that arrived, in order, and then the reason why it ended."""

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
"""A payload that arrived whole, on the host or on a device."""

WINDOW_BYTES = 8 * 2**20
"""How much may wait in one direction of a link before its sender has to (one bigger message always may)."""


def check_sizes(header: bytes, payload: Payload) -> int:
    """Bytes of the payload; ValueError if it or the header is larger than transports carry."""
    size = payload.size
    if size > MAX_PAYLOAD_BYTES or len(header) > MAX_HEADER_BYTES:
        raise ValueError(
            f"a message of {len(header)} + {size} bytes; at most {MAX_HEADER_BYTES} + {MAX_PAYLOAD_BYTES} travel"
        )
    return size


def again(error: TransferError) -> TransferError:
    """The same error, to be raised. An error keeps the frames that it was raised through, and so must not be kept by
    what those frames hold."""
    return type(error)(*error.args)


class Arrived(NamedTuple):
    """A message whose payload is here, and how long its bytes were under way as far as this end could see."""

    header: bytes
    payload: Content
    arrival_s: float = 0.0


class Inbox:
    """Received messages of one link, for one task that takes them. Belongs to one event loop."""

    def __init__(self) -> None:
        self._messages: deque[Arrived] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self.ended: TransferError | None = None

    def push(self, message: Arrived) -> None:
        """Add a message now; one that comes after the end is dropped."""
        if self.ended is None:
            self._messages.append(message)
            self._bytes += len(message.payload)
            self._changed.set()

    async def put(self, message: Arrived) -> None:
        """Add a message once there is room for it; raises what `end` was given if the inbox ends meanwhile."""
        while self.ended is None and self._bytes and self._bytes + len(message.payload) > WINDOW_BYTES:
            self._room.clear()
            await self._room.wait()
        if self.ended is not None:
            raise again(self.ended)
        self.push(message)

    async def get(self) -> Arrived:
        """The next message; once all are taken and the inbox has ended, raises what `end` was given."""
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
        """Nothing comes any more, because of ``error`` (the first one counts); ``discard`` drops what waits."""
        if discard:
            self._messages.clear()
            self._bytes = 0
        self.ended = self.ended or error
        self._changed.set()
        self._room.set()


class InboxLink(KVLink):
    """A link whose messages arrive whole, in memory of their own: they are copied once more when they are fetched."""

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
        """Copy the payload of the last message."""
        payload, self._payload = self._payload, b""
        if isinstance(payload, bytes | memoryview):
            fetch.write(memoryview(payload))
        else:
            fetch.write_on_device(lambda region: payload[region.offset : sum(region)], [Region(0, len(payload))])
