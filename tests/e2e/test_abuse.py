"""One client's fault costs no other client a request: real gateway, workers, engines and clients, on the embedded
model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from pdserve import AsyncClient, Client
from pdserve.client.generation import Generation
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import CapacityExceeded, InvalidRequest
from pdserve.pb import inference_pb2 as pb
from tests.local_cluster import LocalCluster, leaked_blocks, local_cluster

SETTINGS: dict[str, Any] = {
    "model": {"path": "tiny", "dtype": "float32"},
    "engine": {"block_size": 16, "num_blocks": 256, "max_num_batched_tokens": 256},
    "router": {"max_unread_tokens": 256, "max_queue": 200},
    "gateway": {"default_timeout_s": 15.0},
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
    """Clients that stream one answer after another until `stop`, each on a connection of its own. Every answer has to
    be right, at its first attempt."""

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
            while True:
                try:
                    stream = client.generate(PROMPT, **DRAWN, timeout_s=100)
                    self.results.append(await stream.result())
                except Exception as error:  # noqa: BLE001 - the test looks at all of them
                    self.errors.append(error)
                    return
                if self._over.is_set():
                    return

    def stop(self, expected: tuple[int, ...]) -> None:
        """End them."""
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


def test_requests_that_are_too_long_or_malformed_or_reset_disturb_no_other(
    cluster: LocalCluster, expected: tuple[int, ...]
) -> None:
    innocents = Innocents(cluster.target)
    for text in ("word " * 50_000, "\u4e2d" * 100_000):
        code, details = raw_call(cluster.target, pb.GenerateRequest(text=text).SerializeToString())
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith("prompt: ")
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 500_000)).SerializeToString()
    assert raw_call(cluster.target, ids)[1] == "prompt: 500000 tokens exceed the context of 2048; shorten it"
    stops = pb.GenerateRequest(text="x", sampling=pb.Sampling(stop_token_ids=[1] * 500_000)).SerializeToString()
    assert raw_call(cluster.target, stops)[1].startswith("stop_token_ids: 500000 entries are more than 1024")
    assert raw_call(cluster.target, b"\xff\xff\xff\xff")[1].startswith("message: ")
    # Beyond what any valid request could have, nothing is read at all.
    for asked in (pb.Sampling(stop_token_ids=[1] * 5_000_000), pb.Sampling(stop=["word " * 800_000])):
        code, _ = raw_call(cluster.target, pb.GenerateRequest(text="x", sampling=asked).SerializeToString())
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    with Client(cluster.target) as client:
        with pytest.raises(InvalidRequest, match="longer than any request that fits"):
            client.generate("word " * 800_000).result()
        assert client.generate("\n" * 2000, max_tokens=2).result().prompt_tokens <= 2046, "the longest that fits"
        with pytest.raises(InvalidRequest, match="tokens exceed the context of 2048"):
            client.generate("zq xj " * 2000, max_tokens=2).result()
    data = pb.GenerateRequest(text="x", sampling=pb.Sampling(max_tokens=8)).SerializeToString()
    with grpc.insecure_channel(cluster.target) as channel:
        generate: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(METHOD)
        for _ in range(5):
            for call in [generate(data) for _ in range(200)]:
                call.cancel()
    innocents.stop(expected)
    assert leaked_blocks(cluster.wait_idle()) == 0


def holds_nothing(status: ServiceStatus) -> bool:
    return leaked_blocks(status) == sum(worker.outstanding_tokens for worker in status.workers) == 0


def test_a_client_that_stops_reading_holds_nothing_and_gets_everything_when_it_reads_on(
    cluster: LocalCluster, expected: tuple[int, ...]
) -> None:
    """It is paused long before its deadline. One that does not read on ends by the service's own deadline."""
    sampling = pb.Sampling(max_tokens=1500, ignore_eos=True, logprobs=20)
    # With 20 logprobs for each token, what is not read exceeds every buffer on the way.
    data = pb.GenerateRequest(text=PROMPT, sampling=sampling).SerializeToString()
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]

    def until(holds: Callable[[ServiceStatus], bool]) -> None:
        deadline_s = time.monotonic() + 120
        while not holds(status := client.status()):
            assert time.monotonic() < deadline_s, status
            time.sleep(0.05)

    with Client(cluster.target) as client, grpc.insecure_channel(cluster.target, options=options) as channel:
        generate: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(METHOD)
        for reads_on in (True, False):
            call = generate(data, timeout=250 if reads_on else None)
            messages = [next(call)]
            until(holds_nothing)
            assert client.status().running == 1
            innocents = Innocents(cluster.target, 2)
            innocents.stop(expected)
            if reads_on:
                events = [pb.GenerateResponse.FromString(message) for message in (*messages, *call)]
                assert events[-1].completion.attempts > 1, "it was paused"
                tokens = tuple(event.token.token_id for event in events[:-1])
                assert len(tokens) == 1500
            until(lambda status: status.running == 0)
        # Greedily: a drawn token may differ where two ways of computing its context round differently.
        again = client.generate(PROMPT, mode="pd", timeout_s=250, max_tokens=1500, ignore_eos=True)
        assert again.result().token_ids == tokens
    assert leaked_blocks(cluster.wait_idle()) == 0


async def burst(target: str, count: int, prompt_tokens: int) -> tuple[int, list[Exception]]:
    """So many streams at once, over a few connections: how many were answered, and what the others were told. Each has
    a salt of its own, so that nothing is cached."""
    clients = [AsyncClient(target) for _ in range(4)]
    streams = [
        clients[index % 4].generate(
            [7] * prompt_tokens, max_tokens=2, ignore_eos=True, salt=f"{prompt_tokens} {index}", timeout_s=100
        )
        for index in range(count)
    ]
    outcomes = await asyncio.gather(*(stream.result() for stream in streams), return_exceptions=True)
    for client in clients:
        await client.close()
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    return count - len(errors), errors


def test_a_burst_is_answered_up_to_the_queue_and_refused_beyond_it(cluster: LocalCluster) -> None:
    assert asyncio.run(burst(cluster.target, 180, prompt_tokens=8)) == (180, [])
    answered, errors = asyncio.run(burst(cluster.target, 800, prompt_tokens=200))
    assert answered >= 200
    assert {type(error) for error in errors} == {CapacityExceeded}, {str(error) for error in errors}
    assert all("requests are waiting (router.max_queue)" in str(error) for error in errors)
    assert leaked_blocks(cluster.wait_idle()) == 0
