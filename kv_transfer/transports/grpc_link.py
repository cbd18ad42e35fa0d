"""A gRPC stream as a link, the same at both ends.

The link uses gRPC's synchronous API with two threads: one takes frames from `GrpcLink.outgoing`, one runs
`GrpcLink.read`. The threads and the event loop share a thread-safe queue and `call_soon_threadsafe`. `grpc.aio` is no
alternative: several of its loops in one process disturb each other's poller, and the control server has one already.

Messages travel as frames, which are bytes to gRPC. The first frame of a message has the lengths of header and payload
(4 bytes each, little endian), the header, and the beginning of the payload; further frames have only payload. Frames
have at most about 2 MiB, because gRPC is slower with larger ones.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue

import grpc

from kv_transfer.base import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, NOTHING, Message, check_sizes
from kv_transfer.fetch import Payload
from kv_transfer.memory import Memory
from kv_transfer.pending_peers import MAX_HELLO_BYTES
from kv_transfer.transports.inbox import WINDOW_BYTES, Arrived, InboxLink, again
from pdserve.core.errors import PeerLost, TransferTimeout

FRAME_BYTES = 2 * 2**20
_FLUSH_S = 1.0
_LENGTHS = struct.Struct("<II")


def encode(header: bytes, payload: Payload) -> Iterator[bytes]:
    """The frames of one message. Reads the payload's parts frame by frame."""
    size = check_sizes(header, payload)
    pieces: list[bytes | memoryview] = [_LENGTHS.pack(len(header), size), header]
    room = FRAME_BYTES
    for part in payload.parts:
        rest = memoryview(part).cast("B")
        while rest.nbytes:
            if not room:
                yield b"".join(pieces)
                pieces, room = [], FRAME_BYTES
            pieces.append(rest[:room])
            rest, room = rest[room:], room - min(room, rest.nbytes)
    yield b"".join(pieces)


def decode(frames: Iterable[bytes], check: Callable[[int, int], None] = lambda *_: None) -> Iterator[Arrived]:
    """The messages in a stream of frames. ValueError if the frames are malformed. The payload of a message of one frame
    is a view of the frame. ``check`` gets the sizes of header and payload before memory is allocated for the message,
    and may raise ValueError."""
    stream = iter(frames)
    for frame in stream:
        data = memoryview(frame)
        if data.nbytes < _LENGTHS.size:
            raise ValueError("a message without lengths")
        header_size, size = _LENGTHS.unpack_from(data)
        if header_size > MAX_HEADER_BYTES or size > MAX_PAYLOAD_BYTES:
            raise ValueError(f"a message of {header_size} + {size} bytes")
        check(header_size, size)
        start = _LENGTHS.size + header_size
        header, payload = bytes(data[_LENGTHS.size : start]), data[start:]
        if len(header) < header_size or payload.nbytes > size:
            raise ValueError("a message whose lengths are wrong")
        yield header, payload if payload.nbytes == size else _gather(payload, size, stream)


def _gather(first: memoryview, size: int, stream: Iterator[bytes]) -> memoryview:
    whole = memoryview(bytearray(size))
    whole[: first.nbytes] = first
    filled = first.nbytes
    while filled < size:
        data = memoryview(next(stream, b""))
        if not 0 < data.nbytes <= size - filled:
            raise ValueError("a message that ends early or late")
        whole[filled : filled + data.nbytes] = data
        filled += data.nbytes
    return whole


class GrpcLink(InboxLink):
    """A stream to ``peer``. ``on_end`` is called on the loop when the stream has ended. The owner sets ``cancel``,
    which ends the RPC."""

    codes = True

    def __init__(
        self,
        memory: Memory,
        loop: asyncio.AbstractEventLoop,
        peer: str,
        timeout_s: float,
        on_end: Callable[[GrpcLink], None],
    ) -> None:
        super().__init__("grpc_stream", memory)
        self._loop, self._peer, self._timeout_s, self._on_end = loop, peer, timeout_s, on_end
        self._frames: SimpleQueue[bytes | None] = SimpleQueue()
        self._queued_bytes = 0
        self._taken = asyncio.Event()
        # The bytes that the reading thread has passed to the loop, which limit it, and whether they still do.
        self._unread_bytes, self._limited = 0, True
        self._read_some = threading.Condition()
        self._gone: PeerLost | None = None
        self._over = asyncio.Event()
        self.cancel: Callable[[], object] = lambda: None
        self.refused = ""
        """The reason to send to a pending peer whose link was cut."""

    async def send(self, header: bytes, payload: Payload = NOTHING) -> None:
        """Queue the message's frames for the sending thread, each when it fits into the window."""
        begun = False
        try:
            async with asyncio.timeout(self._timeout_s):
                for frame in encode(header, payload):
                    while not self._gone and self._queued_bytes and self._queued_bytes + len(frame) > WINDOW_BYTES:
                        self._taken.clear()
                        await self._taken.wait()
                    if self._gone is not None:
                        raise again(self._gone)
                    begun = True
                    self._queued_bytes += len(frame)
                    self._frames.put(frame)
            begun = False
        except TimeoutError:
            raise TransferTimeout(f"{self._peer} took nothing for {self._timeout_s} s (grpc_stream)") from None
        finally:
            if begun:  # an incomplete message, whose end the peer could not find
                self.cancel()

    async def recv(self) -> Message:
        """The next message."""
        message = await super().recv()
        self._note_read(len(message.header) + message.size)
        return message

    @property
    def gone(self) -> bool:
        """Whether sending has become impossible."""
        return self._gone is not None

    async def wait_ended(self) -> None:
        """Wait until the stream has ended."""
        await self._over.wait()

    def cut(self, why: str) -> None:
        """Cancel the RPC. gRPC has its own copies of the payloads that were sent."""
        self._lose(why)
        if self._pending_peer is not None:
            self.refused = why
            self._frames.put(None)  # ends the RPC with that reason
        else:
            self.cancel()

    async def aclose(self) -> None:
        """Send the queued frames and half-close. Cancel the RPC if the peer does not close within a second."""
        self._gone = self._gone or PeerLost(f"the link to {self._peer} was closed here (grpc_stream)")
        self._end(self._gone, discard=True)
        self._note_read(0, limited=False)
        self._taken.set()
        self._frames.put(None)
        if self._pending_peer is not None:
            self.cancel()
        try:
            async with asyncio.timeout(_FLUSH_S):
                await self._over.wait()
        except TimeoutError:
            self.cancel()
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            self.on_closed(self)

    def outgoing(self) -> Iterator[bytes]:
        """The frames to send until the link closes. A thread of gRPC iterates over them."""
        while (frame := self._frames.get()) is not None:
            self.post(self._sent, len(frame))
            yield frame

    def read(self, frames: Iterable[bytes]) -> None:
        """Read the peer's frames until the stream ends. The body of a thread."""
        why = "the peer closed the link"
        num_messages = 0

        def check(header_size: int, size: int) -> None:
            nonlocal num_messages
            num_messages += 1
            if self._pending_peer is not None and (num_messages > 1 or header_size > MAX_HELLO_BYTES or size):
                what = f"message {num_messages}, of {header_size} + {size} bytes,"
                raise ValueError(f"{what} before its introduction")

        try:
            for header, payload in decode(frames, check):
                self._await_room(len(header) + len(payload))
                self.post(self._push, (header, payload))
        except grpc.RpcError as error:
            details = getattr(error, "details", None)  # missing in the RpcError of a server's stream
            why = (details() if details else None) or "the stream broke"
            error.__traceback__ = None  # at a client, the error is the call: its traceback would form a cycle
        except ValueError as error:
            why = f"the peer sent a malformed message: {error}"
            self.cancel()
        finally:
            self.terminated(why)
            self.post(self._finish)

    def terminated(self, why: str = "the peer is gone") -> None:
        """Stop sending: the RPC has ended. `read` may still have messages to read. May be called in any thread."""
        self._frames.put(None)
        self.post(self._lose, why)

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Run ``function`` on the link's loop, from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _sent(self, size: int) -> None:
        self._queued_bytes -= size
        self._taken.set()

    def _lose(self, why: str) -> None:
        self._gone = self._gone or PeerLost(f"{self._peer}: {why} (grpc_stream)")
        self._taken.set()

    def _await_room(self, size: int) -> None:
        """Wait in the reading thread until ``size`` more bytes fit into the window."""
        with self._read_some:
            self._read_some.wait_for(
                lambda: not (self._limited and self._unread_bytes and self._unread_bytes + size > WINDOW_BYTES)
            )
            self._unread_bytes += size

    def _note_read(self, size: int, *, limited: bool = True) -> None:
        with self._read_some:
            self._unread_bytes -= size
            self._limited = self._limited and limited
            self._read_some.notify()

    def _finish(self) -> None:
        if self._gone is not None:
            self._end(self._gone)
        self._over.set()
        self.introduced()
        self._on_end(self)
