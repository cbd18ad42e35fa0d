"""However a caller leaves a stream, the service stops computing and every KV block comes back.

Each request asks for 100,000 tokens, which take minutes on any machine; the service must be idle again within seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest

from ops.settled import settled
from pdserve import AsyncClient, AsyncStream, Client, Stream
from tests.local_cluster import ROOT, LocalCluster, local_cluster

TOKENS = 100_000
PROMPT = [5, 6, 7] * 10
IDLE_WITHIN_S = 10.0  # about a second, on an idle machine
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2 * TOKENS,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    config = tmp_path_factory.mktemp("long") / "config.json"
    config.write_text(json.dumps(SHAPE))
    engine = {"block_size": 16, "num_blocks": 2 * TOKENS // 16, "max_num_batched_tokens": 64}
    settings = {"model": {"path": f"dummy:{config}", "dtype": "float32"}, "engine": engine}
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
