"""However a caller leaves a stream, the service hears of it: its request is cancelled, though stream and client may
live on. (`pdserve simulate`: what the service does then, in whatever state the request is.)"""

from __future__ import annotations

import asyncio
import gc
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


def break_out(client: Client, stream: Stream) -> None:
    for _ in stream:
        break


def leave_with(client: Client, stream: Stream) -> None:
    with stream:
        next(stream)


def close_stream(client: Client, stream: Stream) -> None:
    next(stream)
    stream.close()


def close_client(client: Client, stream: Stream) -> None:
    next(stream)
    client.close()


def cancel_while_another_thread_reads(client: Client, stream: Stream) -> None:
    next(stream)
    threading.Timer(0.1, stream.cancel).start()
    with pytest.raises(RequestAborted):
        stream.result()


LOOP_ENDED, CLOSED, CANCELLED = r"use next\(stream\)", "its stream was closed", "cancelled by the client"
SYNC_WAYS: dict[Callable[[Client, Stream], None], str] = {
    break_out: LOOP_ENDED, leave_with: CLOSED,
    close_stream: CLOSED, close_client: "was closed", cancel_while_another_thread_reads: CANCELLED,
}  # fmt: skip
"""Each with what the stream says afterwards."""


@pytest.mark.parametrize(("leave", "why"), SYNC_WAYS.items(), ids=[each.__name__ for each in SYNC_WAYS])
def test_leaving_a_stream_cancels_its_request(
    service: ScriptedService, leave: Callable[[Client, Stream], None], why: str
) -> None:
    with Client(service.target) as client:
        stream = client.generate("hang")
        leave(client, stream)  # neither the stream nor the client need go for it
        assert service.servicer.cancelled.wait(HEARD_S)
        with pytest.raises(RequestAborted, match=why):
            stream.result()


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_dropping_a_stream_cancels_its_request(service: ScriptedService, in_a_cycle: bool) -> None:
    with Client(service.target) as client:
        kept: list[object] = [client.generate("hang")]
        next(kept[0])  # type: ignore[call-overload]
        if in_a_cycle:
            kept.append(kept)
        del kept
        if in_a_cycle:
            gc.collect()
        assert service.servicer.cancelled.wait(HEARD_S)


async def time_out_in_result(client: AsyncClient, stream: AsyncStream) -> None:
    await anext(stream)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.result(), 0.1)


async def cancel_the_task(client: AsyncClient, stream: AsyncStream) -> None:
    await anext(stream)
    task = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def async_break_out(client: AsyncClient, stream: AsyncStream) -> None:
    async for _ in stream:
        break


async def leave_async_with(client: AsyncClient, stream: AsyncStream) -> None:
    async with stream:
        await anext(stream)


async def close_async_stream(client: AsyncClient, stream: AsyncStream) -> None:
    await anext(stream)
    await stream.aclose()


async def close_async_client(client: AsyncClient, stream: AsyncStream) -> None:
    await anext(stream)
    await client.close()


async def cancel_while_a_task_reads(client: AsyncClient, stream: AsyncStream) -> None:
    await anext(stream)
    asyncio.get_running_loop().call_later(0.1, stream.cancel)
    with pytest.raises(RequestAborted):
        await stream.result()


INTERRUPTED = "was cancelled or interrupted"
ASYNC_WAYS: dict[Callable[[AsyncClient, AsyncStream], Awaitable[None]], str] = {
    time_out_in_result: INTERRUPTED, cancel_the_task: INTERRUPTED,
    async_break_out: r"use anext\(stream\)", leave_async_with: CLOSED, close_async_stream: CLOSED,
    close_async_client: "was closed", cancel_while_a_task_reads: CANCELLED,
}  # fmt: skip


async def heard(service: ScriptedService) -> bool:
    return await asyncio.to_thread(service.servicer.cancelled.wait, HEARD_S)


@pytest.mark.parametrize(("leave", "why"), ASYNC_WAYS.items(), ids=[each.__name__ for each in ASYNC_WAYS])
async def test_leaving_an_async_stream_cancels_its_request(
    service: ScriptedService, leave: Callable[[AsyncClient, AsyncStream], Awaitable[None]], why: str
) -> None:
    async with AsyncClient(service.target) as client:
        stream = client.generate("hang")
        await leave(client, stream)
        assert await heard(service)
        with pytest.raises(RequestAborted, match=why):
            await stream.result()


@pytest.mark.parametrize("in_a_cycle", [False, True])
async def test_dropping_an_async_stream_cancels_its_request(service: ScriptedService, in_a_cycle: bool) -> None:
    async with AsyncClient(service.target) as client:
        kept: list[object] = [client.generate("hang")]
        await anext(kept[0])  # type: ignore[call-overload]
        if in_a_cycle:
            kept.append(kept)
        del kept
        if in_a_cycle:
            await asyncio.to_thread(gc.collect)  # the collector runs in any thread
        assert await heard(service)


async def test_the_end_of_the_event_loop_cancels_its_requests(service: ScriptedService) -> None:
    kept: list[object] = []

    async def main() -> None:
        client = AsyncClient(service.target)
        stream = client.generate("hang")
        await anext(stream)
        kept.extend((client, stream))

    await asyncio.to_thread(asyncio.run, main())
    assert await heard(service)
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
