"""One hand-off as its sender sees it: what is still to send, what is not acknowledged yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import PdserveError
from core.handoff import KVDestination
from kv_transfer.integrity import MAX_RESENDS, MAX_TRAILER_BYTES
from kv_transfer.status import TransferStatus


@dataclass(frozen=True, slots=True)
class SentKV:
    """A hand-off the receiver has acknowledged in full. ``bytes`` and ``messages`` count each block once, ``retries``
    messages that went out again; ``wire_ms`` is first message sent to last acknowledged."""

    transport: str
    bytes: int
    messages: int
    retries: int
    wire_ms: float


@dataclass(slots=True)
class Part:
    """One message of blocks, kept until it is acknowledged, because it may have to go out again."""

    seq: int
    first_slot: int
    block_ids: tuple[int, ...]
    last: bool
    resends: int = 0


class Outgoing:
    """The state of one hand-off. Blocks are queued by `add` and taken as messages by `next_part`."""

    def __init__(self, request_id: str, destination: KVDestination, blocks_per_message: int) -> None:
        self.request_id, self.destination = request_id, destination
        self.status = TransferStatus.BOOTSTRAPPING
        self.outcome: SentKV | PdserveError | None = None
        self.done = asyncio.Event()
        self.idle = asyncio.Event()
        """Set while nothing reads its blocks."""
        self.idle.set()
        self.trailer = b""
        self._blocks_per_message = blocks_per_message
        self._pending: deque[tuple[int, int]] = deque()  # slot, block
        self._again: deque[Part] = deque()
        self._unacknowledged: dict[int, Part] = {}
        self._closed = self._last_sent = False
        self._seq = self._blocks = self._retries = 0
        self._first_s: float | None = None

    def add(self, first_slot: int, block_ids: Sequence[int], *, last: bool, trailer: bytes) -> None:
        """Queue the blocks for the slots from ``first_slot``, without those the receiver holds already. ValueError if
        slots lie outside the destination, or if it was closed."""
        destination = self.destination
        if not 0 <= first_slot <= first_slot + len(block_ids) <= destination.num_blocks:
            raise ValueError(f"slots {first_slot} to {first_slot + len(block_ids)} of {destination.num_blocks}")
        if self._closed:
            raise ValueError(f"{self.request_id}: blocks after its last")
        if len(trailer) > (MAX_TRAILER_BYTES if last else 0):
            raise ValueError(f"a trailer comes with the last blocks and has at most {MAX_TRAILER_BYTES} bytes")
        pairs = enumerate(block_ids, first_slot)
        self._pending.extend((slot, block) for slot, block in pairs if slot >= destination.num_skipped)
        self._closed, self.trailer = last, trailer

    @property
    def ready(self) -> bool:
        """Whether `next_part` has something."""
        return self.outcome is None and bool(self._again or self._pending or (self._closed and not self._last_sent))

    def next_part(self, now_s: float) -> Part:
        """The next message, adjacent slots coalesced; call it only if `ready`."""
        if self._first_s is None:
            self._first_s, self.status = now_s, TransferStatus.TRANSFERRING
        if self._again:
            return self._again.popleft()
        first_slot = self._pending[0][0] if self._pending else self.destination.num_blocks
        block_ids: list[int] = []
        while (
            self._pending
            and len(block_ids) < self._blocks_per_message
            and self._pending[0][0] == first_slot + len(block_ids)
        ):
            block_ids.append(self._pending.popleft()[1])
        self._seq += 1
        self._blocks += len(block_ids)
        self._last_sent = self._closed and not self._pending
        part = Part(self._seq, first_slot, tuple(block_ids), self._last_sent)
        self._unacknowledged[part.seq] = part
        return part

    def acknowledge(self, seq: int) -> bool:
        """Whether this was the last message that was missing."""
        self._unacknowledged.pop(seq, None)
        return self._last_sent and not self._unacknowledged

    def resend(self, seq: int) -> bool:
        """Queue a message that arrived changed once more; False if it has been sent often enough."""
        part = self._unacknowledged.get(seq)
        if part is None or part.resends == MAX_RESENDS:
            return False
        part.resends += 1
        self._retries += 1
        self._again.append(part)
        return True

    def sent(self, transport: str, now_s: float, block_bytes: int) -> SentKV:
        """The account of the hand-off, all of it acknowledged now."""
        wire_ms = (now_s - (self._first_s or now_s)) * 1e3
        return SentKV(transport, self._blocks * block_bytes, self._seq, self._retries, wire_ms)
