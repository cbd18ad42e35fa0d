"""The decode role: make room for a prompt's KV, receive it, and generate tokens from token 2 on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from contract import control
from contract.engine import Abort, KVReady, KVRole
from kv_transfer.receive_transfer import ReceivedKV
from pdserve.core.errors import TransferRefused
from pdserve.core.handoff import FirstToken
from pdserve.core.sampling import FinishReason
from pdserve.core.timeline import EventKind
from pdserve.core.worker import TokenOutput
from worker.kv import KVHandoff
from worker.request_table import Handler, ServedRequest, finish_reason
from worker.serving import run, send_prefix

_FIRST_TOKENS = msgspec.msgpack.Decoder(FirstToken)


async def receive(served: ServedRequest) -> None:
    """Serve one request from token 2 on. Its KV comes from `ServedRequest.peer`."""
    async with served.resources.kv.begin(ReceiveHandoff(served)) as done:
        served.submit(KVRole.RECEIVE)
        kv = await done
    events = (
        served.event(EventKind.ROOM_MADE, kv.reserved_s),
        served.event(EventKind.KV_VERIFIED, kv.received.verified_s),
    )
    if kv.first_token.ends_here:
        output = TokenOutput(None, FinishReason.STOP, events, kv.received.proof)
        served.outbox.output(served.attempt_id, output)
        served.resources.command(Abort(served.attempt_id))  # the engine would continue after this token
        return
    if served.tells_ready:
        ready = served.event(EventKind.DECODE_READY, kv.received.verified_s)
        served.outbox.output(served.attempt_id, TokenOutput(None, None, (ready,)))
    second = await served.sampled()
    reason = finish_reason(second.token)
    served.tell(
        second,
        *events,
        *served.token_2_events(second, second.token.first_scheduled_s),
        finish_reason=reason,
        proof=kv.received.proof,
    )
    if reason is None:
        await served.forward_rest()


class HandedOver(NamedTuple):
    """A complete hand-off. Its blocks were allocated at ``reserved_s`` (seconds of the host's clock)."""

    received: ReceivedKV
    first_token: FirstToken
    reserved_s: float


class ReceiveHandoff(KVHandoff[HandedOver]):
    """Receives one prompt's blocks."""

    def __init__(self, served: ServedRequest) -> None:
        super().__init__(served.attempt_id, served.peer, served.deadline_s)
        self._vocab_size = served.resources.vocab_size

    async def run(self) -> HandedOver:
        """Wait for room, announce it to the sender, and tell the engine when all blocks are verified."""
        reserved = await self._reserved
        transfer = self._ends.receiver.announce(
            self.attempt_id, self._peer.worker_id, reserved.block_ids, reserved.num_cached_blocks, self._deadline_s
        )
        received = await transfer.wait()
        first_token = self._first_token(received.trailer)
        # Also if token 1 ends the request: the blocks are verified, and the prefix cache may keep them.
        self._ends.command(KVReady(self.attempt_id, first_token.token_id))
        return HandedOver(received, first_token, reserved.reserved_s)

    def _first_token(self, trailer: bytes) -> FirstToken:
        """Token 1 from the trailer. TransferRefused if the trailer is malformed, or has no token of the model."""
        try:
            first = _FIRST_TOKENS.decode(trailer)
        except (msgspec.DecodeError, ValueError, RecursionError):
            first = None
        if first is None or not 0 <= first.token_id < self._vocab_size:
            raise TransferRefused("the hand-off's trailer is no token")
        return first


HANDLERS: Mapping[type[control.Work], Handler] = {
    control.Run: run,
    control.Receive: receive,
    control.SendPrefix: send_prefix,
}
"""How a decode worker serves each kind of request."""
