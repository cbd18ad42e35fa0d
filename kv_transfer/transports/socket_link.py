"""Messages on a stream socket, for every transport that has one.

A frame is its kind, the header's length, the payload's length and the number of references (little endian); then the
header; then either the references (offset and length, 8 bytes each, into memory that the peer has mapped) or the
payload itself. `_FLUSH` asks the peer to say `_FLUSHED` when it has dealt with everything before.
"""

from __future__ import annotations

import asyncio
import select
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from kv_transfer.base import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, Buffer, KVLink, Message
from kv_transfer.sink import Sink, Stretch
from kv_transfer.transports.inbox import check_sizes
from kv_transfer.transports.socket_stream import SocketStream
from kv_transfer.transports.strangers import MAX_HELLO_BYTES, Stranger
from pdserve.core.errors import PeerLost, TransferError

_FRAME = struct.Struct("<BIQI")
_REFERENCE = struct.Struct("<QQ")
_MESSAGE, _FLUSH, _FLUSHED = range(3)
FIRST_OWN_SIGNAL = 3
"""Signals (frames without anything behind them) from here on mean what a link's own class says."""
_MAX_REFERENCES = 2**16
_REFERENCES_AT_ONCE = 2**10


class OwnMemory(Protocol):
    """What this process shares."""

    def offset(self, part: Stretch) -> int | None:
        """Where ``part`` begins in it; None if it lies elsewhere."""
        ...


class OthersMemory(Protocol):
    """What the peer shares: ``size`` bytes."""

    size: int

    def view(self, offset: int, size: int) -> Stretch:
        """A part of it, which must not reach beyond."""
        ...

    def finish(self) -> None:
        """Return when all copies out of it are done."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class SocketLink(KVLink):
    """With ``memory``, payloads that lie in it travel by reference, and the peer copies them out of its own mapping;
    ``peer_memory`` is the peer's, mapped here. ``on_device``: both are on a GPU, and all payloads lie in them."""

    def __init__(
        self,
        transport: str,
        stream: SocketStream,
        memory: OwnMemory | None = None,
        peer_memory: OthersMemory | None = None,
        *,
        on_device: bool = False,
    ) -> None:
        self.transport, self.on_device = transport, on_device
        self._stream, self._memory, self._peer_memory = stream, memory, peer_memory
        self._writing = asyncio.Lock()
        self._left = 0  # of an inline payload
        self._peer_size = 0 if peer_memory is None else peer_memory.size  # what references may lie in
        self._references: list[tuple[int, int]] = []
        self._referred = self._dealt_with = 0  # messages sent by reference, and those the peer will not read again
        self._flushes: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._closed = False
        self._stranger: Stranger | None = None
        self.on_closed: Callable[[SocketLink], object] = lambda _: None

    @property
    def closed(self) -> bool:
        """Whether `aclose` has been called here."""
        return self._closed

    def strange(self, stranger: Stranger) -> None:
        """It was accepted, and its peer has yet to introduce itself."""
        self._stranger, stranger.cut = stranger, self.cut

    def introduced(self) -> None:
        """See `KVLink.introduced`."""
        if self._stranger is not None:
            self._stranger.leave()
            self._stranger = None

    async def send(self, header: bytes, payload: Sequence[Buffer] = ()) -> None:
        """Write one frame."""
        size = check_sizes(header, payload)
        parts = [part for part in payload if len(part)]
        references = self._refer(parts)
        count = len(references) // _REFERENCE.size
        if self.on_device and parts and not count:
            raise ValueError(f"a payload outside the pool ({self.transport})")
        frame = _FRAME.pack(_MESSAGE, len(header), size, count) + header + references
        async with self._writing:
            self._referred += bool(count)  # here, so that a flush counts what goes before it and nothing else
            await self._stream.write([frame] if count else [frame, *parts])

    async def drained(self) -> None:
        """Wait until the peer has dealt with what was sent by reference."""
        if self._dealt_with == self._referred and not self._writing.locked():
            return
        flushed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            async with self._writing:
                self._flushes.append((self._referred, flushed))
                await self._stream.write([_signal(_FLUSH)])
            await flushed
        except TransferError as error:
            self.cut(str(error))

    def cut(self, why: str) -> None:
        """Shut the socket down; from then on the peer cannot take anything for good any more (see `take`)."""
        self._stream.cut(why)
        self._let_go()

    async def recv(self) -> Message:
        """The next message."""
        self._references.clear()
        if self._left:
            left, self._left = self._left, 0
            await self._stream.skip(left)
        try:
            while True:
                kind, header_size, size, count = _FRAME.unpack(await self._stream.read(_FRAME.size))
                self._check_frame(kind, header_size, size, count)
                header = bytes(await self._stream.read(header_size))
                if kind == _MESSAGE:
                    break
                await self._on_signal(kind)
            if count:
                self._references = await self._read_references(count, size)
            else:
                self._left = size
        except PeerLost:
            self._let_go()
            raise
        return Message(header, size)

    async def take(self, sink: Sink) -> None:
        """Move the payload: from the socket, or from the peer's memory. That counts only if the peer still had the link
        open when the copy was done: after that it may use the memory for something else."""
        if self._left:
            self._left -= await self._stream.fill(sink)
            return
        if not self._references or self._peer_memory is None:
            return
        self._copy(self._peer_memory, sink)
        self._references.clear()
        self._check_open()

    def _copy(self, memory: OthersMemory, sink: Sink) -> None:
        """Without a view in the frame of `take`: an error's traceback would keep it, and that the peer's memory."""
        for offset, length in self._references:
            sink.write(memory.view(offset, length))
        memory.finish()

    async def aclose(self) -> None:
        """Close the socket, and let go of the peer's memory."""
        self._closed = True
        stranger = self._stranger
        try:
            await self._stream.aclose(at_once=stranger is not None)
        finally:
            self._let_go()
            self._references.clear()
            if self._peer_memory is not None:
                self._peer_memory.close()
            if stranger is not None:
                stranger.leave()
            self.on_closed(self)

    def _refer(self, parts: Sequence[Buffer]) -> bytes:
        """The references to ``parts``; none unless all of them lie in the shared memory."""
        if self._memory is None or not parts or len(parts) > _MAX_REFERENCES:
            return b""
        references = bytearray()
        for part in parts:
            offset = self._memory.offset(part)
            if offset is None:
                return b""
            references += _REFERENCE.pack(offset, len(part))
        return bytes(references)

    def _check_frame(self, kind: int, header_size: int, size: int, count: int) -> None:
        """Before any memory is set aside for it; PeerLost."""
        what = f"a message of {header_size} + {size} bytes"
        if header_size > MAX_HEADER_BYTES or size > MAX_PAYLOAD_BYTES:
            raise self._stream.lose(f"the peer announced {what}")
        if count > min(_MAX_REFERENCES, size) or (count and not self._peer_size):
            raise self._stream.lose(f"the peer announced {what} in {count} references")
        if self._stranger is not None and (kind != _MESSAGE or header_size > MAX_HELLO_BYTES or size):
            raise self._stream.lose(f"the peer announced {what} before it introduced itself")

    async def _read_references(self, count: int, size: int) -> list[tuple[int, int]]:
        """So many, which are ``size`` bytes of the peer's memory; each is checked as it comes."""
        pairs: list[tuple[int, int]] = []
        while len(pairs) < count:
            some = min(count - len(pairs), _REFERENCES_AT_ONCE)
            for offset, length in _REFERENCE.iter_unpack(await self._stream.read(some * _REFERENCE.size)):
                size -= length
                if not length or size < 0:
                    raise self._stream.lose("the peer refers to memory in a way that makes no sense")
                if offset + length > self._peer_size:
                    reach = f"bytes {offset} to {offset + length} of its {self._peer_size}"
                    raise self._stream.lose(f"the peer refers to {reach}")
                pairs.append((offset, length))
        if size:
            raise self._stream.lose("the peer refers to memory in a way that makes no sense")
        return pairs

    def _check_open(self) -> None:
        """PeerLost once the peer has closed the link: what was read of its memory may be something else already."""
        poll = select.poll()
        poll.register(self._stream.socket, select.POLLRDHUP)
        if poll.poll(0):
            raise self._stream.lose("the peer closed the link while its memory was read")

    async def _send_signal(self, kind: int) -> None:
        async with self._writing:
            await self._stream.write([_signal(kind)])

    async def _on_signal(self, kind: int) -> None:
        if kind == _FLUSH:
            await self._send_signal(_FLUSHED)
        elif kind == _FLUSHED and self._flushes:
            self._dealt_with, flushed = self._flushes.popleft()
            if not flushed.done():
                flushed.set_result(None)
        else:
            raise self._stream.lose(f"the peer sent a frame of unknown kind {kind}")

    def _let_go(self) -> None:
        """The link is lost: the peer takes nothing any more that would count."""
        self._dealt_with = self._referred
        for _, flushed in self._flushes:
            if not flushed.done():
                flushed.set_result(None)
        self._flushes.clear()


def _signal(kind: int) -> bytes:
    return _FRAME.pack(kind, 0, 0, 0)
