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
from collections.abc import Sequence

from core.errors import PeerLost, TransferError
from kv_transfer.base import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, Buffer, KVLink, Message
from kv_transfer.shared_memory import PeerMemory, SharedMemory
from kv_transfer.sink import Sink
from kv_transfer.transports.inbox import check_sizes
from kv_transfer.transports.socket_stream import SocketStream

_FRAME = struct.Struct("<BIQI")
_REFERENCE = struct.Struct("<QQ")
_MESSAGE, _FLUSH, _FLUSHED = range(3)
_MAX_REFERENCES = 2**16


class SocketLink(KVLink):
    """With ``memory``, payloads that lie in it travel by reference, and the peer copies them out of its own mapping;
    ``peer_memory`` is the peer's, mapped here."""

    def __init__(
        self,
        transport: str,
        stream: SocketStream,
        memory: SharedMemory | None = None,
        peer_memory: PeerMemory | None = None,
    ) -> None:
        self.transport = transport
        self._stream, self._memory, self._peer_memory = stream, memory, peer_memory
        self._writing = asyncio.Lock()
        self._left = 0  # of an inline payload
        self._references: list[memoryview] = []
        self._referred = self._dealt_with = 0  # messages sent by reference, and those the peer will not read again
        self._flushes: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `aclose` has been called here."""
        return self._closed

    async def send(self, header: bytes, payload: Sequence[Buffer] = ()) -> None:
        """Write one frame."""
        parts = [part for part in payload if memoryview(part).nbytes]
        size = check_sizes(header, parts)
        references = self._refer(parts)
        count = len(references) // _REFERENCE.size
        frame = _FRAME.pack(_MESSAGE, len(header), size, count) + header + references
        self._referred += bool(count)
        async with self._writing:
            await self._stream.write([frame] if count else [frame, *parts])

    async def drained(self) -> None:
        """Wait until the peer has dealt with what was sent by reference."""
        if self._dealt_with == self._referred:
            return
        flushed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            async with self._writing:
                self._flushes.append((self._referred, flushed))
                await self._stream.write([_FRAME.pack(_FLUSH, 0, 0, 0)])
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
                if header_size > MAX_HEADER_BYTES or size > MAX_PAYLOAD_BYTES or count > _MAX_REFERENCES:
                    raise self._stream.lose(f"the peer announced a message of {header_size} + {size} bytes")
                header = bytes(await self._stream.read(header_size))
                if kind == _MESSAGE:
                    break
                await self._on_flush(kind)
            if count:
                self._map(await self._stream.read(count * _REFERENCE.size), size)
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
        if not self._references:
            return
        for view in self._references:
            with view:  # released at once: an error's traceback would keep it, and the peer's memory mapped
                sink.write(view)
        self._references.clear()
        poll = select.poll()
        poll.register(self._stream.socket, select.POLLRDHUP)
        if poll.poll(0):
            raise self._stream.lose("the peer closed the link while its memory was read")

    async def aclose(self) -> None:
        """Close the socket, and let go of the peer's memory."""
        self._closed = True
        await self._stream.aclose()
        self._let_go()
        self._references.clear()
        if self._peer_memory is not None:
            self._peer_memory.close()

    def _refer(self, parts: Sequence[Buffer]) -> bytes:
        """The references to ``parts``; none unless all of them lie in the shared memory."""
        if self._memory is None or not parts or len(parts) > _MAX_REFERENCES:
            return b""
        references = bytearray()
        for part in parts:
            offset = self._memory.offset(part)
            if offset is None:
                return b""
            references += _REFERENCE.pack(offset, memoryview(part).nbytes)
        return bytes(references)

    def _map(self, references: memoryview, size: int) -> None:
        pairs = list(_REFERENCE.iter_unpack(references))
        if self._peer_memory is None or sum(length for _, length in pairs) != size:
            raise self._stream.lose("the peer refers to memory in a way that makes no sense")
        try:
            self._references = [self._peer_memory.view(offset, length) for offset, length in pairs]
        except TransferError as error:
            raise self._stream.lose(error) from None

    async def _on_flush(self, kind: int) -> None:
        if kind == _FLUSH:
            async with self._writing:
                await self._stream.write([_FRAME.pack(_FLUSHED, 0, 0, 0)])
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
