"""The receiving end: it remembers which blocks a hand-off may fill, verifies what arrives, and copies it there itself.

Only slot numbers come over the wire, so no sender can name a block; and a hand-off that was aborted or expired is
forgotten at once, so a sender that wakes up late finds nobody to write for. Everything runs on one event loop; checking
a message and copying it is one step between two awaits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from core.clock import Clock
from core.errors import (
    PdserveError,
    PeerLost,
    RequestAborted,
    TransferError,
    TransferTimeout,
    to_wire,
)
from core.handoff import KVDestination, KVEndpoint
from kv_transfer.base import BlockStore, KVLink, KVTransport, Message
from kv_transfer.handshake import check_block_size, dismiss, greet, parse
from kv_transfer.incoming import Incoming, ReceivedKV
from kv_transfer.integrity import (
    Abort,
    Ack,
    Blocks,
    Header,
    Open,
    Reason,
    Refusal,
    Refused,
    encode,
    peer_error,
)
from kv_transfer.lease import Lease
from kv_transfer.status import TransferStatus

_log = logging.getLogger(__name__)


class KVReceiver:
    """Receives hand-offs into ``store``. The transport stays its creator's, to be closed after this.

    ``lease_s``: how long a hand-off's sender (or a new link's peer) may be silent. ``delay_s`` is a hook for tests: it
    passes before a hand-off's last block counts as verified.
    """

    def __init__(
        self,
        store: BlockStore,
        transport: KVTransport,
        *,
        worker_id: str,
        epoch: str,
        checksum: bool,
        clock: Clock,
        lease_s: float,
        delay_s: float = 0.0,
    ) -> None:
        check_block_size(store.layout)
        self._store, self._transport, self._clock = store, transport, clock
        self._worker_id, self._epoch, self._checksums = worker_id, epoch, checksum
        self._lease_s, self._delay_s = lease_s, delay_s
        self._endpoint: KVEndpoint | None = None
        self._by_request: dict[str, Incoming] = {}
        self._by_nonce: dict[str, Incoming] = {}
        self._leases: dict[str, Lease] = {}
        self._refused: Counter[str] = Counter()
        self._sending: dict[KVLink, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def refused(self) -> Mapping[str, int]:
        """How many messages were refused, by `Reason`."""
        return dict(self._refused)

    async def start(self, host: str) -> KVEndpoint:
        """Listen on ``host`` and serve every link; PeerLost if the address is not this host's."""
        self._endpoint = await self._transport.listen(host)
        self._spawn(self._accept())
        return self._endpoint

    def expect(self, request_id: str, block_ids: Sequence[int], num_skipped: int, deadline_s: float) -> KVDestination:
        """Await the blocks of a prompt into ``block_ids``, the first ``num_skipped`` of which are in place already.
        ``deadline_s`` is a time of the receiver's clock. ValueError if the arguments make no sense."""
        if self._endpoint is None:
            raise ValueError("start() comes first")
        if request_id in self._by_request:
            raise ValueError(f"{request_id} is expected already")
        if not 0 <= num_skipped <= len(block_ids) or len(set(block_ids)) < len(block_ids):
            raise ValueError(f"{num_skipped} skipped of {len(block_ids)} blocks, which must differ")
        if not all(0 <= block < self._store.num_blocks for block in block_ids):
            raise ValueError(f"blocks outside a pool of {self._store.num_blocks}")
        incoming = Incoming(request_id, secrets.token_hex(16), block_ids, num_skipped, self._clock.now())
        self._by_request[request_id] = self._by_nonce[incoming.nonce] = incoming

        def expire(why: str) -> None:
            self._fail(incoming, TransferTimeout(f"KV of {request_id} is incomplete and {why}"))

        self._leases[incoming.nonce] = Lease(self._clock, deadline_s, self._lease_s, expire)
        return KVDestination(self._worker_id, self._endpoint, self._epoch, incoming.nonce, len(block_ids), num_skipped)

    async def wait(self, request_id: str) -> ReceivedKV:
        """The complete hand-off; its request id is then free again. Raises TransferTimeout at its deadline or when its
        sender was silent for too long, PeerLost, RequestAborted after `abort`, or what the sender gave up with."""
        incoming = self._find(request_id)
        await incoming.done.wait()
        if self._by_request.get(request_id) is incoming:
            del self._by_request[request_id]
        if isinstance(incoming.outcome, ReceivedKV):
            return incoming.outcome
        assert incoming.outcome is not None
        raise incoming.outcome

    def status(self, request_id: str) -> TransferStatus:
        """How far it is; ValueError once `wait` or `abort` has ended it."""
        return self._find(request_id).status

    async def abort(self, request_id: str) -> None:
        """Give a hand-off up and tell its sender. When this returns, no copy into its blocks is under way or can
        follow. Unknown ones are fine."""
        incoming = self._by_request.pop(request_id, None)
        if incoming is not None:
            self._fail(incoming, RequestAborted(f"the KV hand-off of {request_id} was aborted by its receiver"))

    async def aclose(self) -> None:
        """Fail what is awaited, close the links."""
        for incoming in list(self._by_nonce.values()):
            self._fail(incoming, PeerLost(f"the KV receiver of {self._worker_id} was closed"), tell=False)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _find(self, request_id: str) -> Incoming:
        if (incoming := self._by_request.get(request_id)) is None:
            raise ValueError(f"{request_id} is not expected")
        return incoming

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        with contextlib.suppress(PeerLost):
            while True:
                self._spawn(self._serve(await self._transport.accept()))

    async def _serve(self, link: KVLink) -> None:
        """Speak with one peer until its link ends, which fails its hand-offs."""
        self._sending[link] = asyncio.Lock()
        lost: TransferError = PeerLost("the KV link was closed here")
        try:
            async with asyncio.timeout(self._lease_s):
                try:
                    await greet(link, self._worker_id, self._epoch, self._store.layout, checksums=self._checksums)
                except Refusal as refusal:
                    self._refused[refusal.reason] += 1
                    _log.warning("a KV link was refused: %s", refusal)
                    await dismiss(link, refusal)
                    return
            while True:
                await self._take(link, await link.recv())
        except TimeoutError:
            _log.warning("a KV peer said nothing for %g s after connecting", self._lease_s)
        except TransferError as error:
            lost = error
        finally:
            for incoming in [each for each in self._by_nonce.values() if each.link is link]:
                self._fail(incoming, PeerLost(f"the sender of {incoming.request_id} was lost: {lost}"), tell=False)
            del self._sending[link]
            await link.aclose()

    async def _take(self, link: KVLink, message: Message) -> None:
        """Deal with one message: after it, its blocks are in the pool or nothing has changed."""
        nonce, seq = "", 0
        try:
            header = parse(message)
            if isinstance(header, Open | Blocks):
                nonce, seq = header.nonce, header.seq if isinstance(header, Blocks) else 0
                await self._fill(link, header, message)
            elif isinstance(header, Abort):
                if (incoming := self._by_nonce.get(header.nonce)) is not None and incoming.link is link:
                    why = f"the sender of {incoming.request_id} gave up: {header.message}"
                    self._fail(incoming, peer_error(header.kind, why), tell=False)
            else:
                raise Refusal(Reason.MALFORMED, f"a {type(header).__name__} has no place here")
        except Refusal as refusal:
            _log.warning("a KV message was refused: %s", refusal)
            await self._refuse(link, nonce, seq, refusal)

    async def _fill(self, link: KVLink, header: Open | Blocks, message: Message) -> None:
        if header.epoch != self._epoch:
            raise Refusal(Reason.STALE_EPOCH, f"{header.request_id}: {self._worker_id} has started anew")
        if (incoming := self._by_nonce.get(header.nonce)) is None:
            raise Refusal(Reason.UNKNOWN_NONCE, f"{header.request_id} is not expected (any more)")
        if incoming.request_id != header.request_id:
            raise Refusal(Reason.WRONG_REQUEST, f"{header.request_id} is not what this nonce was given for")
        incoming.heard(link)
        self._leases[incoming.nonce].renew()
        if isinstance(header, Open):
            await self._answer(link, Ack(header.nonce, 0))
            return
        incoming.begin(self._clock.now())
        block_bytes = self._store.layout.block_bytes
        block_ids = incoming.check(header, message.payload, block_bytes, checksums=self._checksums)
        if block_ids:
            try:
                self._store.write_blocks(block_ids, message.payload)
            except PdserveError as error:
                self._fail(incoming, error)
                return
        incoming.accept(header, len(block_ids) * block_bytes)
        if incoming.complete and self._delay_s:
            self._spawn(self._publish_later(link, incoming, header.seq))
            return
        self._publish(incoming)
        await self._answer(link, Ack(header.nonce, header.seq))

    async def _publish_later(self, link: KVLink, incoming: Incoming, seq: int) -> None:
        await asyncio.sleep(self._delay_s)
        if incoming.outcome is None:
            self._publish(incoming)
            with contextlib.suppress(TransferError):
                await self._answer(link, Ack(incoming.nonce, seq))

    def _publish(self, incoming: Incoming) -> None:
        if incoming.complete and incoming.outcome is None:
            name, now_s = self._transport.name, self._clock.now()
            self._conclude(incoming, incoming.received(name, now_s, checksums=self._checksums))

    def _fail(self, incoming: Incoming, error: PdserveError, *, tell: bool = True) -> None:
        if incoming.outcome is None:
            self._conclude(incoming, error)
            if tell and incoming.link is not None:
                self._spawn(self._tell(incoming.link, Abort(incoming.nonce, *to_wire(error))))

    def _conclude(self, incoming: Incoming, outcome: ReceivedKV | PdserveError) -> None:
        """Forget the nonce, so that nothing can be written for it any more, and wake who waits."""
        del self._by_nonce[incoming.nonce]
        self._leases.pop(incoming.nonce).cancel()
        success = isinstance(outcome, ReceivedKV)
        incoming.status = TransferStatus.SUCCESS if success else TransferStatus.FAILED
        incoming.outcome = outcome
        incoming.done.set()

    async def _refuse(self, link: KVLink, nonce: str, seq: int, refusal: Refusal) -> None:
        self._refused[refusal.reason] += 1
        await self._answer(link, Refused(nonce, seq, *to_wire(refusal.error)))

    async def _tell(self, link: KVLink, header: Header) -> None:
        with contextlib.suppress(TransferError):
            await self._answer(link, header)

    async def _answer(self, link: KVLink, header: Header) -> None:
        if (lock := self._sending.get(link)) is not None:
            async with lock:
                await link.send(encode(header))
