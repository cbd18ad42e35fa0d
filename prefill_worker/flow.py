"""The prefill role: run the prompt, push its blocks chunk by chunk while the next is computed, give token 1, and hold
the blocks until the receiver has confirmed them (or the hand-off has failed: either way they are given back)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

import msgpack

from engine.messages import KVRole, PrefixFound, Progress, Release, Step, TokenOut
from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.core.handoff import KVDestination
from pdserve.core.sampling import FinishReason
from pdserve.core.worker import TokenOutput, Work
from worker.flow import Flow, LocalFlow
from worker.outbox import Outbox
from worker.worker import Worker

log = logging.getLogger(__name__)


class PrefillFlow(Flow):
    """One prompt on its way to ``destination``."""

    kv_role = KVRole.PUSH

    def __init__(
        self, worker: Worker, work: Work, outbox: Outbox, received_s: float, destination: KVDestination | None = None
    ) -> None:
        super().__init__(worker, work, outbox, received_s, destination)
        if destination is None:
            raise InvalidRequest(f"request {work.request_id}: a prefill that pushes needs a destination")
        self._num_slots = destination.num_blocks
        self._num_queued = destination.num_skipped  # slots handed to the sender so far (or not to be sent)
        self._layers_queued = 0  # of those after them, of the step that runs
        self._progress: Progress | None = None
        self._token_given = False
        self._confirmation: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the hand-off, then submit; raises if the destination's worker is not connected."""
        assert self.destination is not None
        await self.incarnation.kv.begin_send(self.request_id, self.destination, self.deadline_s)
        self._confirmation = self.follow(self._await_confirmation())
        self.submit(max_tokens=1)

    def on_prefix_found(self, found: PrefixFound) -> None:
        """Blocks that need not be computed can travel at once."""
        super().on_prefix_found(found)
        self._push(found.num_tokens, found.block_ids)

    def on_layers(self, progress: Progress, num_layers: int) -> None:
        """Push what the step that runs has computed so far, of the blocks that it completes."""
        layers = range(self._layers_queued, num_layers)
        if progress.num_computed_tokens < len(self.work.token_ids):
            end = progress.num_computed_tokens // self.incarnation.layout.block_size
        else:
            end = self._num_slots
        if end > self._num_queued and layers:
            blocks = progress.block_ids[self._num_queued : end]
            self.incarnation.kv.send_blocks(self.request_id, self._num_queued, blocks, layers)
            self._layers_queued = num_layers

    def on_progress(self, progress: Progress) -> None:
        """Push the blocks that are full by now."""
        self._progress = progress
        if progress.num_computed_tokens < len(self.work.token_ids):
            self._push(progress.num_computed_tokens, progress.block_ids)

    def _push(self, num_tokens: int, block_ids: Sequence[int]) -> None:
        """The blocks that are full of the first ``num_tokens`` tokens, unless everything is to be sent at the end."""
        full = num_tokens // self.incarnation.layout.block_size
        if full > self._num_queued and self.worker.spec.config.transfer.overlap != "none":
            self._send(block_ids[self._num_queued : full])
            self._num_queued = full

    def _send(self, block_ids: Sequence[int], *, last: bool = False, trailer: bytes = b"") -> None:
        """What is left of these blocks' layers."""
        layers = range(self._layers_queued, self.incarnation.layout.num_layers)
        self._layers_queued = 0
        self.incarnation.kv.send_blocks(
            self.request_id, self._num_queued, block_ids, layers, last=last, trailer=trailer
        )

    def on_token(self, token: TokenOut, step: Step) -> TokenOutput:
        """Token 1: push what is left with it, so that decode need not hear of it from anybody else."""
        assert self._progress is not None, "a step reports progress before the token it ends with"
        last = self._progress.block_ids[self._num_queued : self._num_slots]
        ends_here = token.finish_reason == FinishReason.STOP
        trailer = msgpack.packb([token.token_id, ends_here])
        self._send(last, last=True, trailer=trailer)
        self._token_given = True
        reason = FinishReason.STOP if ends_here else None
        return TokenOutput(
            token.token_id,
            reason,
            self.prefill_events(token, step),
            logprobs=token.logprobs,
            cached_tokens=self.cached_tokens,
        )

    async def _await_confirmation(self) -> None:
        try:
            await self.incarnation.kv.sent(self.request_id)
        except PdserveError as error:
            if not self.worker.has(self):
                return
            if not self._token_given:
                self.worker.fail(self, error)
                return
            # Decode sees the same failure and tells the gateway; here the blocks are of no use any more.
            log.warning("%s: hand-off of request %s failed: %s", self.worker.spec.worker_id, self.request_id, error)
        self.incarnation.engine.send(Release(self.request_id))
        self.worker.forget(self)

    @property
    def holds_after_finish(self) -> bool:
        """The blocks are held until the receiver has them."""
        return True

    async def close(self) -> None:
        """Stop sending before the blocks can belong to somebody else."""
        await self.incarnation.kv.abort_send(self.request_id)
        await super().close()


FLOWS: Mapping[KVRole, type[Flow]] = {KVRole.LOCAL: LocalFlow, KVRole.PUSH: PrefillFlow}
"""The ways in which a prefill worker can serve a request."""
