"""One receiver as the sender sees it: the link to it, and the transfers that share this link."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

from kv_transfer.base import KVLink
from kv_transfer.pool import Pool
from kv_transfer.protocol import (
    Abort,
    Ack,
    Announce,
    Blocks,
    Confirm,
    Header,
    Open,
    Refused,
    checksum,
    decode,
    encode,
    peer_error,
)
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

_SETTLE_S = 0.5
_MESSAGE_S = 0.1  # what one message should take at most
_LEAST_MESSAGE_BYTES = 64 * 2**10
_MAX_ANNOUNCED = 4096  # a receiver announces what the router has placed: far fewer are ever ahead of their requests
_NO_TURNS: deque[SendTransfer] = deque()
_log = logging.getLogger(__name__)

Conclude = Callable[[SendTransfer, PdserveError | None], None]
"""Ends a transfer: None if the receiver has all of it, else the reason why it failed."""


class SendLink:
    """Three tasks work on the link: one writes (one message of each transfer in turn), one reads the answers, one says
    every ``heartbeat_s`` that the transfers still live. When the link ends, its transfers fail. While
    ``max_inflight_bytes`` or more are not acknowledged, nothing new is sent: only control messages, and what arrived
    changed (its bytes count already). ``share`` is the layout of the receiver's pool: what it holds is sent."""

    def __init__(
        self,
        about: PeerLink,
        epoch: str,
        endpoint: KVEndpoint,
        link: KVLink,
        *,
        pool: Pool,
        share: KVLayout,
        checksums: bool,
        max_inflight_bytes: int,
        clock: Clock,
        heartbeat_s: float,
        is_over: Callable[[str], bool],
        lease_s: float,
        conclude: Conclude,
        announced: Iterable[Announce] = (),
    ) -> None:
        self.about, self.worker_id, self.epoch, self.endpoint = about, about.worker_id, epoch, endpoint
        self.alive = True
        self._link, self._pool, self._share, self._checksums, self._clock = link, pool, share, checksums, clock
        self._confirms = link.reads_late and not checksums
        self._max_inflight_bytes = max_inflight_bytes
        self._inflight_bytes = 0
        # On a slow link messages are small: an abort has to wait for the one that is being written.
        moved_bytes = round(about.ceiling_gbs * 1e9 * _MESSAGE_S)
        self._most_message_bytes = max(_LEAST_MESSAGE_BYTES, moved_bytes) if moved_bytes else None
        self._heartbeat_s, self._lease_s, self._conclude = heartbeat_s, lease_s, conclude
        self._transfers: dict[str, SendTransfer] = {}  # by nonce
        self._unbound: dict[str, SendTransfer] = {}  # by attempt id: the receiver has not told yet where the blocks go
        self._announced: dict[str, Announce] = {}  # by attempt id: transfers that have not begun here yet
        self._is_over = is_over
        self._turns: deque[SendTransfer] = deque()
        self._resending: deque[SendTransfer] = deque()  # resends bypass the in-flight limit: their bytes count already
        self._controls: deque[Header] = deque()
        self._work = asyncio.Event()
        self._task = asyncio.create_task(self._run())
        for each in announced:
            self._on_announce(each)

    def add(self, transfer: SendTransfer) -> None:
        """Take on a transfer to this receiver."""
        transfer.settle, transfer.layout = lambda: self._settle(transfer), self._share
        transfer.transport = self.about.transport
        if self._most_message_bytes is not None:
            transfer.message_bytes = min(transfer.message_bytes, self._most_message_bytes)
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
        transfer.lease.watch(self._lease_s)  # its receiver is known: from now on the receiver's silence counts
        self._control(_open(transfer, self.epoch))
        self.advance(transfer)

    def _on_announce(self, announced: Announce) -> None:
        """The receiver has room for a transfer: one that waits for this, has not begun here yet, or is over."""
        transfer = self._unbound.pop(announced.attempt_id, None)
        if transfer is not None:
            self._bind(transfer, announced)
        elif self._is_over(announced.attempt_id):
            over = RequestAborted(f"{announced.attempt_id} has ended at its sender")
            self._control(Abort(announced.nonce, *to_wire(over)))
        else:
            self._announced[announced.attempt_id] = announced
            while len(self._announced) > _MAX_ANNOUNCED:  # the receiver's lease ends the oldest
                del self._announced[next(iter(self._announced))]

    def advance(self, transfer: SendTransfer) -> None:
        """It may have something to send now."""
        if transfer.ready and transfer not in self._turns and transfer.nonce in self._transfers:
            self._turns.append(transfer)
            self._work.set()

    def drop(self, transfer: SendTransfer, error: PdserveError | None) -> None:
        """Forget a transfer; with an error, the receiver is told to give it up as well."""
        self._unbound.pop(transfer.attempt_id, None)
        if self._transfers.pop(transfer.nonce, None) is None:
            return
        self._inflight_bytes -= transfer.unacknowledged_bytes
        self._work.set()
        if error is not None:
            self._control(Abort(transfer.nonce, *to_wire(error)))

    async def aclose(self) -> None:
        """Close the link and wait until its tasks have ended; its transfers fail."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.alive = False  # also if the task was cancelled before it began
        await self._link.aclose()

    async def _settle(self, transfer: SendTransfer) -> None:
        """Return once nothing reads the blocks of a transfer that failed, neither here nor at the receiver. A receiver
        that keeps them for longer than `_SETTLE_S` is given up, with all transfers to it."""
        if not transfer.has_sent:
            return
        if self.alive:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_S):
                    await transfer.idle.wait()
                    await self._link.drained()
                    return
            _log.warning("%s does not let go of %s: its KV link is cut", self.worker_id, transfer.attempt_id)
        self._link.cut(f"{self.worker_id} did not let go of what it was sent")
        await transfer.idle.wait()

    def _control(self, header: Header) -> None:
        self._controls.append(header)
        self._work.set()

    async def _run(self) -> None:
        tasks = [asyncio.create_task(work) for work in (self._write(), self._read(), self._beat())]
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
        part = transfer.next_part(self._clock.now())
        trailer = transfer.trailer if part.last else b""
        if not part.resends:
            self._inflight_bytes += part.size
        transfer.idle.clear()
        try:
            started_s = time.perf_counter()
            regions = self._pool.regions(part.block_ids, part.layers, self._share) if part.block_ids else []
            payload = await self._link.payload(regions)
            digest = checksum(payload.parts, trailer) if self._checksums else 0
            transfer.export_s += time.perf_counter() - started_s
            header = Blocks(
                nonce=transfer.nonce,
                epoch=self.epoch,
                attempt_id=transfer.attempt_id,
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
            transfer.lease.renew()  # the receiver takes what is written
        except TransferError:
            raise
        except PdserveError as error:  # its blocks cannot be read: the others are not concerned
            self._conclude(transfer, error)
        except (RuntimeError, ValueError) as error:  # the same, by a device
            _log.exception("the KV of %s cannot be read", transfer.attempt_id)
            self._conclude(transfer, TransferError(f"KV of {transfer.attempt_id} cannot be read: {error}"))
        finally:
            transfer.idle.set()

    def _open_turns(self) -> deque[SendTransfer]:
        """Those who may send something new; empty while enough is on its way."""
        return self._turns if self._inflight_bytes < self._max_inflight_bytes else _NO_TURNS

    async def _read(self) -> None:
        while True:
            answer = decode((await self._link.recv()).header)
            if isinstance(answer, Announce):
                self._on_announce(answer)
                continue
            if not isinstance(answer, Ack | Refused | Abort):
                raise TransferRefused(f"a {type(answer).__name__} has no place here")
            if isinstance(answer, Refused) and not answer.nonce:
                raise TransferRefused(answer.message)
            transfer = self._transfers.get(answer.nonce)
            if transfer is None:
                continue  # given up meanwhile
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
                    self.drop(transfer, None)  # it knows already
                self._conclude(transfer, peer_error(answer.kind, f"{self.worker_id}: {answer.message}"))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            for transfer in self._transfers.values():
                self._control(_open(transfer, self.epoch))


def _open(transfer: SendTransfer, epoch: str) -> Open:
    return Open(transfer.nonce, epoch, transfer.attempt_id)
