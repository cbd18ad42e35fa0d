"""Fetching the KV of a prompt's prefix from the cache of another worker, and sending it to one.

The worker that computes the prompt runs a `PrefixReceive` beside it (`fetching`), the other one serves the request
`worker.messages.SendPrefix` (`send_prefix`). Between the two it is an ordinary KV transfer, except that it has an id of
its own and ends early if the sender has only the first of the blocks. If it fails, the prompt is computed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine.messages import KVReady, PinPrefix, Progress, Release, Reserved
from kv_transfer.receive_transfer import ReceivedKV
from pdserve.core.errors import PdserveError
from pdserve.core.handoff import KVPeer, PrefixFetch, PrefixSource, prefix_transfer_id
from pdserve.core.kv_layout import KVLayout
from pdserve.core.sampling import FinishReason
from pdserve.core.timeline import Event, EventKind
from pdserve.core.worker import TokenOutput
from worker.kv import KVEnds
from worker.request_table import ServedRequest

log = logging.getLogger(__name__)


class Fetching:
    """The fetch that belongs to a request, if it has one."""

    def __init__(self, served: ServedRequest, receive: PrefixReceive | None) -> None:
        self._served, self._receive = served, receive

    @property
    def outcome(self) -> PrefixFetch | None:
        """What came of it; None without a fetch. Known when the request has its first token."""
        return self._receive.outcome if self._receive is not None else None

    @property
    def events(self) -> tuple[Event, ...]:
        """Its events; the same applies."""
        if self._receive is None or self._receive.outcome is None:
            return ()
        began_s, ready_s = self._receive.began_s, self._receive.ready_s
        served = self._served
        return served.event(EventKind.PREFIX_AWAITED, began_s), served.event(EventKind.PREFIX_READY, ready_s)


@asynccontextmanager
async def fetching(served: ServedRequest) -> AsyncIterator[Fetching]:
    """A context in which a request is submitted and gets its first token. The fetch that `ServedRequest.prefix_source`
    asks for runs in it."""
    if (source := served.prefix_source) is None:
        yield Fetching(served, None)
        return
    resources = served.resources
    receive = PrefixReceive(served.attempt_id, source, resources.layout, served.deadline_s)
    async with resources.kv.begin(receive) as running:
        running.done.add_done_callback(served.on_handoff_end)  # only a bug, or the end of the KV thread, is an error
        yield Fetching(served, receive)


class PrefixReceive:
    """Receives the first blocks of a prompt from ``source``, as a `worker.kv.KVHandoff`, and lets the request run: with
    what has come by its time limit, or without it."""

    def __init__(self, attempt_id: str, source: PrefixSource, layout: KVLayout, deadline_s: float) -> None:
        self.attempt_id = prefix_transfer_id(attempt_id)
        self._request, self._source, self._deadline_s = attempt_id, source, deadline_s
        self._block_size = layout.block_size
        self._num_blocks = source.num_tokens // layout.block_size
        self.outcome: PrefixFetch | None = None
        self.began_s = self.ready_s = 0.0

    def begin(self, ends: KVEnds) -> None:
        """Wait for the engine to allocate blocks; no transfer begins before."""
        self._ends = ends
        self._reserved: asyncio.Future[Reserved] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Wait for room, announce it to the sender, and tell the engine how many blocks are verified."""
        reserved = await self._reserved
        self.began_s = reserved.reserved_s
        num_cached = min(reserved.num_cached_blocks, self._num_blocks)
        received: ReceivedKV | None = None
        failure = ""
        if num_cached < self._num_blocks:
            try:
                received = await self._receive(reserved.block_ids[: self._num_blocks], num_cached)
            except PdserveError as error:
                failure = str(error)
                log.warning("%s: it is computed: %s", self.attempt_id, failure)
        num_blocks = num_cached if received is None else received.num_blocks
        self.ready_s = self._ends.clock.now() if received is None else received.verified_s
        self.outcome = PrefixFetch(
            source=self._source.peer.worker_id,
            tokens=(num_blocks - num_cached) * self._block_size,
            tokens_wanted=(self._num_blocks - num_cached) * self._block_size,
            duration_ms=(self.ready_s - self.began_s) * 1e3,
            proof=None if received is None else received.proof,
            failure=failure,
        )
        # After the outcome, so that this is known before the first token.
        self._ends.command(KVReady(self._request, None, num_blocks * self._block_size))

    async def _receive(self, block_ids: list[int], num_cached: int) -> ReceivedKV:
        receiver, sender_id = self._ends.receiver, self._source.peer.worker_id
        deadline_s = min(self._deadline_s, self._ends.clock.now() + self._source.timeout_s)
        receiver.announce(self.attempt_id, sender_id, block_ids, num_cached, deadline_s, partial=True)
        try:
            return await receiver.wait(self.attempt_id)
        finally:
            await receiver.abort(self.attempt_id)

    def on_event(self, event: Reserved | Progress) -> None:
        """Note the blocks that the engine has allocated."""
        assert isinstance(event, Reserved), "the prefix itself computes nothing"
        if not self._reserved.done():
            self._reserved.set_result(event)


async def send_prefix(served: ServedRequest) -> None:
    """Send the cached blocks that hold the beginning of the request's tokens to `ServedRequest.peer`. Nothing is
    computed; blocks that are no longer cached are not sent."""
    resources, request = served.resources, served.request
    send = PrefixSend(served.attempt_id, served.peer, resources.layout, served.deadline_s)
    async with resources.kv.begin(send) as running:
        resources.engine.send(PinPrefix(served.attempt_id, request.salt, request.token_ids))
        await running.done
    served.outbox.output(served.attempt_id, TokenOutput(None, FinishReason.STOP))


class PrefixSend:
    """Sends the blocks that a `PinPrefix` finds to ``peer``, as a `worker.kv.KVHandoff`."""

    def __init__(self, attempt_id: str, peer: KVPeer, layout: KVLayout, deadline_s: float) -> None:
        self.attempt_id = attempt_id
        self._peer, self._layout, self._deadline_s = peer, layout, deadline_s

    def begin(self, ends: KVEnds) -> None:
        """Wait for the engine to pin blocks."""
        self._ends = ends
        self._pinned: asyncio.Future[Reserved] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Send the blocks, wait until the receiver has acknowledged them, and let the engine release them."""
        sender, block_ids = self._ends.sender, (await self._pinned).block_ids
        try:
            sender.push(self.attempt_id, self._peer, len(block_ids), self._deadline_s, partial=True)
            sender.send_blocks(self.attempt_id, 0, block_ids, self._layout.all_layers, last=True)
            await sender.wait(self.attempt_id)
        finally:
            await sender.abort(self.attempt_id)
            self._ends.command(Release(self.attempt_id))

    def on_event(self, event: Reserved | Progress) -> None:
        """Note the blocks that the engine has pinned."""
        assert isinstance(event, Reserved), "a prefix that is sent is not computed"
        if not self._pinned.done():
            self._pinned.set_result(event)
