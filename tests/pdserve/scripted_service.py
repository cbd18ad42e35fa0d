"""A small pdserve service for the client's and the CLI's tests: real gRPC over a real socket, scripted answers.

The prompt's text says what happens:

- ``fail CODE details`` ends with that status; ``raise CODE CLASS details`` names the error's class as well, and
  ``refuse CODE CLASS RETRY_AFTER_MS details`` also when to come back; ``token`` before any of them sends a token first
- ``hang`` sends one token and then waits until it is cancelled
- ``broken`` ends without a completion
- anything else is answered
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent import futures
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pdserve.core.errors import ERROR_KIND_KEY, RETRY_AFTER_KEY
from pdserve.core.timeline import GATEWAY, EventKind
from pdserve.pb import inference_pb2 as pb
from pdserve.pb import inference_pb2_grpc as pb_grpc
from tests.certificates import Pair

VOCAB_SIZE = 1000
BLOCK_SIZE = 16
KV_BYTES_PER_TOKEN = 512
PREFILL_S = 0.004
STEP_S = 0.002


class ScriptedServicer(pb_grpc.InferenceServicer):
    """Answers as the service would; what it was asked is in ``requests``."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.cancelled = threading.Event()
        self.free_blocks = 64
        self.lost_bytes = 0
        self.refuse_ms = ""  # unless empty, every request is refused and told to come back after that time
        self.status_after_requests = True
        self.token_shift = {pb.MODE_PD: 0, pb.MODE_COLOCATED: 0}
        self.authorizations: list[str] = []  # of all calls, empty for those without

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        events = [pb.Event(kind=EventKind.RECEIVED, worker=GATEWAY, time_s=time.monotonic())]
        self.requests.append(request)
        self._note_authorization(context)
        words = request.text.split()
        if self.refuse_ms:
            words = ["refuse", "RESOURCE_EXHAUSTED", "CapacityExceeded", self.refuse_ms, "the queue is full"]
        if words[:1] == ["token"]:
            yield pb.GenerateResponse(token=pb.Token(token_id=1, text="a"))
            del words[0]
        if words[:1] == ["fail"]:
            context.abort(grpc.StatusCode[words[1]], " ".join(words[2:]))
        if words[:1] == ["raise"]:
            context.set_trailing_metadata(((ERROR_KIND_KEY, words[2]),))
            context.abort(grpc.StatusCode[words[1]], " ".join(words[3:]))
        if words[:1] == ["refuse"]:
            context.set_trailing_metadata(((ERROR_KIND_KEY, words[2]), (RETRY_AFTER_KEY, words[3])))
            context.abort(grpc.StatusCode[words[1]], " ".join(words[4:]))
        if words[:1] == ["broken"]:
            yield pb.GenerateResponse(token=pb.Token(token_id=1, text="a"))
            return
        if words[:1] == ["hang"]:
            gone = threading.Event()

            def ended() -> None:
                self.cancelled.set()
                gone.set()

            context.add_callback(ended)  # before the token: nothing after it runs if the client leaves at once
            yield pb.GenerateResponse(token=pb.Token(token_id=1, text="a"))
            gone.wait(120)  # longer than any test waits for the end
            return
        yield from self._answer(request, events)

    def _note_authorization(self, context: Any) -> None:
        self.authorizations.append(dict(context.invocation_metadata()).get("authorization", ""))

    def _answer(self, request: pb.GenerateRequest, events: list[pb.Event]) -> Iterator[pb.GenerateResponse]:
        mode = request.mode if request.mode == pb.MODE_COLOCATED else pb.MODE_PD
        decode = "prefill-0" if mode == pb.MODE_COLOCATED else "decode-0"
        prompt = list(request.token_ids.ids) or list(request.text.encode())
        wanted = request.sampling.max_tokens or 4
        ids = [(sum(prompt) + self.token_shift[mode] + i) % VOCAB_SIZE for i in range(wanted)]
        text = [f" w{i}" for i in ids]

        def note(kind: EventKind, worker: str = GATEWAY) -> None:
            events.append(pb.Event(kind=kind, worker=worker, time_s=time.monotonic()))

        for kind in (EventKind.TOKENIZED, EventKind.PAIR_CHOSEN, EventKind.PREFILL_SENT):
            note(kind)
        note(EventKind.PREFILL_RECEIVED, "prefill-0")
        note(EventKind.PREFILL_SCHEDULED, "prefill-0")
        time.sleep(PREFILL_S)
        note(EventKind.TOKEN_1_SAMPLED, "prefill-0")
        for index, token_id in enumerate(ids):
            if index == 1:
                if mode == pb.MODE_PD:
                    note(EventKind.ROOM_MADE, decode)
                    note(EventKind.KV_VERIFIED, decode)
                note(EventKind.DECODE_SCHEDULED, decode)
            if index:
                time.sleep(STEP_S)
            if index == 1:
                note(EventKind.TOKEN_2_SAMPLED, decode)
            if index < 2:
                note((EventKind.TOKEN_1_ARRIVED, EventKind.TOKEN_2_ARRIVED)[index])
                note((EventKind.TOKEN_1_EMITTED, EventKind.TOKEN_2_EMITTED)[index])
            token = pb.Token(token_id=token_id, text=text[index], index=index)
            if request.sampling.HasField("logprobs"):
                token.logprob = -0.5
                others = [pb.TopLogprob(token_id=i, text=f"t{i}", logprob=-1.0 - i) for i in range(9)]
                token.top_logprobs.extend(others[: request.sampling.logprobs])
            yield pb.GenerateResponse(token=token)
        note(EventKind.FINISHED)
        events.append(pb.Event(kind="an event of a later version", worker=GATEWAY, time_s=0.0))
        sent = -(-len(prompt) // BLOCK_SIZE) if mode == pb.MODE_PD and wanted > 1 else 0
        expected = sent * BLOCK_SIZE * KV_BYTES_PER_TOKEN
        yield pb.GenerateResponse(
            completion=pb.Completion(
                request_id=request.request_id or "made-by-gateway",
                text="".join(text),
                finish_reason="length",
                mode=mode,
                prefill_worker="prefill-0",
                decode_worker=decode,
                prompt_tokens=len(prompt),
                output_tokens=len(ids),
                transfer=pb.Transfer(
                    transport="grpc_stream" if sent else "",
                    kv_bytes=expected - self.lost_bytes if sent else 0,
                    kv_bytes_expected=expected,
                    blocks_sent=sent,
                    messages=1 if sent else 0,
                    checksum="xxh3-64 verified" if sent else "",
                    wire_ms=0.5 if sent else 0.0,
                    exposed_ms=0.25 if sent else 0.0,
                    request_to_ready_ms=5.0 if sent else 0.0,
                    block_size=BLOCK_SIZE,
                ),
                events=events,
                clocks=[pb.Clock(worker=name, offset_s=0.0, error_s=0.0001) for name in ("prefill-0", "decode-0")],
                attempts=2,
                failures=[pb.FailedAttempt(worker="decode-1", error="WorkerLost", text="it is gone")],
                token_ids=ids,
            )
        )

    def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        self._note_authorization(context)
        if self.requests and not self.status_after_requests:
            context.abort(grpc.StatusCode.UNAVAILABLE, "stopping")
        return pb.GetStatusResponse(
            ready=True,
            version="0.1.0",
            model="scripted",
            context_length=2048,
            block_size=BLOCK_SIZE,
            kv_bytes_per_token=KV_BYTES_PER_TOKEN,
            vocab_size=VOCAB_SIZE,
            dtype="float32",
            checkpoint_dtype="bfloat16",
            notes=["decode-0: core 3 is shared [with another]"],
            costs=["hand-off within a host: 1 ms + 0.4 ms/MB (from 20 requests)"],
            workers=[
                pb.WorkerStatus(
                    worker_id=f"{role}-0",
                    role=role,
                    state="ready",
                    node="here",
                    device="cpu",
                    num_blocks=64,
                    free_blocks=self.free_blocks,
                    prompt_tokens_looked_up=200,
                    prompt_tokens_cached=150,
                    cached_blocks=37,
                    draft_tokens=40 if role == "decode" else 0,
                    accepted_draft_tokens=10 if role == "decode" else 0,
                    links=[pb.PeerLink(worker_id="decode-0", transport="shm", reason="the fastest", ceiling_gbs=9.5)]
                    if role == "prefill"
                    else [],
                    kv_refused={"checksum": 2} if role == "decode" else {},
                )
                for role in ("prefill", "decode")
            ],
        )


class CountingHealth(health.HealthServicer):  # type: ignore[misc]
    """How often the service was asked whether it serves is in ``checks``."""

    checks = 0

    def Check(self, request: Any, context: Any) -> Any:
        self.checks += 1
        return super().Check(request, context)


class ScriptedService:
    """The servicer behind a port of its own, with grpc.health.v1; ``target`` is where it listens. With a certificate it
    uses TLS."""

    def __init__(self, tls: Pair | None = None) -> None:
        self.servicer = ScriptedServicer()
        self.health = CountingHealth()
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=32))
        pb_grpc.add_InferenceServicer_to_server(self.servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        if tls is None:
            self.target = f"localhost:{self._server.add_insecure_port('127.0.0.1:0')}"
        else:
            credentials = grpc.ssl_server_credentials([(tls.key.read_bytes(), tls.cert.read_bytes())])
            self.target = f"https://localhost:{self._server.add_secure_port('127.0.0.1:0', credentials)}"
        self.set_serving(True)

    def set_serving(self, serving: bool) -> None:
        """What the health check says."""
        answer = health_pb2.HealthCheckResponse
        self.health.set("", answer.SERVING if serving else answer.NOT_SERVING)

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(grace=None).wait()
