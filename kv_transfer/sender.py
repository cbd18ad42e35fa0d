"""The sending end: it reads blocks out of its pool and pushes them to receivers, several hand-offs at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from kv_transfer.base import BlockStore, KVTransport
from kv_transfer.factory import Choice, choose
from kv_transfer.handoff_over import HandoffOver
from kv_transfer.handshake import check_block_size, introduce, measure, sorted_eos
from kv_transfer.integrity import Announce, Hello
from kv_transfer.lease import Lease
from kv_transfer.send_link import SendLink
from kv_transfer.send_transfer import SendTransfer, SentKV
from kv_transfer.status import TransferStatus
from pdserve.core.clock import Clock
from pdserve.core.errors import PdserveError, PeerLost, RequestAborted, TransferTimeout
from pdserve.core.handoff import KVDestination, KVEndpoint, KVPeer, PeerLink

_HEARTBEATS_PER_LEASE = 3
_REMEMBERED = 4096  # attempts that have ended: a late announcement of one of them is answered at once
_IDLE_TIMEOUT_S = 60.0  # longer than any transport takes to give a send up
_log = logging.getLogger(__name__)


class KVSender:
    """Sends hand-offs from ``store``. The ``transports``, best first, stay their creator's, to be closed after this.

    ``message_bytes``: adjacent blocks are coalesced up to this (a message has one block at least).
    ``max_inflight_bytes``: how much may travel to one receiver without its acknowledgement. ``lease_s``: how long a
    receiver may be silent. ``eos_token_ids`` are the model's; receivers with others refuse this one. One event loop;
    `start` and `send_blocks` never wait. Every `start` needs its `wait` or `abort`.
    """

    def __init__(
        self,
        store: BlockStore,
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
        check_block_size(store.layout)
        self._eos_token_ids = sorted_eos(eos_token_ids)
        self._store, self._transports, self._clock = store, tuple(transports), clock
        self._worker_id, self._checksums = worker_id, checksum
        self._message_bytes, self._max_inflight_bytes = message_bytes, max_inflight_bytes
        self._lease_s, self._connect_timeout_s = lease_s, connect_timeout_s
        self._peers: dict[str, SendLink] = {}
        self._connecting: dict[str, asyncio.Lock] = {}
        self._handoffs: dict[str, SendTransfer] = {}
        self._leases: dict[str, Lease] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._over: dict[str, None] = {}  # attempts that have ended lately, oldest first

    def links(self) -> tuple[PeerLink, ...]:
        """The links it has, by worker id."""
        links = (peer.about for peer in list(self._peers.values()) if peer.alive)
        return tuple(sorted(links, key=lambda link: link.worker_id))

    async def connect(self, worker_id: str, epoch: str, endpoints: Sequence[KVEndpoint]) -> None:
        """Have a link to this incarnation of a worker; nothing to do if there is one. Raises LayoutMismatch,
        TransferRefused (it is another incarnation by now), TransferTimeout, PeerLost; ConfigError if no transport of
        this end reaches it."""
        choice = choose(self._transports, endpoints, worker_id)
        async with self._connecting.setdefault(worker_id, asyncio.Lock()):
            known = self._peer(worker_id, epoch)
            if known is not None and known.endpoint == choice.endpoint:
                return
            peer = await self._meet(worker_id, epoch, choice)
            old = self._peers.pop(worker_id, None)
            self._peers[worker_id] = peer
            if old is not None:
                await old.aclose()

    def start(self, attempt_id: str, destination: KVDestination, deadline_s: float) -> None:
        """Begin a hand-off; connects on its own where there is no link. ``deadline_s`` is a time of the sender's clock.
        ValueError if the request has one already."""
        handoff = self._new(attempt_id, destination.peer, destination.num_blocks, deadline_s)
        handoff.bind(destination.nonce, destination.num_blocks, destination.num_skipped)
        self._leases[attempt_id].watch(self._lease_s)
        self._add(handoff)

    def push(self, attempt_id: str, peer: KVPeer, num_blocks: int, deadline_s: float) -> None:
        """Begin a hand-off of ``num_blocks`` blocks to ``peer``, which announces over the link where they go. What is
        queued before that waits. Else as `start`."""
        self._add(self._new(attempt_id, peer, num_blocks, deadline_s))

    def _new(self, attempt_id: str, peer: KVPeer, num_blocks: int, deadline_s: float) -> SendTransfer:
        if attempt_id in self._handoffs:
            raise ValueError(f"{attempt_id} is being sent already")
        handoff = SendTransfer(attempt_id, peer, num_blocks, self._store.layout, self._message_bytes)
        self._handoffs[attempt_id] = handoff

        def expire(why: str) -> None:
            self._conclude(handoff, TransferTimeout(f"KV of {attempt_id} is not handed over and {why}"))

        self._leases[attempt_id] = Lease(self._clock, deadline_s, None, expire)
        return handoff

    def _add(self, handoff: SendTransfer) -> None:
        if (peer := self._peer_of(handoff)) is not None:
            peer.add(handoff)
        else:
            self._spawn(self._bootstrap(handoff))

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
        """Queue ``layers`` (default: all) of blocks for the slots from ``first_slot``; those the receiver holds already
        are left out. They must keep their content until `wait` or `abort` returns. ``last`` closes the hand-off, with a
        ``trailer`` of at most 4 KiB for the receiver's owner. One that failed meanwhile ignores this, and `wait` says
        so. ValueError on bad arguments, HandoffOver after `wait` or `abort`."""
        handoff = self._find(attempt_id)
        if handoff.outcome is not None:
            return
        if not all(0 <= block < self._store.num_blocks for block in block_ids):
            raise ValueError(f"blocks outside a pool of {self._store.num_blocks}")
        handoff.add(
            first_slot,
            block_ids,
            self._store.layout.all_layers if layers is None else layers,
            last=last,
            trailer=trailer,
        )
        if (peer := self._peer_of(handoff)) is not None:
            peer.advance(handoff)

    async def wait(self, attempt_id: str) -> SentKV:
        """Return once the receiver has acknowledged everything; then, or after an error, nothing reads its blocks any
        more. Raises TransferTimeout (deadline, or a silent receiver), PeerLost, TransferRefused, ChecksumMismatch,
        LayoutMismatch, RequestAborted after `abort`, what `fail` was given, or what the receiver gave up with.
        HandoffOver if there is none."""
        handoff = self._find(attempt_id)
        await handoff.done.wait()
        await self._idle(handoff)
        if self._handoffs.get(attempt_id) is handoff:
            del self._handoffs[attempt_id]
        if isinstance(handoff.outcome, SentKV):
            return handoff.outcome
        assert handoff.outcome is not None
        raise handoff.outcome

    def status(self, attempt_id: str) -> TransferStatus:
        """How far it is; HandoffOver once `wait` or `abort` has ended it."""
        return self._find(attempt_id).status

    def fail(self, attempt_id: str, error: PdserveError) -> None:
        """End a hand-off with ``error``, which `wait` raises; its receiver is told. One that is over stays as it is."""
        if (handoff := self._handoffs.get(attempt_id)) is not None:
            self._conclude(handoff, error)

    async def abort(self, attempt_id: str) -> None:
        """Give a hand-off up and tell its receiver. When this returns, nothing reads its blocks any more. Unknown ones
        are fine."""
        handoff = self._handoffs.get(attempt_id)
        if handoff is None:
            return
        self._conclude(handoff, RequestAborted(f"the KV hand-off of {attempt_id} was aborted by its sender"))
        self._handoffs.pop(attempt_id, None)
        await self._idle(handoff)

    async def aclose(self) -> None:
        """Fail what is under way, close the links."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(peer.aclose() for peer in self._peers.values()))
        self._peers.clear()
        for handoff in list(self._handoffs.values()):
            self._conclude(handoff, PeerLost(f"the KV sender of {self._worker_id} was closed"))

    async def _idle(self, handoff: SendTransfer) -> None:
        """Wait until nothing reads its blocks; a transport that never lets go of them must not keep them for good."""
        try:
            async with asyncio.timeout(_IDLE_TIMEOUT_S):
                if handoff.settle is not None and not isinstance(handoff.outcome, SentKV):
                    await handoff.settle()
                await handoff.idle.wait()
        except TimeoutError:
            _log.error("%s: a send of its blocks has not ended for %g s", handoff.attempt_id, _IDLE_TIMEOUT_S)

    def _find(self, attempt_id: str) -> SendTransfer:
        if (handoff := self._handoffs.get(attempt_id)) is None:
            raise HandoffOver(f"{attempt_id} is not being sent")
        return handoff

    def _peer(self, worker_id: str, epoch: str) -> SendLink | None:
        peer = self._peers.get(worker_id)
        return peer if peer is not None and peer.alive and peer.epoch == epoch else None

    def _peer_of(self, handoff: SendTransfer) -> SendLink | None:
        return self._peer(handoff.peer.worker_id, handoff.peer.epoch)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bootstrap(self, handoff: SendTransfer) -> None:
        to = handoff.peer
        try:
            await self.connect(to.worker_id, to.epoch, to.endpoints)
        except PdserveError as error:
            self._conclude(handoff, error)
        finally:
            peer = self._peer_of(handoff)
            if peer is None:  # also after an unexpected error: the hand-off must not wait for its deadline
                self._conclude(handoff, PeerLost(f"there is no KV link to {to.worker_id}"))
            else:
                peer.add(handoff)
                if isinstance(handoff.outcome, PdserveError):  # it failed meanwhile: the receiver has to hear of it
                    peer.drop(handoff, handoff.outcome)

    async def _meet(self, worker_id: str, epoch: str, choice: Choice) -> SendLink:
        link = await choice.transport.connect(choice.endpoint, self._connect_timeout_s)
        peer: SendLink | None = None
        announced: list[Announce] = []
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                checksums = link.hashes(self._checksums)
                hello = Hello(self._worker_id, epoch, self._store.layout, checksums, self._eos_token_ids)
                await introduce(link, hello, worker_id)
                ceiling_gbs = await measure(link, self._store, announced)
            peer = SendLink(
                PeerLink(worker_id, choice.transport.name, choice.reason, ceiling_gbs),
                epoch,
                choice.endpoint,
                link,
                store=self._store,
                checksums=checksums,
                max_inflight_bytes=self._max_inflight_bytes,
                clock=self._clock,
                heartbeat_s=self._lease_s / _HEARTBEATS_PER_LEASE,
                is_over=self._over.__contains__,
                bound=self._bound,
                heard=lambda handoff: self._leases[handoff.attempt_id].renew(),
                conclude=self._conclude,
                announced=announced,
            )
        except TimeoutError:
            raise TransferTimeout(f"{worker_id} did not answer within {self._connect_timeout_s:g} s") from None
        finally:
            if peer is None:
                await link.aclose()
        return peer

    def _bound(self, handoff: SendTransfer) -> None:
        """Its receiver is known: from now on its silence counts."""
        if (lease := self._leases.get(handoff.attempt_id)) is not None:
            lease.watch(self._lease_s)

    def _conclude(self, handoff: SendTransfer, error: PdserveError | None) -> None:
        if handoff.outcome is not None:
            return
        self._leases.pop(handoff.attempt_id).cancel()
        self._over[handoff.attempt_id] = None
        while len(self._over) > _REMEMBERED:
            del self._over[next(iter(self._over))]
        if error is None:
            handoff.outcome = handoff.sent(self._clock.now())
            handoff.status = TransferStatus.SUCCESS
        else:
            handoff.outcome, handoff.status = error, TransferStatus.FAILED
        if (peer := self._peer_of(handoff)) is not None:
            peer.drop(handoff, error)
        handoff.done.set()
