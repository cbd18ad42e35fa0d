"""A link of the torch_dist transport: a TCP connection for headers, and process groups for payloads."""

from __future__ import annotations

import asyncio
import itertools
import logging
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kv_transfer.base import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, NOTHING
from kv_transfer.fetch import Fetch, Payload, settled
from kv_transfer.memory import Memory
from kv_transfer.strangers import MAX_HELLO_BYTES
from kv_transfer.transports.inbox import Arrived, Content, Inbox, InboxLink, again, check_sizes
from pdserve.core.errors import PeerLost, TransferError, TransferTimeout

if TYPE_CHECKING:
    from kv_transfer.transports.torch_groups import Groups

FRAME = struct.Struct("<IQ")  # length of the header, length of the payload
_QUEUED_FRAMES = 256
_GRACE_S = 1.0
_log = logging.getLogger(__name__)


class TorchDistLink(InboxLink):
    """A link that sends payloads in one thread and receives them in another."""

    def __init__(
        self,
        memory: Memory,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        groups: Groups,
        timeout_s: float,
        *,
        on_device: bool,
    ) -> None:
        super().__init__("torch_dist", memory, Inbox())
        self.on_device = on_device
        self._reader, self._writer, self._timeout_s = reader, writer, timeout_s
        self._groups: Groups | None = groups
        self._peer = "{}:{}".format(*writer.get_extra_info("peername")[:2])
        self._announced: asyncio.Queue[tuple[bytes, int] | None] = asyncio.Queue(_QUEUED_FRAMES)
        self._receiving = False
        self._why = ""
        self._senders = ThreadPoolExecutor(1, "kv-torch-send")
        self._receivers = ThreadPoolExecutor(1, "kv-torch-recv")
        self._tasks = [asyncio.create_task(self._read_frames()), asyncio.create_task(self._receive())]

    async def send(self, header: bytes, payload: Payload = NOTHING) -> None:
        """Announce the payload, and send a copy of it in the sending thread, which may outlast this call."""
        size = check_sizes(header, payload)
        if self._inbox.ended is not None:
            raise again(self._inbox.ended)
        if self._groups is None:
            raise PeerLost(f"{self._peer}: the link is down (torch_dist)")
        groups = self._groups
        try:
            self._writer.write(FRAME.pack(len(header), size) + header)
            async with asyncio.timeout(self._timeout_s):
                await self._writer.drain()
        except TimeoutError:
            raise TransferTimeout(f"{self._peer} took nothing for {self._timeout_s} s (torch_dist)") from None
        except OSError as error:
            raise self._fail(error) from None
        if not size:
            return
        loop = asyncio.get_running_loop()
        # On a device, `joined` blocks until the copy is complete.
        joined = (
            await loop.run_in_executor(self._senders, groups.joined, payload, self.memory)
            if self.on_device
            else groups.joined(payload, self.memory)
        )
        sent = loop.run_in_executor(self._senders, groups.send, joined)
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.shield(sent)
        except TimeoutError:
            self._leave(sent)
            raise self._fail(f"a payload timed out: it was not received within {self._timeout_s} s") from None
        except asyncio.CancelledError:
            self._leave(sent)
            self._fail("a send was cancelled")
            raise
        except RuntimeError as error:
            raise self._fail(self._why or error) from None
        finally:
            del sent  # its error keeps this frame

    async def _move(self, fetch: Fetch) -> None:
        """Copy the payload. On a device, wait for the copy, because the payload's memory is reused."""
        with fetch.writing():
            payload = self._payload
            await super()._move(fetch)
            await settled(self.memory)
            del payload

    def cut(self, why: str) -> None:
        """Close the connection and the groups."""
        self._fail(why)

    async def aclose(self) -> None:
        """Close the connection and the groups, and let the threads end."""
        self._inbox.end(PeerLost(f"the link to {self._peer} was closed here (torch_dist)"), discard=True)
        self._writer.close()
        self._drop_groups()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()  # their errors keep this link
        self._senders.shutdown(wait=False)
        self._receivers.shutdown(wait=False)
        self.introduced()
        self.on_closed(self)

    async def _read_frames(self) -> None:
        try:
            for number in itertools.count():
                header_size, size = FRAME.unpack(await self._reader.readexactly(FRAME.size))
                what = f"message {number}, of {header_size} + {size} bytes"
                if header_size > MAX_HEADER_BYTES or size > MAX_PAYLOAD_BYTES:
                    self._why = f"the peer announced {what}"
                    break
                if self._stranger is not None and (number or header_size > MAX_HELLO_BYTES or size):
                    self._why = f"the peer announced {what}, before its introduction"
                    break
                await self._announced.put((await self._reader.readexactly(header_size), size))
        except (OSError, asyncio.IncompleteReadError):
            self._why = "the peer closed the link"
        # A receive in progress may complete with the peer's last message; if not, Gloo ends it by itself.
        if self._groups is not None and not (self._receiving and self._groups.fails_alone):
            self._drop_groups()
        await self._announced.put(None)

    async def _receive(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while (frame := await self._announced.get()) is not None:
                header, size = frame
                payload: Content = b""
                arrival_s = 0.0
                if size:
                    if self._groups is None:  # the peer is gone, and has not sent this payload
                        break
                    self._receiving, started_s = True, loop.time()
                    async with asyncio.timeout(self._timeout_s):
                        payload = await loop.run_in_executor(self._receivers, self._groups.recv, size)
                    self._receiving, arrival_s = False, loop.time() - started_s
                await self._inbox.put(Arrived(header, payload, arrival_s))
        except TimeoutError:
            self._fail(f"a payload timed out: it did not arrive within {self._timeout_s} s")
        except RuntimeError as error:
            self._fail(self._why or error)
        except TransferError:
            return  # closed here
        self._fail(self._why)

    def _fail(self, why: BaseException | str) -> TransferError:
        """End the link and its groups. The peer ends its own when the connection closes."""
        timed_out = "timed out" in str(why).lower()
        error = (TransferTimeout if timed_out else PeerLost)(f"{self._peer}: {why} (torch_dist)")
        self._inbox.end(error)
        self._drop_groups()
        self._writer.close()
        return again(error)

    def _drop_groups(self) -> None:
        groups, self._groups = self._groups, None
        if groups is not None:
            groups.abort()

    def _leave(self, sent: asyncio.Future[Any]) -> None:
        """Stop waiting for a send, and log an error if its thread does not end. NCCL ends it by the abort. Gloo ends it
        when the peer closes its group, or by the group's timeout."""

        def complain() -> None:
            _log.error("a send to %s does not end; its thread stays (torch_dist)", self._peer)

        def ended(done: asyncio.Future[Any]) -> None:
            complaint.cancel()
            if not done.cancelled():
                done.exception()

        complaint = asyncio.get_running_loop().call_later(self._timeout_s + _GRACE_S, complain)
        sent.add_done_callback(ended)
