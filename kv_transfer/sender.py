"""The sending end of KV transfers: it reads blocks from its pool and sends them to receivers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from contract.kv import Announce, Hello
from kv_transfer.base import KVTransport, Tasks
from kv_transfer.codec import codec_of
from kv_transfer.factory import choose
from kv_transfer.handshake import check_block_size, introduce, measure, sorted_eos
from kv_transfer.pool import Pool
from kv_transfer.send_transfer import SendLink, SendTransfer
from pdserve.core.clock import Clock
from pdserve.core.config import CodecName, TransferConfig
from pdserve.core.errors import PdserveError, PeerLost, TransferTimeout
from pdserve.core.handoff import KVEndpoint, KVPeer, PeerLink

_REMEMBERED = 8192  # far more attempts than a router has placed here that have not arrived, or have just ended


class Early(NamedTuple):
    """The announcement, over ``link``, of an attempt that has not begun here."""

    link: SendLink
    announced: Announce


class KVSender:
    """Sends from ``pool`` over ``transports`` (best first), which the caller closes after this.

    Belongs to one event loop. ``eos_token_ids``: the model's end-of-sequence ids; receivers with different ones refuse
    the link. ConfigError if blocks are larger than a message or cannot be coded, ModelError if there are too many ids.
    """

    def __init__(
        self,
        pool: Pool,
        transports: Sequence[KVTransport],
        config: TransferConfig,
        *,
        worker_id: str,
        clock: Clock,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        check_block_size(pool.layout)
        self._codec = codec_of(config.codec, pool.layout)
        self._eos_token_ids = sorted_eos(eos_token_ids)
        self._pool, self._transports, self._config = pool, tuple(transports), config
        self._worker_id, self._clock = worker_id, clock
        self._links: dict[str, SendLink] = {}  # by worker id: the newest
        self._connecting: dict[str, asyncio.Lock] = {}
        self._attempts: dict[str, Early | SendTransfer | None] = {}
        """What is known of each attempt: its announcement, its transfer, or None: it has ended. Of those without a
        transfer, the newest are remembered."""
        self._tasks = Tasks()

    def links(self) -> tuple[PeerLink, ...]:
        """The open links, ordered by worker id."""
        links = (link.about for link in list(self._links.values()) if link.alive)
        return tuple(sorted(links, key=lambda link: link.worker_id))

    async def connect(self, peer: KVPeer) -> None:
        """Open a link to this incarnation of a worker, unless there is one. Raises LayoutMismatch, TransferRefused (the
        worker has another incarnation now), TransferTimeout, PeerLost, or ConfigError if no transport reaches the
        worker."""
        transport, endpoint, reason = choose(self._transports, peer.endpoints, peer.worker_id)
        async with self._connecting.setdefault(peer.worker_id, asyncio.Lock()):
            known = self._link_to(peer)
            if known is not None and known.endpoint == endpoint:
                return
            link, announced = await self._meet(peer, transport, endpoint, reason)
            old = self._links.get(peer.worker_id)
            self._links[peer.worker_id] = link
            for transfer in self._transfers():
                if transfer.link is None and self._link_to(transfer.peer) is link:
                    link.add(transfer)
            for each in announced:
                self._on_announce(link, each)
            if old is not None:
                await old.aclose()

    def push(
        self, attempt_id: str, peer: KVPeer, num_blocks: int, deadline_s: float, *, partial: bool = False
    ) -> SendTransfer:
        """Begin a transfer of ``num_blocks`` blocks to ``peer``; opens a link where there is none. Blocks that are
        queued wait until the peer has announced where they go. ``deadline_s`` is a time of the sender's clock. With
        ``partial``, these may be only the first of the announced blocks. ValueError if the attempt has a transfer
        already.

        The transfer is complete when the receiver has acknowledged everything. It fails with TransferTimeout at the
        deadline or when the receiver was silent for `transfer.lease_s`, PeerLost, TransferRefused, ChecksumMismatch,
        LayoutMismatch, RequestAborted after `SendTransfer.abort`, or the error with which the receiver aborted."""
        known = self._attempts.get(attempt_id)
        if isinstance(known, SendTransfer):
            raise ValueError(f"{attempt_id} is being sent already")
        transfer = SendTransfer(
            attempt_id, self._clock, deadline_s, self._on_end, peer, num_blocks, self._pool, partial=partial
        )
        self._attempts[attempt_id] = transfer
        if (link := self._link_to(peer)) is None:
            self._tasks.spawn(self._connect(transfer))
        else:
            link.add(transfer)
            if known is not None:
                self._on_announce(*known)
        return transfer

    async def aclose(self) -> None:
        """Fail all transfers with PeerLost, and close the links."""
        await self._tasks.aclose()
        await asyncio.gather(*(link.aclose() for link in self._links.values()))
        self._links.clear()
        for transfer in self._transfers():
            transfer.end(PeerLost(f"the KV sender of {self._worker_id} was closed"))

    # --- links -------------------------------------------------------------------------------------------------------

    def _link_to(self, peer: KVPeer) -> SendLink | None:
        link = self._links.get(peer.worker_id)
        return link if link is not None and link.alive and link.peer.epoch == peer.epoch else None

    async def _connect(self, transfer: SendTransfer) -> None:
        """Open the link of a transfer. Also if the transfer ends meanwhile: the receiver must be told."""
        try:
            await self.connect(transfer.peer)
        except PdserveError as error:
            transfer.end(error)
        finally:
            if transfer.link is None:  # also after an unexpected error, so that the transfer ends before its deadline
                transfer.end(PeerLost(f"there is no KV link to {transfer.peer.worker_id}"))

    async def _meet(
        self, peer: KVPeer, transport: KVTransport, endpoint: KVEndpoint, reason: str
    ) -> tuple[SendLink, list[Announce]]:
        """Shake hands. Returns the link, and the announcements that came meanwhile."""
        timeout_s, announced = self._config.connect_timeout_s, list[Announce]()
        link = await transport.connect(endpoint, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                checksums = link.hashes(self._config.checksum)
                codec = self._codec if link.codes else None
                name: CodecName = "none" if codec is None else codec.name
                hello = Hello(self._worker_id, peer.epoch, self._pool.layout, checksums, self._eos_token_ids, name)
                await introduce(link, hello, peer.worker_id)
                by_value = codec is not None  # probes go the way of coded payloads
                ceiling_gbs = await measure(link, self._pool, announced, self._clock, by_value=by_value)
        except BaseException as error:
            await link.aclose()
            if isinstance(error, TimeoutError):
                raise TransferTimeout(f"{peer.worker_id} did not answer within {timeout_s:g} s") from None
            raise
        if self._codec is not None:
            reason += f", {self._codec.name} coding" if codec else ", not coded"
        about = PeerLink(peer.worker_id, transport.name, reason, ceiling_gbs)
        met = SendLink(
            about, peer, endpoint, link, codec, self._pool, self._config, self._clock, self._on_announce, self._on_lost
        )
        return met, announced

    # --- attempts ----------------------------------------------------------------------------------------------------

    def _transfers(self) -> list[SendTransfer]:
        return [known for known in self._attempts.values() if isinstance(known, SendTransfer)]

    def _on_announce(self, link: SendLink, announced: Announce) -> None:
        """Bind the transfer that an announcement is for, keep the announcement, or answer that the attempt is over."""
        attempt_id = announced.attempt_id
        known = self._attempts.get(attempt_id)
        if isinstance(known, SendTransfer):
            if known.link is link and not known.nonce:
                link.bind(known, announced)
        elif known is None and attempt_id in self._attempts:
            link.refuse(announced)
        else:
            self._remember(attempt_id, Early(link, announced))

    def _on_lost(self, link: SendLink, error: PeerLost) -> None:
        """End the transfers of a link, and forget what was announced over it."""
        for attempt_id, known in list(self._attempts.items()):
            if known is not None and known.link is link:
                if isinstance(known, SendTransfer):
                    known.end(error)
                else:
                    self._attempts.pop(attempt_id, None)

    def _on_end(self, transfer: SendTransfer) -> None:
        self._remember(transfer.attempt_id, None)
        if transfer.link is not None:
            transfer.link.drop(transfer)

    def _remember(self, attempt_id: str, known: Early | None) -> None:
        """Set what is known of an attempt without a transfer. A transfer whose announcement is forgotten ends by the
        receiver's lease."""
        self._attempts.pop(attempt_id, None)
        self._attempts[attempt_id] = known
        if len(self._attempts) > _REMEMBERED:
            del self._attempts[next(key for key, each in self._attempts.items() if not isinstance(each, SendTransfer))]
