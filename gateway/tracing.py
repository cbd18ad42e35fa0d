"""OpenTelemetry traces: a span for every request, and within it one for each stage of its breakdown.

The spans are made when the request has ended, from the events of its timeline, on the gateway's clock. So tracing costs
a running request nothing, and a span is exactly as long as the stage in the breakdown."""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.inference import Arrival, Completion
from pdserve.core.clock import Clock
from pdserve.core.errors import PdserveError
from pdserve.core.timeline import EventKind, Figure, Timeline

Attributes = Mapping[str, str | int | float]

_DECODE = "decode"
"""The span from token 2 to the last token, which is no stage of a figure."""


class Tracing:
    """Sends spans to ``exporter``. A request's ``traceparent`` makes its span part of the client's trace."""

    def __init__(self, exporter: SpanExporter, clock: Clock, version: str) -> None:
        resource = Resource.create({"service.name": "pdserve", "service.version": version})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("pdserve", version)
        self._clock = clock

    def gap(self, seconds: float) -> None:
        """Not traced."""

    def cancelled(self) -> None:
        """Not traced."""

    def failed(self, error: PdserveError, arrival: Arrival | None) -> None:
        """Make the span of a request that failed. One that was not admitted has none."""
        if arrival is not None:
            attributes = {"error.type": type(error).__name__}
            span = self._begin(_context_of(arrival), "pdserve.request", arrival.received_s, attributes, SpanKind.SERVER)
            span.set_status(Status(StatusCode.ERROR, str(error)))
            span.end(self._nanoseconds(self._clock.now()))

    def finished(self, completion: Completion, arrival: Arrival) -> None:
        """Make the spans of a request that ended with an answer."""
        timeline = completion.record.timeline
        request = self._begin(
            _context_of(arrival), "pdserve.request", arrival.received_s, _attributes(completion), SpanKind.SERVER
        )
        for event in timeline.events.values():
            at_s = timeline.gateway_time(event.kind)
            request.add_event(event.kind.value, {"worker": event.worker}, self._nanoseconds(at_s))
        inside = set_span_in_context(request)
        figure = Figure.TTFT_DECODE if timeline.has(EventKind.TOKEN_2_EMITTED) else Figure.TTFT
        for stage, start, end in timeline.spans(figure):
            self._span(inside, stage.name, timeline, start, end)
        if figure is Figure.TTFT_DECODE:
            self._span(inside, _DECODE, timeline, EventKind.TOKEN_2_EMITTED, EventKind.FINISHED)
        request.end(self._nanoseconds(timeline.gateway_time(EventKind.FINISHED)))

    def close(self) -> None:
        """Send what is left, within a few seconds."""
        self._provider.shutdown()

    def _span(self, inside: Context, name: str, timeline: Timeline, start: EventKind, end: EventKind) -> None:
        begun_s, ended_s = timeline.gateway_time(start), timeline.gateway_time(end)
        attributes = {"pdserve.worker": timeline.events[end].worker}
        span = self._begin(inside, f"pdserve.{name}", begun_s, attributes, SpanKind.INTERNAL)
        # Clocks of two hosts are compared with an error, so an end may seem to lie before its start.
        span.end(self._nanoseconds(max(begun_s, ended_s)))

    def _begin(self, context: Context, name: str, at_s: float, attributes: Attributes, kind: SpanKind) -> Span:
        return self._tracer.start_span(
            name, context, kind, attributes=dict(attributes), start_time=self._nanoseconds(at_s)
        )

    def _nanoseconds(self, at_s: float) -> int:
        """A time of the gateway's clock, in nanoseconds since the epoch."""
        return time.time_ns() - round((self._clock.now() - at_s) * 1e9)


def tracing_to(endpoint: str, clock: Clock, version: str) -> Tracing:
    """Tracing to the collector at ``endpoint`` (OTLP over gRPC)."""
    return Tracing(OTLPSpanExporter(endpoint, insecure=not endpoint.startswith("https://")), clock, version)


def _context_of(arrival: Arrival) -> Context:
    return TraceContextTextMapPropagator().extract({"traceparent": arrival.traceparent}, Context())


def _attributes(completion: Completion) -> Attributes:
    record, result, proof = completion.record, completion.result, completion.result.proof
    attributes: dict[str, str | int | float] = {
        "pdserve.request_id": record.request.request_id,
        "pdserve.mode": "" if result.mode is None else result.mode.value,
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
