"""A client that misbehaves until it is ended: `python -m benchmarks.abuse_client KIND TARGET TOKEN`.

``TARGET`` is the gRPC port for `GRPC_KINDS` and `FLOOD`, and the HTTP port for `HTTP_KINDS`."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import grpc

from pdserve import AsyncClient
from pdserve.core.errors import CapacityExceeded
from pdserve.pb import inference_pb2 as pb

GRPC_KINDS = ("long-text", "stop-ids", "never-reads", "reads-in-bursts", "resets", "beyond-limits")
FLOOD = "flood"
HTTP_KINDS = ("http-lists", "http-fields")
METHOD = "/pdserve.v1.Inference/Generate"
OPTIONS = [("grpc.max_send_message_length", 2**30), ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]
PAUSE_S = 0.02
RESETS = 200
AT_ONCE = 50
FLOOD_REQUESTS = 192
FLOOD_PAUSE_S = 2.0
BODY_BYTES = 2**20

Call = Callable[[pb.GenerateRequest], Any]


def main(kind: str, target: str, token: str) -> None:
    """Misbehave."""
    if kind in HTTP_KINDS:
        _post(kind, target, token)
    if kind == FLOOD:
        asyncio.run(_flood(target, token))
    with grpc.insecure_channel(target, options=OPTIONS) as channel:
        generate: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(METHOD)

        def call(request: pb.GenerateRequest) -> Any:
            return generate(request.SerializeToString(), metadata=(("authorization", f"Bearer {token}"),))

        if kind == "never-reads":
            calls = [call(_long()) for _ in range(4)]
            for each in calls:
                with contextlib.suppress(grpc.RpcError):
                    next(each)
            signal.pause()
        if kind == "resets":
            while True:
                for each in [call(_short()) for _ in range(RESETS)]:
                    each.cancel()
        if kind == "beyond-limits":  # the token allows one at a time
            with contextlib.suppress(grpc.RpcError):
                first = call(_long())
                next(first)
            while True:
                for each in [call(_short()) for _ in range(AT_ONCE)]:
                    with contextlib.suppress(grpc.RpcError):
                        list(each)
        if kind == "reads-in-bursts":
            _read_in_bursts(call)
        request = {
            "long-text": pb.GenerateRequest(text="word " * (4 * 2**20 // 5)),
            "stop-ids": pb.GenerateRequest(text="x", sampling=pb.Sampling(stop_token_ids=[1] * 12_000_000)),
        }[kind]
        while True:
            with contextlib.suppress(grpc.RpcError):
                list(call(request))
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


def _short() -> pb.GenerateRequest:
    return pb.GenerateRequest(text="x", sampling=pb.Sampling(max_tokens=8))


def _long() -> pb.GenerateRequest:
    return pb.GenerateRequest(text="x", sampling=pb.Sampling(max_tokens=1900, ignore_eos=True, logprobs=20))


def _read_in_bursts(call: Call) -> None:
    """Leave outputs unread until the request is paused, then read them: its context is prefilled again each time."""
    prompt = pb.TokenIds(ids=range(5, 1005))
    while True:
        sampling = pb.Sampling(max_tokens=900, ignore_eos=True, logprobs=20)
        calls = [call(pb.GenerateRequest(token_ids=prompt, sampling=sampling)) for _ in range(8)]
        with contextlib.suppress(grpc.RpcError, StopIteration):
            while True:
                time.sleep(0.5)
                for each in calls:
                    for _ in range(100):
                        next(each)


def _post(kind: str, target: str, token: str) -> None:
    """Bodies of 1 MiB that take long to parse."""
    host, _, port = target.rpartition(":")
    lists = b'{"prompt":[' + b",".join([b"[0]"] * (BODY_BYTES // 4)) + b"]}"
    field = b'{"a":[{"b":1}]}'
    message = b'{"role":"user","content":"x","more":[' + b",".join([field] * (BODY_BYTES // len(field))) + b"]}"
    path, body = {
        "http-lists": ("/v1/completions", lists),
        "http-fields": ("/v1/chat/completions", b'{"messages":[' + message + b"]}"),
    }[kind]
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    while True:
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("POST", path, body, headers)
            connection.getresponse().read()
        connection.close()
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
