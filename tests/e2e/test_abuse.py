"""One client's fault costs nobody else a request: real gateway, workers, engines and clients, on the embedded model."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from pdserve import AsyncClient, Client
from pdserve.client.generation import Generation
from pdserve.client.status import ServiceWorker
from pdserve.core.errors import CapacityExceeded, InvalidRequest
from pdserve.pb import inference_pb2 as pb
from pdserve.pb import inference_pb2_grpc
from tests.local_cluster import LocalCluster, leaked_blocks, local_cluster

SETTINGS: dict[str, Any] = {
    "model": {"path": "tiny", "dtype": "float32"},
    "engine": {"block_size": 16, "num_blocks": 256, "max_num_batched_tokens": 64},
}
PROMPT = "def read_lines(path):\n    with open(path) as file:\n"
TOKENS = 80
METHOD = "/pdserve.v1.Inference/Generate"
DRAWN: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": 7}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(SETTINGS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(cluster: LocalCluster) -> tuple[int, ...]:
    with Client(cluster.target) as client:
        tokens = client.generate(PROMPT, **DRAWN).result().token_ids
        assert len(set(tokens)) > TOKENS / 2
        return tokens


class Innocents(threading.Thread):
    """Clients that stream one answer after another until `stop`, each on a connection of its own."""

    def __init__(self, target: str, count: int = 4) -> None:
        super().__init__()
        self.results: list[Generation] = []
        self.errors: list[BaseException] = []
        self._target = target
        self._count = count
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        await asyncio.gather(*(self._stream() for _ in range(self._count)))

    async def _stream(self) -> None:
        async with AsyncClient(self._target) as client:
            while not self._over.is_set():
                try:
                    stream = client.generate(PROMPT, **DRAWN, timeout_s=100)
                    self.results.append(await stream.result())
                except Exception as error:  # noqa: BLE001 - the test looks at all of them
                    self.errors.append(error)
                    return

    def stop(self, expected: tuple[int, ...]) -> None:
        """End them; every answer was right, at its first attempt."""
        self._over.set()
        self.join(100)
        assert not self.errors
        assert len(self.results) >= self._count
        assert [result.token_ids for result in self.results] == [expected] * len(self.results)
        assert {result.attempts for result in self.results} == {1}


def raw_call(target: str, data: bytes, timeout_s: float = 30.0) -> tuple[grpc.StatusCode, str]:
    """The status and the message with which the service refuses these bytes."""
    with grpc.insecure_channel(target, options=[("grpc.max_send_message_length", 2**30)]) as channel:
        generate: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(METHOD)
        with pytest.raises(grpc.RpcError) as caught:
            list(generate(data, timeout=timeout_s))
    error: Any = caught.value
    return error.code(), error.details()


def test_requests_that_are_far_too_long_are_refused_and_disturb_nobody(
    cluster: LocalCluster, expected: tuple[int, ...]
) -> None:
    innocents = Innocents(cluster.target)
    for _ in range(3):
        for text in ("word " * 50_000, "\u4e2d" * 100_000):
            code, details = raw_call(cluster.target, pb.GenerateRequest(text=text).SerializeToString())
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert details.startswith("prompt: ")
        ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 500_000)).SerializeToString()
        assert raw_call(cluster.target, ids)[1] == "prompt: 500000 tokens exceed the context of 2048; shorten it"
        stops = pb.GenerateRequest(text="x", sampling=pb.Sampling(stop_token_ids=[1] * 500_000)).SerializeToString()
        assert raw_call(cluster.target, stops)[1].startswith("stop_token_ids: 500000 entries are more than 1024")
        # Beyond what any valid request could have, nothing is read at all.
        for asked in (pb.Sampling(stop_token_ids=[1] * 5_000_000), pb.Sampling(stop=["word " * 800_000])):
            code, _ = raw_call(cluster.target, pb.GenerateRequest(text="x", sampling=asked).SerializeToString())
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        with Client(cluster.target) as client, pytest.raises(InvalidRequest, match="longer than any request that fits"):
            client.generate("word " * 800_000).result()
    innocents.stop(expected)


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x12\x02\xc3\x28", b"\x12\xff\xff\xff\xff\x0f"])
def test_what_is_no_request_is_an_invalid_argument(cluster: LocalCluster, data: bytes) -> None:
    code, details = raw_call(cluster.target, data)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("message: ")


def test_the_longest_text_that_fits_is_served(cluster: LocalCluster) -> None:
    with Client(cluster.target) as client:
        result = client.generate("\n" * 2000, max_tokens=2).result()
        assert result.prompt_tokens <= 2046
        with pytest.raises(InvalidRequest, match="tokens exceed the context of 2048"):
            client.generate("zq xj " * 2000, max_tokens=2).result()


def small_window(target: str) -> grpc.Channel:
    """A connection that takes few unread bytes."""
    return grpc.insecure_channel(target, options=[("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)])


def test_a_client_that_stops_reading_does_not_outlive_its_deadline_nor_skew_the_load(
    expected: tuple[int, ...],
) -> None:
    settings = {**SETTINGS, "router": {"max_unread_tokens": 64}, "gateway": {"default_timeout_s": 15.0}}
    with (
        local_cluster(settings) as cluster,
        Client(cluster.target) as client,
        small_window(cluster.target) as channel,
    ):
        generate: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(METHOD)
        # With 20 logprobs for each token, what is not read exceeds every buffer on the way.
        asked = pb.Sampling(max_tokens=1900, ignore_eos=True, logprobs=20)
        call = generate(pb.GenerateRequest(text=PROMPT, sampling=asked).SerializeToString())
        next(call)
        started_s = time.monotonic()
        while _load(client.status()) or leaked_blocks(client.status()):
            # It is paused long before its deadline: it holds neither load nor blocks.
            assert time.monotonic() - started_s < 12, client.status()
            time.sleep(0.05)
        assert client.status().running == 1
        innocents = Innocents(cluster.target, 2)
        time.sleep(3.0)
        innocents.stop(expected)
        while client.status().running:
            assert time.monotonic() - started_s < 60, client.status()
            time.sleep(0.1)
        assert leaked_blocks(cluster.wait_idle()) == 0


def test_a_client_that_reads_late_gets_everything(expected: tuple[int, ...]) -> None:
    settings = {**SETTINGS, "router": {"max_unread_tokens": 256}}
    with local_cluster(settings) as cluster, Client(cluster.target) as client:
        with small_window(cluster.target) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            asked = pb.Sampling(max_tokens=1900, ignore_eos=True, logprobs=20, temperature=1.0, seed=7)
            call = stub.Generate(pb.GenerateRequest(text=PROMPT, sampling=asked), timeout=250)
            tokens = [next(call).token.token_id]
            started_s = time.monotonic()
            while _load(client.status()):
                assert time.monotonic() - started_s < 120, client.status()
                time.sleep(0.05)
            messages = list(call)
            tokens += [message.token.token_id for message in messages[:-1]]
            assert messages[-1].completion.attempts > 1, "it was paused"
        assert len(tokens) == 1900
        assert tuple(tokens[:TOKENS]) == expected
        undisturbed = client.generate(
            PROMPT, max_tokens=1900, ignore_eos=True, temperature=1.0, seed=7, mode="pd"
        ).result()
        assert tuple(tokens) == undisturbed.token_ids


def _load(status: Any) -> int:
    return sum(worker.outstanding_tokens for worker in status.workers)


def test_a_gateway_that_was_stopped_loses_no_worker(expected: tuple[int, ...]) -> None:
    router = {"heartbeat_timeout_s": 1.5, "heartbeat_s": 0.2}
    with local_cluster({**SETTINGS, "router": router}) as cluster:
        innocents = Innocents(cluster.target, 2)
        for _ in range(2):
            time.sleep(0.5)
            cluster.kill("gateway", signal.SIGSTOP)
            time.sleep(4.0)
            cluster.kill("gateway", signal.SIGCONT)
        innocents.stop(expected)


def test_a_worker_process_that_was_stopped_does_not_take_its_engine_for_hung(expected: tuple[int, ...]) -> None:
    """Its engine kept answering; nobody read that."""
    engine = {**SETTINGS["engine"], "hang_timeout_s": 1.5}
    with local_cluster({**SETTINGS, "engine": engine}) as cluster, Client(cluster.target) as client:
        before = {worker.worker_id: worker.engine_pid for worker in cluster.inside().workers}
        for name in ("prefill-0", "decode-0"):
            cluster.kill(name, signal.SIGSTOP)
        time.sleep(4.0)
        for name in ("prefill-0", "decode-0"):
            cluster.kill(name, signal.SIGCONT)
        result = client.generate(PROMPT, **DRAWN, timeout_s=60).result()
        assert result.token_ids == expected
        time.sleep(2.0)
        assert {worker.worker_id: worker.engine_pid for worker in cluster.inside().workers} == before


def test_an_idle_engine_that_is_killed_costs_no_request(expected: tuple[int, ...]) -> None:
    with local_cluster(SETTINGS, prefill=2) as cluster, Client(cluster.target) as client:
        for victim in ("prefill-0", "prefill-1", "decode-0"):
            os.kill(_wait_ready(cluster, victim).engine_pid, signal.SIGKILL)
            for _ in range(12):
                result = client.generate(PROMPT, **{**DRAWN, "max_tokens": 4}, timeout_s=60).result()
                assert result.token_ids == expected[:4]
        assert leaked_blocks(cluster.wait_idle()) == 0


def _wait_ready(cluster: LocalCluster, worker_id: str) -> ServiceWorker:
    deadline_s = time.monotonic() + 60
    while True:
        ready = [worker for worker in cluster.inside().workers if worker.state == "ready"]
        if (worker := next((worker for worker in ready if worker.worker_id == worker_id), None)) is not None:
            return worker
        assert time.monotonic() < deadline_s, cluster.inside()
        time.sleep(0.1)


async def burst(target: str, count: int, prompt_tokens: int = 1000) -> tuple[int, list[Exception]]:
    """So many streams at once, over a few connections: how many were answered, and what the others were told. Each has
    a salt of its own, so that nothing is cached."""
    clients = [AsyncClient(target) for _ in range(4)]

    async def one(index: int) -> bool | Exception:
        stream = clients[index % 4].generate(
            [7] * prompt_tokens, max_tokens=2, ignore_eos=True, salt=f"{index}", timeout_s=100
        )
        try:
            return len((await stream.result()).token_ids) == 2
        except Exception as error:  # noqa: BLE001 - the test looks at all of them
            return error

    outcomes = await asyncio.gather(*(one(index) for index in range(count)))
    for client in clients:
        await client.close()
    return sum(outcome is True for outcome in outcomes), [o for o in outcomes if isinstance(o, Exception)]


def test_a_burst_beyond_the_queue_is_answered_or_refused() -> None:
    engine = {**SETTINGS["engine"], "max_num_batched_tokens": 512}
    with local_cluster({**SETTINGS, "engine": engine, "router": {"max_queue": 20}}) as cluster:
        answered, errors = asyncio.run(burst(cluster.target, 1500))
        assert answered + len(errors) == 1500
        assert answered >= 20
        assert {type(error) for error in errors} == {CapacityExceeded}, {str(error) for error in errors}
        assert all("requests are waiting (router.max_queue)" in str(error) for error in errors)
        assert leaked_blocks(cluster.wait_idle()) == 0


def test_a_burst_below_the_queue_is_answered(cluster: LocalCluster) -> None:
    answered, errors = asyncio.run(burst(cluster.target, 600, prompt_tokens=8))
    assert (answered, errors) == (600, [])
    assert leaked_blocks(cluster.wait_idle()) == 0


def test_streams_that_are_reset_cost_nobody_a_request(cluster: LocalCluster, expected: tuple[int, ...]) -> None:
    innocents = Innocents(cluster.target)
    data = pb.GenerateRequest(text="x", sampling=pb.Sampling(max_tokens=8)).SerializeToString()
    with grpc.insecure_channel(cluster.target) as channel:
        generate: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(METHOD)
        for _ in range(20):
            for call in [generate(data) for _ in range(200)]:
                call.cancel()
    innocents.stop(expected)
    assert leaked_blocks(cluster.wait_idle()) == 0
