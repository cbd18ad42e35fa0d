"""The public gRPC service: requests in, tokens and a final completion out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc

from gateway.output_text import OutputText
from gateway.responses import completion_to_proto, token_to_proto
from gateway.statuses import status_of
from gateway.tokenizer import Tokenizer
from gateway.validation import (
    Limits,
    check_logit_bias,
    check_stop_token_ids,
    fit_max_tokens,
    read_message,
    read_mode,
    read_prompt,
    read_request_id,
    read_salt,
    read_sampling,
)
from pdserve.core.awake_clock import wait_awake
from pdserve.core.clock import Clock
from pdserve.core.errors import ERROR_KIND_KEY, RETRY_AFTER_KEY, CapacityExceeded, NotReady, PdserveError, to_wire
from pdserve.core.request import Mode, Request
from pdserve.core.sampling import FinishReason
from pdserve.core.timeline import GATEWAY, EventKind
from pdserve.pb import inference_pb2 as pb
from router.request_record import Deadline, RequestRecord
from router.router import Router

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
SEND_FAILURE_S = 5.0
"""Time for sending a failure's reason to the client."""

Context = grpc.aio.ServicerContext[bytes, Any]

_EMITTED = (EventKind.TOKEN_1_EMITTED, EventKind.TOKEN_2_EMITTED)


class InferenceService:
    """``limits`` gives the workers' limits (None: none has registered yet), ``status`` the status message."""

    def __init__(
        self,
        router: Router,
        tokenizer: Tokenizer | None,
        limits: Callable[[], Limits | None],
        status: Callable[[], pb.GetStatusResponse],
        clock: Clock,
        default_timeout_s: float,
    ) -> None:
        self._router = router
        self._tokenizer = tokenizer
        self._limits = limits
        self._status = status
        self._clock = clock
        self._default_timeout_s = default_timeout_s
        self._in_use: set[str] = set()
        self.draining: NotReady | None = None
        """The error that refuses new requests; None if they are served."""
        self._being_read = 0  # requests whose prompt is being tokenized or waits for it
        self.in_progress = 0
        """Requests that have started and not ended."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register with ``server``. `Generate` gets requests as bytes, so that a malformed one is refused like any
        other invalid request."""
        handlers: dict[str, grpc.RpcMethodHandler[bytes, Any]] = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self.Generate, response_serializer=pb.GenerateResponse.SerializeToString
            ),
            "GetStatus": grpc.unary_unary_rpc_method_handler(
                self.GetStatus, response_serializer=pb.GetStatusResponse.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def GetStatus(self, request: bytes, context: Context) -> pb.GetStatusResponse:
        """The service's workers, their load, and their blocks."""
        return self._status()

    async def Generate(self, data: bytes, context: Context) -> None:
        """Stream one `Token` message per token, then one `Completion`. Errors become statuses."""
        received_s = self._clock.now()
        left_s = context.time_remaining()
        timeout_s = self._default_timeout_s if left_s is None else left_s
        has_begun = False
        self.in_progress += 1
        try:
            if self.draining is not None:
                raise NotReady(*self.draining.args)
            self._router.arrived(self._being_read)
            deadline = Deadline(received_s + timeout_s, self._clock)
            async with aclosing(self._respond(read_message(data), deadline, received_s)) as responses:
                async for response in responses:
                    # Bounded, because a client that stops reading blocks the write.
                    has_begun = True
                    await deadline.bound(context.write(response), "the client was reading the answer")
            return
        except PdserveError as error:
            failure: Exception = error
        except Exception as error:
            log.exception("unexpected error in a request")
            failure = error
        finally:
            self.in_progress -= 1
        if not has_begun:
            await self._send_failure(failure, context)
        sending = asyncio.create_task(self._send_failure(failure, context))
        if await wait_awake(sending, SEND_FAILURE_S):
            sending.result()
        else:  # the client does not read
            sending.cancel()

    async def _send_failure(self, failure: Exception, context: Context) -> NoReturn:
        kind, message = to_wire(failure)
        metadata = [(ERROR_KIND_KEY, kind)]
        if isinstance(failure, CapacityExceeded | NotReady) and failure.retry_after_s is not None:
            metadata.append((RETRY_AFTER_KEY, f"{failure.retry_after_s * 1e3:.0f}"))
        await context.abort(status_of(failure), message, tuple(metadata))

    async def _respond(
        self, message: pb.GenerateRequest, deadline: Deadline, received_s: float
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        request_id = read_request_id(message, self._in_use)
        self._in_use.add(request_id)
        try:
            self._being_read += 1
            try:
                request = await deadline.bound(self._read(message, request_id), "its prompt was tokenized")
            finally:
                self._being_read -= 1
            record = RequestRecord(request, deadline)
            record.timeline.record(EventKind.RECEIVED, GATEWAY, received_s)
            async with aclosing(self._tokens(record)) as responses:
                async for response in responses:
                    yield response
        finally:
            self._in_use.discard(request_id)

    async def _read(self, message: pb.GenerateRequest, request_id: str) -> Request:
        mode, salt = read_mode(message), read_salt(message)
        sampling = read_sampling(message, self._tokenizer)
        limits = self._limits()
        if limits is None:
            run_mode = self._router.auto_mode if mode is Mode.AUTO else mode
            raise self._router.registry.unavailable(run_mode) or NotReady("no worker has registered; try again")
        check_stop_token_ids(sampling, limits.vocab_size)
        check_logit_bias(sampling, limits.vocab_size)
        prompt = await read_prompt(message, self._tokenizer, limits)
        sampling = fit_max_tokens(message, len(prompt), limits, sampling)
        return Request(request_id, prompt, sampling, mode, salt=salt)

    async def _tokens(self, record: RequestRecord) -> AsyncGenerator[pb.GenerateResponse, None]:
        request, timeline, now = record.request, record.timeline, self._clock.now
        detokenizer = self._tokenizer.detokenizer(request.prompt_token_ids) if self._tokenizer else None
        output = OutputText(detokenizer, request.sampling.stop)
        finish_reason = FinishReason.ERROR
        timeline.record(EventKind.TOKENIZED, GATEWAY, now())
        generation = self._router.generate(record)
        async with aclosing(generation):
            index = 0
            async for token in generation:
                text = output.add(token.token_id)
                if token.finish_reason is not None:
                    finish_reason = token.finish_reason
                    text += output.end()
                if output.stopped:
                    finish_reason = FinishReason.STOP
                message = token_to_proto(token, text, index, self._tokenizer)
                response = pb.GenerateResponse(token=message)
                if index < len(_EMITTED):
                    timeline.record(_EMITTED[index], GATEWAY, now())
                yield response
                index += 1
                if output.stopped and token.finish_reason is None:
                    await generation.stop()
                    break
        timeline.record(EventKind.FINISHED, GATEWAY, now())
        yield pb.GenerateResponse(completion=completion_to_proto(record, generation.result, output, finish_reason))
