"""The prefill role: compute the prompt, push its blocks meanwhile, and sample token 1. The blocks are released when the
receiver has acknowledged them, or when the hand-off has failed."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from contract import control
from contract.engine import KVRole, Progress, Release, Reserved
from pdserve.core.errors import PdserveError
from worker.kv import KVEnds, KVHandoff
from worker.request_table import Handler, ServedRequest
from worker.serving import prefill, run, send_prefix

log = logging.getLogger(__name__)


async def push(served: ServedRequest) -> None:
    """Serve one prompt: token 1 goes to the gateway, its KV to `ServedRequest.peer`."""
    async with served.resources.kv.begin(PushHandoff(served)) as done:
        done.add_done_callback(served.on_handoff_end)
        await prefill(served, KVRole.PUSH)
        try:
            await done
        except PdserveError as error:
            # The decode worker gets the failure too, and tells the gateway.
            log.warning("%s: hand-off of request %s failed: %s", served.worker_id, served.attempt_id, error)


class PushHandoff(KVHandoff[None]):
    """Pushes one prompt's blocks. Full blocks are sent as soon as they are computed, or all blocks together with token
    1, as `transfer.overlap` says."""

    def __init__(self, served: ServedRequest) -> None:
        super().__init__(served.attempt_id, served.peer, served.deadline_s)
        self._layout, self._early = served.resources.layout, served.resources.transfer.overlap != "none"
        self._num_tokens = served.request.num_tokens
        self._num_blocks = self._layout.blocks_for(self._num_tokens)
        self._block_ids: list[int] = []
        self._num_queued = 0  # blocks passed to the sender
        self._layers_queued = 0  # layers of the next blocks, in the current step
        self._all_queued = False

    def begin(self, ends: KVEnds) -> None:
        """Begin the transfer. Blocks wait in the sender for the peer's announcement."""
        self._ends = ends
        self._transfer = ends.sender.push(self.attempt_id, self._peer, self._num_blocks, self._deadline_s)

    async def run(self) -> None:
        """Wait until the receiver has acknowledged all blocks, and let the engine release them."""
        try:
            await self._transfer.wait()
        finally:
            self._ends.command(Release(self.attempt_id))

    def on_event(self, event: Reserved | Progress) -> None:
        """Queue the blocks that were computed since the last event. The event with token 1 has all of them, and those
        of single layers may come after it: another process of vLLM sends them."""
        assert isinstance(event, Progress), "only RECEIVE requests reserve blocks"
        if self._all_queued:
            return
        self._block_ids = event.block_ids or self._block_ids
        computed = event.num_computed_tokens
        full = self._num_blocks if computed >= self._num_tokens else computed // self._layout.block_size
        if event.num_layers:
            if full > self._num_queued and event.num_layers > self._layers_queued:
                self._send(full, range(self._layers_queued, event.num_layers))
                self._layers_queued = event.num_layers
        elif event.first_token is not None:
            self._all_queued = True
            self._send(self._num_blocks, self._other_layers(), trailer=msgspec.msgpack.encode(event.first_token))
        elif self._early and full > self._num_queued:
            self._send(full, self._other_layers())
            self._num_queued, self._layers_queued = full, 0

    def _other_layers(self) -> range:
        return range(self._layers_queued, self._layout.num_layers)

    def _send(self, end: int, layers: range, trailer: bytes = b"") -> None:
        """Queue ``layers`` of the blocks before ``end``. A trailer closes the transfer."""
        blocks = self._block_ids[self._num_queued : end]
        self._transfer.send_blocks(self._num_queued, blocks, layers, last=bool(trailer), trailer=trailer)


HANDLERS: Mapping[type[control.Work], Handler] = {
    control.Run: run,
    control.Push: push,
    control.SendPrefix: send_prefix,
}
"""How a prefill worker serves each kind of request."""
