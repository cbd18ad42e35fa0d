"""Workers without an engine that speak real protocols: `python -m benchmarks.stub_workers COUNT REGISTRIES STEP_MS`.

COUNT workers, half of them prefill and half decode workers, register at the REGISTRIES of all gateways (with commas
between) and serve their requests.
A prefill worker answers at once with token 1. A decode worker gives every request one token in each step of STEP_MS
milliseconds, as an engine does (0: all tokens at once), and says that it has received the KV. The secret comes from
the environment.
"""

from __future__ import annotations

import asyncio
import sys
import time
from itertools import count

from pdserve.core.clock import MonotonicClock, clock_id
from pdserve.core.handoff import KVEndpoint, PeerLink, TransferProof
from pdserve.core.kv_layout import KVLayout
from pdserve.core.request import Request
from pdserve.core.sampling import FinishReason
from pdserve.core.timeline import Event, EventKind
from pdserve.core.worker import Role, TokenOutput, WorkerInfo, WorkerLoad
from pdserve.version import VERSION
from runtime.process import end_with_parent
from runtime.secret import ServiceSecret
from worker.heartbeat import Heartbeat
from worker.messages import Beat, BeatAnswer, LinkState, Push, Receive, SendPrefix, Work
from worker.server import ControlServer, Outbox

VOCABULARY = 512
CONTEXT = 4096
BLOCK = 16
LAYOUT = KVLayout.uniform("stub", "float32", block_size=BLOCK, num_layers=2, num_kv_heads=2, head_dim=16)
BEAT_S = 0.5


class StubWorker:
    """One worker."""

    def __init__(self, role: Role, number: int, registries: list[str], step_s: float, secret: ServiceSecret) -> None:
        self._role, self._step_s = role, step_s
        self.worker_id = f"{role}-{number}"
        self._server = ControlServer(self, self.worker_id, MonotonicClock(), secret)
        self._heartbeats = [Heartbeat(self, self.worker_id, registry, BEAT_S, secret) for registry in registries]
        self._links: list[LinkState] = []
        self._running: dict[str, asyncio.Task[None]] = {}
        self._outboxes: dict[str, Outbox] = {}

    async def start(self) -> None:
        """Listen, and register."""
        await self._server.start("127.0.0.1", 0)
        for heartbeat in self._heartbeats:
            heartbeat.start()

    # --- what the gateway sees ---------------------------------------------------------------------------------------

    def report(self, blocks_after: int | None) -> Beat:
        """The worker, idle or not, has room for everything."""
        info = WorkerInfo(
            worker_id=self.worker_id,
            role=self._role,
            epoch="1",
            control_address=self._server.address,
            kv_endpoints=(KVEndpoint("stub", self.worker_id),),
            node="stub",
            device="cpu",
            pid=1,
            engine_pid=1,
            layout=LAYOUT,
            num_blocks=2**20,
            max_model_len=CONTEXT,
            max_num_batched_tokens=8192,
            vocab_size=VOCABULARY,
            cuda_visible_devices="",
            cores="",
            version=VERSION,
            engine_restarts=0,
            ready=True,
            clock_id=clock_id(),
            life=self.worker_id,
        )
        return Beat(info, WorkerLoad(2**20, len(self._running), 0), self._links)

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

    # --- requests ----------------------------------------------------------------------------------------------------

    def begin(self, work: Work, outbox: Outbox, received_s: float) -> None:
        """Serve a request."""
        request = work.request
        if isinstance(work, SendPrefix):  # it has nothing cached
            outbox.output(request.attempt_id, TokenOutput(None, FinishReason.STOP))
            return
        if isinstance(work, Push):
            outbox.output(request.attempt_id, self._first(received_s, ends=request.max_tokens == 1))
            return
        self._outboxes[request.attempt_id] = outbox
        task = asyncio.create_task(self._decode(request, outbox, received_s, apart=isinstance(work, Receive)))
        self._running[request.attempt_id] = task
        task.add_done_callback(lambda _: self._forget(request.attempt_id))

    def _first(self, received_s: float, *, ends: bool) -> TokenOutput:
        kinds = (EventKind.PREFILL_RECEIVED, EventKind.PREFILL_SCHEDULED, EventKind.TOKEN_1_SAMPLED)
        events = tuple(Event(kind, self.worker_id, received_s) for kind in kinds)
        return TokenOutput(5, FinishReason.LENGTH if ends else None, events)

    async def _decode(self, request: Request, outbox: Outbox, received_s: float, *, apart: bool) -> None:
        wanted = request.max_tokens
        if not apart:
            outbox.output(request.attempt_id, self._first(received_s, ends=wanted == 1))
        for index in range(2, wanted + 1):
            if self._step_s:  # all requests step at the same time
                await asyncio.sleep(self._step_s - time.monotonic() % self._step_s)
            events: tuple[Event, ...] = ()
            proof = None
            if index == 2:
                now_s = time.monotonic()
                kinds: tuple[EventKind, ...] = (EventKind.DECODE_SCHEDULED, EventKind.TOKEN_2_SAMPLED)
                if apart:
                    kinds = (EventKind.ROOM_MADE, EventKind.KV_VERIFIED, *kinds)
                    num_blocks = -(-len(request.prompt_token_ids) // BLOCK)
                    proof = _proof(num_blocks)
                events = tuple(Event(kind, self.worker_id, now_s) for kind in kinds)
            last = FinishReason.LENGTH if index == wanted else None
            outbox.output(request.attempt_id, TokenOutput(5 + index % 100, last, events, proof))

    def _forget(self, attempt_id: str) -> None:
        self._running.pop(attempt_id, None)
        self._outboxes.pop(attempt_id, None)

    async def abort(self, attempt_id: str) -> None:
        """End a request."""
        if (task := self._running.get(attempt_id)) is not None:
            task.cancel()

    def abort_all(self, outbox: Outbox) -> None:
        """End the requests of a stream."""
        for attempt_id in [each for each, box in self._outboxes.items() if box is outbox]:
            self._running[attempt_id].cancel()


def _proof(num_blocks: int) -> TransferProof:
    return TransferProof(
        transport="stub",
        kv_bytes=num_blocks * LAYOUT.block_bytes,
        kv_bytes_retried=0,
        blocks_received=num_blocks,
        blocks_skipped=0,
        messages=1,
        checksum="off",
        export_ms=0.0,
        wire_ms=0.0,
        import_ms=0.0,
        span_ms=0.0,
        request_to_ready_ms=0.0,
        ceiling_gbs=1.0,
    )


async def main(number: int, registry: str, step_s: float) -> None:
    """Serve until ended."""
    secret = ServiceSecret.from_environment()
    numbers = count()
    for _ in range(number // 2):
        for role in Role:
            await StubWorker(role, next(numbers), registry.split(","), step_s, secret).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    end_with_parent()
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]) / 1e3))
