"""What a worker makes of a request whose other half is at fault, and of one that is given up: it ends at once, it
alone, and holds nothing.

A real worker with its engine process, its control stream, and a KV end of the test's own as its peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import decode_worker.receive
import prefill_worker.push
from engine.messages import Abort, Command, KVRole
from engine.process.client import EngineClient
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from pdserve.core.clock import MonotonicClock
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LayoutMismatch,
    PdserveError,
    PeerLost,
    TransferError,
    TransferRefused,
    TransferTimeout,
    WorkerLost,
)
from pdserve.core.handoff import FirstToken, KVPeer
from pdserve.core.request import Request
from pdserve.core.sampling import FinishReason, SamplingParams
from pdserve.core.worker import Role, TokenOutput, WorkerInfo
from tests.host_pool import HostPool
from tests.kv_transfer.status import status_of
from tests.local_cluster import free_port
from tests.loopback import SECRET, create_transport
from tests.output_stream import sent
from tests.planted import delays
from tests.random_models import greedy_tokens, save_random_model
from worker import messages
from worker.client import WorkerClient
from worker.request_table import Handler, ServedRequest
from worker.spec import WorkerSpec
from worker.worker import Worker

PROMPT = (11, 7, 200, 41, 5, 99, 3) * 8  # four blocks, computed in as many steps
NUM_BLOCKS = 32
TIMEOUT_S = 60.0
AT_ONCE_S = 10.0
TEST_PEER = KVPeer("test", "", ())  # all that a receiver has to know of the test's KV end is its name
PREFILL, DECODE = prefill_worker.push.HANDLERS, decode_worker.receive.HANDLERS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models"), "gqa")


@contextlib.asynccontextmanager
async def running(
    model: Path,
    role: Role,
    handlers: Mapping[type[messages.Work], Handler],
    delays_ms: Mapping[str, float] | None = None,
    gateways: int = 1,
    **settings: Mapping[str, Any],
) -> AsyncIterator[tuple[Worker, WorkerClient]]:
    """A worker of a service with ``gateways``, none of which is there, and a client of it. ``settings`` are sections of
    its configuration; ``delays_ms`` are planted in its engine."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "dtype": "float32"},
        "engine": {"block_size": 16, "num_blocks": NUM_BLOCKS, "max_num_batched_tokens": 16, "prefix_caching": False},
        "transfer": {"transport": "tcp"},
    }
    for name, values in settings.items():
        sections.setdefault(name, {}).update(values)
    registries = tuple(f"127.0.0.1:{free_port()}" for _ in range(gateways))
    config = PdserveConfig.parse(sections)
    spec = WorkerSpec(f"{role}-0", role, "127.0.0.1", "127.0.0.1", "cpu", registries, "test", config=config)
    if delays_ms is not None:
        spec = replace(spec, engine_module=delays.ENGINE_MODULE)
    worker = Worker(spec, handlers, SECRET)
    serving = asyncio.create_task(worker.run())
    try:
        with delays.in_environment(delays_ms or {}):
            info = await worker.started
        client = await WorkerClient.connect(info, SECRET)
        try:
            yield worker, client
        finally:
            await client.aclose()
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@contextlib.asynccontextmanager
async def sending_to(info: WorkerInfo) -> AsyncIterator[KVSender]:
    """A prefill worker's KV end, linked."""
    pool = HostPool(info.layout, 16)
    transport = create_transport("tcp", pool.memory)
    sender = KVSender(
        pool,
        [transport],
        worker_id="test",
        checksum=True,
        message_bytes=2**20,
        max_inflight_bytes=2**24,
        clock=MonotonicClock(),
        lease_s=TIMEOUT_S,
        connect_timeout_s=AT_ONCE_S,
    )
    try:
        await sender.connect(info.worker_id, info.epoch, info.kv_endpoints)
        yield sender
    finally:
        await sender.aclose()
        await transport.aclose()


class Receiving:
    """A decode worker's KV end: ``receiver``, and the peer that the prefill worker is given."""

    def __init__(self, receiver: KVReceiver, peer: KVPeer) -> None:
        self.receiver, self.peer = receiver, peer

    def announce(self, attempt_id: str, blocks: Sequence[int], sender: WorkerInfo) -> None:
        """Allocate blocks for a request's KV, and announce them to the prefill worker."""
        self.receiver.announce(attempt_id, sender.worker_id, blocks, 0, MonotonicClock().now() + TIMEOUT_S)


@contextlib.asynccontextmanager
async def receiving_for(info: WorkerInfo) -> AsyncIterator[Receiving]:
    """A decode worker's KV end."""
    pool = HostPool(info.layout, 16)
    transport = create_transport("tcp", pool.memory)
    receiver = KVReceiver(
        pool,
        [transport],
        worker_id="test",
        epoch="e1",
        checksum=True,
        clock=MonotonicClock(),
        lease_s=TIMEOUT_S,
    )
    try:
        yield Receiving(receiver, KVPeer("test", "e1", await receiver.start("127.0.0.1")))
    finally:
        await receiver.aclose()
        await transport.aclose()


def request_for(attempt_id: str, timeout_s: float = TIMEOUT_S, max_tokens: int = 4, **sampling: object) -> Request:
    """A greedy request without an end-of-sequence token."""
    params = SamplingParams(max_tokens, seed=1, **{"ignore_eos": True, **sampling})  # type: ignore[arg-type]
    return Request("r", PROMPT, params, timeout_s=timeout_s, attempt_id=attempt_id)


async def outputs(stream: AsyncIterator[TokenOutput]) -> list[TokenOutput]:
    """All outputs, which must come at once."""
    async with asyncio.timeout(AT_ONCE_S):
        return [output async for output in stream]


async def outputs_after(pause_s: float, stream: AsyncIterator[TokenOutput]) -> list[TokenOutput]:
    """All outputs of a request that is sent a moment later."""
    await asyncio.sleep(pause_s)
    return await outputs(stream)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until ``condition`` holds."""
    async with asyncio.timeout(AT_ONCE_S):
        while not condition():  # noqa: ASYNC110 - conditions have no events
            await asyncio.sleep(0.01)


async def check_idle(worker: Worker, restarts: int = 0) -> None:
    """Wait until all blocks are free and no part of the worker holds a request."""
    table, kv = worker._table, worker.incarnation.kv
    await until(lambda: worker.load.free_blocks == worker.info.num_blocks)
    await until(lambda: (worker.load.running, worker.load.waiting) == (0, 0))
    await until(lambda: not table._tasks)
    assert not table._requests
    assert not table._deadlines
    ends = kv._sender, kv._receiver
    await until(lambda: not (kv._running or ends[0]._transfers))
    await until(lambda: not (ends[1]._by_attempt or ends[1]._by_nonce))
    assert (worker.info.engine_restarts, worker.info.ready) == (restarts, True)


async def hand_over(sender: KVSender, info: WorkerInfo, attempt_id: str, trailer: object) -> None:
    """Send blocks of zeros and this token 1."""
    sender.push(attempt_id, info.peer, 4, MonotonicClock().now() + TIMEOUT_S)
    sender.send_blocks(attempt_id, 0, range(4), last=True, trailer=msgspec.msgpack.encode(trailer))
    await sender.wait(attempt_id)


# --- token 1 as decode gets it ---------------------------------------------------------------------------------------


async def test_decode_fails_a_request_that_only_its_engine_ended(model: Path) -> None:
    """Token 1 ends the request for the decode engine, but not for prefill. No step will have a token of the request."""
    async with running(model, Role.DECODE, DECODE) as (worker, client), sending_to(client.info) as sender:
        failed, _ = await asyncio.gather(
            outputs(sent(client.receive, request_for("a", stop_token_ids=(42,)), TEST_PEER)),
            hand_over(sender, client.info, "a", FirstToken(42, ends_here=False)),
            return_exceptions=True,
        )
        assert type(failed) is LayoutMismatch
        assert "token 1 ends it on worker decode-0 (stop)" in str(failed)
        assert "same eos_token_ids" in str(failed)
        await check_idle(worker)
        tokens, _ = await asyncio.gather(
            outputs(sent(client.receive, request_for("b", stop_token_ids=(42,)), TEST_PEER)),
            hand_over(sender, client.info, "b", FirstToken(41, ends_here=False)),
        )
        assert len(tokens) == 3
        await check_idle(worker)


NO_TOKENS: list[object] = [
    FirstToken(307, ends_here=False), FirstToken(-1, ends_here=False), FirstToken(2**40, ends_here=True),
    ["1", False], [1, 0], [1], [1, False, 2], {"token_id": 1, "ends_here": False}, None,
    msgspec.Raw(b"\x92\xa2\xff\xff\xc2"),
]  # fmt: skip


async def test_a_token_that_no_model_has_ends_its_request_and_not_the_engine(model: Path) -> None:
    async with running(model, Role.DECODE, DECODE) as (worker, client), sending_to(client.info) as sender:
        for i, trailer in enumerate(NO_TOKENS):
            failed, _ = await asyncio.gather(
                outputs(sent(client.receive, request_for(f"r{i}"), TEST_PEER)),
                hand_over(sender, client.info, f"r{i}", trailer),
                return_exceptions=True,
            )
            assert type(failed) is TransferRefused, trailer
            assert "the hand-off's trailer is no token" in str(failed)
        await check_idle(worker)


async def test_token_1_that_ends_a_request_for_prefill_alone_ends_it_in_decodes_engine_too(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the engine would continue a request whose outputs are not read."""
    told = spy_on_engine(monkeypatch)
    async with running(model, Role.DECODE, DECODE) as (worker, client), sending_to(client.info) as sender:
        (output,), _ = await asyncio.gather(
            outputs(sent(client.receive, request_for("r", max_tokens=400), TEST_PEER)),
            hand_over(sender, client.info, "r", FirstToken(42, ends_here=True)),
        )
        assert (output.token_id, output.finish_reason) == (None, FinishReason.STOP)
        await until(lambda: Abort("r") in told)
        await check_idle(worker)


def spy_on_engine(monkeypatch: pytest.MonkeyPatch) -> list[Command]:
    """The commands that are sent to engines from now on."""
    told: list[Command] = []
    send = EngineClient.send

    def listen(engine: EngineClient, command: Command) -> None:
        told.append(command)
        send(engine, command)

    monkeypatch.setattr(EngineClient, "send", listen)
    return told


# --- prefill ---------------------------------------------------------------------------------------------------------


async def test_prefill_fails_a_request_at_once_if_its_blocks_cannot_be_sent(model: Path) -> None:
    """The receiver wants fewer blocks than the prompt has. Both ends hear of it at once; the gateway does from prefill,
    or (once that has given its token) from decode."""
    async with running(model, Role.PREFILL, PREFILL) as (worker, client), receiving_for(client.info) as decode:
        decode.announce("good", range(4), client.info)
        decode.announce("bad", range(4, 6), client.info)
        bad, good = await asyncio.gather(
            outputs(sent(client.push, request_for("bad"), decode.peer)),
            outputs(sent(client.push, request_for("good"), decode.peer)),
            return_exceptions=True,
        )
        why = "test wants 2 blocks of bad less 0; 4 are to be sent"
        assert isinstance(bad, list) or (type(bad) is TransferRefused and why in str(bad))
        async with asyncio.timeout(AT_ONCE_S):
            with pytest.raises(TransferRefused, match=f"the sender of bad gave up: {why}"):
                await decode.receiver.wait("bad")
            received = await decode.receiver.wait("good")
        assert isinstance(good, list)
        assert [output.token_id for output in good] == greedy_tokens(model, PROMPT, 1)
        first = msgspec.msgpack.decode(received.trailer, type=FirstToken)
        assert first == FirstToken(good[0].token_id or 0, ends_here=False)
        await check_idle(worker)


async def test_a_bug_in_a_hand_off_fails_its_request_at_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither end may stay open until the deadline."""
    send_blocks = KVSender.send_blocks

    def fail(sender: KVSender, attempt_id: str, *arguments: Any, **more: Any) -> None:
        if attempt_id == "bad":
            raise ZeroDivisionError("a bug")
        send_blocks(sender, attempt_id, *arguments, **more)

    monkeypatch.setattr(KVSender, "send_blocks", fail)
    async with running(model, Role.PREFILL, PREFILL) as (worker, client), receiving_for(client.info) as decode:
        decode.announce("good", range(4), client.info)
        decode.announce("bad", range(4, 8), client.info)
        bad, good = await asyncio.gather(
            outputs(sent(client.push, request_for("bad"), decode.peer)),
            outputs(sent(client.push, request_for("good"), decode.peer)),
            return_exceptions=True,
        )
        why = "the KV hand-off of bad failed: ZeroDivisionError: a bug"
        assert isinstance(bad, list) or (type(bad) is TransferError and why in str(bad))
        assert isinstance(good, list)
        async with asyncio.timeout(AT_ONCE_S):
            with pytest.raises(TransferError, match="the sender of bad gave up: "):
                await decode.receiver.wait("bad")
            await decode.receiver.wait("good")
        await check_idle(worker)


async def test_prefill_holds_unannounced_blocks_until_the_deadline(model: Path) -> None:
    async with running(model, Role.PREFILL, PREFILL) as (worker, client), receiving_for(client.info) as decode:
        started_s = time.monotonic()
        (output,) = await outputs(sent(client.push, request_for("r", timeout_s=2.0), decode.peer))
        assert [output.token_id] == greedy_tokens(model, PROMPT, 1)
        await until(lambda: worker.load.free_blocks == NUM_BLOCKS - 4)
        await check_idle(worker)
        assert 2.0 <= time.monotonic() - started_s < 2.0 + AT_ONCE_S
        # What is announced after that is told at once that it is over.
        decode.announce("r", range(4), client.info)
        async with asyncio.timeout(AT_ONCE_S):
            with pytest.raises(TransferError, match="the sender of r gave up: "):
                await decode.receiver.wait("r")


async def test_prefill_holds_unannounced_blocks_until_an_abort(model: Path) -> None:
    async with running(model, Role.PREFILL, PREFILL) as (worker, client), receiving_for(client.info) as decode:
        for name in ("a", "b"):
            await outputs(sent(client.push, request_for(name), decode.peer))
        await until(lambda: worker.load.free_blocks == NUM_BLOCKS - 8)
        await asyncio.sleep(0.3)
        assert worker.load.free_blocks == NUM_BLOCKS - 8
        async with asyncio.timeout(AT_ONCE_S):
            await client.abort("a")
        assert "a" not in worker._table
        assert "a" not in worker._table._tasks
        await until(lambda: worker.load.free_blocks == NUM_BLOCKS - 4)
        decode.announce("b", range(4), client.info)
        async with asyncio.timeout(AT_ONCE_S):
            await decode.receiver.wait("b")
        await check_idle(worker)


async def test_prefill_gives_up_while_it_computes(model: Path) -> None:
    """Regardless of what has been announced or sent by then."""
    async with (
        running(model, Role.PREFILL, PREFILL, {"prefill": 300.0}) as (worker, client),
        receiving_for(client.info) as decode,
    ):
        decode.announce("told", range(4), client.info)
        streams = [
            asyncio.create_task(outputs(sent(client.push, request_for(name), decode.peer)))
            for name in ("told", "untold")
        ]
        await until(lambda: worker.load.free_blocks < NUM_BLOCKS)
        async with asyncio.timeout(AT_ONCE_S):
            await asyncio.gather(client.abort("told"), client.abort("untold"))
            with pytest.raises(TransferError, match="the sender of told gave up: "):
                await decode.receiver.wait("told")
        await check_idle(worker)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def test_prefill_fails_at_once_if_its_peer_is_unreachable(model: Path) -> None:
    """Nothing listens there. Prefill reports the failure, unless token 1 was faster."""
    async with running(model, Role.PREFILL, PREFILL, {"prefill": 300.0}) as (worker, client):
        async with receiving_for(client.info) as decode:
            peer = decode.peer
        with pytest.raises(PeerLost):
            await outputs(sent(client.push, request_for("r"), peer))
        await check_idle(worker)


@pytest.mark.parametrize("begun", [True, False])
async def test_prefill_releases_blocks_that_its_receiver_gives_up(model: Path, begun: bool) -> None:
    """After the announcement, whether or not the request has arrived by then."""
    async with running(model, Role.PREFILL, PREFILL) as (worker, client), receiving_for(client.info) as decode:
        await worker.incarnation.kv.connect(decode.peer)
        decode.announce("r", range(4), client.info)
        stream = outputs(sent(client.push, request_for("r"), decode.peer))
        if begun:
            pushing = asyncio.create_task(stream)
            await until(lambda: status_of(decode.receiver, "r") != "bootstrapping")
            await decode.receiver.abort("r")
        else:
            (peer,) = worker.incarnation.kv._sender._peers.values()
            await until(lambda: "r" in peer._announced)
            await decode.receiver.abort("r")
            pushing = asyncio.create_task(stream)
        await asyncio.gather(pushing, return_exceptions=True)  # token 1, or the failure
        await check_idle(worker)


# --- decode ----------------------------------------------------------------------------------------------------------


async def test_decode_fails_a_transfer_that_never_begins_by_its_lease(model: Path) -> None:
    """The sender is alive and linked."""
    lease = {"lease_s": 0.5}
    async with running(model, Role.DECODE, DECODE, transfer=lease) as (worker, client), sending_to(client.info):
        with pytest.raises(TransferTimeout, match=r"KV of r is incomplete and the peer was silent for 0\.5 s"):
            await outputs(sent(client.receive, request_for("r"), TEST_PEER))
        await check_idle(worker)


async def test_decode_fails_a_transfer_that_never_begins_by_its_deadline(model: Path) -> None:
    async with running(model, Role.DECODE, DECODE) as (worker, client), sending_to(client.info):
        started_s = time.monotonic()
        with pytest.raises(TransferTimeout, match="KV of r is incomplete and its deadline passed"):
            await outputs(sent(client.receive, request_for("r", timeout_s=1.0), TEST_PEER))
        assert time.monotonic() - started_s >= 1.0
        await check_idle(worker)


async def test_decode_fails_a_request_whose_sender_is_unknown(model: Path) -> None:
    """No such worker has a link or opens one."""
    async with running(model, Role.DECODE, DECODE) as (worker, client):
        with pytest.raises(PeerLost, match="there is no KV link from test"):
            await outputs(sent(client.receive, request_for("r"), TEST_PEER))
        await check_idle(worker)


async def test_decode_fails_at_once_if_its_sender_gave_up(model: Path) -> None:
    async with running(model, Role.DECODE, DECODE) as (worker, client), sending_to(client.info) as sender:
        sender.push("r", client.info.peer, 4, MonotonicClock().now() + TIMEOUT_S)
        await sender.abort("r")
        with pytest.raises(TransferError, match="the sender of r gave up: "):
            await outputs(sent(client.receive, request_for("r"), TEST_PEER))
        await check_idle(worker)


async def test_decode_fails_at_once_if_its_sender_is_lost(model: Path) -> None:
    async with running(model, Role.DECODE, DECODE) as (worker, client):
        async with sending_to(client.info) as sender:
            stream = asyncio.create_task(outputs(sent(client.receive, request_for("r"), TEST_PEER)))
            sender.push("r", client.info.peer, 4, MonotonicClock().now() + TIMEOUT_S)
            sender.send_blocks("r", 0, range(2))
            await until(lambda: status_of(sender, "r") == "transferring")
        with pytest.raises(PeerLost):
            await stream
        await check_idle(worker)


async def test_decode_fails_a_request_without_room_at_its_deadline(model: Path) -> None:
    async with running(model, Role.DECODE, DECODE) as (worker, client), sending_to(client.info):
        filling = [
            asyncio.create_task(outputs(sent(client.receive, request_for(f"f{i}"), TEST_PEER))) for i in range(8)
        ]
        await until(lambda: worker.load.free_blocks <= 4 and worker.load.waiting > 0)
        with pytest.raises(DeadlineExceeded, match="request r exceeded its deadline on worker decode-0"):
            await outputs(sent(client.receive, request_for("r", timeout_s=0.5), TEST_PEER))
        await asyncio.gather(*(client.abort(f"f{i}") for i in range(8)))
        await check_idle(worker)
        for each in filling:
            each.cancel()
        await asyncio.gather(*filling, return_exceptions=True)


class Phases:
    """Requests on a decode worker, one in each phase."""

    NAMES = ("waiting for room", "waiting for KV", "receiving KV", "streaming")

    def __init__(self, worker: Worker, client: WorkerClient, sender: KVSender) -> None:
        self.worker, self.client, self.sender = worker, client, sender
        self.tokens: dict[str, list[TokenOutput]] = {}
        self.streams: dict[str, asyncio.Task[None]] = {}

    async def reach(self) -> None:
        """Begin a request in each phase; the last one fills the pool."""
        deadline_s = MonotonicClock().now() + TIMEOUT_S
        self._begin("streaming", max_tokens=400)
        await hand_over(self.sender, self.client.info, "streaming", FirstToken(42, ends_here=False))
        await until(lambda: len(self.tokens["streaming"]) > 2)
        self._begin("receiving KV")
        self.sender.push("receiving KV", self.client.info.peer, 4, deadline_s)
        self.sender.send_blocks("receiving KV", 0, range(2))
        await until(lambda: self._status("receiving KV") == "transferring")
        self._begin("waiting for KV")
        await until(lambda: self._status("waiting for KV") == "bootstrapping")
        for i in range(8):
            self._begin(f"filling {i}")
        self._begin("waiting for room")
        await until(lambda: self.worker.load.free_blocks < 4 and self.worker.load.waiting > 0)
        assert self._status("waiting for room") is None
        assert self._status("waiting for KV") == "bootstrapping"
        assert not self.streams["streaming"].done()

    def _status(self, name: str) -> str | None:
        receiver = self.worker.incarnation.kv._receiver
        return status_of(receiver, name) if name in receiver._by_attempt else None

    def _begin(self, name: str, max_tokens: int = 4) -> None:
        tokens = self.tokens[name] = []

        async def read() -> None:
            async for output in sent(self.client.receive, request_for(name, max_tokens=max_tokens), TEST_PEER):
                tokens.append(output)  # noqa: PERF401 - seen by others as they come

        self.streams[name] = asyncio.create_task(read())

    async def close(self) -> None:
        """Close the test's KV end."""
        for stream in self.streams.values():
            stream.cancel()
        await asyncio.gather(*self.streams.values(), return_exceptions=True)


@pytest.mark.parametrize("first", Phases.NAMES)
async def test_decode_releases_aborted_requests_in_each_phase(model: Path, first: str) -> None:
    async with running(model, Role.DECODE, DECODE) as (worker, client), sending_to(client.info) as sender:
        phases = Phases(worker, client, sender)
        try:
            await phases.reach()
            order = [first, *(name for name in phases.streams if name != first)]
            for name in order:
                async with asyncio.timeout(AT_ONCE_S):
                    await client.abort(name)
                assert name not in worker._table
                assert name not in worker._table._tasks  # it holds nothing any more
                if name == "receiving KV":
                    async with asyncio.timeout(AT_ONCE_S):
                        with pytest.raises(TransferError):
                            await sender.wait(name)
            await check_idle(worker)
        finally:
            await phases.close()


async def test_decode_releases_everything_when_its_gateway_is_lost(model: Path) -> None:
    async with running(model, Role.DECODE, DECODE) as (worker, client), sending_to(client.info) as sender:
        other = await WorkerClient.connect(client.info, SECRET)
        stream = asyncio.create_task(outputs(sent(other.run, request_for("of another", max_tokens=50))))
        phases = Phases(worker, client, sender)
        try:
            await phases.reach()
            await client.aclose()
            assert len(await stream) == 50
            await check_idle(worker)
            for task in phases.streams.values():
                with pytest.raises(WorkerLost):
                    await task
        finally:
            await phases.close()
            await other.aclose()


async def test_a_killed_engine_fails_its_requests_in_each_phase(model: Path) -> None:
    async with running(model, Role.DECODE, DECODE) as (worker, client), sending_to(client.info) as sender:
        phases = Phases(worker, client, sender)
        try:
            await phases.reach()
            process = worker.incarnation.engine._process
            assert process is not None
            process.kill()
            async with asyncio.timeout(AT_ONCE_S):
                for task in phases.streams.values():
                    with pytest.raises(WorkerLost, match="the engine of worker decode-0"):
                        await task
                with pytest.raises(TransferError):
                    await sender.wait("receiving KV")
            async with asyncio.timeout(60):
                while worker.info.epoch == client.info.epoch or not worker.info.ready:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert [each.token_id for each in await outputs(sent(client.run, request_for("next")))] == greedy_tokens(
                model, PROMPT, 4
            )
            await check_idle(worker, restarts=1)
        finally:
            await phases.close()


# --- both ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["at once", "decode first", "prefill first"])
async def test_both_halves_in_any_order(model: Path, order: str) -> None:
    """Two workers that are connected by their KV link only."""
    async with (
        running(model, Role.PREFILL, PREFILL) as (prefill, to_prefill),
        running(model, Role.DECODE, DECODE) as (decode, to_decode),
    ):
        if order != "prefill first":
            await prefill.incarnation.kv.connect(to_decode.info.peer)
        expected = greedy_tokens(model, PROMPT, 6)
        names = [f"r{i}" for i in range(4)]

        async def one(name: str) -> list[int | None]:
            request = request_for(name, max_tokens=6)
            pause_s = {"at once": (0.0, 0.0), "decode first": (0.3, 0.0), "prefill first": (0.0, 0.3)}[order]

            first, rest = await asyncio.gather(
                outputs_after(pause_s[0], sent(to_prefill.push, request, to_decode.info.peer)),
                outputs_after(pause_s[1], sent(to_decode.receive, request, to_prefill.info.peer)),
            )
            assert rest[0].proof is not None
            assert rest[0].proof.kv_bytes == to_decode.info.layout.expected_bytes(len(PROMPT))
            assert rest[-1].finish_reason is FinishReason.LENGTH
            return [output.token_id for output in (*first, *rest)]

        for tokens in await asyncio.gather(*map(one, names)):
            assert tokens == expected
        await check_idle(prefill)
        await check_idle(decode)


@pytest.mark.parametrize("half", ["prefill", "decode"])
async def test_giving_up_one_half_ends_the_other(model: Path, half: str) -> None:
    """Once the decode worker has told where the blocks go. (A prefill worker whose peer never does hears of it from the
    gateway.)"""
    async with (
        running(model, Role.PREFILL, PREFILL, {"prefill": 1000.0}) as (prefill, to_prefill),
        running(model, Role.DECODE, DECODE) as (decode, to_decode),
    ):
        await prefill.incarnation.kv.connect(to_decode.info.peer)
        pushing = asyncio.create_task(outputs(sent(to_prefill.push, request_for("r"), to_decode.info.peer)))
        receiving = asyncio.create_task(outputs(sent(to_decode.receive, request_for("r"), to_prefill.info.peer)))
        receiver = decode.incarnation.kv._receiver
        await until(lambda: "r" in receiver._by_attempt and status_of(receiver, "r") in ("waiting", "transferring"))
        given_up, other = (pushing, receiving) if half == "prefill" else (receiving, pushing)
        async with asyncio.timeout(AT_ONCE_S):
            await (to_prefill if half == "prefill" else to_decode).abort("r")
            with pytest.raises(TransferError):
                await other
        await check_idle(prefill)
        await check_idle(decode)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)


async def test_requests_given_up_at_any_moment_leave_nothing(model: Path) -> None:
    """At one end first, or at both ends at once; other requests are not affected."""
    draw = random.Random(3)
    expected = greedy_tokens(model, PROMPT, 6)
    async with (
        running(model, Role.PREFILL, PREFILL) as (prefill, to_prefill),
        running(model, Role.DECODE, DECODE) as (decode, to_decode),
    ):

        async def serve(name: str) -> None:
            request = request_for(name, max_tokens=6)
            streams = (
                sent(to_prefill.push, request, decode.info.peer),
                sent(to_decode.receive, request, prefill.info.peer),
            )
            halves = [asyncio.create_task(outputs_after(draw.random() * 0.05, stream)) for stream in streams]
            if draw.random() < 0.4:
                first, rest = await asyncio.gather(*halves)
                assert [output.token_id for output in (*first, *rest)] == expected
                return
            await asyncio.sleep(draw.random() * 0.15)
            async with asyncio.timeout(AT_ONCE_S):
                for client in draw.sample((to_prefill, to_decode), 2):
                    await client.abort(name)
                    await asyncio.sleep(draw.choice((0.0, 0.05)))
            for half in halves:
                half.cancel()
            await asyncio.gather(*halves, return_exceptions=True)

        for turn in range(8):
            await asyncio.gather(*(serve(f"{turn}.{i}") for i in range(7)))
            for client in (to_prefill, to_decode):  # what was given up before it had begun
                await asyncio.gather(*(client.abort(f"{turn}.{i}") for i in range(7)))
            await check_idle(prefill)
            await check_idle(decode)


# --- what is wrong at once -------------------------------------------------------------------------------------------


async def broken(served: ServedRequest) -> None:
    """A role with a bug."""
    served.submit(KVRole.LOCAL)
    raise ZeroDivisionError("a bug")


async def test_a_bug_in_a_part_of_a_request_fails_it_at_once(model: Path) -> None:
    async with running(model, Role.DECODE, {messages.Run: broken}) as (worker, client):
        with pytest.raises(PdserveError, match="ZeroDivisionError: a bug"):
            await outputs(sent(client.run, request_for("r")))
        await check_idle(worker)


async def test_requests_that_a_worker_cannot_serve_are_refused(model: Path) -> None:
    async with running(model, Role.PREFILL, PREFILL) as (worker, client), receiving_for(client.info) as decode:
        with pytest.raises(InvalidRequest, match="worker prefill-0 is a prefill worker and cannot receive"):
            await outputs(sent(client.receive, request_for("r"), TEST_PEER))
        stream = asyncio.create_task(outputs(sent(client.push, request_for("twice"), decode.peer)))
        await until(lambda: "twice" in worker._table)
        second = await WorkerClient.connect(client.info, SECRET)
        with pytest.raises(InvalidRequest, match="attempt_id: 'twice' is running on worker prefill-0 already"):
            await outputs(sent(second.push, request_for("twice"), decode.peer))
        await second.aclose()
        assert len(await stream) == 1  # which the other one's end did not touch
        await client.abort("twice")
        await check_idle(worker)


async def test_an_unreadable_message_ends_its_stream_alone(model: Path) -> None:
    async with running(model, Role.DECODE, DECODE) as (worker, client):
        second = await WorkerClient.connect(client.info, SECRET)
        stream = asyncio.create_task(outputs(sent(second.receive, request_for("r"), TEST_PEER)))
        await until(lambda: "r" in worker._table)
        second._outgoing.put_nowait(b"\x92\xa4Exec\x01")
        with pytest.raises(WorkerLost):
            await stream
        await second.aclose()
        await check_idle(worker)
        assert len(await outputs(sent(client.run, request_for("next")))) == 4
