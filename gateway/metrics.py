"""Prometheus metrics of the service: what the gateway sees of every request, and what workers report.

One scrape of the gateway has everything. Names end in their unit; ``_total`` marks counters. Histograms have buckets
from 100 µs, because the stages of a small model are that short. docs/operations.md explains each metric."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from contract.scaling import GatewayLoad, ScalingReport, within_objective
from gateway.admitted_call import AdmittedCall
from gateway.inference import Completion, Observer
from pdserve.core.errors import PdserveError, RequestAborted
from pdserve.core.handoff import TransferProof
from pdserve.core.timeline import EventKind, Figure
from router.breaker import BreakerState
from router.registered_worker import RegisteredWorker

disable_created_metrics()  # type: ignore[no-untyped-call]  # a time series beside every counter that nobody reads

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCIES_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0,
)  # fmt: skip
_PAIR = ("prefill_worker", "decode_worker", "transport")


class LabelSeries:
    """The values of one combination of labels."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class LatencyHistogram(Collector):
    """Costs little where it is observed. `prometheus_client.Histogram` takes a lock and searches its buckets one by one
    for every value; a gateway observes a value for each token, and some twenty for each request, all on one thread.

    A histogram in ``registry``, observed on one thread. ``bounds`` are the upper bounds of its buckets in seconds,
    ascending. A value equal to a bound is within it."""

    def __init__(
        self, name: str, what: str, labels: Sequence[str], bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._what, self._labels, self._bounds = name, what, tuple(labels), tuple(bounds)
        self._series: dict[tuple[str, ...], LabelSeries] = {}
        if not labels:
            self.of()
        registry.register(self)

    def of(self, *values: str) -> LabelSeries:
        """The series with these values of the labels."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = LabelSeries(self._bounds)
        return series

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """The metric as it is now."""
        family = HistogramMetricFamily(self._name, self._what, labels=self._labels)
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for values, series in self._series.items():
            buckets = list(zip(names, accumulate(series.counts), strict=True))
            family.add_metric(values, buckets, series.total)
        yield family


class Metrics(Observer, Collector):
    """``pdserve_…`` metrics in a registry of their own. ``state`` gives those that are read at a scrape."""

    def __init__(self, state: Callable[[], Iterator[Metric]]) -> None:
        self._registry = registry = CollectorRegistry()
        self._state = state
        registry.register(self)

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"pdserve_{name}", what, labels, registry=registry)

        def of_labels(name: str, what: str, *labels: str) -> Callable[..., Counter]:
            # `labels` of the library converts its arguments and takes a lock.
            return cache(counter(name, what, *labels).labels)

        def latency(name: str, what: str, *labels: str) -> LatencyHistogram:
            return LatencyHistogram(f"pdserve_{name}_seconds", what, labels, _LATENCIES_S, registry)

        self._finished = of_labels("requests_finished", "Requests that ended with an answer", "mode", "finish_reason")
        self._failed = of_labels("requests_failed", "Requests that failed or were refused, by error", "reason")
        self._cancelled = counter("requests_cancelled", "Requests that their clients cancelled")
        self._retries = counter("request_retries", "Attempts after the first one")
        self._prompt_tokens = counter("prompt_tokens", "Tokens of the prompts of finished requests")
        self._cached_tokens = counter("prompt_tokens_cached", "Tokens of these prompts that were cached")
        self._output_tokens = counter("output_tokens", "Tokens that were generated")
        self._e2e = latency("request", "From receiving a request to writing its last token", "mode")
        self._figures = {
            Figure.TTFT: latency("ttft", "From receiving a request to writing token 1", "mode"),
            Figure.TTFT_DECODE: latency("ttft_decode", "The same for token 2, which waits for the hand-off", "mode"),
        }
        self._stages = latency("stage", "A stage; those of a figure add up to it", "figure", "stage")
        self._gaps = latency("inter_token", "Between two tokens of a request").of()
        self._exposed = latency("kv_exposed", "KV transfer that was not hidden behind prefill", *_PAIR)
        self._wire = latency("kv_wire", "Time that its bytes spent on the link", *_PAIR)
        self._ready = latency("kv_request_to_ready", "From the allocation of decode's blocks to their KV", *_PAIR)
        self._kv_bytes = of_labels("kv_bytes", "KV bytes that arrived and were verified", *_PAIR)
        self._kv_retried = of_labels("kv_bytes_retried", "KV bytes that had to be sent again", *_PAIR)
        self._kv_blocks = of_labels(
            "kv_blocks", "KV blocks sent, and blocks skipped because decode had them", *_PAIR, "what"
        )
        self._fetches = of_labels(
            "prefix_fetches",
            "Prefixes fetched from another worker: complete, partial (it had less), failed (the prompt was computed)",
            "source", "worker", "outcome",
        )  # fmt: skip
        self._fetched_bytes = of_labels("prefix_fetch_bytes", "KV bytes of fetched prefixes", "source", "worker")

    def gap(self, seconds: float, index: int) -> None:
        """A token came ``seconds`` after the one before."""
        self._gaps.observe(seconds)

    def failed(self, error: PdserveError, call: AdmittedCall | None) -> None:
        """A request ended with ``error``, or was refused."""
        (self._cancelled if isinstance(error, RequestAborted) else self._failed(error.kind)).inc()

    def finished(self, completion: Completion, call: AdmittedCall) -> None:
        """A request ended with an answer."""
        record, result = completion.record, completion.result
        timeline, mode = record.timeline, completion.mode
        self._finished(mode, completion.finish_reason.value).inc()
        self._retries.inc(max(0, record.attempts - 1))
        self._prompt_tokens.inc(len(record.request.prompt_token_ids))
        self._cached_tokens.inc(result.prefill_cached_tokens)
        self._output_tokens.inc(len(record.output_token_ids) - len(record.request.output_token_ids))
        received_s, finished_s = (timeline.gateway_time(kind) for kind in (EventKind.RECEIVED, EventKind.FINISHED))
        self._e2e.of(mode).observe(finished_s - received_s)
        for figure, histogram in self._figures.items():
            if (breakdown := completion.breakdowns[figure]) is None:
                continue
            histogram.of(mode).observe(breakdown.total_ms / 1e3)
            for stage, stage_ms in breakdown.stages_ms.items():
                self._stages.of(figure.value, stage).observe(max(0.0, stage_ms) / 1e3)
        if (proof := result.proof) is not None:
            self._moved(completion, proof)
        if (fetch := result.prefix_fetch) is not None:
            between = fetch.source, result.prefill_worker
            outcome = "failed" if fetch.failure else "complete" if fetch.tokens == fetch.tokens_wanted else "partial"
            self._fetches(*between, outcome).inc()
            if fetch.proof is not None:
                self._fetched_bytes(*between).inc(fetch.proof.kv_bytes)

    def collect(self) -> Iterator[Metric]:
        """The metrics that are read at a scrape."""
        return self._state()

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _moved(self, completion: Completion, proof: TransferProof) -> None:
        result = completion.result
        pair = (result.prefill_worker, result.decode_worker, proof.transport)
        if completion.exposed_ms is not None:
            self._exposed.of(*pair).observe(completion.exposed_ms / 1e3)
        self._wire.of(*pair).observe(proof.wire_ms / 1e3)
        self._ready.of(*pair).observe(proof.request_to_ready_ms / 1e3)
        self._kv_bytes(*pair).inc(proof.kv_bytes)
        self._kv_retried(*pair).inc(proof.kv_bytes_retried)
        self._kv_blocks(*pair, "sent").inc(proof.blocks_received)
        self._kv_blocks(*pair, "skipped").inc(proof.blocks_skipped)


_OF_WORKERS: tuple[tuple[type[Metric], str, str, Callable[[RegisteredWorker], float]], ...] = (
    (GaugeMetricFamily, "ready", "1 if the worker takes requests", lambda w: w.is_ready),
    (GaugeMetricFamily, "blocks", "KV blocks of the worker's pool", lambda w: w.info.num_blocks),
    (GaugeMetricFamily, "blocks_free", "KV blocks that are free or only cached", lambda w: w.load.free_blocks),
    (GaugeMetricFamily, "blocks_cached", "KV blocks that prompts can find", lambda w: w.load.cached_blocks),
    (GaugeMetricFamily, "blocks_stored", "Cold KV blocks kept outside of the pool", lambda w: w.load.stored_blocks),
    (GaugeMetricFamily, "requests_running", "Requests in the engine's batch", lambda w: w.load.running),
    (GaugeMetricFamily, "requests_waiting", "Requests waiting in the engine", lambda w: w.load.waiting),
    (GaugeMetricFamily, "tokens_outstanding", "Tokens still to be computed",
     lambda w: w.outstanding_tokens + w.load.others_tokens),
    (CounterMetricFamily, "steps", "Steps of the engine (0: it does not tell)", lambda w: w.load.steps),
    (CounterMetricFamily, "busy_seconds", "Seconds that these steps took", lambda w: w.load.busy_s),
    (CounterMetricFamily, "preemptions", "Requests that lost their blocks to others", lambda w: w.load.preemptions),
    (CounterMetricFamily, "engine_restarts", "Restarts of the worker's engine", lambda w: w.info.engine_restarts),
    (CounterMetricFamily, "prompt_tokens_looked_up", "Prompt tokens looked up in the prefix cache",
     lambda w: w.load.prompt_tokens_looked_up),
    (CounterMetricFamily, "prompt_tokens_cached", "Prompt tokens that were found there",
     lambda w: w.load.prompt_tokens_cached),
    (CounterMetricFamily, "draft_tokens", "Guessed tokens that steps verified", lambda w: w.load.draft_tokens),
    (CounterMetricFamily, "draft_tokens_accepted", "Guessed tokens that were right",
     lambda w: w.load.accepted_draft_tokens),
    (GaugeMetricFamily, "paused", "1 if it gets no request but probes, because it failed the last ones",
     lambda w: w.breaker.state is not BreakerState.CLOSED),
)  # fmt: skip
_OF_REASONS: tuple[tuple[str, str, Callable[[RegisteredWorker], Mapping[str, int]]], ...] = (
    ("requests_failed", "Requests that it failed, by error", lambda w: w.breaker.total),
    ("kv_refused", "KV messages that it refused", lambda w: w.load.kv_refused),
)


def service_metrics(
    workers: Sequence[RegisteredWorker],
    restarts: Mapping[str, int],
    queued: int,
    running: int,
    ready: bool,
    about: dict[str, str],
) -> Iterator[Metric]:
    """Metrics that are read at a scrape: queue, workers, blocks, caches and links. ``restarts``: how often each
    worker's process was replaced. ``about``: version and model."""
    yield InfoMetricFamily("pdserve", "Always 1", value=about)
    yield GaugeMetricFamily("pdserve_ready", "1 if requests are served", value=float(ready))
    yield GaugeMetricFamily("pdserve_requests_queued", "Requests that wait for a worker", value=queued)
    yield GaugeMetricFamily("pdserve_requests_running", "Requests that are on workers", value=running)
    labels = ("worker", "role")
    for kind, name, what, value in _OF_WORKERS:
        family: Any = kind(f"pdserve_worker_{name}", what, labels=labels)  # type: ignore[call-arg]
        for worker in workers:
            family.add_metric([worker.worker_id, worker.role.value], value(worker))
        yield family
    replaced = CounterMetricFamily(
        "pdserve_worker_restarts", "Restarts of the worker's process that the gateway has seen", labels=labels
    )
    for worker in workers:
        replaced.add_metric([worker.worker_id, worker.role.value], restarts.get(worker.worker_id, 0))
    yield replaced
    for name, what, counts in _OF_REASONS:
        family = CounterMetricFamily(f"pdserve_worker_{name}", what, labels=(*labels, "reason"))
        for worker in workers:
            for reason, count in counts(worker).items():
                family.add_metric([worker.worker_id, worker.role.value, reason], count)
        yield family
    ceilings = GaugeMetricFamily(
        "pdserve_link_ceiling_bytes_per_second", "The best rate of a KV link so far", labels=_PAIR
    )
    for worker in workers:
        for (peer, _), link in worker.linked.items():
            ceilings.add_metric([worker.worker_id, peer, link.transport], link.ceiling_gbs * 1e9)
    yield ceilings


def scaling_metrics(load: GatewayLoad, scaling: ScalingReport | None) -> Iterator[Metric]:
    """How requests meet their objectives (without an objective there is no metric), and what the controller of roles
    and workers has done (None: there is no controller)."""
    objectives = CounterMetricFamily(
        "pdserve_objective",
        "First tokens (ttft) and gaps after token 2 (itl) that met their objective, or did not",
        labels=("figure", "met"),
    )
    for figure, counts in (("ttft", load.ttft), ("itl", load.itl)):
        if counts:
            for label, count in zip(("yes", "no"), within_objective(counts), strict=True):
                objectives.add_metric([figure, label], count)
    yield objectives
    if scaling is not None:
        actions = CounterMetricFamily(
            "pdserve_scaling_actions", "Actions of the controller, such as `flip prefill`", labels=("action",)
        )
        for kind, count in scaling.actions.items():
            actions.add_metric([kind], count)
        yield actions
