"""Prometheus metrics of the service: what the gateway sees of every request, and what workers report.

One scrape of the gateway has everything. Names end in their unit; ``_total`` marks counters. Histograms have buckets
from 100 µs, because the stages of a small model are that short. `make reference` writes the texts that metrics have
here into docs/operations.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.histogram import LatencyHistogram
from gateway.inference import Arrival, Completion
from gateway.load_meter import GatewayLoad, within_objective
from gateway.scaling_report import ScalingReport
from pdserve.core.errors import PdserveError
from pdserve.core.handoff import PrefixFetch, TransferProof
from pdserve.core.timeline import EventKind, Figure
from router.breaker import BreakerState
from router.registered_worker import RegisteredWorker
from router.request_record import RequestRecord

disable_created_metrics()  # type: ignore[no-untyped-call]  # a time series beside every counter that nobody reads

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCIES_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0,
)  # fmt: skip
_PAIR = ("prefill_worker", "decode_worker", "transport")


class Metrics:
    """``pdserve_…`` metrics in a registry of their own. `observe` and its neighbours are called by the service;
    ``state`` gives the metrics that are read at a scrape."""

    def __init__(self, state: Collector) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(state)

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
        self._ready = latency("kv_request_to_ready", "From a request's arrival at decode to its KV", *_PAIR)
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

    def first(self, record: RequestRecord, seconds: float) -> None:
        """Counted with `finished`."""

    def gap(self, seconds: float, index: int) -> None:
        """A token came ``seconds`` after the one before."""
        self._gaps.observe(seconds)

    def failed(self, error: PdserveError, arrival: Arrival | None) -> None:
        """A request ended with ``error``, or was refused."""
        self._failed(type(error).__name__).inc()

    def cancelled(self) -> None:
        """A request's client cancelled it."""
        self._cancelled.inc()

    def finished(self, completion: Completion, arrival: Arrival) -> None:
        """A request ended with an answer."""
        record, result = completion.record, completion.result
        timeline, mode = record.timeline, "" if result.mode is None else result.mode.value
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
            self._fetched(fetch, result.prefill_worker)

    def _fetched(self, fetch: PrefixFetch, worker_id: str) -> None:
        outcome = "failed" if fetch.failure else "complete" if fetch.tokens == fetch.tokens_wanted else "partial"
        self._fetches(fetch.source, worker_id, outcome).inc()
        if fetch.proof is not None:
            self._fetched_bytes(fetch.source, worker_id).inc(fetch.proof.kv_bytes)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _moved(self, completion: Completion, proof: TransferProof) -> None:
        result, timeline = completion.result, completion.record.timeline
        pair = (result.prefill_worker, result.decode_worker, proof.transport)
        sampled, verified = EventKind.TOKEN_1_SAMPLED, EventKind.KV_VERIFIED
        if timeline.has(sampled) and timeline.has(verified):
            exposed_s = timeline.gateway_time(verified) - timeline.gateway_time(sampled)
            self._exposed.of(*pair).observe(max(0.0, exposed_s))
        self._wire.of(*pair).observe(proof.wire_ms / 1e3)
        self._ready.of(*pair).observe(proof.request_to_ready_ms / 1e3)
        self._kv_bytes(*pair).inc(proof.kv_bytes)
        self._kv_retried(*pair).inc(proof.kv_bytes_retried)
        self._kv_blocks(*pair, "sent").inc(proof.blocks_received)
        self._kv_blocks(*pair, "skipped").inc(proof.blocks_skipped)


class ServiceState(Collector):
    """Metrics that are read at a scrape: queue, workers, blocks, caches and links. ``workers`` gives the registered
    workers, ``load`` the queued and running requests, ``ready`` whether the service takes requests, and ``about``
    its version and model."""

    def __init__(
        self,
        workers: Callable[[], Sequence[RegisteredWorker]],
        load: Callable[[], tuple[int, int]],
        ready: Callable[[], bool],
        about: dict[str, str],
    ) -> None:
        self._workers, self._load, self._ready, self._about = workers, load, ready, about

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        queued, running = self._load()
        yield InfoMetricFamily("pdserve", "Always 1", value=self._about)
        yield GaugeMetricFamily("pdserve_ready", "1 if requests are served", value=float(self._ready()))
        yield GaugeMetricFamily("pdserve_requests_queued", "Requests that wait for a worker", value=queued)
        yield GaugeMetricFamily("pdserve_requests_running", "Requests that are on workers", value=running)
        yield from self._of_workers()
        yield self._links()

    def _of_workers(self) -> Iterator[Metric]:
        workers = self._workers()
        labels = ("worker", "role")

        def gauge(name: str, what: str, value: Callable[[RegisteredWorker], float]) -> Metric:
            family = GaugeMetricFamily(f"pdserve_worker_{name}", what, labels=labels)
            for worker in workers:
                family.add_metric([worker.worker_id, worker.role.value], value(worker))
            return family

        def counter(name: str, what: str, value: Callable[[RegisteredWorker], float]) -> Metric:
            family = CounterMetricFamily(f"pdserve_worker_{name}", what, labels=labels)
            for worker in workers:
                family.add_metric([worker.worker_id, worker.role.value], value(worker))
            return family

        yield gauge("ready", "1 if the worker takes requests", lambda w: w.is_ready)
        yield gauge("blocks", "KV blocks of the worker's pool", lambda w: w.info.num_blocks)
        yield gauge("blocks_free", "KV blocks that are free or only cached", lambda w: w.load.free_blocks)
        yield gauge("blocks_cached", "KV blocks that prompts can find", lambda w: w.load.cached_blocks)
        yield gauge("blocks_stored", "Cold KV blocks kept outside of the pool", lambda w: w.load.stored_blocks)
        yield gauge("requests_running", "Requests in the engine's batch", lambda w: w.load.running)
        yield gauge("requests_waiting", "Requests waiting in the engine", lambda w: w.load.waiting)
        yield gauge(
            "tokens_outstanding",
            "Tokens still to be computed",
            lambda w: w.outstanding_tokens + w.others_tokens,
        )
        yield counter("preemptions", "Requests that lost their blocks to others", lambda w: w.load.preemptions)
        yield counter("engine_restarts", "Restarts of the worker's engine", lambda w: w.info.engine_restarts)
        yield counter(
            "prompt_tokens_looked_up", "Prompt tokens looked up in the prefix cache",
            lambda w: w.load.prompt_tokens_looked_up,
        )  # fmt: skip
        yield counter(
            "prompt_tokens_cached", "Prompt tokens that were found there", lambda w: w.load.prompt_tokens_cached
        )
        yield gauge(
            "paused", "1 if it gets no request but probes, because it failed the last ones",
            lambda w: w.breaker.state is not BreakerState.CLOSED,
        )  # fmt: skip
        failed = CounterMetricFamily(
            "pdserve_worker_requests_failed",
            "Requests that it failed, by error",
            labels=(*labels, "reason"),
        )
        for worker in workers:
            for reason, count in worker.breaker.total.items():
                failed.add_metric([worker.worker_id, worker.role.value, reason], count)
        yield failed
        refused = CounterMetricFamily(
            "pdserve_worker_kv_refused", "KV messages that it refused", labels=(*labels, "reason")
        )
        for worker in workers:
            for reason, count in worker.load.kv_refused.items():
                refused.add_metric([worker.worker_id, worker.role.value, reason], count)
        yield refused

    def _links(self) -> Metric:
        ceilings = GaugeMetricFamily(
            "pdserve_link_ceiling_bytes_per_second", "The best rate of a KV link so far", labels=_PAIR
        )
        for worker in self._workers():
            for (peer, _), link in worker.linked.items():
                ceilings.add_metric([worker.worker_id, peer, link.transport], link.ceiling_gbs * 1e9)
        return ceilings


class ScalingState(Collector):
    """How requests meet their objectives (without an objective there is no metric), and what the controller of roles
    and workers has done (None: there is no controller)."""

    def __init__(self, load: Callable[[], GatewayLoad], scaling: Callable[[], ScalingReport | None]) -> None:
        self._load, self._scaling = load, scaling

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        load = self._load()
        objectives = CounterMetricFamily(
            "pdserve_objective",
            "First tokens (ttft) and gaps after token 2 (itl) that met their objective, or did not",
            labels=("figure", "met"),
        )
        for figure, counts in (("ttft", load.ttft), ("itl", load.itl)):
            if counts:
                met, missed = within_objective(counts)
                objectives.add_metric([figure, "yes"], met)
                objectives.add_metric([figure, "no"], missed)
        yield objectives
        if (scaling := self._scaling()) is not None:
            actions = CounterMetricFamily(
                "pdserve_scaling_actions", "Actions of the controller, such as `flip prefill`", labels=("action",)
            )
            for kind, count in scaling.actions.items():
                actions.add_metric([kind], count)
            yield actions
