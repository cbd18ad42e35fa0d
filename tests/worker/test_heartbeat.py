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
from pdserve.core.errors import LayoutMismatch, WorkerLost
from pdserve.core.handoff import KVPeer, PeerLink
from pdserve.core.secret import ServiceSecret
from pdserve.core.stream_proof import StreamListener
from pdserve.core.worker import Role
from tests.loopback import SECRET
from tests.random_models import save_random_model
from tests.worker.test_requests import running
from worker.authentication import REGISTRY, Context, proven_server
from worker.messages import BEATS, MAX_BEAT_BYTES, Beat, BeatAnswer, encode

PREFILL, DECODE = prefill_worker.push.ROLES, decode_worker.receive.ROLES
SELDOM = {"heartbeat_s": 60.0, "heartbeat_timeout_s": 600.0}
"""With these settings a worker sends heartbeats only after changes."""
SOON_S = 15.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models"), "gqa")


@dataclass
class Registry:
    """The gateway's registry: answers with the wanted links, and records the heartbeats."""

    wanted: list[KVPeer] = field(default_factory=list)
    superseded: bool = False
    beats: asyncio.Queue[Beat] = field(default_factory=asyncio.Queue)

    async def serve(self, requests: AsyncIterator[bytes], _: Context) -> AsyncGenerator[bytes, None]:
        """Answer one worker's heartbeats."""
        async for data in requests:
            await self.beats.put(BEATS.decode(data))
            yield encode(BeatAnswer("g", self.superseded, self.wanted))

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
        running(model, Role.DECODE, DECODE, router=SELDOM, engine={"block_size": 32}) as (unlike, _),
        registry_at(prefill.spec.registry_address) as registry,
    ):
        assert (await registry.next()).links == {}
        peer, epoch = decode.info.peer, ("decode-0", decode.info.epoch)

        # A decode worker has come.
        registry.wanted = [peer]
        client.beat_now()
        assert (await registry.next()).links == {}
        link = (await registry.next()).links[epoch]
        assert isinstance(link, PeerLink)
        assert (link.worker_id, link.transport) == ("decode-0", "tcp")

        # It is replaced by another, of which this one is not.
        stranger = KVPeer("decode-0", "another", peer.endpoints)
        registry.wanted = [stranger]
        client.beat_now()
        assert list((await registry.next()).links) == [epoch]
        (failed,) = (await registry.next()).links.items()
        assert failed[0] == ("decode-0", "another")
        assert "has started anew" in str(failed[1])

        # One with another layout.
        registry.wanted = [unlike.info.peer]
        client.beat_now()
        await registry.next()
        (failed,) = (await registry.next()).links.items()
        assert failed[0] == ("decode-0", unlike.info.epoch)
        assert isinstance(failed[1], LayoutMismatch)
        assert "block_size" in str(failed[1])

        # None.
        registry.wanted = []
        for _ in range(2):
            client.beat_now()
            beat = await registry.next()
        assert beat.links == {}
        await asyncio.sleep(0.5)
        assert registry.beats.empty(), "no news, no heartbeats"


async def test_a_new_engine_opens_its_links_anew(model: Path) -> None:
    async with (
        running(model, Role.PREFILL, PREFILL, router=SELDOM) as (prefill, _),
        running(model, Role.DECODE, DECODE, router=SELDOM) as (decode, _),
        registry_at(prefill.spec.registry_address) as registry,
    ):
        registry.wanted = [decode.info.peer]
        while not (before := await registry.next()).links:
            pass
        os.kill(prefill.info.engine_pid, signal.SIGKILL)
        while not ((beat := await registry.next()).links and beat.info.ready):
            pass
        assert beat.info.epoch != before.info.epoch
        assert isinstance(beat.links["decode-0", decode.info.epoch], PeerLink)


async def test_a_superseded_worker_ends(model: Path) -> None:
    async with (
        running(model, Role.PREFILL, PREFILL, router=SELDOM) as (prefill, client),
        registry_at(prefill.spec.registry_address) as registry,
    ):
        await registry.next()
        registry.superseded = True
        client.beat_now()
        with pytest.raises(WorkerLost, match="worker prefill-0 was replaced or retired, and ends"):
            await asyncio.wait_for(asyncio.shield(prefill._superseded), SOON_S)
        await asyncio.wait_for(client.wait_closed(), SOON_S)
