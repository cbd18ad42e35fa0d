"""One KV transfer at its sender, and the link to one receiver, which transfers share."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from contract.kv import (
    MAX_RESENDS,
    MAX_TRAILER_BYTES,
    Abort,
    Ack,
    Announce,
    Blocks,
    Confirm,
    Header,
    Open,
    Rated,
    Refused,
    decode,
    peer_error,
)
from contract.message import encode
from kv_transfer.base import KVLink
from kv_transfer.codec import Codec
from kv_transfer.fetch import coded_payload
from kv_transfer.pool import Pool
from kv_transfer.transfer import Transfer
from pdserve.core.clock import Clock
from pdserve.core.config import TransferConfig
from pdserve.core.errors import (
    ChecksumMismatch,
    PdserveError,
    PeerLost,
    RequestAborted,
    TransferError,
    TransferRefused,
    to_wire,
)
from pdserve.core.handoff import KVEndpoint, KVPeer, PeerLink

_IDLE_TIMEOUT_S = 60.0  # longer than the timeout of any send
_FIRST_MESSAGE_BYTES = 2**20
_HEARTBEATS_PER_LEASE = 3
_SETTLE_S = 0.5
_MESSAGE_S = 0.05  # the longest time that one message should take; a cancel waits for it
_LEAST_MESSAGE_BYTES = 64 * 2**10
_INFLIGHT_MESSAGES = 4  # of the link's least size: two on their way, and those that are being acknowledged
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Part:
    """One message with ``size`` bytes of blocks. It is kept until it is acknowledged, for a resend."""

    seq: int
    first_slot: int
    block_ids: tuple[int, ...]
    layers: range
    size: int
    last: bool
    resends: int = 0


class SendTransfer(Transfer[None]):
    """One transfer of ``num_blocks`` blocks of ``pool`` to ``peer``. `send_blocks` queues them, and the link takes them
    as messages (`next_part`). ``layout`` becomes the receiver's when the transfer gets its link. With ``partial``, the
    receiver may have announced more blocks than these, the first ones."""

    _end_name, _unfinished = "sender", "not handed over"

    def __init__(
        self,
        attempt_id: str,
        clock: Clock,
        deadline_s: float,
        on_end: Callable[[SendTransfer], None],
        peer: KVPeer,
        num_blocks: int,
        pool: Pool,
        *,
        partial: bool,
    ) -> None:
        super().__init__(attempt_id, clock, deadline_s, None, on_end)
        self.peer, self._num_blocks, self._partial = peer, num_blocks, partial
        self._pool, self.layout = pool, pool.layout
        self.link: SendLink | None = None
        self.message_bytes = 0
        """The target size of a message, from the link."""
        self.nonce = ""
        """Empty before `bind`; blocks are not sent before."""
        self.idle = asyncio.Event()
        """Set while nothing here reads the blocks."""
        self.idle.set()
        self.trailer = b""
        self.export_s = 0.0
        self._pending: deque[tuple[int, int, range]] = deque()  # slot, block, layers
        self._unacknowledged: dict[int, Part] = {}
        self._num_skipped = 0
        self._closed = self._last_sent = False
        self._seq = 0

    def send_blocks(
        self,
        first_slot: int,
        block_ids: Sequence[int],
        layers: range | None = None,
        *,
        last: bool = False,
        trailer: bytes = b"",
    ) -> None:
        """Queue ``layers`` (default: all) of blocks for the slots from ``first_slot``. Slots that the receiver holds
        already are skipped. The blocks must keep their content until `wait` or `abort` returns.

        ``last`` closes the transfer, with a ``trailer`` of at most 4 KiB for the receiver. Does nothing once the
        transfer has ended; `wait` raises the error. ValueError on bad arguments."""
        if self.is_over:
            return
        layers, num_layers = self.layout.all_layers if layers is None else layers, self.layout.num_layers
        slots = range(first_slot, first_slot + len(block_ids))
        if self._closed or not (
            0 <= slots.start <= slots.stop <= self._num_blocks
            and 0 <= layers.start < layers.stop <= num_layers
            and layers.step == 1
            and all(0 <= block < self._pool.num_blocks for block in block_ids)
            and len(trailer) <= (MAX_TRAILER_BYTES if last else 0)
        ):
            state = f"{self.attempt_id}{' after its last' if self._closed else ''}"
            what = f"blocks {block_ids} of {self._pool.num_blocks} for slots {slots} of {self._num_blocks}"
            raise ValueError(f"{state}: {what}, layers {layers} of {num_layers}, a trailer of {len(trailer)} bytes")
        pairs = zip(slots, block_ids, strict=True)
        self._pending.extend((slot, block, layers) for slot, block in pairs if slot >= self._num_skipped)
        self._closed, self.trailer = last, trailer
        if self.link is not None:
            self.link.advance(self)

    async def _at_rest(self) -> None:
        """Wait until nothing reads the blocks, at most `_IDLE_TIMEOUT_S`."""
        try:
            async with asyncio.timeout(_IDLE_TIMEOUT_S):
                if self.link is not None and self.error is not None:
                    await self.link.settle(self)
                await self.idle.wait()
        except TimeoutError:
            _log.error("%s: a send of its blocks has not ended for %g s", self.attempt_id, _IDLE_TIMEOUT_S)

    # --- for the link ------------------------------------------------------------------------------------------------

    def bind(self, announced: Announce) -> None:
        """Apply the receiver's announcement. TransferRefused if it is for another number of blocks."""
        self.nonce, wanted, num_skipped = announced.nonce, announced.num_blocks, announced.num_skipped
        fits = wanted >= self._num_blocks if self._partial else wanted == self._num_blocks
        if not fits or not 0 <= num_skipped <= wanted:
            raise TransferRefused(
                f"{self.peer.worker_id} wants {wanted} blocks of {self.attempt_id} less {num_skipped}; "
                f"{self._num_blocks} are to be sent"
            )
        self._num_skipped = num_skipped
        self._pending = deque(piece for piece in self._pending if piece[0] >= num_skipped)

    @property
    def ready(self) -> bool:
        """Whether `next_part` may be called."""
        if not self.nonce or self.is_over:
            return False
        return bool(self._pending or (self._closed and not self._last_sent))

    def next_part(self) -> Part:
        """The next message, with as many adjacent slots as fit. Requires `ready`."""
        end = max(self._num_blocks, self._num_skipped)
        first_slot, _, layers = self._pending[0] if self._pending else (end, 0, self.layout.all_layers)
        piece_bytes = self.layout.layer_bytes(layers)
        # The first message is small, so that the receiver begins while the next one is read and hashed.
        message_bytes = self.message_bytes if self._seq else min(self.message_bytes, _FIRST_MESSAGE_BYTES)
        most = max(1, message_bytes // piece_bytes)
        block_ids: list[int] = []
        while (
            self._pending
            and len(block_ids) < most
            and self._pending[0][0] == first_slot + len(block_ids)
            and self._pending[0][2] == layers
        ):
            block_ids.append(self._pending.popleft()[1])
        self._seq += 1
        self._last_sent = self._closed and not self._pending
        part = Part(self._seq, first_slot, tuple(block_ids), layers, len(block_ids) * piece_bytes, self._last_sent)
        self._unacknowledged[part.seq] = part
        return part

    def acknowledge(self, seq: int) -> int:
        """Note that the receiver has a message. Returns its bytes, which are no longer in flight."""
        part = self._unacknowledged.pop(seq, None)
        return 0 if part is None else part.size

    @property
    def has_sent(self) -> bool:
        """Whether any message was sent."""
        return self._seq > 0

    @property
    def complete(self) -> bool:
        """Whether the receiver has acknowledged everything."""
        return self._last_sent and not self._unacknowledged

    @property
    def unacknowledged_bytes(self) -> int:
        """The bytes in flight."""
        return sum(part.size for part in self._unacknowledged.values())

    def resend(self, seq: int) -> Part | None:
        """The message to send again after a failed checksum. None after `MAX_RESENDS` resends."""
        part = self._unacknowledged.get(seq)
        if part is None or part.resends == MAX_RESENDS:
            return None
        part.resends += 1
        return part


class SendLink:
    """A link to one receiver. Its transfers take turns, one message each; they fail when the link ends.

    While `transfer.max_inflight_bytes` or more are unacknowledged (at least four messages, where the link has a least
    size of them), only control messages and resends are sent. Blocks are coded with ``codec``. ``on_announce`` is
    called for each announcement, ``on_lost`` once with what ended the link.
    """

    def __init__(
        self,
        about: PeerLink,
        peer: KVPeer,
        endpoint: KVEndpoint,
        link: KVLink,
        codec: Codec | None,
        pool: Pool,
        config: TransferConfig,
        clock: Clock,
        on_announce: Callable[[SendLink, Announce], None],
        on_lost: Callable[[SendLink, PeerLost], None],
    ) -> None:
        self.about, self.peer, self.endpoint, self.alive = about, peer, endpoint, True
        self._link, self._codec, self._pool, self._config, self._clock = link, codec, pool, config, clock
        self._on_announce, self._on_lost = on_announce, on_lost
        self._checksums = link.hashes(config.checksum)
        self._max_inflight_bytes = max(config.max_inflight_bytes, _INFLIGHT_MESSAGES * link.least_message_bytes)
        self._inflight_bytes = 0
        self._num_answers = 0  # to messages, which the receiver reads in order
        self._transfers: dict[str, SendTransfer] = {}  # by nonce: what the receiver has announced, and has not ended
        self._turns: deque[SendTransfer] = deque()
        self._resending: deque[tuple[SendTransfer, Part]] = deque()  # resends bypass the in-flight limit
        self._controls: deque[Header] = deque()
        self._work = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def add(self, transfer: SendTransfer) -> None:
        """Send a transfer over this link, once it is announced."""
        transfer.link, transfer.layout = self, self._pool.layout
        transfer.message_bytes = max(self._config.message_bytes, self._link.least_message_bytes)
        # Messages are small on a slow link, because an abort waits for the one that is being written.
        moved_bytes = round(self.about.ceiling_gbs * 1e9 * _MESSAGE_S)  # hand-offs have rated the link since
        transfer.message_bytes = min(transfer.message_bytes, max(_LEAST_MESSAGE_BYTES, moved_bytes))

    def bind(self, transfer: SendTransfer, announced: Announce) -> None:
        """Begin to send a transfer to where the receiver has announced it."""
        self._transfers[announced.nonce] = transfer
        try:
            transfer.bind(announced)
        except TransferRefused as error:
            transfer.end(error)
            return
        transfer.lease.watch(self._config.lease_s)  # from its announcement on, the receiver must not be silent
        self._open(transfer)
        self.advance(transfer)

    def refuse(self, announced: Announce) -> None:
        """Answer the announcement of an attempt that has ended."""
        over = RequestAborted(f"{announced.attempt_id} has ended at its sender")
        self._control(Abort(announced.nonce, *to_wire(over)))

    def advance(self, transfer: SendTransfer) -> None:
        """Give a transfer a turn if it has something to send."""
        if transfer.ready and transfer not in self._turns and transfer.nonce in self._transfers:
            self._turns.append(transfer)
            self._work.set()

    def drop(self, transfer: SendTransfer) -> None:
        """Forget a transfer. If it has failed, tell the receiver to abort it."""
        if self._transfers.pop(transfer.nonce, None) is None:
            return
        self._inflight_bytes -= transfer.unacknowledged_bytes
        self._work.set()
        if transfer.error is not None:
            self._control(Abort(transfer.nonce, *to_wire(transfer.error)))

    async def aclose(self) -> None:
        """Close the link, fail its transfers, and wait until its tasks have ended."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.alive = False  # the task may have been cancelled before its first step
        await self._link.aclose()

    async def settle(self, transfer: SendTransfer) -> None:
        """Wait until nothing reads the blocks of a failed transfer, here or at the receiver, which reads what was sent
        before them, too. If it has answered nothing for `_SETTLE_S`, cut the link, which fails all its transfers."""
        if not transfer.has_sent:
            return
        if self.alive:
            settled = asyncio.create_task(self._settled(transfer))
            try:
                answers = -1
                while answers != self._num_answers:
                    answers = self._num_answers
                    if (await asyncio.wait((settled,), timeout=_SETTLE_S))[0]:
                        return
            finally:
                settled.cancel()
            _log.warning("%s still reads blocks of %s; its KV link is cut", self.peer.worker_id, transfer.attempt_id)
        self._link.cut(f"{self.peer.worker_id} still read blocks of a failed transfer")
        await transfer.idle.wait()

    async def _settled(self, transfer: SendTransfer) -> None:
        await transfer.idle.wait()
        await self._link.drained()

    def _control(self, header: Header) -> None:
        self._controls.append(header)
        self._work.set()

    async def _run(self) -> None:
        tasks = [asyncio.create_task(work) for work in (self._write(), self._read(), self._send_heartbeats())]
        lost = PeerLost(f"the KV link to {self.peer.worker_id} was closed here")
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            error = done.pop().exception()
            lost = PeerLost(f"the KV link to {self.peer.worker_id} was lost: {error}")
            if not isinstance(error, TransferError):
                _log.error("the KV link to %s failed", self.peer.worker_id, exc_info=error)
        finally:
            self.alive = False
            self._transfers.clear()
            self._on_lost(self, lost)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._link.aclose()

    async def _write(self) -> None:
        while True:
            if self._controls:
                await self._link.send(encode(self._controls.popleft()))
            elif self._resending:
                transfer, part = self._resending.popleft()
                if not transfer.is_over:
                    await self._send_part(transfer, part)
            elif self._turns and self._inflight_bytes < self._max_inflight_bytes:
                transfer = self._turns.popleft()
                if transfer.ready:
                    await self._send_part(transfer, transfer.next_part())
                    self.advance(transfer)
            else:
                self._work.clear()
                await self._work.wait()

    async def _send_part(self, transfer: SendTransfer, part: Part) -> None:
        trailer = transfer.trailer if part.last else b""
        if not part.resends:
            self._inflight_bytes += part.size
        transfer.idle.clear()
        try:
            started_s = self._clock.now()
            regions = self._pool.regions(part.block_ids, part.layers) if part.block_ids else []
            payload = await self._link.payload(regions)
            if self._codec is not None and regions:
                payload = await coded_payload(self._codec, payload)
            digest = await payload.checksum(trailer) if self._checksums else 0
            transfer.export_s += self._clock.now() - started_s
            header = Blocks(
                nonce=transfer.nonce,
                epoch=self.peer.epoch,
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
            transfer.end(error)
        except (RuntimeError, ValueError) as error:  # the same, of a device or closed memory
            _log.exception("the KV of %s cannot be read", transfer.attempt_id)
            transfer.end(TransferError(f"KV of {transfer.attempt_id} cannot be read: {error}"))
        finally:
            transfer.idle.set()

    async def _read(self) -> None:
        while True:
            answer = decode((await self._link.recv()).header)
            if isinstance(answer, Announce):
                self._on_announce(self, answer)
                continue
            if isinstance(answer, Rated):
                self.about = replace(self.about, ceiling_gbs=answer.ceiling / 1e9)
                continue
            if not isinstance(answer, Ack | Refused | Abort):
                raise TransferRefused(f"a {type(answer).__name__} was not expected")
            self._num_answers += isinstance(answer, Ack | Refused)
            if isinstance(answer, Refused) and not answer.nonce:
                raise TransferRefused(answer.message)
            if (transfer := self._transfers.get(answer.nonce)) is not None:  # else it has ended
                transfer.lease.renew()
                self._on_answer(transfer, answer)

    def _on_answer(self, transfer: SendTransfer, answer: Ack | Refused | Abort) -> None:
        if isinstance(answer, Ack):
            self._inflight_bytes -= transfer.acknowledge(answer.seq)
            self._work.set()
            if transfer.complete:
                if self._link.reads_late and not self._checksums:
                    self._control(Confirm(transfer.nonce))
                transfer.end(None)
            return
        if isinstance(answer, Abort):
            self.drop(transfer)  # the receiver has aborted it
        elif answer.kind == ChecksumMismatch.__name__ and (part := transfer.resend(answer.seq)) is not None:
            self._resending.append((transfer, part))
            self._work.set()
            return
        transfer.end(peer_error(answer.kind, f"{self.peer.worker_id}: {answer.message}"))

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._config.lease_s / _HEARTBEATS_PER_LEASE)
            for transfer in self._transfers.values():
                self._open(transfer)

    def _open(self, transfer: SendTransfer) -> None:
        self._control(Open(transfer.nonce, self.peer.epoch, transfer.attempt_id, self._now_us()))

    def _now_us(self) -> int:
        return round(self._clock.now() * 1e6)
