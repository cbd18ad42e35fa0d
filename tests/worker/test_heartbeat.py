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
from contract.control import BEATS, MAX_BEAT_BYTES, Beat, BeatAnswer, encode
from ops.launch.worker import HANDLERS
from pdserve.core.block_update import SNAPSHOT, BlockUpdate, pack
from pdserve.core.errors import LayoutMismatch, WorkerLost
from pdserve.core.handoff import KVPeer, PeerLink
from pdserve.core.prefix_digests import PrefixDigests
from pdserve.core.request import Request
from pdserve.core.sampling import SamplingParams
from pdserve.core.worker import Role
from runtime.secret import ServiceSecret
from runtime.stream_proof import StreamListener
from tests.loopback import SECRET
from tests.output_stream import sent
from tests.worker.test_requests import PROMPT, outputs, request_for, running, until
from worker.authentication import REGISTRY, proven_server
from worker.client import WorkerClient

PREFILL, DECODE = prefill_worker.push.HANDLERS, decode_worker.receive.HANDLERS
SELDOM = {"heartbeat_s": 60.0, "heartbeat_timeout_s": 600.0}
"""With these settings a worker sends heartbeats only after changes."""
OFTEN = {"heartbeat_s": 0.05, "heartbeat_timeout_s": 600.0}
SOON_S = 15.0


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
        running(model, Role.DECODE, DECODE, router=SELDOM, engine={"block_size": 32}) as (unlike, _),
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

        # It is replaced by another, of which this one is not.
        stranger = KVPeer("decode-0", "another", peer.endpoints)
        registry.wanted = [stranger]
        client.request_heartbeat()
        assert list((await registry.next()).links) == [epoch]
        (failed,) = (await registry.next()).links.items()
        assert failed[0] == ("decode-0", "another")
        assert "has started anew" in str(failed[1])

        # One with another layout.
        registry.wanted = [unlike.info.peer]
        client.request_heartbeat()
        await registry.next()
        (failed,) = (await registry.next()).links.items()
        assert failed[0] == ("decode-0", unlike.info.epoch)
        assert isinstance(failed[1], LayoutMismatch)
        assert "block_size" in str(failed[1])

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


async def test_each_gateway_hears_of_the_load_of_all(model: Path) -> None:
    """Gateways come after the worker, in any order, and one of them goes."""
    async with running(model, Role.PREFILL, PREFILL, gateways=2, router=OFTEN) as (prefill, client):
        first, second = prefill.spec.registry_addresses
        running_on = asyncio.create_task(outputs(sent(client.run, request_for("one", max_tokens=200))))
        async with registry_at(second) as late:
            beat = await late.next()
            while not beat.load.running:
                beat = await late.next()
            assert 0 < beat.load.outstanding_tokens <= len(PROMPT) + 200
            async with registry_at(first) as other:
                assert (await other.next()).info == beat.info
            for _ in range(3):
                await late.next()
            assert len(await running_on) == 200
            while beat.load.outstanding_tokens or beat.load.running:
                beat = await late.next()
        assert prefill.load.outstanding_tokens == 0


async def test_it_announces_the_blocks_of_its_prefix_cache_to_who_wants_them(model: Path) -> None:
    async def answered(client: WorkerClient, prompt: tuple[int, ...], name: str) -> None:
        request = Request(name, prompt, SamplingParams(max_tokens=1), timeout_s=60.0, attempt_id=name, salt="s")
        async for _ in sent(client.run, request):
            pass

    engine = {"block_size": 4, "prefix_caching": True}
    async with (
        running(model, Role.PREFILL, PREFILL, router=SELDOM, engine=engine) as (worker, client),
        registry_at(worker.spec.registry_addresses[0]) as registry,
    ):
        assert (await registry.next()).blocks is None
        prompt = tuple(range(1, 14))
        hashes = list(PrefixDigests("s", 4).hashes(prompt))

        async def announced() -> BlockUpdate | None:
            client.request_heartbeat()
            return (await registry.next()).blocks

        async def heard(ends: int) -> None:
            """The worker has heard of so many changes from its engine."""
            async with asyncio.timeout(SOON_S):
                while worker.incarnation.cached_blocks.ends < ends:  # noqa: ASYNC110 - nobody is told
                    await asyncio.sleep(0.01)

        await answered(client, prompt, "one")
        await heard(3)
        assert await announced() is None, "nobody has asked"
        registry.blocks_after = SNAPSHOT
        assert await announced() is None, "the answer asks"
        update = await announced()
        assert update == BlockUpdate(SNAPSHOT, 3, pack(hashes))
        registry.blocks_after = 3
        assert await announced() == update, "the answer before did not confirm it"
        assert await announced() is None, "no news"
        await answered(client, (*prompt, 99, 98, 97), "two")
        await heard(4)
        longer = list(PrefixDigests("s", 4).hashes((*prompt, 99, 98, 97)))
        assert await announced() == BlockUpdate(3, 4, pack(longer[3:]))


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
            await asyncio.wait_for(asyncio.shield(worker._superseded), SOON_S)
        await asyncio.wait_for(client.wait_closed(), SOON_S)
