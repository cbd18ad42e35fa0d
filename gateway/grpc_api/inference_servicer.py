"""The public gRPC service: one message per token, then one completion; errors as statuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

from gateway.admitted_call import AdmittedCall
from gateway.failures import end_call, sent_in_time
from gateway.grpc_api.connection_guard import ConnectionGuard
from gateway.grpc_api.interceptor import CALLER, metadata_of
from gateway.grpc_api.messages import completion_to_proto, submission_of, token_to_proto
from gateway.inference import Completion, Inference, OutputToken
from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.pb import inference_pb2 as pb

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
RESET_S = 0.01
"""A call that was reset first looks as if it had ended without a message, and is then cancelled within this time."""

Context = grpc.aio.ServicerContext[bytes, Any]


class InferenceServicer:
    """``status`` gives the answer of `GetStatus`. ``guard`` reads the requests of `Generate`."""

    def __init__(
        self, inference: Inference, status: Callable[[], pb.GetStatusResponse], guard: ConnectionGuard
    ) -> None:
        self._inference = inference
        self._status = status
        self._guard = guard

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register with ``server``. `Generate` reads its request itself, so that the guard knows of it, and gets it as
        bytes, so that a malformed one is refused like any other invalid request."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Generate": grpc.stream_stream_rpc_method_handler(
                self.Generate, response_serializer=pb.GenerateResponse.SerializeToString
            ),
            "GetStatus": grpc.unary_unary_rpc_method_handler(
                self.GetStatus,
                request_deserializer=pb.GetStatusRequest.FromString,
                response_serializer=pb.GetStatusResponse.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        """The service's workers, their load, and their blocks."""
        self._guard.authenticated(context.peer())
        return self._status()

    async def _response(self, output: OutputToken | Completion) -> pb.GenerateResponse:
        tokenizer = self._inference.tokenizer
        if isinstance(output, OutputToken):
            token = token_to_proto(output.token_id, output.text, output.index, output.logprobs, tokenizer)
            return pb.GenerateResponse(token=token)
        if not output.record.prompt_logprobs:
            return pb.GenerateResponse(completion=completion_to_proto(output, tokenizer))
        # There may be many, and others have turns meanwhile.
        completion = await asyncio.to_thread(completion_to_proto, output, tokenizer)
        return pb.GenerateResponse(completion=completion)

    async def _message(self, peer: str, context: Context, call: AdmittedCall) -> bytes:
        """The request. `InvalidRequest` if the call has none, `DeadlineExceeded` if it comes too late."""
        reading = self._guard.read(peer, context.read())
        message = await call.deadline.bound(reading, "the client was sending its message")
        if message is not None:
            return message
        await asyncio.sleep(RESET_S)
        raise InvalidRequest("message: the call ended without one; send a GenerateRequest")

    async def Generate(self, requests: object, context: Context) -> None:
        """Stream one `Token` message per token, then one `Completion`. Errors become statuses."""
        peer, traceparent = context.peer(), metadata_of(context.invocation_metadata(), "traceparent")
        self._guard.authenticated(peer)
        call: AdmittedCall | None = None
        beginning: asyncio.Future[None] | None = None
        try:
            # A call that is refused because of the queue or a limit is refused before its message is read.
            with self._inference.admission(
                CALLER.get(), context.time_remaining(), traceparent, peer.rpartition(":")[0]
            ) as call:
                data = await self._message(peer, context, call)
                self._inference.was_read()
                outputs = self._inference.generate(submission_of(data), call)
                bound = call.deadline.bound
                async with aclosing(outputs):
                    async for output in outputs:
                        response = await self._response(output)
                        writing: Awaitable[None] = context.write(response)
                        if beginning is None:
                            # gRPC notes that the headers are sent only when this write ends. A call in which it was
                            # interrupted cannot be ended.
                            beginning = asyncio.ensure_future(writing)
                            beginning.add_done_callback(lambda done: done.cancelled() or done.exception())
                            writing = asyncio.shield(beginning)
                        # Bounded, because a client that stops reading blocks the write.
                        await bound(writing, "the client was reading the answer")
            return
        except PdserveError as error:
            failure: Exception = error
            if call is None:
                self._guard.refused(peer)
        except Exception as error:
            log.exception("unexpected error in a request")
            failure = error
        if beginning is None:
            await end_call(context, failure)
        else:
            # If the client does not read, this ends when gRPC cancels this task: at the client's deadline, or when the
            # connection ends.
            await asyncio.wait({beginning})
            await sent_in_time(end_call(context, failure))
