"""One hand-off as its receiver sees it: which slots are filled, what may come next, what came."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import PdserveError
from core.handoff import TransferProof
from kv_transfer.base import Buffer, KVLink
from kv_transfer.integrity import Blocks, Reason, Refusal, checksum
from kv_transfer.status import TransferStatus


@dataclass(frozen=True, slots=True)
class ReceivedKV:
    """A hand-off that is complete: the proof, the sender's trailer, and when its last block was verified (seconds of
    the receiver's clock)."""

    proof: TransferProof
    trailer: bytes
    verified_s: float


class Incoming:
    """The state of one hand-off. `check` decides on a message without changing anything but the account of retries;
    `accept` is called once its blocks are in the pool."""

    def __init__(self, request_id: str, nonce: str, block_ids: Sequence[int], num_skipped: int, now_s: float) -> None:
        self.request_id, self.nonce = request_id, nonce
        self.status = TransferStatus.BOOTSTRAPPING
        self.link: KVLink | None = None
        self.outcome: ReceivedKV | PdserveError | None = None
        self.done = asyncio.Event()
        self._block_ids, self._num_skipped = tuple(block_ids), num_skipped
        self._free = set(range(num_skipped, len(block_ids)))
        self._next_seq = 1
        self._resending: set[int] = set()
        self._closed = False
        self._trailer = b""
        self._reserved_s, self._first_s = now_s, now_s
        self._messages = self._bytes = self._retried_bytes = 0

    def heard(self, link: KVLink) -> None:
        """Its sender spoke on ``link``, the only one it may use from now on."""
        if self.link is None:
            self.link, self.status = link, TransferStatus.WAITING
        elif self.link is not link:
            raise Refusal(Reason.WRONG_LINK, f"{self.request_id}: its sender uses another link")

    def check(self, header: Blocks, payload: Buffer, block_bytes: int, *, checksums: bool) -> tuple[int, ...]:
        """The pool's blocks this message fills; `Refusal` if it must not be taken."""
        name = f"{self.request_id} message {header.seq}"
        size, end = memoryview(payload).nbytes, header.first_slot + header.num_blocks
        if 0 < header.seq < self._next_seq and header.seq not in self._resending:
            self._retried_bytes += size
            raise Refusal(Reason.DUPLICATE, f"{name} came before")
        if header.seq not in self._resending and (header.seq != self._next_seq or self._closed):
            raise Refusal(Reason.REORDERED, f"{name} came out of order")
        if header.first_slot < self._num_skipped or end > len(self._block_ids):
            bounds = f"slots {header.first_slot} to {end}, not within {self._num_skipped} to {len(self._block_ids)}"
            raise Refusal(Reason.OUT_OF_BOUNDS, f"{name} fills {bounds}")
        if size != header.num_blocks * block_bytes or not (header.num_blocks or header.last):
            raise Refusal(Reason.WRONG_SIZE, f"{name} has {size} bytes for {header.num_blocks} blocks of {block_bytes}")
        slots = range(header.first_slot, end)
        if not self._free.issuperset(slots):
            self._retried_bytes += size
            raise Refusal(Reason.DUPLICATE, f"{name} fills a slot that is filled")
        missing = len(self._free) - len(slots)
        if missing and (self._closed or header.last) and not self._resending - {header.seq}:
            raise Refusal(Reason.INCOMPLETE, f"{name} is the last, but {missing} blocks never came")
        if checksums and checksum([payload], header.trailer) != header.checksum:
            self._retried_bytes += size
            self._resending.add(header.seq)
            self._next_seq = max(self._next_seq, header.seq + 1)
            raise Refusal(Reason.CHECKSUM, f"{name} arrived changed")
        return self._block_ids[header.first_slot : end]

    def begin(self, now_s: float) -> None:
        """A message with blocks has arrived."""
        if self.status is not TransferStatus.TRANSFERRING:
            self.status, self._first_s = TransferStatus.TRANSFERRING, now_s

    def accept(self, header: Blocks, size: int) -> None:
        """Take note that the message's blocks are in the pool."""
        self._free.difference_update(range(header.first_slot, header.first_slot + header.num_blocks))
        self._resending.discard(header.seq)
        self._next_seq = max(self._next_seq, header.seq + 1)
        self._messages += 1
        self._bytes += size
        if header.last:
            self._closed, self._trailer = True, header.trailer

    @property
    def complete(self) -> bool:
        """Whether every slot is filled and the sender has closed it."""
        return self._closed and not self._free and not self._resending

    def received(self, transport: str, now_s: float, *, checksums: bool) -> ReceivedKV:
        """The account of the complete hand-off, whose last block is verified now."""
        proof = TransferProof(
            transport=transport,
            kv_bytes=self._bytes,
            kv_bytes_retried=self._retried_bytes,
            blocks_received=len(self._block_ids) - self._num_skipped,
            blocks_skipped=self._num_skipped,
            messages=self._messages,
            checksum="xxh3-64 verified" if checksums else "off",
            wire_ms=(now_s - self._first_s) * 1e3,
            request_to_ready_ms=(now_s - self._reserved_s) * 1e3,
        )
        return ReceivedKV(proof, self._trailer, now_s)
