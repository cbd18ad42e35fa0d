"""The link to one sender as the receiver sees it, and one KV transfer over it: which slots are filled, and which
message may come next."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from contract.kv import Announce, Blocks, Header, Probe, Probed, Rated, Reason, Refusal
from contract.message import encode
from kv_transfer.base import KVLink
from kv_transfer.codec import Codec
from kv_transfer.fetch import Coded, Fetch
from kv_transfer.link_rate import Run, SenderClock
from kv_transfer.pool import Pool
from kv_transfer.transfer import Transfer
from pdserve.core.clock import Clock
from pdserve.core.errors import TransferError
from pdserve.core.handoff import TransferProof
from pdserve.core.kv_layout import MAX_PROBE_BYTES, KVLayout


class ReceiveLink:
    """The link to one sender. ``checksum`` is the setting `transfer.checksum`."""

    def __init__(self, link: KVLink, pool: Pool, checksum: bool | Literal["device"], clock: Clock) -> None:
        self.link, self._clock = link, clock
        self.sender_id = ""
        """The worker id of the sender, from its `Hello` on."""
        self.checksums = link.hashes(checksum)
        """Whether payloads are hashed."""
        self.verified = ("device-64 verified" if link.on_device else "xxh3-64 verified") if self.checksums else "off"
        """What `TransferProof.checksum` says."""
        self.confirms = link.reads_late and not self.checksums
        """Whether a transfer counts only once its sender has confirmed it (`protocol.Confirm`)."""
        self.codec: Codec | None = None
        """How its sender codes blocks, from its `Hello` on."""
        self.ceiling_gbs = 0.0
        """The link's ceiling (`kv_transfer.link_rate`), in 10^9 bytes per second; 0: nothing was measured."""
        self.sender_clock = SenderClock()
        self._told = 0
        self._pool, self._train = pool, Run()
        self._answered_s: float | None = None  # a probe without a payload, which may be answered by another one
        self._saying = asyncio.Lock()

    async def say(self, header: Header) -> None:
        """Send a header to the sender. PeerLost or TransferTimeout as from `KVLink.send`."""
        async with self._saying:
            await self.link.send(encode(header))

    async def tell(self, header: Header) -> None:
        """Send a header, and ignore a lost link, which fails its transfers anyway."""
        with contextlib.suppress(TransferError):
            await self.say(header)

    async def probe(self, header: Probe, size: int, received_s: float) -> None:
        """Fetch the payload of a `Probe`. Answer the last one of a train with the train's time."""
        if size > MAX_PROBE_BYTES:
            raise Refusal(Reason.MALFORMED, f"a probe of {size} bytes")
        if self._answered_s is not None:
            self.sender_clock.answered(received_s - self._answered_s)
            self._answered_s = None
        if size:
            fetch = self.link.fetch(self._pool.next_probe(size))
            await fetch
            await fetch.commit()
            self._train.add(size, self.sender_clock.arrival_s(header.sent_us), self._clock.now())
        if header.left:
            return
        train, self._train = self._train, Run()
        if train.tells:
            self.raise_ceiling(train.gbs)
        if not train.num_bytes:
            self._answered_s = self._clock.now()
        self._told = self._ceiling
        await self.say(Probed(round(train.busy_s * 1e6), self._told))

    def coded(self, size: int, num_bytes: int) -> Coded | None:
        """How a payload of ``size`` bytes is coded that is for ``num_bytes`` of blocks; None if it is not."""
        return Coded(self.codec, size) if self.codec is not None and 0 < size < num_bytes else None

    def raise_ceiling(self, gbs: float) -> None:
        """Note the rate of a run, which raises the ceiling if it is higher."""
        self.ceiling_gbs = max(self.ceiling_gbs, gbs)

    async def tell_ceiling(self) -> None:
        """Tell the sender the ceiling if it has changed."""
        if self._told != self._ceiling:
            self._told = self._ceiling
            await self.say(Rated(self._told))

    @property
    def _ceiling(self) -> int:
        return round(self.ceiling_gbs * 1e9)


@dataclass(frozen=True, slots=True)
class ReceivedKV:
    """A complete transfer: the proof, the sender's trailer, and the time at which the last block was verified (seconds
    of the receiver's clock). The first ``num_blocks`` announced blocks hold the KV."""

    proof: TransferProof
    trailer: bytes
    verified_s: float
    num_blocks: int


class ReceiveTransfer(Transfer[ReceivedKV]):
    """One transfer from worker ``sender_id`` into ``block_ids``, as ``announcement`` tells that worker. With
    ``partial``, it may end before all of them have come.

    For each message, `check` decides by its header whether the payload may be fetched. Then either `accept` counts its
    blocks, or `reject` notes that the checksum was wrong.
    """

    _end_name, _unfinished = "receiver", "incomplete"

    def __init__(
        self,
        announcement: Announce,
        clock: Clock,
        deadline_s: float,
        lease_s: float,
        on_end: Callable[[ReceiveTransfer], None],
        sender_id: str,
        block_ids: Sequence[int],
        layout: KVLayout,
        *,
        partial: bool,
    ) -> None:
        super().__init__(announcement.attempt_id, clock, deadline_s, lease_s, on_end)
        self.announcement, self.nonce = announcement, announcement.nonce
        self.sender_id = sender_id
        self.source: ReceiveLink | None = None
        """The link over which its sender was heard."""
        self.fetch: Fetch | None = None
        """The last message's payload."""
        self._layout, self._partial = layout, partial
        self._block_ids, self._num_skipped = tuple(block_ids), announcement.num_skipped
        every = (1 << layout.num_layers) - 1
        num_missing = len(block_ids) - self._num_skipped
        self._missing = [0] * self._num_skipped + [every] * num_missing  # bits of layers, by slot
        self._num_missing = num_missing * layout.num_layers
        self._next_seq = 1
        self._resending: dict[int, int] = {}  # the blocks of messages that are to come again, by their number
        self._closed = False
        self._trailer = b""
        self._reserved_s = clock.now()
        self._first_s: float | None = None
        self._run = Run()
        self._messages = self._kv_bytes = self._retried_bytes = self._export_us = 0
        self._import_s = 0.0

    async def _at_rest(self) -> None:
        if self.fetch is not None:
            await self.fetch.at_rest()

    # --- for the receiver --------------------------------------------------------------------------------------------

    def heard(self, source: ReceiveLink) -> None:
        """Renew the lease: the sender sent a message over ``source``. `Refusal` if the transfer uses another link."""
        if self.source is None:
            self.source = source
        elif self.source is not source:
            raise Refusal(Reason.WRONG_LINK, f"{self.attempt_id}: its sender uses another link")
        self.lease.renew()

    def check(self, header: Blocks, size: int) -> tuple[Sequence[int], range]:
        """The blocks and layers that a message with ``size`` bytes of payload fills. `Refusal` if it does not fit the
        transfer."""
        name, layout = f"{self.attempt_id} message {header.seq}", self._layout
        end, end_layer = header.first_slot + header.num_blocks, header.first_layer + header.num_layers
        if 0 < header.seq < self._next_seq and header.seq not in self._resending:
            self._retried_bytes += size
            raise Refusal(Reason.DUPLICATE, f"{name} was received before")
        if header.seq not in self._resending and (header.seq != self._next_seq or self._closed):
            raise Refusal(Reason.REORDERED, f"{name} is out of order")
        if header.first_slot < self._num_skipped or end > len(self._block_ids):
            bounds = f"slots {header.first_slot} to {end}, not within {self._num_skipped} to {len(self._block_ids)}"
            raise Refusal(Reason.OUT_OF_BOUNDS, f"{name} fills {bounds}")
        if not header.num_layers or end_layer > layout.num_layers:
            bounds = f"layers {header.first_layer} to {end_layer} of {layout.num_layers}"
            raise Refusal(Reason.OUT_OF_BOUNDS, f"{name} fills {bounds}")
        layers = range(header.first_layer, end_layer)
        num_bytes = header.num_blocks * layout.layer_bytes(layers)
        is_coded = self.source is not None and self.source.coded(size, num_bytes) is not None
        if (size != num_bytes and not is_coded) or not (header.num_blocks or header.last):
            what = f"{header.num_layers} layers of {header.num_blocks} blocks, {layout.layer_bytes(layers)} bytes each"
            raise Refusal(Reason.WRONG_SIZE, f"{name} has {size} bytes for {what}")
        bits = self._bits(header)
        if any(missing & bits != bits for missing in self._missing[header.first_slot : end]):
            self._retried_bytes += size
            raise Refusal(Reason.DUPLICATE, f"{name} fills a slot that is filled")
        missing = self._num_missing - header.num_blocks * header.num_layers
        others = [num_blocks for seq, num_blocks in self._resending.items() if seq != header.seq]
        if not missing and any(others):
            # Else the transfer would wait for them until its deadline.
            raise Refusal(Reason.REORDERED, f"{name} fills blocks of a message that is to come again")
        if missing and not self._partial and (self._closed or header.last) and not others:
            raise Refusal(Reason.INCOMPLETE, f"{name} is the last, but {missing} layers of blocks never came")
        return self._block_ids[header.first_slot : end], layers

    def begin(self, begun_s: float) -> float:
        """Note a message that its sender began to send at ``begun_s``. Returns this time, which is an estimate; it is
        not before the blocks were announced."""
        begun_s = max(begun_s, self._reserved_s)
        if self._first_s is None:
            self._first_s = begun_s
        return begun_s

    def accept(self, header: Blocks, size: int, begun_s: float, now_s: float, import_s: float) -> None:
        """Count a message whose blocks are verified at ``now_s``. Its sender began to send it at ``begun_s``; hashing
        and copying it took ``import_s`` seconds of this time."""
        bits = self._bits(header)
        for slot in range(header.first_slot, header.first_slot + header.num_blocks):
            self._missing[slot] &= ~bits
        self._num_missing -= header.num_blocks * header.num_layers
        self._resending.pop(header.seq, None)
        self._next_seq = max(self._next_seq, header.seq + 1)
        self._messages += 1
        self._kv_bytes += header.num_blocks * self._layout.layer_bytes(
            range(header.first_layer, header.first_layer + header.num_layers)
        )
        self._import_s += min(import_s, self._run.add(size, begun_s, now_s))
        self._export_us = max(self._export_us, header.export_us)
        if header.last:
            self._closed, self._trailer = True, header.trailer

    def reject(self, header: Blocks, size: int) -> Refusal:
        """Expect a message again, whose checksum was wrong."""
        self._retried_bytes += size
        self._resending[header.seq] = header.num_blocks
        self._next_seq = max(self._next_seq, header.seq + 1)
        return Refusal(Reason.CHECKSUM, f"{self.attempt_id} message {header.seq} failed its checksum")

    @property
    def complete(self) -> bool:
        """Whether the last message has come and every slot is filled, or as many as the sender had."""
        return self._closed and not self._resending and (self._partial or not self._num_missing)

    def received(self, now_s: float) -> ReceivedKV:
        """The result of the complete transfer, whose last block was verified at ``now_s``. Raises the ceiling of the
        link if the transfer was faster."""
        assert self.source is not None, "a complete transfer has a sender"
        span_s = now_s - (self._first_s or now_s)
        # The blocks of a partial transfer count up to the first gap.
        num_blocks = next((slot for slot, missing in enumerate(self._missing) if missing), len(self._missing))
        proof = TransferProof(
            transport=self.source.link.transport,
            kv_bytes=self._kv_bytes,
            wire_bytes=self._run.num_bytes,
            kv_bytes_retried=self._retried_bytes,
            blocks_received=num_blocks - self._num_skipped,
            blocks_skipped=self._num_skipped,
            messages=self._messages,
            checksum=self.source.verified,
            export_ms=self._export_us / 1e3,
            wire_ms=(self._run.busy_s - self._import_s) * 1e3,
            import_ms=self._import_s * 1e3,
            span_ms=span_s * 1e3,
            request_to_ready_ms=(now_s - self._reserved_s) * 1e3,
            ceiling_gbs=0.0,
        )
        self.source.raise_ceiling(proof.gbs)
        proof = msgspec.structs.replace(proof, ceiling_gbs=self.source.ceiling_gbs)
        return ReceivedKV(proof, self._trailer, now_s, num_blocks)

    @staticmethod
    def _bits(header: Blocks) -> int:
        bits: int = ((1 << header.num_layers) - 1) << header.first_layer
        return bits
