"""One receiver as the sender sees it: the link to it, and the transfers that share the link."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from contract.kv import (
    Abort,
    Ack,
    Announce,
    Blocks,
    Confirm,
    Header,
    Open,
    Rated,
    Refused,
    checksum,
    decode,
    peer_error,
)
from contract.message import encode
from kv_transfer.base import KVLink
from kv_transfer.pool import Pool
from kv_transfer.send_transfer import SendTransfer
from pdserve.core.clock import Clock
from pdserve.core.errors import (
    ChecksumMismatch,
    PdserveError,
    PeerLost,
    RequestAborted,
    TransferError,
    TransferRefused,
    to_wire,
)
from pdserve.core.handoff import KVEndpoint, PeerLink
from pdserve.core.kv_layout import KVLayout

_HEARTBEATS_PER_LEASE = 3
_SETTLE_S = 0.5
_MESSAGE_S = 0.05  # the longest time that one message should take; a cancel waits for it
_LEAST_MESSAGE_BYTES = 64 * 2**10
_INFLIGHT_MESSAGES = 4  # of the link's least size: two on their way, and those that are being acknowledged
_MAX_ANNOUNCED = 4096  # far more than a router has placed without the request having arrived here
_NO_TURNS: deque[SendTransfer] = deque()
_log = logging.getLogger(__name__)

Conclude = Callable[[SendTransfer, PdserveError | None], None]
"""Ends a transfer, with its error or None."""


class SendLink:
    """A link to one receiver. Its transfers take turns, one message each; they fail when the link ends.

    While ``max_inflight_bytes`` or more are unacknowledged (at least four messages, where the link has a least size of
    them), only control messages and resends are sent. ``shard`` is the layout of the receiver's pool: only the KV heads
    in it are sent. ``is_over`` tells whether an attempt has ended. ``announced`` are announcements that came during the
    handshake.
    """

    def __init__(
        self,
        about: PeerLink,
        epoch: str,
        endpoint: KVEndpoint,
        link: KVLink,
        *,
        pool: Pool,
        shard: KVLayout,
        checksums: bool,
        max_inflight_bytes: int,
        clock: Clock,
        is_over: Callable[[str], bool],
        lease_s: float,
        conclude: Conclude,
        announced: Iterable[Announce] = (),
    ) -> None:
        self.about, self.worker_id, self.epoch, self.endpoint = about, about.worker_id, epoch, endpoint
        self.alive = True
        self._link, self._pool, self._shard, self._checksums, self._clock = link, pool, shard, checksums, clock
        self._confirms = link.reads_late and not checksums
        self._max_inflight_bytes = max(max_inflight_bytes, _INFLIGHT_MESSAGES * link.least_message_bytes)
        self._inflight_bytes = 0
        self._lease_s, self._conclude = lease_s, conclude
        self._transfers: dict[str, SendTransfer] = {}  # by nonce
        self._unbound: dict[str, SendTransfer] = {}  # by attempt id, not announced yet
        self._announced: dict[str, Announce] = {}  # by attempt id, not begun here yet
        self._is_over = is_over
        self._turns: deque[SendTransfer] = deque()
        self._resending: deque[SendTransfer] = deque()  # resends bypass the in-flight limit
        self._controls: deque[Header] = deque()
        self._work = asyncio.Event()
        self._task = asyncio.create_task(self._run())
        for each in announced:
            self._on_announce(each)

    def add(self, transfer: SendTransfer) -> None:
        """Send a transfer over this link."""
        transfer.settle, transfer.layout = lambda: self._settle(transfer), self._shard
        transfer.message_bytes = max(transfer.message_bytes, self._link.least_message_bytes)
        # Messages are small on a slow link, because an abort waits for the one that is being written.
        if moved_bytes := round(self.about.ceiling_gbs * 1e9 * _MESSAGE_S):  # hand-offs have rated the link since
            transfer.message_bytes = min(transfer.message_bytes, max(_LEAST_MESSAGE_BYTES, moved_bytes))
        announced = self._announced.pop(transfer.attempt_id, None)
        if announced is not None:
            self._bind(transfer, announced)
        else:
            self._unbound[transfer.attempt_id] = transfer

    def _bind(self, transfer: SendTransfer, announced: Announce) -> None:
        try:
            transfer.bind(announced.nonce, announced.num_blocks, announced.num_skipped)
        except TransferRefused as error:
            self._control(Abort(announced.nonce, *to_wire(error)))
            self._conclude(transfer, error)
            return
        self._transfers[transfer.nonce] = transfer
        transfer.lease.watch(self._lease_s)  # from its announcement on, the receiver must not be silent
        self._open(transfer)
        self.advance(transfer)

    def _on_announce(self, announced: Announce) -> None:
        """Bind the transfer that an announcement is for, keep the announcement, or answer that the transfer is over."""
        transfer = self._unbound.pop(announced.attempt_id, None)
        if transfer is not None:
            self._bind(transfer, announced)
        elif self._is_over(announced.attempt_id):
            over = RequestAborted(f"{announced.attempt_id} has ended at its sender")
            self._control(Abort(announced.nonce, *to_wire(over)))
        else:
            self._announced[announced.attempt_id] = announced
            while len(self._announced) > _MAX_ANNOUNCED:  # the transfer dropped here ends by the receiver's lease
                del self._announced[next(iter(self._announced))]

    def advance(self, transfer: SendTransfer) -> None:
        """Give a transfer a turn if it has something to send."""
        if transfer.ready and transfer not in self._turns and transfer.nonce in self._transfers:
            self._turns.append(transfer)
            self._work.set()

    def drop(self, transfer: SendTransfer, error: PdserveError | None) -> None:
        """Forget a transfer. With an error, tell the receiver to abort it."""
        self._unbound.pop(transfer.attempt_id, None)
        if self._transfers.pop(transfer.nonce, None) is None:
            return
        self._inflight_bytes -= transfer.unacknowledged_bytes
        self._work.set()
        if error is not None:
            self._control(Abort(transfer.nonce, *to_wire(error)))

    async def aclose(self) -> None:
        """Close the link, fail its transfers, and wait until its tasks have ended."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.alive = False  # the task may have been cancelled before its first step
        await self._link.aclose()

    async def _settle(self, transfer: SendTransfer) -> None:
        """Wait until nothing reads the blocks of a failed transfer, here or at the receiver. If that takes longer than
        `_SETTLE_S`, cut the link, which fails all its transfers."""
        if not transfer.has_sent:
            return
        if self.alive:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_S):
                    await transfer.idle.wait()
                    await self._link.drained()
                    return
            _log.warning("%s still reads blocks of %s; its KV link is cut", self.worker_id, transfer.attempt_id)
        self._link.cut(f"{self.worker_id} still read blocks of a failed transfer")
        await transfer.idle.wait()

    def _control(self, header: Header) -> None:
        self._controls.append(header)
        self._work.set()

    async def _run(self) -> None:
        tasks = [asyncio.create_task(work) for work in (self._write(), self._read(), self._send_heartbeats())]
        lost = PeerLost(f"the KV link to {self.worker_id} was closed here")
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            error = done.pop().exception()
            lost = PeerLost(f"the KV link to {self.worker_id} was lost: {error}")
            if not isinstance(error, TransferError):
                _log.error("the KV link to %s failed", self.worker_id, exc_info=error)
        finally:
            self.alive = False
            transfers = [*self._transfers.values(), *self._unbound.values()]
            self._transfers.clear()
            self._unbound.clear()
            for transfer in transfers:
                self._conclude(transfer, lost)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._link.aclose()

    async def _write(self) -> None:
        while True:
            while not (turns := self._resending or self._open_turns()) and not self._controls:
                self._work.clear()
                await self._work.wait()
            if self._controls:
                await self._link.send(encode(self._controls.popleft()))
                continue
            transfer = turns.popleft()
            if transfer.ready:
                await self._send_part(transfer)
                self.advance(transfer)

    async def _send_part(self, transfer: SendTransfer) -> None:
        part = transfer.next_part()
        trailer = transfer.trailer if part.last else b""
        if not part.resends:
            self._inflight_bytes += part.size
        transfer.idle.clear()
        try:
            started_s = time.perf_counter()
            regions = self._pool.regions(part.block_ids, part.layers, self._shard) if part.block_ids else []
            payload = await self._link.payload(regions)
            digest = checksum(payload.parts, trailer) if self._checksums else 0
            transfer.export_s += time.perf_counter() - started_s
            header = Blocks(
                nonce=transfer.nonce,
                epoch=self.epoch,
                attempt_id=transfer.attempt_id,
                sent_us=self._now_us(),
                seq=part.seq,
                first_slot=part.first_slot,
                num_blocks=len(part.block_ids),
                first_layer=part.layers.start,
                num_layers=len(part.layers),
                checksum=digest,
                export_us=round(transfer.export_s * 1e6),
                last=part.last,
                trailer=trailer,
            )
            await self._link.send(encode(header), payload)
            transfer.lease.renew()  # the receiver has taken bytes
        except TransferError:
            raise
        except PdserveError as error:  # the blocks cannot be read: only this transfer fails
            self._conclude(transfer, error)
        except (RuntimeError, ValueError) as error:  # the same, of a device or closed memory
            _log.exception("the KV of %s cannot be read", transfer.attempt_id)
            self._conclude(transfer, TransferError(f"KV of {transfer.attempt_id} cannot be read: {error}"))
        finally:
            transfer.idle.set()

    def _open_turns(self) -> deque[SendTransfer]:
        """The transfers that may send; empty while the in-flight limit is reached."""
        return self._turns if self._inflight_bytes < self._max_inflight_bytes else _NO_TURNS

    async def _read(self) -> None:
        while True:
            answer = decode((await self._link.recv()).header)
            if isinstance(answer, Announce):
                self._on_announce(answer)
                continue
            if isinstance(answer, Rated):
                self.about = replace(self.about, ceiling_gbs=answer.ceiling / 1e9)
                continue
            if not isinstance(answer, Ack | Refused | Abort):
                raise TransferRefused(f"a {type(answer).__name__} was not expected")
            if isinstance(answer, Refused) and not answer.nonce:
                raise TransferRefused(answer.message)
            transfer = self._transfers.get(answer.nonce)
            if transfer is None:
                continue  # it has ended
            transfer.lease.renew()
            if isinstance(answer, Ack):
                self._inflight_bytes -= transfer.acknowledge(answer.seq)
                self._work.set()
                if transfer.complete:
                    if self._confirms:
                        self._control(Confirm(transfer.nonce))
                    self._conclude(transfer, None)
            elif (
                isinstance(answer, Refused) and answer.kind == ChecksumMismatch.__name__ and transfer.resend(answer.seq)
            ):
                self._resending.append(transfer)
                self._work.set()
            else:
                if isinstance(answer, Abort):
                    self.drop(transfer, None)  # the receiver has aborted it
                self._conclude(transfer, peer_error(answer.kind, f"{self.worker_id}: {answer.message}"))

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / _HEARTBEATS_PER_LEASE)
            for transfer in self._transfers.values():
                self._open(transfer)

    def _open(self, transfer: SendTransfer) -> None:
        self._control(Open(transfer.nonce, self.epoch, transfer.attempt_id, self._now_us()))

    def _now_us(self) -> int:
        return round(self._clock.now() * 1e6)
