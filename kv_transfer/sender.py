"""The sending end of KV transfers: it reads blocks from its pool and sends them to receivers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from contract.kv import Announce, Hello
from kv_transfer.base import KVTransport, Tasks
from kv_transfer.factory import choose
from kv_transfer.handshake import check_block_size, introduce, measure, sorted_eos
from kv_transfer.pool import Pool
from kv_transfer.send_link import SendLink
from kv_transfer.send_transfer import SendTransfer
from kv_transfer.transfer import Lease, TransferEnded
from pdserve.core.clock import Clock
from pdserve.core.errors import PdserveError, PeerLost, RequestAborted, TransferTimeout
from pdserve.core.handoff import KVEndpoint, KVPeer, PeerLink

_REMEMBERED = 4096  # ended attempts; an announcement for one of them is answered with an Abort
_IDLE_TIMEOUT_S = 60.0  # longer than the timeout of any send
_log = logging.getLogger(__name__)


class KVSender:
    """Sends from ``pool`` over ``transports`` (best first), which the caller closes after this.

    Belongs to one event loop. `push` and `send_blocks` never wait. Each `push` must be followed by `wait` or `abort`.

    ``message_bytes``: the size up to which adjacent blocks travel as one message; a message has at least one block.
    ``max_inflight_bytes``: the limit on unacknowledged bytes for each receiver. ``lease_s``: how long a receiver may be
    silent. ``eos_token_ids``: the model's end-of-sequence ids; receivers with different ones refuse the link.
    ConfigError if blocks are larger than a message, ModelError if there are too many ids.
    """

    def __init__(
        self,
        pool: Pool,
        transports: Sequence[KVTransport],
        *,
        worker_id: str,
        checksum: bool,
        message_bytes: int,
        max_inflight_bytes: int,
        clock: Clock,
        lease_s: float,
        connect_timeout_s: float,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        check_block_size(pool.layout)
        self._eos_token_ids = sorted_eos(eos_token_ids)
        self._pool, self._transports, self._clock = pool, tuple(transports), clock
        self._worker_id, self._checksums = worker_id, checksum
        self._message_bytes, self._max_inflight_bytes = message_bytes, max_inflight_bytes
        self._lease_s, self._connect_timeout_s = lease_s, connect_timeout_s
        self._peers: dict[str, SendLink] = {}
        self._connecting: dict[str, asyncio.Lock] = {}
        self._transfers: dict[str, SendTransfer] = {}
        self._tasks = Tasks()
        self._over: dict[str, None] = {}  # ended attempts, the oldest first

    def links(self) -> tuple[PeerLink, ...]:
        """The open links, ordered by worker id."""
        links = (peer.about for peer in list(self._peers.values()) if peer.alive)
        return tuple(sorted(links, key=lambda link: link.worker_id))

    async def connect(self, worker_id: str, epoch: str, endpoints: Sequence[KVEndpoint]) -> None:
        """Open a link to this incarnation of a worker, unless there is one. Raises LayoutMismatch, TransferRefused (the
        worker has another incarnation now), TransferTimeout, PeerLost, or ConfigError if no transport reaches the
        worker."""
        transport, endpoint, reason = choose(self._transports, endpoints, worker_id)
        async with self._connecting.setdefault(worker_id, asyncio.Lock()):
            known = self._peer(worker_id, epoch)
            if known is not None and known.endpoint == endpoint:
                return
            peer = await self._meet(worker_id, epoch, transport, endpoint, reason)
            old = self._peers.pop(worker_id, None)
            self._peers[worker_id] = peer
            if old is not None:
                await old.aclose()

    def push(self, attempt_id: str, peer: KVPeer, num_blocks: int, deadline_s: float, *, partial: bool = False) -> None:
        """Begin a transfer of ``num_blocks`` blocks to ``peer``; opens a link where there is none. Blocks that are
        queued wait until the peer has announced where they go, for at most ``lease_s`` once all of them are.
        ``deadline_s`` is a time of the sender's clock. With ``partial``, these may be only the first of the announced
        blocks. ValueError if the attempt has a transfer already."""
        if attempt_id in self._transfers:
            raise ValueError(f"{attempt_id} is being sent already")

        def expire(why: str) -> None:
            self._conclude(transfer, TransferTimeout(f"KV of {attempt_id} is not handed over and {why}"))

        lease = Lease(self._clock, deadline_s, None, expire)
        layout = self._pool.layout
        transfer = SendTransfer(attempt_id, lease, peer, num_blocks, layout, self._message_bytes, partial=partial)
        self._transfers[attempt_id] = transfer
        if (link := self._peer_of(transfer)) is not None:
            link.add(transfer)
        else:
            self._tasks.spawn(self._bootstrap(transfer))

    def send_blocks(
        self,
        attempt_id: str,
        first_slot: int,
        block_ids: Sequence[int],
        layers: range | None = None,
        *,
        last: bool = False,
        trailer: bytes = b"",
    ) -> None:
        """Queue ``layers`` (default: all) of blocks for the slots from ``first_slot``. Slots that the receiver holds
        already are skipped. The blocks must keep their content until `wait` or `abort` returns.

        ``last`` closes the transfer, with a ``trailer`` of at most 4 KiB for the receiver. Does nothing if the transfer
        has failed; `wait` raises the error. ValueError on bad arguments, TransferEnded after `wait` or `abort`."""
        transfer = self._find(attempt_id)
        if transfer.is_over:
            return
        if not all(0 <= block < self._pool.num_blocks for block in block_ids):
            raise ValueError(f"blocks outside a pool of {self._pool.num_blocks}")
        transfer.add(
            first_slot,
            block_ids,
            self._pool.layout.all_layers if layers is None else layers,
            last=last,
            trailer=trailer,
        )
        if last and not transfer.nonce:
            transfer.lease.watch(self._lease_s)  # a receiver without room must not hold blocks here until the deadline
        if (peer := self._peer_of(transfer)) is not None:
            peer.advance(transfer)

    async def wait(self, attempt_id: str) -> None:
        """Wait until the receiver has acknowledged everything. When this returns or raises, nothing reads the blocks.

        Raises TransferTimeout at the deadline or when the receiver was silent for ``lease_s``, PeerLost,
        TransferRefused, ChecksumMismatch, LayoutMismatch, RequestAborted after `abort`, the error with which the
        receiver aborted, or TransferEnded if there is no such transfer."""
        transfer = self._find(attempt_id)
        await transfer.ended()
        await self._idle(transfer)
        if self._transfers.get(attempt_id) is transfer:
            del self._transfers[attempt_id]
        transfer.result()

    async def abort(self, attempt_id: str) -> None:
        """End a transfer and tell its receiver. When this returns, nothing reads its blocks. Does nothing if there is
        no such transfer."""
        transfer = self._transfers.get(attempt_id)
        if transfer is None:
            return
        self._conclude(transfer, RequestAborted(f"the KV transfer of {attempt_id} was aborted by its sender"))
        self._transfers.pop(attempt_id, None)
        await self._idle(transfer)

    async def aclose(self) -> None:
        """Fail all transfers with PeerLost, and close the links."""
        await self._tasks.aclose()
        await asyncio.gather(*(peer.aclose() for peer in self._peers.values()))
        self._peers.clear()
        for transfer in list(self._transfers.values()):
            self._conclude(transfer, PeerLost(f"the KV sender of {self._worker_id} was closed"))

    async def _idle(self, transfer: SendTransfer) -> None:
        """Wait until nothing reads the transfer's blocks, at most `_IDLE_TIMEOUT_S`."""
        try:
            async with asyncio.timeout(_IDLE_TIMEOUT_S):
                if transfer.settle is not None and transfer.error is not None:
                    await transfer.settle()
                await transfer.idle.wait()
        except TimeoutError:
            _log.error("%s: a send of its blocks has not ended for %g s", transfer.attempt_id, _IDLE_TIMEOUT_S)

    def _find(self, attempt_id: str) -> SendTransfer:
        if (transfer := self._transfers.get(attempt_id)) is None:
            raise TransferEnded(f"{attempt_id} is not being sent")
        return transfer

    def _peer(self, worker_id: str, epoch: str) -> SendLink | None:
        peer = self._peers.get(worker_id)
        return peer if peer is not None and peer.alive and peer.epoch == epoch else None

    def _peer_of(self, transfer: SendTransfer) -> SendLink | None:
        return self._peer(transfer.peer.worker_id, transfer.peer.epoch)

    async def _bootstrap(self, transfer: SendTransfer) -> None:
        to = transfer.peer
        try:
            await self.connect(to.worker_id, to.epoch, to.endpoints)
        except PdserveError as error:
            self._conclude(transfer, error)
        finally:
            peer = self._peer_of(transfer)
            if peer is None:  # also after an unexpected error, so that the transfer ends before its deadline
                self._conclude(transfer, PeerLost(f"there is no KV link to {to.worker_id}"))
            else:
                peer.add(transfer)
                if transfer.error is not None:  # the receiver must be told
                    peer.drop(transfer, transfer.error)

    async def _meet(
        self, worker_id: str, epoch: str, transport: KVTransport, endpoint: KVEndpoint, reason: str
    ) -> SendLink:
        link = await transport.connect(endpoint, self._connect_timeout_s)
        peer: SendLink | None = None
        announced: list[Announce] = []
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                checksums = link.hashes(self._checksums)
                hello = Hello(self._worker_id, epoch, self._pool.layout, checksums, self._eos_token_ids)
                shard = await introduce(link, hello, worker_id)
                ceiling_gbs = await measure(link, self._pool, announced, self._clock)
            peer = SendLink(
                PeerLink(worker_id, transport.name, reason, ceiling_gbs),
                epoch,
                endpoint,
                link,
                pool=self._pool,
                shard=shard,
                checksums=checksums,
                max_inflight_bytes=self._max_inflight_bytes,
                clock=self._clock,
                is_over=self._over.__contains__,
                lease_s=self._lease_s,
                conclude=self._conclude,
                announced=announced,
            )
        except TimeoutError:
            raise TransferTimeout(f"{worker_id} did not answer within {self._connect_timeout_s:g} s") from None
        finally:
            if peer is None:
                await link.aclose()
        return peer

    def _conclude(self, transfer: SendTransfer, error: PdserveError | None) -> None:
        if transfer.is_over:
            return
        self._over[transfer.attempt_id] = None
        while len(self._over) > _REMEMBERED:
            del self._over[next(iter(self._over))]
        transfer.conclude(error)
        if (peer := self._peer_of(transfer)) is not None:
            peer.drop(transfer, error)
