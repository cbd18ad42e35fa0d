"""The receiving end of KV transfers: it accepts links, checks messages, and writes blocks into its pool.

Messages name slots of a transfer, never blocks of the pool. When a transfer is aborted or expires, the receiver cancels
its fetch and forgets its nonce at once, and so refuses late messages. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from contract.kv import (
    Abort,
    Ack,
    Announce,
    Blocks,
    Confirm,
    Hello,
    Open,
    Probe,
    Reason,
    Refusal,
    Refused,
    peer_error,
)
from kv_transfer.base import KVLink, KVTransport, Message, Tasks
from kv_transfer.codec import codec_of
from kv_transfer.handshake import check_block_size, dismiss, greet, parse, sorted_eos
from kv_transfer.pending_peers import INTRODUCTION_S
from kv_transfer.pool import Pool
from kv_transfer.receive_transfer import ReceiveLink, ReceiveTransfer
from pdserve.core.chance import SYSTEM
from pdserve.core.clock import Clock
from pdserve.core.config import TransferConfig
from pdserve.core.errors import PdserveError, PeerLost, TransferError, to_wire
from pdserve.core.handoff import KVEndpoint

LINK_TIMEOUT_S = 2.0
"""Limit: wait of a hand-off for a link from its sender. Then: `transfer.on_kv_failure`.

A sender opens one when it shakes hands, or when a transfer begins."""

_log = logging.getLogger(__name__)


class KVReceiver:
    """Receives into ``pool``. The caller closes the ``transports``, after this.

    ``eos_token_ids``: the model's end-of-sequence ids; a peer with different ones is refused. ConfigError if blocks are
    larger than a message or cannot be coded, ModelError if there are too many ids.
    """

    def __init__(
        self,
        pool: Pool,
        transports: Sequence[KVTransport],
        config: TransferConfig,
        *,
        worker_id: str,
        epoch: str,
        clock: Clock,
        eos_token_ids: Iterable[int] = (),
        chance: random.Random = SYSTEM,
    ) -> None:
        check_block_size(pool.layout)
        codec_of(config.codec, pool.layout)
        self._eos_token_ids = sorted_eos(eos_token_ids)
        self._pool, self._clock, self._chance = pool, clock, chance
        self._worker_id, self._epoch, self._config = worker_id, epoch, config
        self._transports = tuple(transports)
        self._transfers: dict[str, ReceiveTransfer] = {}  # by nonce: those that have not ended
        self._links: list[ReceiveLink] = []  # whose senders have introduced themselves, the newest last
        self._refused: Counter[str] = Counter()
        self._tasks = Tasks()

    @property
    def refused(self) -> Mapping[str, int]:
        """How many messages, and peers that did not know the service's secret, were refused, by `Reason`."""
        return +Counter(
            {**self._refused, Reason.UNPROVEN: sum(transport.num_unauthenticated for transport in self._transports)}
        )

    async def start(self, host: str, port: int = 0) -> tuple[KVEndpoint, ...]:
        """Listen on ``host`` with every transport, and serve every link. The i-th transport uses ``port`` + i if it
        uses ports (0: any free ports). PeerLost if the address is not one of this host, or a port is taken."""
        ports = itertools.count(port) if port else itertools.repeat(0)
        endpoints = [
            await transport.listen(host, each) for transport, each in zip(self._transports, ports, strict=False)
        ]
        for transport in self._transports:
            self._tasks.spawn(self._accept(transport))
        return tuple(endpoints)

    def announce(
        self,
        attempt_id: str,
        sender_id: str,
        block_ids: Sequence[int],
        num_skipped: int,
        deadline_s: float,
        *,
        partial: bool = False,
    ) -> ReceiveTransfer:
        """Receive a prompt's blocks into ``block_ids``, the first ``num_skipped`` of which are in place already, and
        announce this to worker ``sender_id`` over its link. With ``partial``, the sender may have only the first of
        them (`ReceivedKV.num_blocks`).

        ``deadline_s`` is a time of the receiver's clock. Without a link, the announcement waits for one; the transfer
        fails with PeerLost after `LINK_TIMEOUT_S`, and when the link over which it was announced is lost. It also fails
        with TransferTimeout at the deadline or when the sender was silent for `transfer.lease_s`, RequestAborted after
        `ReceiveTransfer.abort`, or the error with which the sender aborted. ValueError on bad arguments. The caller
        announces an attempt once."""
        inside = {block for block in block_ids if 0 <= block < self._pool.num_blocks}
        if not 0 <= num_skipped <= len(block_ids) == len(inside):
            bounds = f"which must differ and be below {self._pool.num_blocks}"
            raise ValueError(f"{num_skipped} skipped of blocks {block_ids}, {bounds}")
        transfer = ReceiveTransfer(
            Announce(attempt_id, self._chance.randbytes(16).hex(), len(block_ids), num_skipped),
            self._clock,
            deadline_s,
            self._config.lease_s,
            self._on_end,
            sender_id,
            block_ids,
            self._pool.layout,
            partial=partial,
        )
        self._transfers[transfer.nonce] = transfer
        link = self._link_from(sender_id)
        self._tasks.spawn(self._await_link(transfer) if link is None else link.tell(transfer.announcement))
        return transfer

    def hello(self, link: KVLink) -> Hello:
        """The first message that a peer must send on ``link``, apart from its worker id."""
        return Hello(
            self._worker_id,
            self._epoch,
            self._pool.layout,
            link.hashes(self._config.checksum),
            self._eos_token_ids,
            self._config.codec,
        )

    async def aclose(self) -> None:
        """Fail all transfers with PeerLost, and close the links."""
        for transfer in list(self._transfers.values()):
            self._lose(transfer, PeerLost(f"the KV receiver of {self._worker_id} was closed"))
        await self._tasks.aclose()

    # --- links -------------------------------------------------------------------------------------------------------

    async def _accept(self, transport: KVTransport) -> None:
        with contextlib.suppress(PeerLost):
            while True:
                self._tasks.spawn(
                    self._serve(ReceiveLink(await transport.accept(), self._pool, self._config.checksum, self._clock))
                )

    async def _serve(self, link: ReceiveLink) -> None:
        """Handle a sender's messages until its link ends, and then fail its transfers."""
        lost: TransferError = PeerLost("the KV link was closed here")
        try:
            if await self._meet(link):
                while True:
                    message = await link.link.recv()
                    await self._on_message(link, message)
                    if not message.size:  # a peer that sends many small messages must not delay the other links
                        await asyncio.sleep(0)
        except TransferError as error:
            # The traceback's frames would keep this link's memory until the next garbage collection.
            lost = error.with_traceback(None)
        finally:
            self._on_lost(link, lost)
            await link.link.aclose()

    async def _meet(self, link: ReceiveLink) -> bool:
        """Shake hands with the sender. Returns False if it does not introduce itself, or does not fit."""
        introduction_s = min(self._config.lease_s, INTRODUCTION_S)
        try:
            async with asyncio.timeout(introduction_s):
                try:
                    hello = await greet(link.link, self.hello(link.link))
                    link.sender_id, link.codec = hello.worker_id, codec_of(hello.codec, self._pool.layout)
                except Refusal as refusal:
                    self._refused[refusal.reason] += 1
                    _log.warning("a KV link was refused: %s", refusal)
                    await dismiss(link.link, refusal)
                    return False
        except TimeoutError:
            _log.warning("a KV peer did not introduce itself within %g s", introduction_s)
            return False
        self._links.append(link)
        for transfer in self._transfers.values():
            if transfer.sender_id == link.sender_id and transfer.source is None:
                self._tasks.spawn(link.tell(transfer.announcement))
        return True

    def _link_from(self, sender_id: str) -> ReceiveLink | None:
        """The newest link from a sender, which may have another one that it has given up."""
        return next((link for link in reversed(self._links) if link.sender_id == sender_id), None)

    def _on_lost(self, link: ReceiveLink, error: PdserveError) -> None:
        """Fail the transfers of a link that has ended: those that came over it, and those announced over it, unless its
        sender has another link, over which they are announced again."""
        is_newest = self._link_from(link.sender_id) is link
        if link in self._links:
            self._links.remove(link)
        other = self._link_from(link.sender_id)
        for transfer in list(self._transfers.values()):
            unheard = transfer.source is None and is_newest and transfer.sender_id == link.sender_id
            if unheard and other is not None:
                self._tasks.spawn(other.tell(transfer.announcement))
            elif unheard or transfer.source is link:
                self._lose(transfer, PeerLost(f"the sender of {transfer.attempt_id} was lost: {error}"))

    async def _await_link(self, transfer: ReceiveTransfer) -> None:
        await asyncio.sleep(LINK_TIMEOUT_S)
        if self._link_from(transfer.sender_id) is None:
            transfer.end(PeerLost(f"there is no KV link from {transfer.sender_id}"))

    # --- messages ----------------------------------------------------------------------------------------------------

    async def _on_message(self, link: ReceiveLink, message: Message) -> None:
        """Handle one message. Its blocks then count, or it was refused and only blocks of its own transfer may have
        changed."""
        nonce, seq, received_s = "", 0, self._clock.now()
        try:
            header = parse(message)
            if isinstance(header, Blocks | Open | Probe):
                link.sender_clock.heard(header.sent_us, received_s)
            if isinstance(header, Blocks):
                nonce, seq = header.nonce, header.seq
                await self._fill(link, self._expected(link, header), header, message.size)
            elif isinstance(header, Open):
                nonce = header.nonce
                self._expected(link, header)
                await link.say(Ack(nonce, 0))
            elif isinstance(header, Confirm):
                transfer = self._transfers.get(header.nonce)
                if transfer is not None and transfer.source is link and transfer.complete:
                    transfer.end(transfer.received(self._clock.now()))
                    await link.tell_ceiling()
            elif isinstance(header, Probe):
                await link.probe(header, message.size, received_s)
            elif isinstance(header, Abort):
                transfer = self._transfers.get(header.nonce)
                if transfer is not None and transfer.source in (None, link):
                    why = f"the sender of {transfer.attempt_id} gave up: {header.message}"
                    self._lose(transfer, peer_error(header.kind, why))
            else:
                raise Refusal(Reason.MALFORMED, f"a {type(header).__name__} was not expected")
        except Refusal as refusal:
            # A heartbeat may cross the last acknowledgement. Its sender is told, but it does not count as refused.
            if seq or refusal.reason is not Reason.UNKNOWN_NONCE:
                _log.warning("a KV message was refused: %s", refusal)
                self._refused[refusal.reason] += 1
            await link.say(Refused(nonce, seq, *to_wire(refusal.error)))

    def _expected(self, link: ReceiveLink, header: Open | Blocks) -> ReceiveTransfer:
        """The transfer that a message belongs to; renews its lease. `Refusal` if there is none, or it uses another
        link."""
        name = header.attempt_id
        if header.epoch != self._epoch:
            raise Refusal(Reason.STALE_EPOCH, f"{name}: {self._worker_id} has started anew")
        if (transfer := self._transfers.get(header.nonce)) is None:
            raise Refusal(Reason.UNKNOWN_NONCE, f"{name} is not expected (any more)")
        if transfer.attempt_id != name:
            raise Refusal(Reason.WRONG_REQUEST, f"{name} is not what this nonce was given for")
        transfer.heard(link)
        return transfer

    async def _fill(self, link: ReceiveLink, transfer: ReceiveTransfer, header: Blocks, size: int) -> None:
        """Fetch a message's payload into its blocks, verify it there, and acknowledge it."""
        blocks, layers = transfer.check(header, size)
        begun_s = transfer.begin(link.sender_clock.departure_s(header.sent_us))
        try:
            regions = self._pool.regions(blocks, layers)
            coded = link.coded(size, sum(region.size for region in regions))
            fetch = transfer.fetch = link.link.fetch(
                regions, hashed=link.checksums, coded=coded, on_progress=transfer.lease.renew
            )
            await fetch
            fetched_s = self._clock.now()
            if transfer.is_over:
                return  # it has ended, and another request may use its blocks
            if link.checksums and await fetch.checksum(header.trailer) != header.checksum:
                raise transfer.reject(header, size)
            await fetch.commit()
            if fetch.cancelled:
                return
        except TransferError:
            raise
        except PdserveError as error:
            transfer.end(error)
            return
        except (RuntimeError, ValueError) as error:  # of a device, or of closed memory: only this transfer fails
            _log.exception("the KV of %s cannot be written", transfer.attempt_id)
            transfer.end(TransferError(f"KV of {transfer.attempt_id} cannot be written: {error}"))
            return
        now_s = self._clock.now()
        transfer.accept(header, size, begun_s, now_s, now_s - fetched_s + fetch.digest_s)
        await self._finish(link, transfer, header.seq)

    async def _finish(self, link: ReceiveLink, transfer: ReceiveTransfer, seq: int) -> None:
        if transfer.complete and not link.confirms:
            transfer.end(transfer.received(self._clock.now()))
            await asyncio.sleep(0)  # resumes what waits for the transfer, so that decode begins before the writes below
            await link.tell_ceiling()  # before the acknowledgement, so that the sender knows it when it is done
        await link.say(Ack(transfer.nonce, seq))

    # --- ends --------------------------------------------------------------------------------------------------------

    def _lose(self, transfer: ReceiveTransfer, error: PdserveError) -> None:
        """End a transfer whose sender knows it, or cannot be told."""
        transfer.source = None
        transfer.end(error)

    def _on_end(self, transfer: ReceiveTransfer) -> None:
        """Forget the nonce, cancel the fetch, and tell the sender of a failure."""
        del self._transfers[transfer.nonce]
        if transfer.fetch is not None:
            transfer.fetch.cancel()
        if transfer.error is not None and transfer.source is not None:
            self._tasks.spawn(transfer.source.tell(Abort(transfer.nonce, *to_wire(transfer.error))))
