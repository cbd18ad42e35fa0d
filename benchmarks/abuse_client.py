"""A client that misbehaves until it is ended: `python -m benchmarks.abuse_client KIND TARGET`."""

from __future__ import annotations

import contextlib
import signal
import sys
import time

import grpc

from pdserve.pb import inference_pb2 as pb

KINDS = ("long-text", "stop-ids", "never-reads", "resets")
METHOD = "/pdserve.v1.Inference/Generate"
OPTIONS = [("grpc.max_send_message_length", 2**30), ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]
PAUSE_S = 0.02
RESETS = 200


def main(kind: str, target: str) -> None:
    """Misbehave."""
    with grpc.insecure_channel(target, options=OPTIONS) as channel:
        generate: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(METHOD)
        if kind == "never-reads":
            asked = pb.Sampling(max_tokens=1900, ignore_eos=True, logprobs=20)
            calls = [generate(pb.GenerateRequest(text="x", sampling=asked).SerializeToString()) for _ in range(4)]
            for call in calls:
                with contextlib.suppress(grpc.RpcError):
                    next(call)
            signal.pause()
        if kind == "resets":
            asked = pb.Sampling(max_tokens=8)
            data = pb.GenerateRequest(text="x", sampling=asked).SerializeToString()
            while True:
                for call in [generate(data) for _ in range(RESETS)]:
                    call.cancel()
        data = {
            "long-text": pb.GenerateRequest(text="word " * (4 * 2**20 // 5)),
            "stop-ids": pb.GenerateRequest(text="x", sampling=pb.Sampling(stop_token_ids=[1] * 12_000_000)),
        }[kind].SerializeToString()
        while True:
            with contextlib.suppress(grpc.RpcError):
                list(generate(data))
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
