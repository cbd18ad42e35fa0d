"""OpenTelemetry traces: a span for every request, and within it one for each stage of its breakdown.

The spans are made when the request has its last token, from the events of its timeline, on the gateway's clock. So no
token waits for them, and a span is exactly as long as the stage in the breakdown."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.admitted_call import AdmittedCall
from gateway.inference import Completion, Observer
from pdserve.core.clock import Clock
from pdserve.core.errors import PdserveError, RequestAborted
from pdserve.core.timeline import EventKind, Figure

Attributes = Mapping[str, str | int | float]

_DECODE = "decode"
"""The span from token 2 to the last token, which is no stage of a figure."""
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class Tracing(Observer):
    """Sends spans to ``exporter``. A request's ``traceparent`` makes its span part of the client's trace; a client that
    does not sample its trace gets none.

    The spans are made at once, complete, and not with a tracer, which would take a lock for each of their parts."""

    def __init__(self, exporter: SpanExporter, clock: Clock, version: str) -> None:
        self._resource = Resource.create({"service.name": "pdserve", "service.version": version})
        self._scope = InstrumentationScope("pdserve", version)
        self._processor = BatchSpanProcessor(exporter)
        self._ids = RandomIdGenerator()
        self._clock = clock

    def failed(self, error: PdserveError, call: AdmittedCall | None) -> None:
        """Make the span of a request that failed. One that was not admitted, or was cancelled, has none."""
        if call is None or isinstance(error, RequestAborted) or (ends := self._ends(call)) is None:
            return
        epoch_ns = self._epoch()
        attributes = {"error.type": error.kind}
        status = Status(StatusCode.ERROR, str(error))
        now_s = self._clock.now()
        self._send("request", *ends, epoch_ns(call.received_s), epoch_ns(now_s), attributes, SpanKind.SERVER, status)

    def finished(self, completion: Completion, call: AdmittedCall) -> None:
        """Make the spans of a request that ended with an answer."""
        if (ends := self._ends(call)) is None:
            return
        epoch_ns, timeline = self._epoch(), completion.record.timeline
        times = {kind: epoch_ns(timeline.gateway_time(kind)) for kind in timeline.events}
        figure = Figure.TTFT_DECODE if EventKind.TOKEN_2_EMITTED in times else Figure.TTFT
        parts = [(stage.name, start, end) for stage, start, end in timeline.spans(figure)]
        if figure is Figure.TTFT_DECODE:
            parts.append((_DECODE, EventKind.TOKEN_2_EMITTED, EventKind.FINISHED))
        request, parent = ends
        for name, start, end in parts:
            attributes = {"pdserve.worker": timeline.events[end].worker}
            # Clocks of two hosts are compared with an error, so an end may seem to lie before its start.
            ended_ns = max(times[start], times[end])
            self._send(name, self._context(request.trace_id), request, times[start], ended_ns, attributes)
        begun_ns = epoch_ns(call.received_s)
        self._send(
            "request", request, parent, begun_ns, times[EventKind.FINISHED], _attributes(completion), SpanKind.SERVER
        )

    def close(self) -> None:
        """Send what is left, within a few seconds."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]

    def _ends(self, call: AdmittedCall) -> tuple[SpanContext, SpanContext | None] | None:
        """The context of a request's span and that of its parent (None: it begins a trace). None if the client does
        not sample its trace."""
        if not call.traceparent:
            return self._context(self._ids.generate_trace_id()), None
        found = TraceContextTextMapPropagator().extract({"traceparent": call.traceparent}, Context())
        parent = get_current_span(found).get_span_context()
        if not parent.is_valid:
            return self._context(self._ids.generate_trace_id()), None
        return (self._context(parent.trace_id), parent) if parent.trace_flags.sampled else None

    def _context(self, trace_id: int) -> SpanContext:
        return SpanContext(trace_id, self._ids.generate_span_id(), is_remote=False, trace_flags=_SAMPLED)

    def _send(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        begun_ns: int,
        ended_ns: int,
        attributes: Attributes,
        kind: SpanKind = SpanKind.INTERNAL,
        status: Status = Status(),  # noqa: B008 - immutable
    ) -> None:
        self._processor.on_end(
            ReadableSpan(
                f"pdserve.{name}",
                context,
                parent,
                self._resource,
                attributes,
                kind=kind,
                status=status,
                start_time=begun_ns,
                end_time=ended_ns,
                instrumentation_scope=self._scope,
            )
        )

    def _epoch(self) -> Callable[[float], int]:
        """Converts times of the gateway's clock to nanoseconds since 1970."""
        now_s, now_ns = self._clock.now(), time.time_ns()
        return lambda at_s: now_ns - round((now_s - at_s) * 1e9)


def tracing_to(endpoint: str, clock: Clock, version: str) -> Tracing:
    """Tracing to the collector at ``endpoint`` (OTLP over gRPC)."""
    return Tracing(OTLPSpanExporter(endpoint, insecure=not endpoint.startswith("https://")), clock, version)


def _attributes(completion: Completion) -> Attributes:
    record, result, proof = completion.record, completion.result, completion.result.proof
    attributes: dict[str, str | int | float] = {
        "pdserve.request_id": record.request.request_id,
        "pdserve.mode": completion.mode,
        "pdserve.prefill_worker": result.prefill_worker,
        "pdserve.decode_worker": result.decode_worker,
        "pdserve.attempts": record.attempts,
        "pdserve.finish_reason": completion.finish_reason.value,
        "gen_ai.usage.input_tokens": len(record.request.prompt_token_ids),
        "gen_ai.usage.output_tokens": len(record.output_token_ids),
    }
    if proof is not None:
        attributes |= {
            "pdserve.kv.transport": proof.transport,
            "pdserve.kv.bytes": proof.kv_bytes,
            "pdserve.kv.wire_ms": proof.wire_ms,
            "pdserve.kv.request_to_ready_ms": proof.request_to_ready_ms,
        }
    return attributes
