"""The receiving end: it keeps which blocks a hand-off may fill, and decides on its end.

Only slot numbers come over the wire, so no sender can name a block; and a hand-off that was aborted or expired is
forgotten at once and its sink closed, so that nothing is written for it any more and a sender that wakes up late finds
nobody. Everything runs on one event loop. What comes over a link is `kv_transfer.source`'s.
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
from kv_transfer.incoming import Incoming, ReceivedKV
from kv_transfer.integrity import Abort, Header, Hello, Reason
from kv_transfer.lease import Lease
from kv_transfer.source import Source
from kv_transfer.status import TransferStatus
from pdserve.core.clock import Clock
from pdserve.core.errors import PdserveError, PeerLost, RequestAborted, TransferError, TransferTimeout, to_wire
from pdserve.core.handoff import KVDestination, KVEndpoint


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
        self._by_request: dict[str, Incoming] = {}
        self._by_nonce: dict[str, Incoming] = {}
        self._leases: dict[str, Lease] = {}
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

    def expect(self, request_id: str, block_ids: Sequence[int], num_skipped: int, deadline_s: float) -> KVDestination:
        """Await the blocks of a prompt into ``block_ids``, the first ``num_skipped`` of which are in place already.
        ``deadline_s`` is a time of the receiver's clock. ValueError if the arguments make no sense."""
        if not self._endpoints:
            raise ValueError("start() comes first")
        if request_id in self._by_request:
            raise ValueError(f"{request_id} is expected already")
        if not 0 <= num_skipped <= len(block_ids) or len(set(block_ids)) < len(block_ids):
            raise ValueError(f"{num_skipped} skipped of {len(block_ids)} blocks, which must differ")
        if not all(0 <= block < self.store.num_blocks for block in block_ids):
            raise ValueError(f"blocks outside a pool of {self.store.num_blocks}")
        nonce, layout = secrets.token_hex(16), self.store.layout
        incoming = Incoming(request_id, nonce, block_ids, num_skipped, layout, self.clock.now())
        self._by_request[request_id] = self._by_nonce[nonce] = incoming

        def expire(why: str) -> None:
            self.fail(incoming, TransferTimeout(f"KV of {request_id} is incomplete and {why}"))

        self._leases[nonce] = Lease(self.clock, deadline_s, self.lease_s, expire)
        return KVDestination(self.worker_id, self._endpoints, self.epoch, nonce, len(block_ids), num_skipped)

    async def wait(self, request_id: str) -> ReceivedKV:
        """The complete hand-off; its request id is then free again. Raises TransferTimeout at its deadline or when its
        sender was silent for too long, PeerLost, RequestAborted after `abort`, or what the sender gave up with.
        HandoffOver if there is none."""
        incoming = self._find(request_id)
        await incoming.done.wait()
        if self._by_request.get(request_id) is incoming:
            del self._by_request[request_id]
        if isinstance(incoming.outcome, ReceivedKV):
            return incoming.outcome
        assert incoming.outcome is not None
        raise incoming.outcome

    def status(self, request_id: str) -> TransferStatus:
        """How far it is; HandoffOver once `wait` or `abort` has ended it."""
        return self._find(request_id).status

    async def abort(self, request_id: str) -> None:
        """Give a hand-off up and tell its sender. When this returns, no copy into its blocks is under way or can
        follow. Unknown ones are fine."""
        incoming = self._by_request.pop(request_id, None)
        if incoming is not None:
            self.fail(incoming, RequestAborted(f"the KV hand-off of {request_id} was aborted by its receiver"))

    async def aclose(self) -> None:
        """Fail what is awaited, close the links."""
        for incoming in list(self._by_nonce.values()):
            self.fail(incoming, PeerLost(f"the KV receiver of {self.worker_id} was closed"), tell=False)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- for `Source` ------------------------------------------------------------------------------------------------

    def hello(self, *, checksums: bool) -> Hello:
        """What a peer has to say first, but for its own name."""
        return Hello(self.worker_id, self.epoch, self.store.layout.to_wire(), checksums, self._eos_token_ids)

    def expected(self, nonce: str) -> Incoming | None:
        """The hand-off that this nonce was given for, while it is under way."""
        return self._by_nonce.get(nonce)

    def heard(self, incoming: Incoming) -> None:
        """Its sender lives."""
        if incoming.outcome is None:
            self._leases[incoming.nonce].renew()

    def count(self, reason: Reason) -> None:
        """A message was refused."""
        self._refused[reason] += 1

    def publish(self, incoming: Incoming) -> None:
        """Everything is verified and in the pool."""
        self._conclude(incoming, incoming.received(self.clock.now()))

    def fail(self, incoming: Incoming, error: PdserveError, *, tell: bool = True) -> None:
        """Nothing more is taken, because of ``error``; the sender is told."""
        if incoming.outcome is None:
            self._conclude(incoming, error)
            if tell and incoming.source is not None:
                self.spawn(_tell(incoming.source, Abort(incoming.nonce, *to_wire(error))))

    def lost(self, source: Source, error: PdserveError) -> None:
        """A link has ended."""
        for incoming in [each for each in self._by_nonce.values() if each.source is source]:
            self.fail(incoming, PeerLost(f"the sender of {incoming.request_id} was lost: {error}"), tell=False)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something until the receiver closes."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _find(self, request_id: str) -> Incoming:
        if (incoming := self._by_request.get(request_id)) is None:
            raise HandoffOver(f"{request_id} is not expected")
        return incoming

    async def _accept(self, transport: KVTransport) -> None:
        with contextlib.suppress(PeerLost):
            while True:
                self.spawn(Source(self, await transport.accept()).serve())

    def _conclude(self, incoming: Incoming, outcome: ReceivedKV | PdserveError) -> None:
        """Forget the nonce and close the sink, so that nothing can be written for it any more, and wake who waits."""
        del self._by_nonce[incoming.nonce]
        self._leases.pop(incoming.nonce).cancel()
        if incoming.sink is not None:
            incoming.sink.close()
        success = isinstance(outcome, ReceivedKV)
        incoming.status = TransferStatus.SUCCESS if success else TransferStatus.FAILED
        incoming.outcome = outcome
        incoming.done.set()


async def _tell(source: Source, header: Header) -> None:
    with contextlib.suppress(TransferError):
        await source.tell(header)
