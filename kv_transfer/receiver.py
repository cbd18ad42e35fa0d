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
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from contract.kv import (
    Abort,
    Ack,
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
from kv_transfer.handshake import check_block_size, dismiss, greet, parse, sorted_eos
from kv_transfer.pending_peers import INTRODUCTION_S
from kv_transfer.pool import Pool
from kv_transfer.receive_transfer import ReceivedKV, ReceiveLink, ReceiveTransfer
from kv_transfer.transfer import Lease, TransferEnded
from pdserve.core.chance import SYSTEM
from pdserve.core.clock import Clock
from pdserve.core.errors import PdserveError, PeerLost, RequestAborted, TransferError, TransferTimeout, to_wire
from pdserve.core.handoff import KVEndpoint

LINK_TIMEOUT_S = 2.0
"""Limit: wait of a hand-off for a link from its sender. Then: `transfer.on_kv_failure`.

A sender opens one when it shakes hands, or when a transfer begins."""

_log = logging.getLogger(__name__)


class KVReceiver:
    """Receives into ``pool``. The caller closes the ``transports``, after this.

    ``lease_s``: how long the sender of a transfer may be silent. ``eos_token_ids``: the model's end-of-sequence ids; a
    peer with different ones is refused. ConfigError if blocks are larger than a message, ModelError if there are too
    many ids.
    """

    def __init__(
        self,
        pool: Pool,
        transports: Sequence[KVTransport],
        *,
        worker_id: str,
        epoch: str,
        checksum: bool,
        clock: Clock,
        lease_s: float,
        eos_token_ids: Iterable[int] = (),
        chance: random.Random = SYSTEM,
    ) -> None:
        check_block_size(pool.layout)
        self._eos_token_ids = sorted_eos(eos_token_ids)
        self._pool, self._clock, self._chance = pool, clock, chance
        self._worker_id, self._epoch, self._checksum = worker_id, epoch, checksum
        self._lease_s = lease_s
        self._transports = tuple(transports)
        self._by_attempt: dict[str, ReceiveTransfer] = {}
        self._by_nonce: dict[str, ReceiveTransfer] = {}
        self._links: dict[str, ReceiveLink] = {}  # by sender id: the newest
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
    ) -> None:
        """Receive a prompt's blocks into ``block_ids``, the first ``num_skipped`` of which are in place already, and
        announce this to worker ``sender_id`` over its link. With ``partial``, the sender may have only the first of
        them (`ReceivedKV.num_blocks`).

        ``deadline_s`` is a time of the receiver's clock. Without a link, the announcement waits for one; the transfer
        fails with PeerLost after `LINK_TIMEOUT_S`, and when the link over which it was announced is lost. ValueError on
        bad arguments, or if the attempt has a transfer here already."""
        if attempt_id in self._by_attempt:
            raise ValueError(f"{attempt_id} is being received already")
        if not 0 <= num_skipped <= len(block_ids) or len(set(block_ids)) < len(block_ids):
            raise ValueError(f"{num_skipped} skipped of {len(block_ids)} blocks, which must differ")
        if not all(0 <= block < self._pool.num_blocks for block in block_ids):
            raise ValueError(f"blocks outside a pool of {self._pool.num_blocks}")

        def expire(why: str) -> None:
            self._fail(transfer, TransferTimeout(f"KV of {attempt_id} is incomplete and {why}"))

        lease = Lease(self._clock, deadline_s, self._lease_s, expire)
        nonce, layout, now_s = self._chance.randbytes(16).hex(), self._pool.layout, self._clock.now()
        transfer = ReceiveTransfer(
            attempt_id, sender_id, lease, nonce, block_ids, num_skipped, layout, now_s, partial=partial
        )
        self._by_attempt[attempt_id] = self._by_nonce[nonce] = transfer
        if (link := self._links.get(sender_id)) is not None:
            self._tasks.spawn(link.tell(transfer.announcement))
        else:
            self._tasks.spawn(self._await_link(transfer))

    async def wait(self, attempt_id: str) -> ReceivedKV:
        """Wait until the transfer is complete. When this returns or raises, nothing writes into its blocks, and its
        attempt id is free again.

        Raises TransferTimeout at the deadline or when the sender was silent for ``lease_s``, PeerLost, RequestAborted
        after `abort`, the error with which the sender aborted, or TransferEnded if there is no such transfer."""
        if (transfer := self._by_attempt.get(attempt_id)) is None:
            raise TransferEnded(f"{attempt_id} is not expected")
        await transfer.ended()
        await self._release(transfer)
        return transfer.result()

    def hello(self, link: KVLink) -> Hello:
        """The first message that a peer must send on ``link``, apart from its worker id."""
        return Hello(self._worker_id, self._epoch, self._pool.layout, link.hashes(self._checksum), self._eos_token_ids)

    async def abort(self, attempt_id: str) -> None:
        """End a transfer and tell its sender. When this returns, nothing writes into its blocks. Does nothing if there
        is no such transfer."""
        if (transfer := self._by_attempt.get(attempt_id)) is not None:
            self._fail(transfer, RequestAborted(f"the KV transfer of {attempt_id} was aborted by its receiver"))
            await self._release(transfer)

    async def aclose(self) -> None:
        """Fail all transfers with PeerLost, and close the links."""
        for transfer in list(self._by_nonce.values()):
            self._fail(transfer, PeerLost(f"the KV receiver of {self._worker_id} was closed"), tell=False)
        await self._tasks.aclose()

    # --- links -------------------------------------------------------------------------------------------------------

    async def _accept(self, transport: KVTransport) -> None:
        with contextlib.suppress(PeerLost):
            while True:
                self._tasks.spawn(
                    self._serve(ReceiveLink(await transport.accept(), self._pool, self._checksum, self._clock))
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
        introduction_s = min(self._lease_s, INTRODUCTION_S)
        try:
            async with asyncio.timeout(introduction_s):
                try:
                    link.sender_id = (await greet(link.link, self.hello(link.link))).worker_id
                except Refusal as refusal:
                    self._refused[refusal.reason] += 1
                    _log.warning("a KV link was refused: %s", refusal)
                    await dismiss(link.link, refusal)
                    return False
        except TimeoutError:
            _log.warning("a KV peer did not introduce itself within %g s", introduction_s)
            return False
        self._links[link.sender_id] = link
        for transfer in self._by_nonce.values():
            if transfer.sender_id == link.sender_id and transfer.source is None:
                self._tasks.spawn(link.tell(transfer.announcement))
        return True

    def _on_lost(self, link: ReceiveLink, error: PdserveError) -> None:
        """Fail the transfers of a link that has ended: those that came over it, and those announced over it."""
        is_newest = self._links.get(link.sender_id) is link
        if is_newest:
            del self._links[link.sender_id]
        for transfer in list(self._by_nonce.values()):
            unheard = transfer.source is None and is_newest and transfer.sender_id == link.sender_id
            if unheard or transfer.source is link:
                self._fail(transfer, PeerLost(f"the sender of {transfer.attempt_id} was lost: {error}"), tell=False)

    async def _await_link(self, transfer: ReceiveTransfer) -> None:
        await asyncio.sleep(LINK_TIMEOUT_S)
        if transfer.sender_id not in self._links:
            self._fail(transfer, PeerLost(f"there is no KV link from {transfer.sender_id}"))

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
                transfer = self._by_nonce.get(header.nonce)
                if transfer is not None and transfer.source is link and transfer.complete:
                    self._conclude(transfer, transfer.received(self._clock.now()))
                    await link.tell_ceiling()
            elif isinstance(header, Probe):
                await link.probe(header, message.size, received_s)
            elif isinstance(header, Abort):
                transfer = self._by_nonce.get(header.nonce)
                if transfer is not None and transfer.source in (None, link):
                    why = f"the sender of {transfer.attempt_id} gave up: {header.message}"
                    self._fail(transfer, peer_error(header.kind, why), tell=False)
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
        if (transfer := self._by_nonce.get(header.nonce)) is None:
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
            fetch = transfer.fetch = link.link.fetch(regions, hashed=link.checksums, on_progress=transfer.lease.renew)
            await fetch
            fetched_s = time.perf_counter()
            if transfer.is_over:
                return  # it has ended, and another request may use its blocks
            if fetch.digest is not None:
                fetch.digest.update(header.trailer)
                if fetch.digest.intdigest() != header.checksum:
                    raise transfer.reject(header, size)
            await fetch.commit()
            if fetch.cancelled:
                return
        except TransferError:
            raise
        except PdserveError as error:
            self._fail(transfer, error)
            return
        except (RuntimeError, ValueError) as error:  # of a device, or of closed memory: only this transfer fails
            _log.exception("the KV of %s cannot be written", transfer.attempt_id)
            self._fail(transfer, TransferError(f"KV of {transfer.attempt_id} cannot be written: {error}"))
            return
        import_s = time.perf_counter() - fetched_s + fetch.digest_s
        transfer.accept(header, size, begun_s, self._clock.now(), import_s)
        await self._finish(link, transfer, header.seq)

    async def _finish(self, link: ReceiveLink, transfer: ReceiveTransfer, seq: int) -> None:
        if transfer.complete and not link.confirms:
            self._conclude(transfer, transfer.received(self._clock.now()))
            await link.tell_ceiling()  # before the acknowledgement, so that the sender knows it when it is done
        await link.say(Ack(transfer.nonce, seq))

    # --- ends --------------------------------------------------------------------------------------------------------

    async def _release(self, transfer: ReceiveTransfer) -> None:
        """Wait until nothing writes into the blocks of an ended transfer. Until then, `abort` has to find it."""
        if transfer.fetch is not None:
            await transfer.fetch.at_rest()
        if self._by_attempt.get(transfer.attempt_id) is transfer:
            del self._by_attempt[transfer.attempt_id]

    def _fail(self, transfer: ReceiveTransfer, error: PdserveError, *, tell: bool = True) -> None:
        """End a transfer with ``error``, and tell the sender."""
        if not transfer.is_over:
            self._conclude(transfer, error)
            if tell and transfer.source is not None:
                self._tasks.spawn(transfer.source.tell(Abort(transfer.nonce, *to_wire(error))))

    def _conclude(self, transfer: ReceiveTransfer, outcome: ReceivedKV | PdserveError) -> None:
        """End a transfer: forget its nonce, and cancel its fetch."""
        del self._by_nonce[transfer.nonce]
        if transfer.fetch is not None:
            transfer.fetch.cancel()
        transfer.conclude(outcome)
