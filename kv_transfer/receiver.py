"""The receiving end: it keeps which blocks a hand-off may fill, and decides on its end.

Only slot numbers come over the wire, so no sender can name a block; and a hand-off that was aborted or expired is
forgotten at once and its sink closed, so that nothing is written for it any more and a sender that wakes up late finds
nobody. Everything runs on one event loop. What comes over a link is `kv_transfer.receive_link`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any

from kv_transfer.base import BlockStore, KVTransport
from kv_transfer.handoff_over import HandoffOver
from kv_transfer.handshake import check_block_size, sorted_eos
from kv_transfer.integrity import Abort, Header, Hello, Reason
from kv_transfer.lease import Lease
from kv_transfer.receive_link import ReceiveLink
from kv_transfer.receive_transfer import ReceivedKV, ReceiveTransfer
from kv_transfer.status import TransferStatus
from pdserve.core.clock import Clock
from pdserve.core.errors import PdserveError, PeerLost, RequestAborted, TransferError, TransferTimeout, to_wire
from pdserve.core.handoff import KVDestination, KVEndpoint

LINK_TIMEOUT_S = 2.0
"""A sender has a link from its handshake on, or opens one when a hand-off begins: one that has none by then is gone."""


class KVReceiver:
    """Receives hand-offs into ``store``. The ``transports`` stay their creator's, to be closed after this.

    ``lease_s``: how long a hand-off's sender may be silent. ``delay_s`` is a hook for tests: it
    passes before a hand-off's last block counts as verified. ``eos_token_ids`` are the model's; peers with others are
    refused.
    """

    def __init__(
        self,
        store: BlockStore,
        transports: Sequence[KVTransport],
        *,
        worker_id: str,
        epoch: str,
        checksum: bool,
        clock: Clock,
        lease_s: float,
        delay_s: float = 0.0,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        check_block_size(store.layout)
        self._eos_token_ids = sorted_eos(eos_token_ids)
        self.store, self.clock = store, clock
        self.worker_id, self.epoch, self.checksums = worker_id, epoch, checksum
        self.lease_s, self.delay_s = lease_s, delay_s
        self._transports = tuple(transports)
        self._endpoints: tuple[KVEndpoint, ...] = ()
        self._by_request: dict[str, ReceiveTransfer] = {}
        self._by_nonce: dict[str, ReceiveTransfer] = {}
        self._leases: dict[str, Lease] = {}
        self._links: dict[str, ReceiveLink] = {}  # by sender's id: the newest
        self._refused: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def refused(self) -> Mapping[str, int]:
        """How many messages were refused, by `Reason`."""
        return dict(self._refused)

    async def start(self, host: str, port: int = 0) -> tuple[KVEndpoint, ...]:
        """Listen on ``host`` with every transport and serve every link; the i-th transport on ``port`` + i, if it has
        any use for a port (0: free ones). PeerLost if the address is not this host's or the port not free."""
        ports = itertools.count(port) if port else itertools.repeat(0)
        self._endpoints = tuple(
            [await transport.listen(host, each) for transport, each in zip(self._transports, ports, strict=False)]
        )
        for transport in self._transports:
            self.spawn(self._accept(transport))
        return self._endpoints

    def expect(self, attempt_id: str, block_ids: Sequence[int], num_skipped: int, deadline_s: float) -> KVDestination:
        """Await the blocks of a prompt into ``block_ids``, the first ``num_skipped`` of which are in place already.
        ``deadline_s`` is a time of the receiver's clock. ValueError if the arguments make no sense."""
        if not self._endpoints:
            raise ValueError("start() comes first")
        if attempt_id in self._by_request:
            raise ValueError(f"{attempt_id} is expected already")
        if not 0 <= num_skipped <= len(block_ids) or len(set(block_ids)) < len(block_ids):
            raise ValueError(f"{num_skipped} skipped of {len(block_ids)} blocks, which must differ")
        if not all(0 <= block < self.store.num_blocks for block in block_ids):
            raise ValueError(f"blocks outside a pool of {self.store.num_blocks}")
        nonce, layout = secrets.token_hex(16), self.store.layout
        incoming = ReceiveTransfer(attempt_id, nonce, block_ids, num_skipped, layout, self.clock.now())
        self._by_request[attempt_id] = self._by_nonce[nonce] = incoming

        def expire(why: str) -> None:
            self.fail(incoming, TransferTimeout(f"KV of {attempt_id} is incomplete and {why}"))

        self._leases[nonce] = Lease(self.clock, deadline_s, self.lease_s, expire)
        return KVDestination(self.worker_id, self._endpoints, self.epoch, nonce, len(block_ids), num_skipped)

    def announce(self, attempt_id: str, sender_id: str) -> None:
        """Tell the worker that sends it where an expected hand-off goes: over its link, or as soon as it has one. It
        fails with PeerLost if there is none for `LINK_TIMEOUT_S`, or once that link is lost. HandoffOver if there is no
        such hand-off."""
        incoming = self._find(attempt_id)
        incoming.sender_id = sender_id
        if (link := self._links.get(sender_id)) is not None:
            self.spawn(_tell(link, incoming.announcement))
        else:
            self.spawn(self._await_link(incoming))

    async def _await_link(self, incoming: ReceiveTransfer) -> None:
        await asyncio.sleep(LINK_TIMEOUT_S)
        if incoming.sender_id not in self._links:
            self.fail(incoming, PeerLost(f"there is no KV link from {incoming.sender_id}"))

    async def wait(self, attempt_id: str) -> ReceivedKV:
        """The complete hand-off; its attempt id is then free again. Raises TransferTimeout at its deadline or when its
        sender was silent for too long, PeerLost, RequestAborted after `abort`, or what the sender gave up with.
        HandoffOver if there is none."""
        incoming = self._find(attempt_id)
        await incoming.done.wait()
        if self._by_request.get(attempt_id) is incoming:
            del self._by_request[attempt_id]
        if isinstance(incoming.outcome, ReceivedKV):
            return incoming.outcome
        assert incoming.outcome is not None
        raise incoming.outcome

    def status(self, attempt_id: str) -> TransferStatus:
        """How far it is; HandoffOver once `wait` or `abort` has ended it."""
        return self._find(attempt_id).status

    async def abort(self, attempt_id: str) -> None:
        """Give a hand-off up and tell its sender. When this returns, no copy into its blocks is under way or can
        follow. Unknown ones are fine."""
        incoming = self._by_request.pop(attempt_id, None)
        if incoming is not None:
            self.fail(incoming, RequestAborted(f"the KV hand-off of {attempt_id} was aborted by its receiver"))

    async def aclose(self) -> None:
        """Fail what is awaited, close the links."""
        for incoming in list(self._by_nonce.values()):
            self.fail(incoming, PeerLost(f"the KV receiver of {self.worker_id} was closed"), tell=False)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- for `ReceiveLink` -------------------------------------------------------------------------------------------

    def hello(self, *, checksums: bool) -> Hello:
        """What a peer has to say first, but for its own name."""
        return Hello(self.worker_id, self.epoch, self.store.layout, checksums, self._eos_token_ids)

    def expected(self, nonce: str) -> ReceiveTransfer | None:
        """The hand-off that this nonce was given for, while it is under way."""
        return self._by_nonce.get(nonce)

    def heard(self, incoming: ReceiveTransfer) -> None:
        """Its sender lives."""
        if incoming.outcome is None:
            self._leases[incoming.nonce].renew()

    def count(self, reason: Reason) -> None:
        """A message was refused."""
        self._refused[reason] += 1

    def publish(self, incoming: ReceiveTransfer) -> None:
        """Everything is verified and in the pool."""
        self._conclude(incoming, incoming.received(self.clock.now()))

    def fail(self, incoming: ReceiveTransfer, error: PdserveError, *, tell: bool = True) -> None:
        """Nothing more is taken, because of ``error``; the sender is told."""
        if incoming.outcome is None:
            self._conclude(incoming, error)
            if tell and incoming.source is not None:
                self.spawn(_tell(incoming.source, Abort(incoming.nonce, *to_wire(error))))

    def met(self, source: ReceiveLink, sender_id: str) -> None:
        """A sender has introduced itself on a new link: it may be awaited."""
        self._links[sender_id] = source
        for incoming in self._by_nonce.values():
            if incoming.sender_id == sender_id and incoming.source is None:
                self.spawn(_tell(source, incoming.announcement))

    def lost(self, source: ReceiveLink, error: PdserveError) -> None:
        """A link has ended."""
        gone = {sender_id for sender_id, link in self._links.items() if link is source}
        for sender_id in gone:
            del self._links[sender_id]
        # The sender gives up what it had begun over this link, announced or not.
        unheard = (each for each in self._by_nonce.values() if each.source is None and each.sender_id in gone)
        for incoming in [*unheard, *(each for each in self._by_nonce.values() if each.source is source)]:
            self.fail(incoming, PeerLost(f"the sender of {incoming.attempt_id} was lost: {error}"), tell=False)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something until the receiver closes."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _find(self, attempt_id: str) -> ReceiveTransfer:
        if (incoming := self._by_request.get(attempt_id)) is None:
            raise HandoffOver(f"{attempt_id} is not expected")
        return incoming

    async def _accept(self, transport: KVTransport) -> None:
        with contextlib.suppress(PeerLost):
            while True:
                self.spawn(ReceiveLink(self, await transport.accept()).serve())

    def _conclude(self, incoming: ReceiveTransfer, outcome: ReceivedKV | PdserveError) -> None:
        """Forget the nonce and close the sink, so that nothing can be written for it any more, and wake who waits."""
        del self._by_nonce[incoming.nonce]
        self._leases.pop(incoming.nonce).cancel()
        if incoming.sink is not None:
            incoming.sink.close()
        success = isinstance(outcome, ReceivedKV)
        incoming.status = TransferStatus.SUCCESS if success else TransferStatus.FAILED
        incoming.outcome = outcome
        incoming.done.set()


async def _tell(source: ReceiveLink, header: Header) -> None:
    with contextlib.suppress(TransferError):
        await source.tell(header)
