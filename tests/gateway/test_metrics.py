"""Metrics, as Prometheus' own parser reads them."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import LatencyHistogram
from pdserve.core.errors import InvalidRequest
from pdserve.pb import inference_pb2 as pb
from tests.gateway.conftest import Service, StartService

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


BOUNDS = (0.0001, 0.00025, 0.5, 1.0, 2.5, 60.0)
LABELS = ("mode", "stage")
SERIES = (("pd", "prefill"), ("colocated", 'a "quoted" one'))


def samples(registry: CollectorRegistry) -> Samples:
    """What a scrape gives."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def scrape(service: Service) -> Samples:
    return samples(service.gateway._metrics._registry)


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[(f"pdserve_{name}", frozenset(labels.items()))]


async def test_a_request_in_all_metrics(service: Service) -> None:
    service.fleet["p0"].cached_tokens = 2
    _, completion = await service.generate(
        token_ids=pb.TokenIds(ids=[5] * 9), mode=pb.MODE_PD, sampling=pb.Sampling(max_tokens=4, ignore_eos=True)
    )
    found = scrape(service)
    assert value(found, "requests_finished_total", mode="pd", finish_reason="length") == 1
    assert value(found, "prompt_tokens_total") == 9
    assert value(found, "prompt_tokens_cached_total") == 2
    assert value(found, "output_tokens_total") == 4
    assert value(found, "inter_token_seconds_count") == 3
    for figure in ("ttft", "ttft_decode"):
        assert value(found, f"{figure}_seconds_count", mode="pd") == 1
        stages_s = sum(
            each for (name, labels), each in found.items()
            if name == "pdserve_stage_seconds_sum" and ("figure", figure) in labels
        )  # fmt: skip
        assert stages_s == pytest.approx(value(found, f"{figure}_seconds_sum", mode="pd"), abs=1e-4)
    pair = {"prefill_worker": "p0", "decode_worker": "d0", "transport": "loopback"}
    assert value(found, "kv_bytes_total", **pair) == completion.transfer.kv_bytes > 0
    assert value(found, "kv_exposed_seconds_count", **pair) == 1
    assert value(found, "kv_exposed_seconds_sum", **pair) == pytest.approx(completion.transfer.exposed_ms / 1e3)
    assert value(found, "kv_blocks_total", **pair, what="sent") == completion.transfer.blocks_sent


async def test_errors_refusals_and_cancels(service: Service) -> None:
    with pytest.raises(Exception, match="top_p"):
        await service.generate(token_ids=pb.TokenIds(ids=[5]), sampling=pb.Sampling(top_p=2.0))
    service.fleet["p0"].hangs.add("prefill")
    call = service.stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5])), timeout=10)
    await service.until(lambda: service.gateway.router.running == 1)
    assert value(scrape(service), "requests_running") == 1
    call.cancel()
    await service.until(lambda: service.is_idle)
    service.gateway.drain()
    with pytest.raises(Exception, match="stopped"):
        await service.generate(token_ids=pb.TokenIds(ids=[5]))
    found = scrape(service)
    assert value(found, "requests_failed_total", reason=InvalidRequest.__name__) == 1
    assert value(found, "requests_failed_total", reason="NotReady") == 1
    assert value(found, "requests_cancelled_total") == 1
    assert value(found, "ready") == 0


async def test_workers_and_links(start_service: StartService) -> None:
    service = await start_service("d0", "d1", "p0")
    await service.until(lambda: service.peers_of("p0") == {"d0", "d1"})
    found = scrape(service)
    for worker, role in (("p0", "prefill"), ("d0", "decode"), ("d1", "decode")):
        assert value(found, "worker_ready", worker=worker, role=role) == 1
        assert value(found, "worker_blocks", worker=worker, role=role) == 64
    link = {"prefill_worker": "p0", "decode_worker": "d1", "transport": "loopback"}
    assert value(found, "link_ceiling_bytes_per_second", **link) == 0
    assert found[("pdserve_info", frozenset({"version": "1.2.3", "model": "fake"}.items()))] == 1


async def test_a_worker_whose_process_was_replaced(start_service: StartService) -> None:
    service = await start_service("d0", "p0")
    of_worker = {"worker": "p0", "role": "prefill"}
    assert value(scrape(service), "worker_restarts_total", **of_worker) == 0
    service.make("p0", life="another process", epoch="another")
    await service.beat("p0")
    assert value(scrape(service), "worker_restarts_total", **of_worker) == 1
    assert value(scrape(service), "worker_restarts_total", worker="d0", role="decode") == 0


@pytest.mark.parametrize("seed", range(5))
def test_it_counts_as_the_library_does(seed: int) -> None:
    draw = random.Random(seed)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    own = LatencyHistogram("wait_seconds", "Time of waiting", LABELS, BOUNDS, ours)
    reference = Histogram("wait_seconds", "Time of waiting", LABELS, registry=theirs, buckets=BOUNDS)
    values = [*BOUNDS, 0.0, 1e9, *(draw.choice(BOUNDS) * draw.uniform(0.0, 3.0) for _ in range(500))]
    for value in values:
        labels = draw.choice(SERIES)
        own.of(*labels).observe(value)
        reference.labels(*labels).observe(value)
    expected = samples(theirs)
    assert samples(ours) == pytest.approx(expected, rel=1e-12)
    assert sum(value for (name, _), value in expected.items() if name == "wait_seconds_count") == len(values)


def test_one_without_labels_is_there_before_its_first_value() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    own = LatencyHistogram("gap_seconds", "Time between two", (), BOUNDS, ours)
    reference = Histogram("gap_seconds", "Time between two", registry=theirs, buckets=BOUNDS)
    assert samples(ours) == samples(theirs)
    for value in BOUNDS:
        own.of().observe(value)
        reference.observe(value)
    assert samples(ours) == pytest.approx(samples(theirs))
