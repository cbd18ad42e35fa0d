"""Workers without an engine that speak the real protocols, in a process of their own."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from contract.control import Beat, BeatAnswer, LinkState, Push, Receive, SendPrefix, Work
from pdserve.core.clock import MonotonicClock, clock_id
from pdserve.core.handoff import PeerLink, TransferProof
from pdserve.core.kv_layout import KVLayout
from pdserve.core.request import Request
from pdserve.core.sampling import FinishReason
from pdserve.core.timeline import Event, EventKind
from pdserve.core.worker import Role, TokenOutput, WorkerLoad
from pdserve.version import VERSION
from runtime.secret import ServiceSecret
from tests.fake_worker import fake_info
from worker.heartbeat import Heartbeat, registry_wire
from worker.server import ControlServer, Outbox

NUM_BLOCKS = 2**20
LAYOUT = KVLayout.uniform("stub", "float32", block_size=16, num_layers=2, num_kv_heads=2, head_dim=16)
BEAT_S = 0.5


class StubWorker:
    """One worker."""

    def __init__(self, role: Role, number: int, registries: list[str], step_s: float, secret: ServiceSecret) -> None:
        self._role, self._step_s, self._secret = role, step_s, secret
        self.worker_id = f"{role}-{number}"
        self._server = ControlServer(self, self.worker_id, MonotonicClock(), secret)
        self._heartbeats = [Heartbeat(self, self.worker_id, registry, BEAT_S) for registry in registries]
        self._links: list[LinkState] = []
        self._running: dict[str, tuple[asyncio.Task[None], Outbox]] = {}

    async def start(self) -> None:
        """Listen, and register."""
        await self._server.start("127.0.0.1", 0)
        for heartbeat in self._heartbeats:
            heartbeat.start(registry_wire(heartbeat.registry_address, self._secret))

    def report(self, gateway_epoch: str, blocks_after: int | None) -> Beat:
        """The worker, idle or not, has room for everything."""
        info = replace(
            fake_info(self.worker_id, self._role, layout=LAYOUT),
            control_address=self._server.address,
            num_blocks=NUM_BLOCKS,
            max_model_len=4096,
            max_num_batched_tokens=8192,
            version=VERSION,
            clock_id=clock_id(),
        )
        others = sum(outbox.gateway_epoch != gateway_epoch for _, outbox in self._running.values())
        load = WorkerLoad(NUM_BLOCKS, len(self._running), 0, others_requests=others)
        return Beat(info, load, self._links)

    def on_answer(self, registry_address: str, answer: BeatAnswer) -> None:
        """Links to all decode workers exist at once."""
        links = [
            LinkState(peer.worker_id, peer.epoch, PeerLink(peer.worker_id, "stub", "it is a stub", 1.0))
            for peer in answer.peers
        ]
        if links != self._links:
            self._links = links
            self.request_heartbeat()

    def on_silence(self, registry_address: str) -> None:
        """Nothing depends on it."""

    def request_heartbeat(self) -> None:
        """Report at once."""
        for heartbeat in self._heartbeats:
            heartbeat.wake()

    def begin(self, work: Work, outbox: Outbox, received_s: float) -> None:
        """Serve a request."""
        request = work.request
        if isinstance(work, SendPrefix):  # it has nothing cached
            outbox.output(request.attempt_id, TokenOutput(None, FinishReason.STOP))
            return
        if not isinstance(work, Receive):
            kinds = (EventKind.PREFILL_RECEIVED, EventKind.PREFILL_SCHEDULED, EventKind.TOKEN_1_SAMPLED)
            reason = FinishReason.LENGTH if request.max_tokens == 1 else None
            outbox.output(request.attempt_id, TokenOutput(5, reason, self._events(received_s, *kinds)))
        if not isinstance(work, Push):
            task = asyncio.create_task(self._decode(request, outbox, apart=isinstance(work, Receive)))
            self._running[request.attempt_id] = (task, outbox)
            task.add_done_callback(lambda _: self._running.pop(request.attempt_id, None))

    async def _decode(self, request: Request, outbox: Outbox, *, apart: bool) -> None:
        for index in range(2, request.max_tokens + 1):
            if self._step_s:  # all requests step at the same time
                await asyncio.sleep(self._step_s - time.monotonic() % self._step_s)
            events: tuple[Event, ...] = ()
            proof = None
            if index == 2:
                kinds = [EventKind.DECODE_SCHEDULED, EventKind.TOKEN_2_SAMPLED]
                if apart:
                    kinds = [EventKind.ROOM_MADE, EventKind.KV_VERIFIED, *kinds]
                    blocks = LAYOUT.blocks_for(len(request.token_ids))
                    kv_bytes = blocks * LAYOUT.block_bytes
                    proof = TransferProof(
                        "stub", kv_bytes, 0, blocks, 0, 1, "off", 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, kv_bytes
                    )
                events = self._events(time.monotonic(), *kinds)
            reason = FinishReason.LENGTH if index == request.max_tokens else None
            outbox.output(request.attempt_id, TokenOutput(5 + index % 100, reason, events, proof))

    def _events(self, time_s: float, *kinds: EventKind) -> tuple[Event, ...]:
        return tuple(Event(kind, self.worker_id, time_s) for kind in kinds)

    def hand_over(self, attempt_id: str, hand_off: bytes) -> None:
        """Nothing: no prefill answers with a hand-off."""

    async def abort(self, attempt_id: str) -> None:
        """End a request."""
        if attempt_id in self._running:
            self._running[attempt_id][0].cancel()

    def abort_all(self, outbox: Outbox) -> None:
        """End the requests of a stream."""
        for task, its in self._running.values():
            if its is outbox:
                task.cancel()


async def work(count: int, registries: list[str], step_s: float) -> None:
    """Serve with ``count`` workers until ended, half of them prefill and half decode workers. They register at the
    registries of all gateways and serve their requests. A prefill worker answers at once with token 1. A decode worker
    gives every request one token in each step of ``step_s``, as an engine does (0: all tokens at once), and says that
    it has received the KV."""
    secret = ServiceSecret.from_environment()
    for number in range(count):
        await StubWorker(list(Role)[number % 2], number, registries, step_s, secret).start()
    await asyncio.Event().wait()
