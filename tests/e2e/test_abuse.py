"""One client's fault, or its end, costs no other client a request: real gateway, workers, engines and clients, on the
embedded model."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import psutil
import pytest

from pdserve import Client
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import InvalidRequest
from pdserve.pb import inference_pb2 as pb
from tests.load import Load
from tests.local_cluster import ROOT, LocalCluster, leaked_blocks, local_cluster

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


def innocents(target: str, clients: int = 4) -> Load:
    """Clients that stream one answer after another; each has to be right at its first attempt."""
    return Load(target, [PROMPT], clients=clients, **DRAWN)


def raw_call(target: str, data: bytes, timeout_s: float = 30.0) -> tuple[grpc.StatusCode, str]:
    """The status and the message with which the service refuses these bytes."""
    with grpc.insecure_channel(target, options=[("grpc.max_send_message_length", 2**30)]) as channel:
        generate: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(METHOD)
        with pytest.raises(grpc.RpcError) as caught:
            list(generate(data, timeout=timeout_s))
    error: Any = caught.value
    return error.code(), error.details()


def test_requests_that_are_too_long_or_malformed_or_reset_disturb_no_other(cluster: LocalCluster) -> None:
    with innocents(cluster.target) as load:
        misbehave(cluster)
    assert load.check() == 1
    cluster.wait_idle()


def misbehave(cluster: LocalCluster) -> None:
    for text in ("word " * 50_000, "\u4e2d" * 100_000):
        code, details = raw_call(cluster.target, pb.GenerateRequest(text=text).SerializeToString())
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith("prompt: ")
    # Beyond what any valid request could have, nothing is read at all.
    for asked in (pb.Sampling(stop_token_ids=[1] * 5_000_000), pb.Sampling(stop=["word " * 800_000])):
        code, _ = raw_call(cluster.target, pb.GenerateRequest(text="x", sampling=asked).SerializeToString())
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    with Client(cluster.target) as client, pytest.raises(InvalidRequest, match="longer than any request that fits"):
        client.generate("word " * 800_000).result()
    data = pb.GenerateRequest(text="x", sampling=pb.Sampling(max_tokens=8)).SerializeToString()
    with grpc.insecure_channel(cluster.target) as channel:
        generate: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(METHOD)
        for _ in range(5):
            for call in [generate(data) for _ in range(200)]:
                call.cancel()


def holds_nothing(status: ServiceStatus) -> bool:
    return leaked_blocks(status) == sum(worker.outstanding_tokens for worker in status.workers) == 0


def test_a_client_that_stops_reading_holds_nothing_and_gets_everything_when_it_reads_on(
    cluster: LocalCluster,
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
            with innocents(cluster.target, 2) as load:
                pass
            assert load.check() == 1
            if reads_on:
                events = [pb.GenerateResponse.FromString(message) for message in (*messages, *call)]
                assert events[-1].completion.attempts > 1, "it was paused"
                tokens = tuple(event.token.token_id for event in events[:-1])
                assert len(tokens) == 1500
            until(lambda status: status.running == 0)
        # Greedily: a drawn token may differ where two ways of computing its context round differently.
        again = client.generate(PROMPT, mode="pd", timeout_s=250, max_tokens=1500, ignore_eos=True)
        assert again.result().token_ids == tokens
    cluster.wait_idle()


LEFT_S = 60.0
"""How long what a killed client had asked for may hold anything."""
STREAMS = """
import asyncio, sys
from pdserve import AsyncClient

async def main():
    async with AsyncClient(sys.argv[1]) as client:
        streams = [client.generate([11, 7, 200] * 14, max_tokens=200, ignore_eos=True, salt=str(i)) for i in range(20)]
        await asyncio.gather(*map(anext, streams))
        print("all have begun", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def held_by(cluster: LocalCluster) -> dict[str, tuple[int, int]]:
    """Open files and threads of each process."""
    processes = {name: psutil.Process(popen.pid) for name, popen in cluster.processes.items()}
    return {name: (process.num_fds(), process.num_threads()) for name, process in processes.items()}


def test_a_client_that_is_killed_leaves_nothing(cluster: LocalCluster) -> None:
    """No blocks, files or threads of its streams. Other clients do not notice."""
    with innocents(cluster.target) as load:
        before = held_by(cluster)
        command = [sys.executable, "-c", STREAMS, cluster.target]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            client.stdout.readline()
            client.kill()
    assert load.check() == 1
    status = cluster.wait_idle(LEFT_S)
    assert (status.queued, status.running) == (0, 0)
    deadline_s = time.monotonic() + LEFT_S
    # A few files or threads may be a pool's, not one for each stream.
    while grown := {
        name: (before[name], held)
        for name, held in held_by(cluster).items()
        if any(now > then + 8 for then, now in zip(before[name], held, strict=True))
    }:
        assert time.monotonic() < deadline_s, grown
        time.sleep(0.2)
