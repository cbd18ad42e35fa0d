"""A stream socket on the event loop. Bytes move between the socket and their memory, without another copy."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from kv_transfer.fetch import Fetch
from pdserve.core.errors import PeerLost, TransferTimeout

_READ_AHEAD = 64 * 2**10
_MAX_PARTS = 512  # in one system call, which accepts 1024
_TURN_BYTES = 8 * 2**20  # moved before other tasks of the loop run
_WAKE_BYTES = 512 * 2**10  # a receiver is woken when this much of a payload has arrived
_SLOW_S = 0.05  # after a longer wait, a receiver is woken for each packet
_POLL_S = 200e-6  # how long a socket is polled while `expects_more`
_CLOSE_S = 1.0
_SCRATCH_BYTES = 256 * 2**10


class SocketStream:
    """Reads and writes exact numbers of bytes. ``peer`` and ``transport`` appear in error messages. ``timeout_s``
    bounds a write that makes no progress."""

    def __init__(self, connection: socket.socket, peer: str, transport: str, timeout_s: float) -> None:
        connection.setblocking(False)
        self._socket, self._peer, self._transport, self._timeout_s = connection, peer, transport, timeout_s
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(_READ_AHEAD)
        self._ahead = memoryview(b"")  # the part of the buffer that was received and not read yet
        # Texts, because errors keep the frames through which they were raised, and with them this stream's memory.
        self._lost = ""
        self._unwritable = ""
        self._waiters: set[asyncio.Future[None]] = set()
        self._turn = 0
        self._low_water = 1
        self.expects_more = False
        """Whether more bytes are likely to arrive at once. If so, the socket is polled for a moment, because waking the
        task takes longer than most gaps in a transfer."""

    @property
    def socket(self) -> socket.socket:
        """The socket."""
        return self._socket

    def lose(self, why: object) -> PeerLost:
        """Stop all reading and writing, and return the error. The first reason is kept."""
        self._lost = self._lost or self._told(why)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        return PeerLost(self._lost)

    def cut(self, why: str) -> None:
        """Shut the connection down at once, at both ends."""
        self.lose(why)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def write_now(self, data: bytes) -> int:
        """Write as much of ``data`` as the socket takes at once, and return the number of bytes. The caller must
        `write` the rest next. PeerLost as from `write`."""
        if lost := self._lost or self._unwritable:
            raise PeerLost(lost)
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._unwritable = self._told(error.strerror)
            raise PeerLost(self._unwritable) from None

    async def write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Write all of ``parts``. PeerLost, or TransferTimeout without progress.

        An incomplete write ends all writing, because the peer could not tell where the next message begins. Reading
        remains possible."""
        views = deque(view for part in parts if (view := memoryview(part).cast("B")).nbytes)
        try:
            while views:
                if self._turn >= _TURN_BYTES:
                    self._turn = 0
                    await asyncio.sleep(0)
                if lost := self._lost or self._unwritable:
                    raise PeerLost(lost)
                try:
                    sent = self._socket.sendmsg(list(islice(views, _MAX_PARTS)))
                except BlockingIOError:
                    async with asyncio.timeout(self._timeout_s):
                        await self._until(self._loop.add_writer, self._loop.remove_writer)
                    continue
                self._turn += sent
                while sent:
                    if sent < views[0].nbytes:
                        views[0] = views[0][sent:]
                        break
                    sent -= views.popleft().nbytes
        except TimeoutError:
            raise TransferTimeout(f"{self._peer} took nothing for {self._timeout_s} s ({self._transport})") from None
        except OSError as error:
            self._unwritable = self._told(error.strerror)
            raise PeerLost(self._unwritable) from None
        finally:
            if views and not self._unwritable:
                self._unwritable = self._told("a message was not written completely")
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)

    @property
    def ahead(self) -> memoryview:
        """The bytes that were received and not read yet. Valid until the next call."""
        return self._ahead

    def drop(self, size: int) -> None:
        """The first ``size`` bytes of `ahead` have been read."""
        self._ahead = self._ahead[size:]

    async def read_ahead(self, size: int) -> None:
        """Wait until `ahead` has at least ``size`` bytes. Not for payloads: see `fill`. PeerLost if they do not
        come."""
        while (kept := self._ahead.nbytes) < size:
            if kept or len(self._buffer) < size:
                buffer = self._buffer if len(self._buffer) >= size else bytearray(size)
                buffer[:kept] = self._ahead
                self._buffer = buffer
            room = [memoryview(self._buffer)[kept:]]
            count = await self._receive(lambda: room)  # noqa: B023 - called at once
            self._ahead = memoryview(self._buffer)[: kept + count]

    async def fill(self, fetch: Fetch, size: int) -> int:
        """Read the next ``size`` bytes, at most what ``fetch`` lacks, into it, unless it is cancelled. Returns the
        number of bytes moved."""
        before = fetch.left
        end = max(0, before - size)  # what it lacks afterwards
        if self._ahead.nbytes and not fetch.cancelled:
            count = min(self._ahead.nbytes, before - end)
            fetch.write(self._ahead[:count])
            self._ahead = self._ahead[count:]
        wake_bytes = _WAKE_BYTES
        try:
            while fetch.left > end and not fetch.cancelled:
                # Waking for each packet costs more than the copy. On a slow link it shows that the peer is alive.
                self._wake_at(min(fetch.left - end, wake_bytes))
                asked_s = self._loop.time()
                # `views` is called after each wait, because the fetch may be cancelled meanwhile.
                views = fetch.views if not end else lambda: _first(fetch.views(), fetch.left - end)
                fetch.advance(await self._receive(views))
                if self._loop.time() - asked_s > _SLOW_S:
                    wake_bytes = 1
        finally:
            self._wake_at(1)
        return before - fetch.left

    async def skip(self, size: int) -> None:
        """Read and drop the next ``size`` bytes."""
        scratch = memoryview(bytearray(min(size, _SCRATCH_BYTES)))
        while size:
            if self._ahead.nbytes:
                count = min(self._ahead.nbytes, size)
                self._ahead = self._ahead[count:]
            else:
                rest = [scratch[:size]]
                count = await self._receive(lambda: rest)  # noqa: B023 - it is called at once
            size -= count

    async def aclose(self, *, at_once: bool = False) -> None:
        """Close the connection: shut writing down, and wait up to a second for the peer to do the same. An earlier
        close could drop bytes that the peer has not read. ``at_once`` does not wait."""
        if self._socket.fileno() < 0:
            return
        self.lose("the link was closed here")
        scratch = bytearray(0 if at_once else _SCRATCH_BYTES)
        try:
            await asyncio.sleep(0)  # tasks that wait for the socket return first
            self._socket.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(_CLOSE_S):
                more = 0 if at_once else 1
                while more:
                    try:
                        more = self._socket.recv_into(scratch)
                        await asyncio.sleep(0)
                    except BlockingIOError:
                        await self._until(self._loop.add_reader, self._loop.remove_reader, although_lost=True)
        except (OSError, TimeoutError):
            pass  # the peer is gone, or has not closed in time
        finally:
            if (fd := self._socket.fileno()) >= 0:
                self._loop.remove_reader(fd)
                self._loop.remove_writer(fd)
            self._socket.close()
            self._buffer, self._ahead = bytearray(), memoryview(b"")

    async def _receive(self, views: Callable[[], list[memoryview]]) -> int:
        """Receive into ``views()``, which is called immediately before each attempt. Returns the number of bytes, which
        is 0 if there are no views."""
        poll_until_s = self._loop.time() + _POLL_S if self.expects_more else 0.0
        while True:
            if self._turn >= _TURN_BYTES:  # with a fast peer, the socket never blocks, and other tasks would not run
                self._turn = 0
                await asyncio.sleep(0)
            if self._lost:
                raise PeerLost(self._lost)
            wanted = views()[:_MAX_PARTS]
            if not wanted:
                return 0
            try:
                count = self._socket.recvmsg_into(wanted)[0]
            except BlockingIOError:
                if poll_until_s and self._loop.time() < poll_until_s:
                    await asyncio.sleep(0)
                else:
                    await self._until(self._loop.add_reader, self._loop.remove_reader)
                continue
            except OSError as error:
                raise self.lose(error.strerror) from None
            if not count:
                raise self.lose("the peer closed the link")
            self._turn += count
            return count

    def _wake_at(self, num_bytes: int) -> None:
        """Make the socket readable when ``num_bytes`` have arrived, or at its end."""
        if num_bytes != self._low_water:
            self._low_water = num_bytes
            with contextlib.suppress(OSError):  # a closed socket shows when it is read
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    async def _until(
        self,
        add: Callable[[int, Callable[[], object]], None],
        remove: Callable[[int], object],
        *,
        although_lost: bool = False,
    ) -> None:
        """Wait until the socket is ready, or the stream is lost."""
        if self._lost and not although_lost:
            return
        fd, waiter = self._socket.fileno(), self._loop.create_future()
        self._waiters.add(waiter)
        add(fd, lambda: None if waiter.done() else waiter.set_result(None))
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
            if self._socket.fileno() == fd:
                remove(fd)

    def _told(self, why: object) -> str:
        return f"{self._peer}: {why} ({self._transport})"


def _first(views: list[memoryview], size: int) -> list[memoryview]:
    """The first ``size`` bytes of ``views``."""
    first = []
    for view in views:
        if size <= 0:
            break
        first.append(view[:size])
        size -= view.nbytes
    return first
