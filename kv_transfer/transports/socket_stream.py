"""A stream socket on the event loop, without a copy of our own: bytes go from and to the memory they belong in."""

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
_MAX_PARTS = 512  # of one system call; the kernel takes 1024
_TURN_BYTES = 8 * 2**20  # moved before other tasks of the loop get their turn
_WAKE_BYTES = 512 * 2**10  # a receiver is woken for at least so much of a payload
_SLOW_S = 0.05  # a receiver that waited longer is woken for each packet
_POLL_S = 200e-6  # how long a socket that is expected to have more is polled
_CLOSE_S = 1.0
_SCRATCH_BYTES = 256 * 2**10


class SocketStream:
    """Reads and writes exact numbers of bytes. ``peer`` and ``transport`` are for messages of errors; ``timeout_s``
    bounds how long a write may go without any progress."""

    def __init__(self, connection: socket.socket, peer: str, transport: str, timeout_s: float) -> None:
        connection.setblocking(False)
        self._socket, self._peer, self._transport, self._timeout_s = connection, peer, transport, timeout_s
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(_READ_AHEAD)
        self._ahead = memoryview(b"")  # of it: bytes that came with others, not asked for yet
        # Texts, not errors: those keep the frames they were raised through, and with them this stream's memory.
        self._lost = ""
        self._unwritable = ""
        self._waiters: set[asyncio.Future[None]] = set()
        self._turn = 0
        self._low_water = 1
        self.expects_more = False
        """Whether the next bytes are likely to come at once. Then the socket is polled for a moment, between other
        tasks of the loop, before it is waited for: to be woken takes longer than most gaps in a transfer."""

    @property
    def socket(self) -> socket.socket:
        """The socket itself, for what is not a byte stream about it."""
        return self._socket

    def lose(self, why: object) -> PeerLost:
        """Nothing moves any more, because of ``why`` (the first reason stays)."""
        self._lost = self._lost or self._told(why)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        return PeerLost(self._lost)

    def cut(self, why: str) -> None:
        """Lose the connection at once, at the peer's end too."""
        self.lose(why)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def write_now(self, data: bytes) -> int:
        """Write as much of ``data`` as the socket takes at once; returns how many bytes. The caller has to `write` the
        rest, before anything else. PeerLost as from `write`."""
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
        """Write all of ``parts``; PeerLost, or TransferTimeout without progress. Whatever ends it before its end ends
        all writing, since the peer could not tell where the next message begins; what the peer has sent can still be
        read."""
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
                self._unwritable = self._told("a message was left unfinished")
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)

    @property
    def ahead(self) -> memoryview:
        """What has come and was not read yet. Valid until the next call."""
        return self._ahead

    def drop(self, size: int) -> None:
        """The first ``size`` bytes of `ahead` have been read."""
        self._ahead = self._ahead[size:]

    async def read_ahead(self, size: int) -> None:
        """Return once `ahead` has ``size`` bytes, a few: payloads go into a `Fetch`. PeerLost if they do not come."""
        while (kept := self._ahead.nbytes) < size:
            if kept or len(self._buffer) < size:
                buffer = self._buffer if len(self._buffer) >= size else bytearray(size)
                buffer[:kept] = self._ahead
                self._buffer = buffer
            room = [memoryview(self._buffer)[kept:]]
            count = await self._receive(lambda: room)  # noqa: B023 - it is called at once
            self._ahead = memoryview(self._buffer)[: kept + count]

    async def fill(self, fetch: Fetch) -> int:
        """Move the next bytes where they are fetched to until all are there or it is cancelled; returns how many were
        moved."""
        before = fetch.left
        if self._ahead.nbytes and not fetch.cancelled:
            count = min(self._ahead.nbytes, fetch.left)
            fetch.write(self._ahead[:count])
            self._ahead = self._ahead[count:]
        wake_bytes = _WAKE_BYTES
        try:
            while fetch.left and not fetch.cancelled:
                # To be woken by each packet would cost more than the copying; on a slow link each shows that the peer
                # lives.
                self._wake_at(min(fetch.left, wake_bytes))
                asked_s = self._loop.time()
                # The views are asked for after each wait: it may be cancelled meanwhile.
                fetch.advance(await self._receive(fetch.views))
                if self._loop.time() - asked_s > _SLOW_S:
                    wake_bytes = 1
        finally:
            self._wake_at(1)
        return before - fetch.left

    async def skip(self, size: int) -> None:
        """Throw the next ``size`` bytes away."""
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
        """End this direction, give the peer a second to end its own (an early end would throw away what it has not
        read yet; ``at_once`` does not care), close."""
        if self._socket.fileno() < 0:
            return
        self.lose("the link was closed here")
        await asyncio.sleep(0)  # tasks that wait for the socket leave it first
        scratch = bytearray(0 if at_once else _SCRATCH_BYTES)
        try:
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
            pass  # it is gone already, or does not care
        finally:
            if (fd := self._socket.fileno()) >= 0:
                self._loop.remove_reader(fd)
                self._loop.remove_writer(fd)
            self._socket.close()
            self._buffer, self._ahead = bytearray(), memoryview(b"")

    async def _receive(self, views: Callable[[], list[memoryview]]) -> int:
        """Fill something of ``views()``, which is called right before; how many bytes (0 without views)."""
        poll_until_s = self._loop.time() + _POLL_S if self.expects_more else 0.0
        while True:
            if self._turn >= _TURN_BYTES:  # a fast peer would never let this wait, and other tasks of the loop run
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
        """Have the socket count as readable once so many bytes have come, or its end."""
        if num_bytes != self._low_water:
            self._low_water = num_bytes
            with contextlib.suppress(OSError):  # its end shows when it is read
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    async def _until(
        self,
        add: Callable[[int, Callable[[], object]], None],
        remove: Callable[[int], object],
        *,
        although_lost: bool = False,
    ) -> None:
        """Wait until the socket can go on, or the stream is lost."""
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
