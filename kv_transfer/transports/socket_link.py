"""Messages on a stream socket.

A frame has its kind, the header's length, the payload's length and the number of references (little endian), followed
by the header, and by either the references (offset and length, 8 bytes each, into memory that the peer can read) or the
payload. The peer answers `_FLUSH` with `_FLUSHED` when it has handled all frames before it.
"""

from __future__ import annotations

import asyncio
import select
import struct
from collections import deque
from collections.abc import Sequence

from kv_transfer.base import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, NOTHING, KVLink, Message, check_sizes
from kv_transfer.fetch import Fetch, Payload
from kv_transfer.memory import Memory
from kv_transfer.pending_peers import MAX_HELLO_BYTES
from kv_transfer.transports.socket_stream import SocketStream
from pdserve.core.errors import PeerLost, TransferError
from pdserve.core.kv_layout import Region

_FRAME = struct.Struct("<BIQI")
_REFERENCE = struct.Struct("<QQ")
_MESSAGE, _FLUSH, _FLUSHED = range(3)
FIRST_OWN_SIGNAL = 3
"""The first kind of signal (a frame without header and payload) for use by subclasses."""
MAX_REFERENCES = 2**16
_REFERENCES_AT_ONCE = 2**10


class SocketLink(KVLink):
    """A link whose payloads travel over the socket. In subclasses, a message may refer to regions of the sender's
    memory instead (`_refer`), which the receiver fetches (`_fetch_references`).

    ``peer_size`` is the size of the peer's memory, in which the references must lie; 0 allows no references."""

    def __init__(self, transport: str, memory: Memory, stream: SocketStream, *, peer_size: int = 0) -> None:
        super().__init__(memory)
        self.transport, self.codes = transport, not peer_size
        self._stream = stream
        self._writing = asyncio.Lock()
        self._left = 0  # of an inline payload
        self._peer_size = peer_size
        self._references: list[Region] = []
        self._referred = self._dealt_with = 0  # messages sent by reference, and those of them that the peer has handled
        self._flushes: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._hang_up: select.poll | None = None
        self._closed = False

    async def send(self, header: bytes, payload: Payload = NOTHING) -> None:
        """Write one frame."""
        size = check_sizes(header, payload)
        references = self._refer(payload) if size else ()
        count = len(references)
        frame = _FRAME.pack(_MESSAGE, len(header), size, count) + header
        for reference in references:
            frame += _REFERENCE.pack(*reference)
        parts = [] if count else payload.parts
        async with self._writing:
            self._referred += bool(count)  # under the lock: a flush covers exactly the messages before it
            written = 0 if parts else self._stream.write_now(frame)
            if written < len(frame):
                await self._stream.write([memoryview(frame)[written:], *parts])

    async def drained(self) -> None:
        """Wait until the peer has handled the messages that were sent by reference."""
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
        """Shut the socket down. What the peer reads afterwards does not count (see `_move`)."""
        self._stream.cut(why)
        self._let_go()

    async def recv(self) -> Message:
        """The next message."""
        stream = self._stream
        self._references = []
        if self._left:
            left, self._left = self._left, 0
            await stream.skip(left)
        try:
            while True:
                if stream.ahead.nbytes < _FRAME.size:
                    await stream.read_ahead(_FRAME.size)
                kind, header_size, size, count = _FRAME.unpack_from(stream.ahead)
                self._check_frame(kind, header_size, size, count)
                head = _FRAME.size + header_size
                if stream.ahead.nbytes < head:
                    await stream.read_ahead(head)
                header = bytes(stream.ahead[_FRAME.size : head])
                stream.drop(head)
                if kind == _MESSAGE:
                    break
                await self._on_signal(kind)
                await asyncio.sleep(0)  # a peer that sends many signals must not delay the other links
            stream.expects_more = size > 0
            if count:
                await self._read_references(count, size)
            else:
                self._left = size
        except PeerLost:
            self._let_go()
            raise
        return Message(header, size)

    async def _move(self, fetch: Fetch) -> None:
        """Move the payload from the socket, or from the peer's memory. A read of the peer's memory counts only if the
        link is still open afterwards: the peer closes the link before it reuses the memory."""
        if self._left:
            self._left -= await self._stream.fill(fetch, self._left)
        elif self._references:
            references, self._references = self._references, []
            await self._fetch_references(references, fetch)
            self._check_open()

    def _refer(self, payload: Payload) -> Sequence[Region]:
        """The references to send instead of the payload, or none."""
        return ()

    async def _fetch_references(self, references: Sequence[Region], fetch: Fetch) -> None:
        """Fetch regions of the peer's memory. PeerLost on a link that shares none."""
        raise self._stream.lose("the peer refers to memory that it does not share")

    async def aclose(self) -> None:
        """Close the socket."""
        self._closed = True
        try:
            await self._stream.aclose(at_once=self._pending_peer is not None)
        finally:
            self._let_go()
            self._references = []
            self.introduced()
            self.on_closed(self)

    def _check_frame(self, kind: int, header_size: int, size: int, count: int) -> None:
        """Raise PeerLost for a frame that is too large, or not allowed, before memory is allocated for it."""
        why = ""
        if header_size > MAX_HEADER_BYTES or size > MAX_PAYLOAD_BYTES:
            why = "which is too large"
        elif count > min(MAX_REFERENCES, size) or (count and not self._peer_size):
            why = f"in {count} references"
        elif self._pending_peer is not None and (kind != _MESSAGE or header_size > MAX_HELLO_BYTES or size):
            why = "before its introduction"
        if why:
            raise self._stream.lose(f"the peer announced a message of {header_size} + {size} bytes, {why}")

    async def _read_references(self, count: int, size: int) -> None:
        """Read and check ``count`` references, which cover ``size`` bytes of the peer's memory."""
        stream, references = self._stream, self._references
        while count:
            some = min(count, _REFERENCES_AT_ONCE) * _REFERENCE.size
            if stream.ahead.nbytes < some:
                await stream.read_ahead(some)
            for offset, length in _REFERENCE.iter_unpack(stream.ahead[:some]):
                size -= length
                if not length or size < 0:
                    raise stream.lose("the peer sent references that do not match the payload")
                if offset + length > self._peer_size:
                    raise stream.lose(
                        f"the peer refers to bytes {offset} to {offset + length} of its {self._peer_size}"
                    )
                references.append(Region(offset, length))
            stream.drop(some)
            count -= some // _REFERENCE.size
        if size:
            raise stream.lose("the peer sent references that do not match the payload")

    def _check_open(self) -> None:
        """Raise PeerLost if the peer has closed the link. It may have reused the memory that was read."""
        if self._hang_up is None:
            self._hang_up = select.poll()
            self._hang_up.register(self._stream.socket, select.POLLRDHUP)
        if self._hang_up.poll(0):
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
        """End all waits for the peer: the link is lost, and what the peer reads does not count."""
        self._dealt_with = self._referred
        for _, flushed in self._flushes:
            if not flushed.done():
                flushed.set_result(None)
        self._flushes.clear()


def _signal(kind: int) -> bytes:
    return _FRAME.pack(kind, 0, 0, 0)
