"""One KV transfer at its sender: what is queued, and what is not acknowledged."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from contract.kv import MAX_RESENDS, MAX_TRAILER_BYTES
from kv_transfer.transfer import Lease, Transfer
from pdserve.core.errors import TransferRefused
from pdserve.core.handoff import KVPeer
from pdserve.core.kv_layout import KVLayout

_FIRST_MESSAGE_BYTES = 2**20


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
    """One transfer. `add` queues blocks, and `next_part` takes them as messages. ``layout`` becomes the receiver's when
    the transfer gets its link. With ``partial``, the receiver may have announced more blocks than these, the first
    ones."""

    def __init__(
        self,
        attempt_id: str,
        lease: Lease,
        peer: KVPeer,
        num_blocks: int,
        layout: KVLayout,
        message_bytes: int,
        *,
        partial: bool = False,
    ) -> None:
        super().__init__(attempt_id, lease)
        self.peer, self.num_blocks, self._partial = peer, num_blocks, partial
        self.layout, self.message_bytes = layout, message_bytes
        self.nonce = ""
        """Empty before `bind`; blocks are not sent before."""
        self.idle = asyncio.Event()
        """Set while nothing here reads the blocks."""
        self.idle.set()
        self.trailer = b""
        self.export_s = 0.0
        self.settle: Callable[[], Awaitable[None]] | None = None
        """Waits until nothing reads the blocks of a failed transfer, here or at the receiver; None without a link."""
        self._pending: deque[tuple[int, int, range]] = deque()  # slot, block, layers
        self._again: deque[Part] = deque()
        self._unacknowledged: dict[int, Part] = {}
        self._num_skipped = 0
        self._closed = self._last_sent = False
        self._seq = 0

    def bind(self, nonce: str, num_blocks: int, num_skipped: int) -> None:
        """Apply the receiver's announcement. TransferRefused if it is for another number of blocks."""
        fits = num_blocks >= self.num_blocks if self._partial else num_blocks == self.num_blocks
        if not fits or not 0 <= num_skipped <= num_blocks:
            raise TransferRefused(
                f"{self.peer.worker_id} wants {num_blocks} blocks of {self.attempt_id} less {num_skipped}; "
                f"{self.num_blocks} are to be sent"
            )
        self.nonce, self._num_skipped = nonce, num_skipped
        self._pending = deque(piece for piece in self._pending if piece[0] >= num_skipped)

    def add(self, first_slot: int, block_ids: Sequence[int], layers: range, *, last: bool, trailer: bytes) -> None:
        """Queue ``layers`` of the blocks for the slots from ``first_slot``, except slots that the receiver holds
        already. ValueError if slots or layers lie outside the transfer, or if it was closed."""
        num_layers = self.layout.num_layers
        if not 0 <= first_slot <= first_slot + len(block_ids) <= self.num_blocks:
            raise ValueError(f"slots {first_slot} to {first_slot + len(block_ids)} of {self.num_blocks}")
        if not 0 <= layers.start < layers.stop <= num_layers or layers.step != 1:
            raise ValueError(f"layers {layers.start} to {layers.stop} of {num_layers}")
        if self._closed:
            raise ValueError(f"{self.attempt_id}: blocks after its last")
        if len(trailer) > (MAX_TRAILER_BYTES if last else 0):
            raise ValueError(f"a trailer comes with the last blocks and has at most {MAX_TRAILER_BYTES} bytes")
        pairs = enumerate(block_ids, first_slot)
        self._pending.extend((slot, block, layers) for slot, block in pairs if slot >= self._num_skipped)
        self._closed, self.trailer = last, trailer

    @property
    def ready(self) -> bool:
        """Whether `next_part` may be called."""
        if not self.nonce or self.is_over:
            return False
        return bool(self._again or self._pending or (self._closed and not self._last_sent))

    def next_part(self) -> Part:
        """The next message, with as many adjacent slots as fit. Requires `ready`."""
        if self._again:
            return self._again.popleft()
        end = max(self.num_blocks, self._num_skipped)
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

    def resend(self, seq: int) -> bool:
        """Queue a message again after a failed checksum. Returns False after `MAX_RESENDS` resends."""
        part = self._unacknowledged.get(seq)
        if part is None or part.resends == MAX_RESENDS:
            return False
        part.resends += 1
        self._again.append(part)
        return True
