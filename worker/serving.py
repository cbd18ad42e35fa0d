"""How every worker serves a request on its own: prefill and decode in place, and what concerns its prefix cache.

The KV of a prompt's prefix may be fetched from the cache of another worker. The worker that computes the prompt runs a
`PrefixReceive` beside it, the other one serves the request `contract.control.SendPrefix` (`send_prefix`). Between the
two it is an ordinary KV transfer, except that it has an id of its own and ends early if the sender has only the first
of the blocks. If it fails, the prompt is computed.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack

from contract.engine import KVReady, KVRole, PinPrefix, Release
from kv_transfer.receive_transfer import ReceivedKV
from pdserve.core.errors import PdserveError
from pdserve.core.handoff import PrefixFetch, PrefixSource, prefix_transfer_id
from pdserve.core.sampling import FinishReason
from pdserve.core.timeline import EventKind
from pdserve.core.worker import TokenOutput
from worker.kv import KVHandoff
from worker.request_table import ServedRequest, finish_reason

log = logging.getLogger(__name__)


async def run(served: ServedRequest) -> None:
    """Prefill and decode on this worker: colocated requests, and requests for a single token."""
    if await prefill(served, KVRole.LOCAL) is not None:
        return
    second = await served.sampled()
    reason = finish_reason(second.token)
    served.tell(
        second,
        *served.token_2_events(second, second.step.step_started_s),
        finish_reason=reason,
    )
    if reason is None:
        await served.forward_rest()


async def prefill(served: ServedRequest, kv_role: KVRole) -> FinishReason | None:
    """Have the prompt computed, and send token 1 to the gateway. The fetch that `ServedRequest.prefix_source` asks for
    runs meanwhile. Returns the finish reason; of a pushed request only one that ends it on either worker."""
    receive: PrefixReceive | None = None
    async with AsyncExitStack() as stack:
        if (source := served.prefix_source) is not None:
            receive = PrefixReceive(served, source)
            fetched = await stack.enter_async_context(served.resources.kv.begin(receive))
            fetched.add_done_callback(served.on_handoff_end)  # only a bug, or the end of the KV thread
        served.submit(kv_role)
        first = await served.sampled()
    reason = finish_reason(first.token)
    if kv_role is KVRole.PUSH and reason is not FinishReason.STOP:
        reason = None
    events = served.prefill_events(first)
    if receive is not None and receive.outcome is not None:
        awaited, ready = EventKind.PREFIX_AWAITED, EventKind.PREFIX_READY
        events = (*events, served.event(awaited, receive.began_s), served.event(ready, receive.ready_s))
    served.tell(
        first,
        *events,
        finish_reason=reason,
        cached_tokens=first.token.cached_tokens,
        prefix_fetch=None if receive is None else receive.outcome,
    )
    return reason


class PrefixReceive(KVHandoff[None]):
    """Receives the first blocks of a prompt from ``source``, and lets the request run: with what has come by its time
    limit, or without it. ``outcome`` is known when the request has its first token."""

    def __init__(self, served: ServedRequest, source: PrefixSource) -> None:
        super().__init__(prefix_transfer_id(served.attempt_id), source.peer, served.deadline_s)
        self._request, self._timeout_s = served.attempt_id, source.timeout_s
        self._block_size = served.resources.layout.block_size
        self._num_blocks = source.num_tokens // self._block_size
        self.outcome: PrefixFetch | None = None
        self.began_s = self.ready_s = 0.0

    async def run(self) -> None:
        """Wait for room, announce it to the sender, and tell the engine how many blocks are verified."""
        reserved = await self._reserved
        self.began_s = reserved.reserved_s
        num_cached = min(reserved.num_cached_blocks, self._num_blocks)
        received: ReceivedKV | None = None
        failure = ""
        if num_cached < self._num_blocks:
            try:
                received = await self._ends.receiver.announce(
                    self.attempt_id,
                    self._peer.worker_id,
                    reserved.block_ids[: self._num_blocks],
                    num_cached,
                    min(self._deadline_s, self._ends.clock.now() + self._timeout_s),
                    partial=True,
                ).wait()
            except PdserveError as error:
                failure = str(error)
                log.warning("%s: it is computed: %s", self.attempt_id, failure)
        num_blocks = num_cached if received is None else received.num_blocks
        self.ready_s = self._ends.clock.now() if received is None else received.verified_s
        self.outcome = PrefixFetch(
            source=self._peer.worker_id,
            tokens=(num_blocks - num_cached) * self._block_size,
            tokens_wanted=(self._num_blocks - num_cached) * self._block_size,
            duration_ms=(self.ready_s - self.began_s) * 1e3,
            proof=None if received is None else received.proof,
            failure=failure,
        )
        # After the outcome, so that this is known before the first token.
        self._ends.command(KVReady(self._request, None, num_blocks * self._block_size))


async def send_prefix(served: ServedRequest) -> None:
    """Send the cached blocks that hold the beginning of the request's tokens to `ServedRequest.peer`. Nothing is
    computed; blocks that are no longer cached are not sent."""
    resources, request = served.resources, served.request
    async with resources.kv.begin(PrefixSend(served.attempt_id, served.peer, served.deadline_s)) as done:
        resources.command(PinPrefix(served.attempt_id, request.salt, request.token_ids))
        await done
    served.outbox.output(served.attempt_id, TokenOutput(None, FinishReason.STOP))


class PrefixSend(KVHandoff[None]):
    """Sends the blocks that a `PinPrefix` finds."""

    async def run(self) -> None:
        """Send the blocks, wait until the receiver has acknowledged them, and let the engine release them."""
        block_ids = (await self._reserved).block_ids
        transfer = self._ends.sender.push(self.attempt_id, self._peer, len(block_ids), self._deadline_s, partial=True)
        try:
            transfer.send_blocks(0, block_ids, last=True)
            await transfer.wait()
        finally:
            await transfer.abort()
            self._ends.command(Release(self.attempt_id))
