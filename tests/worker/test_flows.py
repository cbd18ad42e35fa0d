"""What a worker makes of a request whose other half is at fault: it fails at once, it alone, and holds nothing.

A real worker with its engine process, its control stream, and a KV end of the test's own as its peer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgpack
import pytest

import decode_worker.flow
import prefill_worker.flow
from engine.messages import KVRole
from kv_transfer.factory import create_transport
from kv_transfer.memory_store import MemoryStore
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from pdserve.core.clock import MonotonicClock
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import LayoutMismatch, PdserveError, TransferError, TransferRefused
from pdserve.core.handoff import KVDestination
from pdserve.core.sampling import SamplingParams
from pdserve.core.worker import Role, TokenOutput, Work, WorkerInfo
from tests.local_cluster import free_port
from tests.random_models import greedy_tokens, save_random_model
from worker.client import WorkerClient
from worker.flow import Flow, LocalFlow
from worker.spec import WorkerSpec
from worker.worker import Worker

PROMPT = [11, 7, 200, 41, 5, 99, 3] * 8  # four blocks, computed in as many steps
TIMEOUT_S = 60.0
AT_ONCE_S = 10.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models"), "gqa")


@contextlib.asynccontextmanager
async def running(
    model: Path, role: Role, flows: Mapping[KVRole, type[Flow]]
) -> AsyncIterator[tuple[Worker, WorkerClient]]:
    """A worker without a gateway, and a client of it."""
    config = PdserveConfig.parse(
        {
            "model": {"path": str(model), "dtype": "float32"},
            "engine": {"block_size": 16, "num_blocks": 32, "max_num_batched_tokens": 16},
            "transfer": {"transport": "tcp"},
        }
    )
    registry = f"127.0.0.1:{free_port()}"
    worker = Worker(
        WorkerSpec(f"{role}-0", role, "127.0.0.1", "127.0.0.1", "cpu", registry, "test", config=config), flows
    )
    serving = asyncio.create_task(worker.run())
    try:
        client = await WorkerClient.connect(await worker.started)
        try:
            yield worker, client
        finally:
            await client.aclose()
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@contextlib.asynccontextmanager
async def sending_to(info: WorkerInfo) -> AsyncIterator[KVSender]:
    """A prefill worker's KV end."""
    transport = create_transport("tcp")
    sender = KVSender(
        MemoryStore(info.layout, 16),
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
        yield sender
    finally:
        await sender.aclose()
        await transport.aclose()


@contextlib.asynccontextmanager
async def receiving_for(info: WorkerInfo) -> AsyncIterator[KVReceiver]:
    """A decode worker's KV end."""
    transport = create_transport("tcp")
    receiver = KVReceiver(
        MemoryStore(info.layout, 16),
        [transport],
        worker_id="test",
        epoch="e1",
        checksum=True,
        clock=MonotonicClock(),
        lease_s=TIMEOUT_S,
    )
    await receiver.start("127.0.0.1")
    try:
        yield receiver
    finally:
        await receiver.aclose()
        await transport.aclose()


def work(request_id: str, **sampling: object) -> Work:
    """Greedy, without a sampled end, for a long time unless it fails."""
    params = SamplingParams(max_tokens=4, seed=1, **{"ignore_eos": True, **sampling})  # type: ignore[arg-type]
    return Work(request_id, PROMPT, params, TIMEOUT_S)


async def outputs(stream: AsyncIterator[TokenOutput]) -> list[TokenOutput]:
    """All of them, which must come at once."""
    async with asyncio.timeout(AT_ONCE_S):
        return [output async for output in stream]


async def check_idle(worker: Worker) -> None:
    """All blocks come back."""
    async with asyncio.timeout(AT_ONCE_S):
        while worker.load.free_blocks < worker.info.num_blocks:  # noqa: ASYNC110 - the engine tells when it does
            await asyncio.sleep(0.01)


async def hand_over(sender: KVSender, destination: KVDestination, request_id: str, trailer: object) -> None:
    """Send blocks of zeros, and this for token 1."""
    sender.start(request_id, destination, MonotonicClock().now() + TIMEOUT_S)
    sender.send_blocks(request_id, 0, range(destination.num_blocks), last=True, trailer=msgpack.packb(trailer))
    await sender.wait(request_id)


async def test_decode_fails_at_once_what_its_engine_ended_alone(model: Path) -> None:
    """Prefill's token 1 goes on; to this engine it is the last. No step of it will ever have a token of the request."""
    async with (
        running(model, Role.DECODE, decode_worker.flow.FLOWS) as (worker, client),
        sending_to(client.info) as sender,
    ):
        await hand_over(sender, await client.reserve(work("r", stop_token_ids=(42,))), "r", [42, False])
        with pytest.raises(LayoutMismatch, match=r"token 1 ends it on worker decode-0 \(stop\) .* same eos_token_ids"):
            await outputs(client.decode("r"))
        await check_idle(worker)
        await hand_over(sender, await client.reserve(work("next", stop_token_ids=(42,))), "next", [41, False])
        assert len(await outputs(client.decode("next"))) == 3


@pytest.mark.parametrize("trailer", [[307, False], [-1, False], [2**40, True], ["1", False], None], ids=str)
async def test_a_token_that_no_model_has_ends_its_request_and_not_the_engine(model: Path, trailer: object) -> None:
    async with (
        running(model, Role.DECODE, decode_worker.flow.FLOWS) as (worker, client),
        sending_to(client.info) as sender,
    ):
        await hand_over(sender, await client.reserve(work("r")), "r", trailer)
        with pytest.raises(TransferRefused, match="the hand-off's trailer is no token"):
            await outputs(client.decode("r"))
        await check_idle(worker)
        assert (worker.info.engine_restarts, worker.info.ready) == (0, True)


async def test_what_prefill_cannot_send_fails_its_request_at_once(model: Path) -> None:
    """The destination has fewer slots than the prompt has blocks: the first of them that has no slot is an error. The
    receiver hears of it at once; the gateway does from prefill, or (once that has given its token) from decode."""
    async with (
        running(model, Role.PREFILL, prefill_worker.flow.FLOWS) as (worker, client),
        receiving_for(client.info) as receiver,
    ):
        deadline_s = MonotonicClock().now() + TIMEOUT_S
        right, wrong = receiver.expect("r", range(4), 0, deadline_s), receiver.expect("bad", range(4, 6), 0, deadline_s)
        bad, good = await asyncio.gather(
            outputs(client.prefill(work("bad"), wrong)),
            outputs(client.prefill(work("r"), right)),
            return_exceptions=True,
        )
        why = "the KV hand-off of bad failed at its sender: ValueError: slots "
        assert isinstance(bad, list) or (type(bad) is TransferError and why in str(bad))
        async with asyncio.timeout(AT_ONCE_S):
            with pytest.raises(TransferError, match=f"the sender of bad gave up: {why}"):
                await receiver.wait("bad")
            received = await receiver.wait("r")
        assert isinstance(good, list)
        assert [output.token_id for output in good] == greedy_tokens(model, PROMPT, 1)
        assert msgpack.unpackb(received.trailer) == [good[0].token_id, False]
        await check_idle(worker)


class _Broken(LocalFlow):
    """Has a bug in a task of its own."""

    async def start(self) -> None:
        """Submit, and fail."""
        await super().start()
        self.follow(self._fail())

    async def _fail(self) -> None:
        raise ZeroDivisionError("a bug")


async def test_a_bug_in_a_part_of_a_request_fails_it_at_once(model: Path) -> None:
    async with running(model, Role.DECODE, {KVRole.LOCAL: _Broken}) as (worker, client):
        with pytest.raises(PdserveError, match="ZeroDivisionError: a bug"):
            await outputs(client.run(work("r")))
        await check_idle(worker)
