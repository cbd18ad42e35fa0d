"""Metrics, as Prometheus' own parser reads them."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.core.errors import InvalidRequest
from pdserve.pb import inference_pb2 as pb
from tests.gateway.conftest import Service, StartService

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(service: Service) -> Samples:
    text = service.gateway._metrics.text().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[(f"pdserve_{name}", frozenset(labels.items()))]


async def test_a_request_in_all_metrics(start_service: StartService) -> None:
    service = await start_service("p0", "d0")
    service.fleet["p0"].cached_tokens = 2
    _, completion = await service.generate(
        token_ids=pb.TokenIds(ids=[5] * 9), mode=pb.MODE_PD, sampling=pb.Sampling(max_tokens=4, ignore_eos=True)
    )
    samples = scrape(service)
    assert value(samples, "requests_finished_total", mode="pd", finish_reason="length") == 1
    assert value(samples, "prompt_tokens_total") == 9
    assert value(samples, "prompt_tokens_cached_total") == 2
    assert value(samples, "output_tokens_total") == 4
    assert value(samples, "inter_token_seconds_count") == 3
    for figure in ("ttft", "ttft_decode"):
        assert value(samples, f"{figure}_seconds_count", mode="pd") == 1
        stages_s = sum(
            found for (name, labels), found in samples.items()
            if name == "pdserve_stage_seconds_sum" and ("figure", figure) in labels
        )  # fmt: skip
        assert stages_s == pytest.approx(value(samples, f"{figure}_seconds_sum", mode="pd"), abs=1e-4)
    pair = {"prefill_worker": "p0", "decode_worker": "d0", "transport": "loopback"}
    assert value(samples, "kv_bytes_total", **pair) == completion.transfer.kv_bytes > 0
    assert value(samples, "kv_exposed_seconds_count", **pair) == 1
    assert value(samples, "kv_exposed_seconds_sum", **pair) == pytest.approx(completion.transfer.exposed_ms / 1e3)
    assert value(samples, "kv_blocks_total", **pair, what="sent") == completion.transfer.blocks_sent


async def test_errors_refusals_and_cancels(start_service: StartService) -> None:
    service = await start_service("p0", "d0")
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
    samples = scrape(service)
    assert value(samples, "requests_failed_total", reason=InvalidRequest.__name__) == 1
    assert value(samples, "requests_failed_total", reason="NotReady") == 1
    assert value(samples, "requests_cancelled_total") == 1
    assert value(samples, "ready") == 0


async def test_workers_and_links(start_service: StartService) -> None:
    service = await start_service("d0", "d1", "p0")
    await service.until(lambda: service.peers_of("p0") == {"d0", "d1"})
    samples = scrape(service)
    for worker, role in (("p0", "prefill"), ("d0", "decode"), ("d1", "decode")):
        assert value(samples, "worker_ready", worker=worker, role=role) == 1
        assert value(samples, "worker_blocks", worker=worker, role=role) == 64
    link = {"prefill_worker": "p0", "decode_worker": "d1", "transport": "loopback"}
    assert value(samples, "link_ceiling_bytes_per_second", **link) == 0
    assert samples[("pdserve_info", frozenset({"version": "1.2.3", "model": "fake"}.items()))] == 1
