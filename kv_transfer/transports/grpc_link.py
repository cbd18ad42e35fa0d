"""A gRPC stream as a link, the same at both ends.

The link uses gRPC's synchronous API with two threads: one takes frames from `GrpcLink.outgoing`, one runs
`GrpcLink.read`. The threads and the event loop share a thread-safe queue and `call_soon_threadsafe`. `grpc.aio` is no
alternative: several of its loops in one process disturb each other's poller, and the control server has one already.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue

import grpc

from kv_transfer.base import NOTHING, Message
from kv_transfer.fetch import Payload
from kv_transfer.memory import Memory
from kv_transfer.strangers import MAX_HELLO_BYTES
from kv_transfer.transports.grpc_frame import decode, encode
from kv_transfer.transports.inbox import WINDOW_BYTES, Inbox, InboxLink, again
from pdserve.core.errors import PeerLost, TransferError, TransferTimeout

_FLUSH_S = 1.0


class _Credit:
    """Limits the bytes that the reading thread has passed to the loop; the thread waits in `take`."""

    def __init__(self) -> None:
        self._used = 0
        self._unlimited = False
        self._changed = threading.Condition()

    def take(self, size: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._unlimited or not self._used or self._used + size <= WINDOW_BYTES)
            self._used += size

    def give(self, size: int) -> None:
        with self._changed:
            self._used -= size
            self._changed.notify()

    def lift(self) -> None:
        with self._changed:
            self._unlimited = True
            self._changed.notify()


class GrpcLink(InboxLink):
    """A stream to ``peer``. ``on_end`` is called on the loop when the stream has ended. The owner sets ``cancel``,
    which ends the RPC."""

    def __init__(
        self,
        memory: Memory,
        loop: asyncio.AbstractEventLoop,
        peer: str,
        timeout_s: float,
        on_end: Callable[[GrpcLink], None],
    ) -> None:
        super().__init__("grpc_stream", memory, Inbox())
        self._loop, self._peer, self._timeout_s, self._on_end = loop, peer, timeout_s, on_end
        self._frames: SimpleQueue[bytes | None] = SimpleQueue()
        self._queued_bytes = 0
        self._taken = asyncio.Event()
        self._credit = _Credit()
        self._gone: PeerLost | None = None
        self._over = asyncio.Event()
        self.cancel: Callable[[], object] = lambda: None
        self.refused = ""
        """The reason to send to a stranger whose link was cut."""

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
        self._credit.give(len(message.header) + message.size)
        return message

    @property
    def ended(self) -> TransferError | None:
        """The error with which the stream ended, or None."""
        return self._inbox.ended

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
        if self._stranger is not None:
            self.refused = why
            self._frames.put(None)  # ends the RPC with that reason
        else:
            self.cancel()

    async def aclose(self) -> None:
        """Send the queued frames and half-close. Cancel the RPC if the peer does not close within a second."""
        self._gone = self._gone or PeerLost(f"the link to {self._peer} was closed here (grpc_stream)")
        self._inbox.end(self._gone, discard=True)
        self._credit.lift()
        self._taken.set()
        self._frames.put(None)
        if self._stranger is not None:
            self.cancel()
        try:
            async with asyncio.timeout(_FLUSH_S):
                await self._over.wait()
        except TimeoutError:
            self.cancel()
        except asyncio.CancelledError:
            self.cancel()
            raise

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
            if self._stranger is not None and (num_messages > 1 or header_size > MAX_HELLO_BYTES or size):
                what = f"message {num_messages}, of {header_size} + {size} bytes,"
                raise ValueError(f"{what} before its introduction")

        try:
            for message in decode(frames, check):
                self._credit.take(len(message.header) + len(message.payload))
                self.post(self._inbox.push, message)
        except grpc.RpcError as error:
            details = getattr(error, "details", None)  # missing in the RpcError of a server's stream
            why = (details() if details else None) or "the stream broke"
            error.__traceback__ = None  # at a client, the error is the call: its traceback would form a cycle
        except ValueError as error:
            why = f"the peer sent a malformed message: {error}"
            self.cancel()
        finally:
            self.terminated(why)
            self.post(self._end)

    def terminated(self, why: str = "the peer is gone") -> None:
        """Stop sending: the RPC has ended. `read` may still have messages to read. May be called in any thread."""
        self._frames.put(None)
        self.post(self._lose, why)

    def post(self, function: Callable[..., None], *args: object) -> None:
        """Run ``function`` on the link's loop, from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _sent(self, size: int) -> None:
        self._queued_bytes -= size
        self._taken.set()

    def _lose(self, why: str) -> None:
        self._gone = self._gone or PeerLost(f"{self._peer}: {why} (grpc_stream)")
        self._taken.set()

    def _end(self) -> None:
        if self._gone is not None:
            self._inbox.end(self._gone)
        self._over.set()
        self.introduced()
        self._on_end(self)
