"""Clients that misbehave until they are ended, each a process of its own. `STRANGER_KINDS` need no token: they are
frames of HTTP/2 that no library sends (`experiments.benchmarks.http2_attacks`)."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import random
import signal
import socketserver
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from experiments.benchmarks.bare_grpc import GENERATE
from experiments.benchmarks.http2_attacks import ATTACKS, PREFACE, Attack
from experiments.child_process import ChildProcess, call
from kv_transfer.transports.socket_transport import MAGIC
from pdserve import AsyncClient
from pdserve.core.errors import CapacityExceeded
from pdserve.pb import inference_pb2 as pb

FLOOD = "flood"
LIMITED = "beyond-limits"
HTTP_KINDS = ("http-lists", "http-fields")
STRANGER_KINDS = tuple(f"h2-{kind}" for kind in ATTACKS)
AGAIN = "h2-resets-again"
"""Resets over a new connection whenever one was closed."""
CALL_KINDS = ("long-text", "stop-ids", "never-reads", "reads-in-bursts", "resets", LIMITED)
KINDS = (*CALL_KINDS, *HTTP_KINDS, *STRANGER_KINDS, AGAIN)
OPTIONS = [("grpc.max_send_message_length", 2**30), ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]
PAUSE_S = 0.02
RESETS = 200
AT_ONCE = 50
FLOOD_REQUESTS = 192
FLOOD_PAUSE_S = 2.0
BODY_BYTES = 2**20
RANDOM_BYTES = 4096
OPENINGS = (b"", MAGIC, PREFACE, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n")


@contextlib.contextmanager
def abusing(kind: str, target: str, token: str) -> Iterator[None]:
    """A context in which a process of its own misbehaves. ``target`` is the HTTP port for `HTTP_KINDS`, and else the
    gRPC port."""
    with ChildProcess(f"the client of kind {kind}", call(misbehave, kind, target, token)) as abuser:
        yield
        # An attack ends when its connection is closed; the others go on until they are ended.
        if abuser.status or (abuser.status == 0 and kind not in STRANGER_KINDS):
            raise RuntimeError(f"the client of kind {kind} ended by itself{abuser.log_tail()}")


@contextlib.contextmanager
def strangers(count: int, pace_s: float, addresses: Sequence[str]) -> Iterator[list[int]]:
    """Keep ``count`` connections of strangers open at these addresses, or without any, at a server that closes them at
    once. The list that is yielded gets the number of those that were opened."""
    opened: list[int] = []
    if not count:
        yield opened
        return
    with contextlib.ExitStack() as stack:
        where = addresses or [stack.enter_context(_closing_server())]
        command = call(keep_strangers, count, pace_s, where)
        child = stack.enter_context(ChildProcess("the process of strangers", command))
        time.sleep(pace_s)  # until all are connected
        yield opened
        child.end_input()
        opened.append(child.result(30.0))


@contextlib.contextmanager
def _closing_server() -> Iterator[str]:
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        server.socket.listen(1024)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


# --- the programs ----------------------------------------------------------------------------------------------------


def misbehave(kind: str, target: str, token: str) -> None:
    """In a way that the kind names."""
    if kind == FLOOD:
        asyncio.run(_flood(target, token))
    elif kind in CALL_KINDS:
        _call(kind, target, token)
    elif kind in HTTP_KINDS:
        _post(kind, target, token)
    while True:
        attack = Attack("resets" if kind == AGAIN else kind.removeprefix("h2-"), target)
        while not attack.is_over:  # until the server has closed the connection
            attack.send()
        attack.close()
        if kind != AGAIN:
            return


def _call(kind: str, target: str, token: str) -> None:
    channel = grpc.insecure_channel(target, options=OPTIONS)
    generate: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(GENERATE)

    def ask(*, token_ids: Any = None, text: str = "x", **sampling: Any) -> Any:
        prompt: Any = {"token_ids": pb.TokenIds(ids=token_ids)} if token_ids else {"text": text}
        request = pb.GenerateRequest(sampling=pb.Sampling(**sampling), **prompt)
        return generate(request.SerializeToString(), metadata=(("authorization", f"Bearer {token}"),))

    long: dict[str, Any] = {"max_tokens": 1900, "ignore_eos": True, "logprobs": 20}
    opened: list[Any] = []
    while True:
        with contextlib.suppress(grpc.RpcError, StopIteration):
            match kind:
                case "long-text":
                    list(ask(text="word " * (4 * 2**20 // 5)))
                case "stop-ids":
                    list(ask(stop_token_ids=[1] * 12_000_000))
                case "never-reads":
                    opened = [ask(**long) for _ in range(4)]
                    for each in opened:
                        with contextlib.suppress(grpc.RpcError):
                            next(each)
                    signal.pause()
                case "reads-in-bursts":
                    # Outputs stay unread until the request is paused: its context is prefilled again each time.
                    opened = [ask(**{**long, "max_tokens": 900}, token_ids=range(5, 1005)) for _ in range(8)]
                    while True:
                        time.sleep(0.5)
                        for each in opened:
                            for _ in range(100):
                                next(each)
                case "resets":
                    for each in [ask(max_tokens=8) for _ in range(RESETS)]:
                        each.cancel()
                    continue
                case "beyond-limits":  # the token allows one at a time
                    if not opened:
                        opened = [ask(**long)]
                        next(opened[0])
                    for each in [ask(max_tokens=8) for _ in range(AT_ONCE)]:
                        with contextlib.suppress(grpc.RpcError):
                            list(each)
                    continue
        time.sleep(PAUSE_S)


async def _flood(target: str, token: str) -> None:
    """Keep so many requests at a time in progress; one that is refused comes again after a pause."""
    async with AsyncClient(target, token=token) as client:

        async def ask(number: int) -> None:
            while True:
                prompt = [(number * 31 + index) % 4000 + 5 for index in range(64)]
                number += FLOOD_REQUESTS
                try:
                    await client.generate(prompt, max_tokens=16, ignore_eos=True, timeout_s=100).result()
                except CapacityExceeded:
                    await asyncio.sleep(FLOOD_PAUSE_S)

        await asyncio.gather(*[ask(number) for number in range(FLOOD_REQUESTS)])


def _post(kind: str, target: str, token: str) -> None:
    """Bodies of 1 MiB that take long to parse."""
    lists = b'{"prompt":[' + b",".join([b"[0]"] * (BODY_BYTES // 4)) + b"]}"
    field = b'{"a":[{"b":1}]}'
    message = b'{"role":"user","content":"x","more":[' + b",".join([field] * (BODY_BYTES // len(field))) + b"]}"
    path, body = {
        "http-lists": ("/v1/completions", lists),
        "http-fields": ("/v1/chat/completions", b'{"messages":[' + message + b"]}"),
    }[kind]
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    while True:
        connection = http.client.HTTPConnection(target, timeout=30)
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("POST", path, body, headers)
            connection.getresponse().read()
        connection.close()
        time.sleep(PAUSE_S)


async def keep_strangers(count: int, pace_s: float, addresses: Sequence[str]) -> int:
    """Keep ``count`` connections, spread over the addresses, until the input ends; how many were opened. Each sends
    nothing, or random bytes, after the opening of one of the service's protocols or none, and stays open. One that the
    server closes is opened again, ``pace_s`` after it was opened. The process gets the time that others leave
    (SCHED_IDLE), because it stands for other machines."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    opened = 0

    async def stranger(address: str, seed: int) -> None:
        nonlocal opened
        chance = random.Random(seed)
        host, _, port = address.rpartition(":")
        await asyncio.sleep(chance.uniform(0.0, pace_s))
        while True:
            began_s = time.monotonic()
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, int(port))
                opened += 1
                try:
                    if chance.random() < 0.8:
                        writer.write(chance.choice(OPENINGS) + chance.randbytes(RANDOM_BYTES))
                    while await reader.read(2**16):
                        continue
                finally:
                    writer.transport.abort()
            await asyncio.sleep(max(0.0, began_s + pace_s - time.monotonic()))

    tasks = [asyncio.create_task(stranger(addresses[number % len(addresses)], number)) for number in range(count)]
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    return opened
