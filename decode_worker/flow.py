"""The decode role: reserve room for a prompt's KV, receive it, join the running batch, stream tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgpack

from engine.messages import KVReady, KVRole, Reserved, Step, TokenOut
from kv_transfer.incoming import ReceivedKV
from pdserve.core.errors import PdserveError, TransferRefused
from pdserve.core.handoff import KVDestination
from pdserve.core.sampling import FinishReason
from pdserve.core.timeline import Event, EventKind
from pdserve.core.worker import TokenOutput, Work
from worker.flow import Flow, LocalFlow, finish_reason
from worker.outbox import Outbox
from worker.worker import Worker


class DecodeFlow(Flow):
    """One request from its reservation to its last token."""

    kv_role = KVRole.RECEIVE

    def __init__(
        self, worker: Worker, work: Work, outbox: Outbox, received_s: float, destination: KVDestination | None = None
    ) -> None:
        super().__init__(worker, work, outbox, received_s, destination)
        self._reserved: asyncio.Future[Reserved] = asyncio.get_running_loop().create_future()
        self._kv: ReceivedKV | None = None
        self._first = True
        self._admission: asyncio.Task[None] | None = None

    async def start(self) -> KVDestination:
        """Wait for the engine to set blocks aside, open the reservation; returns where the blocks go."""
        self.submit()
        reserved = await self._reserved
        delay_ms = self.worker.spec.config.testing.delay_ms.get("reserve", 0.0)
        if delay_ms:
            await asyncio.sleep(delay_ms / 1e3)
        destination = await self.incarnation.kv.expect(
            self.request_id, reserved.block_ids, reserved.num_cached_blocks, self.deadline_s
        )
        self._admission = self.follow(self._admit())
        return destination

    def on_reserved(self, reserved: Reserved) -> None:
        """The engine has set the blocks aside."""
        if not self._reserved.done():
            self._reserved.set_result(reserved)

    def on_failed(self, error: PdserveError) -> None:
        """Wake `start` if it still waits for blocks."""
        if not self._reserved.done():
            self._reserved.set_exception(error)
            self._reserved.exception()  # `start` may have been cancelled with the stream

    async def _admit(self) -> None:
        """Once every block is verified: into the running batch, with prefill's token."""
        try:
            self._kv = await self.incarnation.kv.received(self.request_id)
            token_id, ends_here = _first_token(self._kv.trailer, self.incarnation.ready.vocab_size)
            # Even if nothing is left to decode, what came is verified: the prefix cache may keep it.
            self.incarnation.engine.send(KVReady(self.request_id, token_id))
            if not ends_here:
                return
        except PdserveError as error:
            self.worker.fail(self, error)  # without effect if the flow is over already
            return
        verified = (self.event(EventKind.KV_VERIFIED, self._kv.verified_s),)
        self.outbox.output(self.request_id, TokenOutput(None, FinishReason.STOP, verified, self._kv.proof))
        self.worker.forget(self)
        await super().close()

    def on_token(self, token: TokenOut, step: Step) -> TokenOutput:
        """A token; the first here is token 2, and brings the hand-off's events and proof."""
        if not self._first:
            return TokenOutput(token.token_id, finish_reason(token), logprobs=token.logprobs)
        assert self._kv is not None, "no token before the KV is there"
        self._first = False
        events: tuple[Event, ...] = (
            self.event(EventKind.KV_VERIFIED, self._kv.verified_s),
            self.event(EventKind.DECODE_SCHEDULED, token.first_scheduled_s),
            self.event(EventKind.TOKEN_2_SAMPLED, step.sampled_s),
        )
        return TokenOutput(token.token_id, finish_reason(token), events, self._kv.proof, token.logprobs)

    async def close(self) -> None:
        """Close the reservation first: only then can nothing write the blocks any more."""
        await self.incarnation.kv.abort_receive(self.request_id)
        await super().close()


def _first_token(trailer: bytes, vocab_size: int) -> tuple[int, bool]:
    """Prefill's token, and whether it ends the request; TransferRefused if the trailer is something else."""
    try:
        token_id, ends_here = msgpack.unpackb(trailer)
    except (ValueError, TypeError, msgpack.UnpackException):
        raise TransferRefused("the hand-off's trailer is no token") from None
    if type(token_id) is not int or type(ends_here) is not bool or not 0 <= token_id < vocab_size:
        raise TransferRefused("the hand-off's trailer is no token")
    return token_id, ends_here


FLOWS: Mapping[KVRole, type[Flow]] = {KVRole.LOCAL: LocalFlow, KVRole.RECEIVE: DecodeFlow}
"""The ways in which a decode worker can serve a request."""
