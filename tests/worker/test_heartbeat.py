"""The heartbeats of a worker, and its reaction to the answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import decode_worker.receive
import prefill_worker.push
from contract.control import BEATS, MAX_BEAT_BYTES, Beat, BeatAnswer
from contract.message import encode
from ops.launch.worker import HANDLERS
from pdserve.core.errors import WorkerLost
from pdserve.core.handoff import KVPeer, PeerLink
from pdserve.core.worker import Role
from runtime.secret import ServiceSecret
from runtime.stream_proof import StreamListener
from tests.loopback import SECRET
from tests.output_stream import sent
from tests.worker.test_requests import outputs, request_for, running, until
from worker.authentication import REGISTRY, proven_server

PREFILL, DECODE = prefill_worker.push.HANDLERS, decode_worker.receive.HANDLERS
SELDOM = {"heartbeat_s": 60.0, "heartbeat_timeout_s": 600.0}
"""With these settings a worker sends heartbeats only after changes."""
SOON_S = 60.0


@dataclass
class Registry:
    """The gateway's registry: answers with the wanted links, and records the heartbeats."""

    wanted: list[KVPeer] = field(default_factory=list)
    superseded: bool = False
    blocks_after: int | None = None
    role: Role | None = None
    version: int = 0
    beats: asyncio.Queue[Beat] = field(default_factory=asyncio.Queue)

    async def serve(self, requests: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Answer one worker's heartbeats."""
        async for data in requests:
            await self.beats.put(BEATS.decode(data))
            yield encode(BeatAnswer("g", self.superseded, self.wanted, self.blocks_after, self.role, self.version))

    async def next(self) -> Beat:
        """The next heartbeat, which must come soon."""
        return await asyncio.wait_for(self.beats.get(), SOON_S)


@contextlib.asynccontextmanager
async def registry_at(address: str, secret: ServiceSecret = SECRET) -> AsyncIterator[Registry]:
    registry = Registry()
    server = proven_server(REGISTRY, StreamListener(secret, REGISTRY.purpose, address), registry.serve, MAX_BEAT_BYTES)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield registry
    finally:
        await server.stop(None)


async def test_a_worker_reports_at_once_when_it_is_asked_to_and_when_its_links_have_changed(model: Path) -> None:
    async with (
        running(model, Role.PREFILL, PREFILL, router=SELDOM) as (prefill, client),
        running(model, Role.DECODE, DECODE, router=SELDOM) as (decode, _),
        registry_at(prefill.spec.registry_addresses[0]) as registry,
    ):
        assert (await registry.next()).links == {}
        peer, epoch = decode.info.peer, ("decode-0", decode.info.epoch)

        # A decode worker has come.
        registry.wanted = [peer]
        client.request_heartbeat()
        assert (await registry.next()).links == {}
        link = (await registry.next()).links[epoch]
        assert isinstance(link, PeerLink)
        assert (link.worker_id, link.transport) == ("decode-0", "tcp")

        # None.
        registry.wanted = []
        for _ in range(2):
            client.request_heartbeat()
            beat = await registry.next()
        assert beat.links == {}
        await asyncio.sleep(0.5)
        assert registry.beats.empty(), "no news, no heartbeats"

        # The first one again. A new engine opens its links anew.
        registry.wanted = [peer]
        client.request_heartbeat()
        while not (before := await registry.next()).links:
            pass
        stream = asyncio.create_task(outputs(sent(client.run, request_for("lost", max_tokens=400))))
        await until(lambda: prefill.load.running > 0)
        os.kill(prefill.info.engine_pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match="the engine of worker prefill-0"):
            await stream
        while not ((beat := await registry.next()).links and beat.info.ready):
            pass
        assert beat.info.epoch != before.info.epoch
        assert isinstance(beat.links[epoch], PeerLink)


async def test_a_worker_takes_the_role_of_the_latest_version_and_ends_when_it_is_superseded(model: Path) -> None:
    """Gateways may lag behind each other."""
    async with (
        running(model, Role.DECODE, HANDLERS, router=SELDOM, gateways=2) as (worker, client),
        registry_at(worker.spec.registry_addresses[0]) as first,
        registry_at(worker.spec.registry_addresses[1]) as second,
    ):
        for registry in (first, second):
            assert (await registry.next()).info.role is Role.DECODE
        epoch = worker.info.epoch
        first.role, first.version = Role.PREFILL, 2
        second.role, second.version = Role.DECODE, 1
        worker.request_heartbeat()
        for registry in (first, second):  # both are told at once
            while (beat := await registry.next()).info.role is not Role.PREFILL:
                assert beat.info.role is Role.DECODE
            assert beat.info.epoch == epoch
        second.version = 3
        worker.request_heartbeat()
        while (await first.next()).info.role is not Role.DECODE:
            pass
        assert worker.info.role is Role.DECODE
        first.role, first.version = None, 0  # it has started anew and was not told yet
        worker.request_heartbeat()
        assert (await first.next()).info.role is Role.DECODE
        first.superseded = True
        client.request_heartbeat()
        with pytest.raises(WorkerLost, match="worker decode-0 was replaced or retired, and ends"):
            await asyncio.wait_for(asyncio.shield(worker._membership.superseded), SOON_S)
        await asyncio.wait_for(client.wait_closed(), SOON_S)
