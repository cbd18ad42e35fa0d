"""However a caller leaves a stream, the service stops computing and every KV block comes back.

Each request asks for 100,000 tokens, which take minutes on any machine; the service must be idle again within seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import logging
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ops.settled import settled
from pdserve import AsyncClient, AsyncStream, Client, Stream
from tests.e2e import crowd
from tests.local_cluster import ROOT, LocalCluster, local_cluster
from tests.random_models import greedy_tokens, save_random

log = logging.getLogger(__name__)

TOKENS = 100_000
PROMPT = [5, 6, 7] * 10
IDLE_WITHIN_S = 10.0  # about a second, on an idle machine
LEFT_S = 60.0
"""How long what a killed client had asked for may hold anything."""
STREAMS_EACH = 20
SHAPE = {
    "model_type": "llama",
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2 * TOKENS,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long") / "model"
    save_random(folder, SHAPE, seed=3)
    return folder


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[LocalCluster]:
    engine = {"block_size": 16, "num_blocks": 2 * TOKENS // 16, "max_num_batched_tokens": 256, "max_num_seqs": 48}
    settings = {"model": {"path": str(model), "dtype": "float32"}, "engine": engine, "router": {"max_queue": 1_024}}
    with local_cluster(settings) as cluster:
        yield cluster


async def assert_idle(cluster: LocalCluster) -> None:
    async with AsyncClient(cluster.target) as client:
        status = await settled(client, IDLE_WITHIN_S)
    assert status.idle, status
    assert status.used_blocks == 0, status


def start(client: Client) -> Stream:
    return client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True, mode="pd")


def async_start(client: AsyncClient) -> AsyncStream:
    return client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True, mode="pd")


def break_out(client: Client) -> object:
    stream = start(client)
    for _ in stream:
        break
    return stream


def raise_in_the_loop(client: Client) -> object:
    stream = start(client)
    with contextlib.suppress(ZeroDivisionError):
        for _ in stream:
            raise ZeroDivisionError
    return stream


def take_some(client: Client) -> object:
    stream = start(client)
    assert len(list(itertools.islice(stream, 3))) == 3
    return stream


def drop(client: Client) -> object:
    next(start(client))
    return None


def drop_in_a_cycle(client: Client) -> object:
    stream = start(client)
    next(stream)
    cycle: list[object] = [stream]
    cycle.append(cycle)
    del stream, cycle
    gc.collect()
    return None


def leave_with(client: Client) -> object:
    with start(client) as stream:
        next(stream)
    return stream


def close_stream(client: Client) -> object:
    stream = start(client)
    next(stream)
    stream.close()
    return stream


def close_client(client: Client) -> object:
    stream = start(client)
    next(stream)
    client.close()
    return stream


SYNC_WAYS = (
    break_out, raise_in_the_loop, take_some, drop, drop_in_a_cycle, leave_with, close_stream, close_client,
)  # fmt: skip


@pytest.mark.parametrize("leave", SYNC_WAYS, ids=lambda leave: leave.__name__)
async def test_leaving_a_stream_stops_its_request(cluster: LocalCluster, leave: Callable[[Client], object]) -> None:
    client = Client(cluster.target)
    kept = leave(client)  # neither the stream nor the client need go for it
    await assert_idle(cluster)
    client.close()
    del kept


async def time_out_in_result(client: AsyncClient) -> object:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(async_start(client).result(), 0.3)
    return None


async def time_out_in_the_loop(client: AsyncClient) -> object:
    stream = async_start(client)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.3):
            async for _ in stream:
                pass
    return stream


async def cancel_the_task(client: AsyncClient) -> object:
    stream, begun = async_start(client), asyncio.Event()

    async def read() -> None:
        async for _ in stream:
            begun.set()

    task = asyncio.create_task(read())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return stream


async def async_break_out(client: AsyncClient) -> object:
    stream = async_start(client)
    async for _ in stream:
        break
    return stream


async def async_drop(client: AsyncClient) -> object:
    await anext(async_start(client))
    return None


async def async_drop_in_a_cycle(client: AsyncClient) -> object:
    stream = async_start(client)
    await anext(stream)
    cycle: list[object] = [stream]
    cycle.append(cycle)
    del stream, cycle
    await asyncio.to_thread(gc.collect)  # the collector runs in any thread
    return None


async def leave_async_with(client: AsyncClient) -> object:
    async with async_start(client) as stream:
        await anext(stream)
    return stream


async def close_async_stream(client: AsyncClient) -> object:
    stream = async_start(client)
    await anext(stream)
    await stream.aclose()
    return stream


async def close_async_client(client: AsyncClient) -> object:
    stream = async_start(client)
    await anext(stream)
    await client.close()
    return stream


ASYNC_WAYS = (
    time_out_in_result, time_out_in_the_loop, cancel_the_task, async_break_out, async_drop, async_drop_in_a_cycle,
    leave_async_with, close_async_stream, close_async_client,
)  # fmt: skip


@pytest.mark.parametrize("leave", ASYNC_WAYS, ids=lambda leave: leave.__name__)
async def test_leaving_an_async_stream_stops_its_request(
    cluster: LocalCluster, leave: Callable[[AsyncClient], Awaitable[object]]
) -> None:
    client = AsyncClient(cluster.target)
    kept = await leave(client)
    await assert_idle(cluster)
    await client.close()
    del kept


async def test_the_end_of_the_event_loop_stops_its_requests(cluster: LocalCluster) -> None:
    kept: list[object] = []

    async def main() -> None:
        client = AsyncClient(cluster.target)
        stream = async_start(client)
        await anext(stream)
        kept.extend((client, stream))

    await asyncio.to_thread(asyncio.run, main())
    await assert_idle(cluster)
    await asyncio.to_thread(kept.clear)


INTERRUPTED = """
import os, signal, sys, threading, time
from pdserve import Client

def interrupt_in_result(thread=threading.get_ident()):
    reading = False
    while not reading:
        frame = sys._current_frames()[thread]
        while frame is not None and not reading:
            reading = frame.f_code.co_name == "result"
            frame = frame.f_back
    os.kill(os.getpid(), signal.SIGINT)

client = Client(sys.argv[1])
stream = client.generate([5, 6, 7] * 10, max_tokens=100_000, ignore_eos=True, mode="pd")
try:
    if sys.argv[2] == "loop":
        for token in stream:
            print(token.index, flush=True)
    else:
        print(next(stream).index, flush=True)
        threading.Thread(target=interrupt_in_result, daemon=True).start()
        stream.result()
except KeyboardInterrupt as error:
    kept = error
print("interrupted", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("where", ["loop", "result"])
def test_ctrl_c_in_a_stream_stops_its_request(cluster: LocalCluster, where: str) -> None:
    """The process lives on and still has its client, its stream and the exception."""
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, cluster.target, where],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        if where == "loop":
            process.send_signal(signal.SIGINT)
        lines = iter(process.stdout.readline, "")
        assert "interrupted\n" in lines
        asyncio.run(assert_idle(cluster))
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_in_bench_gives_every_block_back(cluster: LocalCluster) -> None:
    command = [sys.executable, "-c", "from ops.cli.main import main; main()", "bench", "--json"]
    load = ["--requests", "1000", "--concurrency", "4", "--input-len", "30", "--output-len", str(TOKENS)]
    process = subprocess.Popen(
        [*command, *load, "--target", cluster.target],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline_s = time.monotonic() + 60
        with Client(cluster.target) as client:
            while not client.status().used_blocks:
                assert process.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    result = json.loads(out)
    assert (result["partial"], result["planned"], result["requests"]) == (True, 1000, 0)
    assert result["leaked_blocks"] == 0


def test_a_stream_read_piece_by_piece_goes_on(cluster: LocalCluster) -> None:
    """`next` is not a loop: nothing is cancelled in between."""
    with Client(cluster.target) as client:
        stream = client.generate(PROMPT, max_tokens=20, ignore_eos=True, mode="pd")
        assert [next(stream).index, next(stream).index] == [0, 1]
        time.sleep(0.2)
        assert [token.index for token in stream] == list(range(2, 20))
        assert len(stream.result().token_ids) == 20


def held_by(process: psutil.Process) -> tuple[int, int]:
    """Open files and threads."""
    return process.num_fds(), process.num_threads()


def run(cluster: LocalCluster, expected: list[int], processes: int, killed: int) -> Counter[str]:
    """A crowd, checked; what became of its streams."""
    draw = random.Random(9)
    service = {name: psutil.Process(popen.pid) for name, popen in cluster.processes.items()}
    before = {name: held_by(process) for name, process in service.items()}
    command = [sys.executable, "-m", "tests.e2e.crowd", cluster.target, str(STREAMS_EACH)]
    clients = [
        subprocess.Popen([*command, str(seed)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for seed in range(processes)
    ]
    try:
        victims = draw.sample(clients, killed)
        for victim in victims:  # while its streams are in all states
            assert victim.stdout is not None
            victim.stdout.readline()
            victim.kill()
        outcomes = Counter[str]()
        for client in clients:
            out, _ = client.communicate(timeout=crowd.TIMEOUT_S)
            if client not in victims:
                assert client.returncode == 0
                outcomes.update(json.loads(out.splitlines()[-1]))
    finally:
        for client in clients:
            client.kill()
            client.communicate()
    status = cluster.wait_idle(LEFT_S)
    assert [worker.free_blocks for worker in status.workers] == [worker.num_blocks for worker in status.workers]
    assert (status.queued, status.running) == (0, 0)
    deadline_s = time.monotonic() + LEFT_S
    while grown := {
        name: (before[name], held_by(each)) for name, each in service.items() if is_more(before[name], each)
    }:
        assert time.monotonic() < deadline_s, grown
        time.sleep(0.2)
    assert outcomes.pop(str(expected)) + outcomes["cancelled"] == STREAMS_EACH * (processes - killed), outcomes
    return outcomes


def is_more(before: tuple[int, int], process: psutil.Process) -> bool:
    """Whether a process holds more than before: a few files or threads may be a pool's, not one for each stream."""
    return any(now > then + 8 for then, now in zip(before, held_by(process), strict=True))


def test_a_small_crowd(model: Path, cluster: LocalCluster) -> None:
    """Many streams at once, of which some are cancelled at random moments, while a client's process is killed."""
    outcomes = run(cluster, greedy_tokens(model, crowd.PROMPT, crowd.TOKENS), processes=2, killed=1)
    assert outcomes["cancelled"] > 0


@pytest.mark.soak
@pytest.mark.timeout(1_200)
def test_a_thousand_streams(model: Path, cluster: LocalCluster) -> None:
    expected = greedy_tokens(model, crowd.PROMPT, crowd.TOKENS)
    before_mb: dict[str, int] = {}
    for number in range(3):  # what each one leaves would add up
        outcomes = run(cluster, expected, processes=50, killed=1)
        memory_mb = {
            name: psutil.Process(popen.pid).memory_info().rss >> 20 for name, popen in cluster.processes.items()
        }
        log.info("crowd %d: %s, memory in MiB %s", number, dict(outcomes), memory_mb)
        grown_mb = {name: memory_mb[name] - before_mb[name] for name in before_mb}  # none at first: it warms up
        assert all(mb <= 24 for mb in grown_mb.values()), grown_mb
        before_mb = memory_mb
