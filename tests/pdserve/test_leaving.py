"""However a caller leaves a stream, the service hears of it: its request is cancelled, though stream and client may
live on. (`tests.e2e.test_states`: what the service does then, in whatever state the request is.)"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable

import pytest

from pdserve import AsyncClient, AsyncStream, Client, Stream
from pdserve.core.errors import RequestAborted
from tests.local_cluster import ROOT
from tests.pdserve.scripted_service import ScriptedService

HEARD_S = 60.0


def begun(client: Client) -> Stream:
    stream = client.generate("hang")
    next(stream)
    return stream


def break_out(client: Client) -> Stream:
    stream = client.generate("hang")
    for _ in stream:
        break
    return stream


def raise_in_the_loop(client: Client) -> Stream:
    stream = client.generate("hang")
    with contextlib.suppress(ZeroDivisionError):
        for _ in stream:
            raise ZeroDivisionError
    return stream


def take_some(client: Client) -> Stream:
    stream = client.generate("hang")
    assert len(list(itertools.islice(stream, 1))) == 1
    return stream


def drop(client: Client) -> None:
    begun(client)


def drop_in_a_cycle(client: Client) -> None:
    cycle: list[object] = [begun(client)]
    cycle.append(cycle)
    del cycle
    gc.collect()


def leave_with(client: Client) -> Stream:
    with begun(client) as stream:
        return stream


def close_stream(client: Client) -> Stream:
    stream = begun(client)
    stream.close()
    return stream


def close_client(client: Client) -> Stream:
    stream = begun(client)
    client.close()
    return stream


def cancel_while_another_thread_reads(client: Client) -> Stream:
    stream = begun(client)
    threading.Timer(0.1, stream.cancel).start()
    with pytest.raises(RequestAborted):
        stream.result()
    return stream


LOOP_ENDED, CLOSED = r"use next\(stream\)", "its stream was closed"
SYNC_WAYS: dict[Callable[[Client], Stream | None], str] = {
    break_out: LOOP_ENDED, raise_in_the_loop: LOOP_ENDED, take_some: LOOP_ENDED, drop: "", drop_in_a_cycle: "",
    leave_with: CLOSED, close_stream: CLOSED, close_client: "was closed",
    cancel_while_another_thread_reads: "cancelled by the client",
}  # fmt: skip
"""Each with what the stream says afterwards."""


@pytest.mark.parametrize(("leave", "why"), SYNC_WAYS.items(), ids=[each.__name__ for each in SYNC_WAYS])
def test_leaving_a_stream_cancels_its_request(
    service: ScriptedService, leave: Callable[[Client], Stream | None], why: str
) -> None:
    client = Client(service.target)
    kept = leave(client)  # neither the stream nor the client need go for it
    assert service.servicer.cancelled.wait(HEARD_S)
    if kept is not None:
        with pytest.raises(RequestAborted, match=why):
            kept.result()
    client.close()


async def async_begun(client: AsyncClient) -> AsyncStream:
    stream = client.generate("hang")
    await anext(stream)
    return stream


async def time_out_in_result(client: AsyncClient) -> AsyncStream:
    stream = await async_begun(client)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.result(), 0.1)
    return stream


async def time_out_in_the_loop(client: AsyncClient) -> AsyncStream:
    stream = await async_begun(client)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            async for _ in stream:
                pass
    return stream


async def cancel_the_task(client: AsyncClient) -> AsyncStream:
    stream = await async_begun(client)
    task = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return stream


async def async_break_out(client: AsyncClient) -> AsyncStream:
    stream = client.generate("hang")
    async for _ in stream:
        break
    return stream


async def async_drop(client: AsyncClient) -> None:
    await async_begun(client)


async def async_drop_in_a_cycle(client: AsyncClient) -> None:
    cycle: list[object] = [await async_begun(client)]
    cycle.append(cycle)
    del cycle
    await asyncio.to_thread(gc.collect)  # the collector runs in any thread


async def leave_async_with(client: AsyncClient) -> AsyncStream:
    async with await async_begun(client) as stream:
        return stream


async def close_async_stream(client: AsyncClient) -> AsyncStream:
    stream = await async_begun(client)
    await stream.aclose()
    return stream


async def close_async_client(client: AsyncClient) -> AsyncStream:
    stream = await async_begun(client)
    await client.close()
    return stream


async def cancel_while_a_task_reads(client: AsyncClient) -> AsyncStream:
    stream = await async_begun(client)
    asyncio.get_running_loop().call_later(0.1, stream.cancel)
    with pytest.raises(RequestAborted):
        await stream.result()
    return stream


INTERRUPTED = "was cancelled or interrupted"
ASYNC_WAYS: dict[Callable[[AsyncClient], Awaitable[AsyncStream | None]], str] = {
    time_out_in_result: INTERRUPTED, time_out_in_the_loop: INTERRUPTED, cancel_the_task: INTERRUPTED,
    async_break_out: r"use anext\(stream\)", async_drop: "", async_drop_in_a_cycle: "", leave_async_with: CLOSED,
    close_async_stream: CLOSED, close_async_client: "was closed", cancel_while_a_task_reads: "cancelled by the client",
}  # fmt: skip


@pytest.mark.parametrize(("leave", "why"), ASYNC_WAYS.items(), ids=[each.__name__ for each in ASYNC_WAYS])
async def test_leaving_an_async_stream_cancels_its_request(
    service: ScriptedService, leave: Callable[[AsyncClient], Awaitable[AsyncStream | None]], why: str
) -> None:
    client = AsyncClient(service.target)
    kept = await leave(client)
    assert await asyncio.to_thread(service.servicer.cancelled.wait, HEARD_S)
    if kept is not None:
        with pytest.raises(RequestAborted, match=why):
            await kept.result()
    await client.close()


async def test_the_end_of_the_event_loop_cancels_its_requests(service: ScriptedService) -> None:
    kept: list[object] = []

    async def main() -> None:
        client = AsyncClient(service.target)
        kept.extend((client, await async_begun(client)))

    await asyncio.to_thread(asyncio.run, main())
    assert await asyncio.to_thread(service.servicer.cancelled.wait, HEARD_S)
    await asyncio.to_thread(kept.clear)


CTRL_C = """
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

stream = Client(sys.argv[1]).generate("hang")
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
def test_ctrl_c_in_a_stream_cancels_its_request(service: ScriptedService, where: str) -> None:
    """The process lives on and still has its client, its stream and the exception."""
    command = [sys.executable, "-c", CTRL_C, service.target, where]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "0\n"
            if where == "loop":
                process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "interrupted\n"
            assert service.servicer.cancelled.wait(HEARD_S)
            assert process.poll() is None
        finally:
            process.kill()
