"""What a worker makes of a request whose other half is at fault: it ends at once, it alone, and holds nothing.
(`pdserve simulate` has requests that are given up, that are late, and whose other half is lost.)

A real worker with its engine process, its control stream, and a KV end of the test's own as its peer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

import decode_worker.receive
import prefill_worker.push
from contract import control
from contract.engine import Abort, Command, KVRole
from kv_transfer.sender import KVSender
from pdserve.core.clock import MonotonicClock
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import (
    InvalidRequest,
    LayoutMismatch,
    PdserveError,
    TransferRefused,
    WorkerLost,
)
from pdserve.core.handoff import FirstToken, KVPeer
from pdserve.core.request import Request
from pdserve.core.sampling import FinishReason, SamplingParams
from pdserve.core.worker import Role, TokenOutput, WorkerInfo
from tests.host_pool import HostPool
from tests.kv_transfer.conftest import sender_of
from tests.local_cluster import free_port
from tests.loopback import SECRET, create_transport
from tests.output_stream import sent
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


async def broken(served: ServedRequest) -> None:
    """A role with a bug."""
    served.submit(KVRole.LOCAL)
    raise ZeroDivisionError("a bug")


pytestmark = pytest.mark.asyncio(loop_scope="module")


@contextlib.asynccontextmanager
async def running(
    model: Path,
    role: Role,
    handlers: Mapping[type[control.Work], Handler],
    gateways: int = 1,
    **settings: Mapping[str, Any],
) -> AsyncIterator[tuple[Worker, WorkerClient]]:
    """A worker of a service with ``gateways``, none of which is there, and a client of it. ``settings`` are sections of
    its configuration."""
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
    worker = Worker(spec, handlers, SECRET)
    serving = asyncio.create_task(worker.run())
    try:
        client = await WorkerClient.connect(await worker.started, "g", SECRET)
        try:
            yield worker, client
        finally:
            await client.aclose()
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


Served = tuple[Worker, WorkerClient]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def prefill(model: Path) -> AsyncIterator[Served]:
    """A prefill worker for all tests that leave it idle. Attempt ids are unique among them."""
    async with running(model, Role.PREFILL, PREFILL) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def decode(model: Path) -> AsyncIterator[Served]:
    """The same for decode. It has a bug where it sends prefixes."""
    async with running(model, Role.DECODE, {**DECODE, control.SendPrefix: broken}) as served:
        yield served


@contextlib.asynccontextmanager
async def sending_to(info: WorkerInfo) -> AsyncIterator[KVSender]:
    """A prefill worker's KV end, linked."""
    pool = HostPool(info.layout, 16)
    transport = create_transport("tcp", pool.memory)
    sender = sender_of(pool, transport, worker_id="test", connect_timeout_s=AT_ONCE_S)
    try:
        await sender.connect(info.peer)
        yield sender
    finally:
        await sender.aclose()
        await transport.aclose()


def request_for(attempt_id: str, timeout_s: float = TIMEOUT_S, max_tokens: int = 4, **sampling: object) -> Request:
    """A greedy request without an end-of-sequence token."""
    params = SamplingParams(max_tokens, seed=1, **{"ignore_eos": True, **sampling})  # type: ignore[arg-type]
    return Request("r", PROMPT, params, timeout_s=timeout_s, attempt_id=attempt_id)


async def outputs(stream: AsyncIterator[TokenOutput]) -> list[TokenOutput]:
    """All outputs, which must come at once."""
    async with asyncio.timeout(AT_ONCE_S):
        return [output async for output in stream]


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
    await until(lambda: not table._requests)
    await until(lambda: not (kv._handoffs or kv._sender._transfers() or kv._receiver._transfers))
    assert (worker.info.engine_restarts, worker.info.ready) == (restarts, True)


async def hand_over(sender: KVSender, info: WorkerInfo, attempt_id: str, trailer: object) -> None:
    """Send blocks of zeros and this token 1."""
    transfer = sender.push(attempt_id, info.peer, 4, MonotonicClock().now() + TIMEOUT_S)
    transfer.send_blocks(0, range(4), last=True, trailer=msgspec.msgpack.encode(trailer))
    await transfer.wait()


# --- token 1 as decode gets it ---------------------------------------------------------------------------------------


async def test_decode_fails_a_request_that_only_its_engine_ended(decode: Served) -> None:
    """Token 1 ends the request for the decode engine, but not for prefill. No step will have a token of the request."""
    worker, client = decode
    async with sending_to(client.info) as sender:
        failed, _ = await asyncio.gather(
            outputs(sent(client.receive, request_for("a1", stop_token_ids=(42,)), TEST_PEER)),
            hand_over(sender, client.info, "a1", FirstToken(42, ends_here=False)),
            return_exceptions=True,
        )
        assert type(failed) is LayoutMismatch
        assert "token 1 ends it on worker decode-0 (stop)" in str(failed)
        assert "same eos_token_ids" in str(failed)
        await check_idle(worker)
        tokens, _ = await asyncio.gather(
            outputs(sent(client.receive, request_for("b1", stop_token_ids=(42,)), TEST_PEER)),
            hand_over(sender, client.info, "b1", FirstToken(41, ends_here=False)),
        )
        assert len(tokens) == 3
        await check_idle(worker)


NO_TOKENS: list[object] = [
    FirstToken(307, ends_here=False), FirstToken(-1, ends_here=False), FirstToken(2**40, ends_here=True),
    ["1", False], [1, 0], [1], [1, False, 2], {"token_id": 1, "ends_here": False}, None,
    msgspec.Raw(b"\x92\xa2\xff\xff\xc2"),
]  # fmt: skip


async def test_a_token_that_no_model_has_ends_its_request_and_not_the_engine(decode: Served) -> None:
    worker, client = decode
    async with sending_to(client.info) as sender:
        for i, trailer in enumerate(NO_TOKENS):
            failed, _ = await asyncio.gather(
                outputs(sent(client.receive, request_for(f"r2.{i}"), TEST_PEER)),
                hand_over(sender, client.info, f"r2.{i}", trailer),
                return_exceptions=True,
            )
            assert type(failed) is TransferRefused, trailer
            assert "the hand-off's trailer is no token" in str(failed)
        await check_idle(worker)


async def test_token_1_that_ends_a_request_for_prefill_alone_ends_it_in_decodes_engine_too(
    decode: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the engine would continue a request whose outputs are not read."""
    worker, client = decode
    resources, told = worker.incarnation.resources, list[Command]()

    def listen(command: Command) -> None:
        told.append(command)
        resources.command(command)

    monkeypatch.setattr(worker.incarnation, "resources", resources._replace(command=listen))
    async with sending_to(client.info) as sender:
        (output,), _ = await asyncio.gather(
            outputs(sent(client.receive, request_for("r3", max_tokens=400), TEST_PEER)),
            hand_over(sender, client.info, "r3", FirstToken(42, ends_here=True)),
        )
        assert (output.token_id, output.finish_reason) == (None, FinishReason.STOP)
        await until(lambda: Abort("r3") in told)
        await check_idle(worker)


# --- what is wrong at once -------------------------------------------------------------------------------------------


async def test_a_bug_in_a_part_of_a_request_fails_it_at_once(decode: Served) -> None:
    worker, client = decode
    with pytest.raises(PdserveError, match="ZeroDivisionError: a bug"):
        await outputs(sent(client.send_prefix, request_for("bug"), TEST_PEER))
    await check_idle(worker)


async def test_requests_that_a_worker_cannot_serve_are_refused(prefill: Served) -> None:
    worker, client = prefill
    with pytest.raises(InvalidRequest, match="worker prefill-0 is a prefill worker and cannot receive"):
        await outputs(sent(client.receive, request_for("r9"), TEST_PEER))
    stream = asyncio.create_task(outputs(sent(client.run, request_for("twice9", max_tokens=100))))
    await until(lambda: "twice9" in worker._table)
    second = await WorkerClient.connect(client.info, "g", SECRET)
    with pytest.raises(InvalidRequest, match="attempt_id: 'twice9' is running on worker prefill-0 already"):
        await outputs(sent(second.run, request_for("twice9")))
    await second.aclose()
    assert len(await stream) == 100  # which the other one's end did not touch
    await check_idle(worker)


async def test_a_gateway_is_told_of_the_requests_of_others(prefill: Served) -> None:
    worker, client = prefill
    second = await WorkerClient.connect(client.info, "h", SECRET)
    stream = asyncio.create_task(outputs(sent(second.run, request_for("others9", max_tokens=100))))
    await until(lambda: "others9" in worker._table)
    for epoch, count in (("g", 1), ("h", 0), ("", 1)):
        load = worker.report(epoch, None).load
        assert load.others_requests == count
        assert (load.others_tokens > 0) == bool(count)
    stream.cancel()
    await second.aclose()
    await check_idle(worker)


async def test_an_unreadable_message_ends_its_stream_alone(decode: Served) -> None:
    worker, client = decode
    second = await WorkerClient.connect(client.info, "g", SECRET)
    stream = asyncio.create_task(outputs(sent(second.receive, request_for("r10"), TEST_PEER)))
    await until(lambda: "r10" in worker._table)
    second._outgoing.put_nowait(b"\x92\xa4Exec\x01")
    with pytest.raises(WorkerLost):
        await stream
    await second.aclose()
    await check_idle(worker)
    assert len(await outputs(sent(client.run, request_for("next")))) == 4
