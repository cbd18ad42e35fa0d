"""The comparison of routing policies: its trace, its arithmetic on rows made by hand, and a load on a real service."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from experiments.experiment import Bench
from experiments.routing import Routing, RoutingOptions
from experiments.run_folder import FinishedCell, RequestRow, RunData
from experiments.workloads.trace import SkewedPrefixes, Trace
from pdserve.core.errors import InvalidRequest
from tests.experiments.quiet import holds, judged
from tests.external_engines.recorded_vllm import RecordedVLLM, running
from tests.local_cluster import local_cluster

SKEWED = SkewedPrefixes(prefixes=4, prefix_blocks=3, own_blocks=2, skew=1.0, output_len=8)


def test_prompts_share_beginnings_some_more_often_than_others() -> None:
    trace = SKEWED.trace(100.0, 20.0, seed=1)
    assert trace == SKEWED.trace(100.0, 20.0, seed=1)
    assert trace.requests != SKEWED.trace(100.0, 20.0, seed=2).requests
    assert 1800 < len(trace.requests) < 2200
    assert trace.times_s[-1] < 20.0
    assert sorted(trace.times_s) == trace.times_s
    beginnings = Counter(request.hash_ids[:3] for request in trace.requests)
    total = sum(1 / rank for rank in range(1, 5))
    for rank, (_, count) in enumerate(beginnings.most_common(), 1):
        assert count / len(trace.requests) == pytest.approx(1 / rank / total, abs=0.04)
    own = [hash_id for request in trace.requests for hash_id in request.hash_ids[3:]]
    assert len(set(own)) == len(own), "nobody shares them"
    assert {len(request.hash_ids) for request in trace.requests} == {4, 5}
    assert all(request.input_length == 512 * len(request.hash_ids) for request in trace.requests)


def test_the_same_requests_come_faster_at_a_higher_rate() -> None:
    slow, fast = SKEWED.trace(2.0, 20.0, seed=3), SKEWED.trace(4.0, 20.0, seed=3)
    assert [request.hash_ids for request in slow.requests] == [r.hash_ids for r in fast.requests[: len(slow.requests)]]
    assert slow.times_s[5] == pytest.approx(2 * fast.times_s[5], abs=1e-3)


def test_a_session_is_a_beginning() -> None:
    trace = SKEWED.trace(10.0, 5.0, seed=1, block_size=4)
    for conversation, request in zip(trace.conversations(99, 0, 100), trace.requests, strict=True):
        assert conversation.session_id == str(request.hash_ids[0])
        assert len(conversation.turns[0].token_ids) == 4 * len(request.hash_ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"prefixes": 0}, "prefixes: 0 is below 1"), ({"skew": -1.0}, "skew: -1 is not within 0 … 10")],
)
def test_values_out_of_range_are_named(changes: dict[str, Any], message: str) -> None:
    values = {"prefixes": 1, "prefix_blocks": 1, "own_blocks": 1, "skew": 0.0, "output_len": 1}
    with pytest.raises(InvalidRequest, match=message):
        SkewedPrefixes(**{**values, **changes}).trace(1.0, 1.0, 0)


def test_each_round_has_all_policies_in_the_opposite_order() -> None:
    options = RoutingOptions.choose({"policies": "round_robin,kv_aware", "rounds": 3, "num_blocks": 50})
    calibration, *cells = Routing(options).cells(None)
    assert calibration.name == "calibration"
    assert [cell.name for cell in cells] == [
        "round_robin/0", "kv_aware/0", "kv_aware/1", "round_robin/1", "round_robin/2", "kv_aware/2",
    ]  # fmt: skip
    assert cells[1].service is not None
    assert (cells[1].service["router.policy"], cells[1].service["engine.num_blocks"]) == ("kv_aware", 50)


def loaded(policy: str, number: int, ttfts_ms: list[float], cached: int) -> tuple[FinishedCell, list[RequestRow]]:
    """The load of one round, with requests of 100 tokens that were due 5 ms before they were sent."""
    name = f"{policy}/{number}"
    rows = [
        RequestRow(
            cell=name, arm=policy, repeat=number, index=index, scheduled_s=1.0, sent_s=1.005, ttft_ms=ttft_ms,
            prompt_tokens=100, prefill_cached_tokens=cached, prefill_worker=f"p{index % 2}",
        )
        for index, ttft_ms in enumerate(ttfts_ms)
    ]  # fmt: skip
    facts = {"workload": "a trace", "load": {"took_s": 1.0, "lag": {"behind": policy == "random"}}}
    return FinishedCell(name, {"policy": policy, "round": number}, 1.0, facts), rows


def summary_of(*loads: tuple[FinishedCell, list[RequestRow]]) -> dict[str, Any]:
    calibration = FinishedCell("calibration", {}, 1.0, {"rate": 4.0, "cold_ttft_ms": 250.0, "prompt_tokens": 100})
    rows = tuple(row for _, rows in loads for row in rows)
    return judged(Routing, RunData("routing", {}, {}, (calibration, *(cell for cell, _ in loads)), rows))[0]


def test_figures_of_each_policy_and_the_winner() -> None:
    summary = summary_of(
        loaded("round_robin", 0, [95.0, 195.0], 0),
        loaded("kv_aware", 0, [45.0, 45.0], 80),
        loaded("kv_aware", 1, [95.0, 95.0], 40),
        loaded("round_robin", 1, [95.0, 195.0, 195.0, 95.0], 20),
    )
    figures = {
        "winner": "kv_aware",
        "rate": 4.0,
        "failed": [],
        "policies.0.policy": "round_robin",
        "policies.0.n": 6,
        "policies.0.rounds": 2,
        "policies.0.ttft_ms.mean": 150.0,  # from when they were due
        "policies.0.ttft_p50_ms": 150.0,
        "policies.0.x_round_robin": 1.0,
        "policies.1.ttft_ms.mean": 75.0,
        "policies.1.x_round_robin": 2.0,
        "policies.1.hit_rate": 0.6,
        "policies.1.computed_tokens": 160,
        "policies.1.busiest_share": 0.5,
        "policies.1.behind": False,
    }
    holds(summary, figures)


def test_failed_requests_are_told_and_without_a_baseline_there_is_no_ratio() -> None:
    cell, rows = loaded("random", 0, [10.0, 20.0], 0)
    rows.append(RequestRow(cell=cell.cell, arm="random", repeat=0, index=9, error="WorkerLost: gone"))
    failed = ["random: 1 of 3 requests failed, first with WorkerLost: gone"]
    holds(summary_of((cell, rows)), {"failed": failed, "policies.0.x_round_robin": None, "policies.0.behind": True})


def test_a_load_on_a_real_service_finds_what_is_cached(tmp_path: Path) -> None:
    given = {"prefixes": 2, "prefix_blocks": 4, "block_size": 16, "workers": 2, "rate": 8.0, "duration_s": 3.0}
    experiment = Routing(RoutingOptions.choose({**given, "policies": "prefix_affinity"}))
    calibration, load = experiment.cells(None)[:2]
    settings = {"engine": {"block_size": 16, "num_blocks": 64}, "router": {"policy": "prefix_affinity"}}
    rows: list[RequestRow] = []
    with local_cluster(settings, prefill=2, decode=0) as cluster:
        bench = Bench(calibration, cluster.target, rows.append, lambda steps: None)
        bench.run(experiment.measure)
        assert bench.facts["rate"] == 8.0
        assert bench.facts["cold_ttft_ms"] > 0
        assert rows == []
        Bench(load, cluster.target, rows.append, lambda steps: None, earlier={"calibration": bench.facts}).run(
            experiment.measure
        )
    trace: Trace = experiment._trace(8.0)
    assert len(rows) == len(trace.requests)
    assert [row.error for row in rows] == [None] * len(rows)
    assert {row.arm for row in rows} == {"prefix_affinity"}
    assert sum(row.prefill_cached_tokens for row in rows) > 64 * len(rows) / 2, "most of them found their beginning"


@pytest.mark.ray
@pytest.mark.cluster
def test_the_command_starts_its_service_and_writes_a_report(
    tmp_path: Path, pdserve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    smallest = "--policies round_robin --rounds 1 --duration-s 1 --rate 8 --workers 2 --prefixes 2 --prefix-blocks 2"
    ran = pdserve(
        "experiment", "routing", *smallest.split(), "--block-size", "16", "--num-blocks", "64",
        "--output", str(tmp_path / "results"), "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    (policy,) = ran.json["policies"]
    assert (ran.json["winner"], policy["errors"], ran.json["failed"]) == ("round_robin", 0, [])
    assert policy["n"] > 0
    (folder,) = (tmp_path / "results" / "routing").iterdir()
    assert "round_robin" in (folder / "report.html").read_text()
    assert not list((tmp_path / "state").glob("pdserve/*.json")), "the service has ended"


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ({"cluster.prefill_urls": ["http://localhost:1"]}, {"router"}),
        ({"worker.engine": "vllm"}, {"router", "cluster", "engine"}),
    ],
)
def test_other_engines_are_compared_by_the_policies_that_need_no_announcements(
    settings: dict[str, Any], keys: set[str]
) -> None:
    experiment = Routing(RoutingOptions.choose({"policies": "round_robin,kv_aware", "rounds": 2}))
    experiment.deployment(lambda stage: None, settings=settings)
    cells = experiment.cells(None)
    assert [cell.name for cell in cells] == ["calibration", "round_robin/0", "round_robin/1"]
    assert all({key.partition(".")[0] for key in cell.service or {}} == keys for cell in cells)
    only = Routing(RoutingOptions.choose({"policies": "kv_aware"}))
    only.deployment(lambda stage: None, settings=settings)
    with pytest.raises(InvalidRequest, match="--policies: kv_aware need an engine that announces"):
        only.cells(None)


@pytest.mark.ray
@pytest.mark.cluster
def test_servers_that_run_keep_running_and_see_other_prompts_by_each_policy(
    tmp_path: Path, pdserve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    servers = [RecordedVLLM(f"engine-{number}") for number in range(2)]
    smallest = "--policies round_robin,session,kv_aware --rounds 1 --duration-s 2 --rate 6 --prefixes 2"
    with running(*servers):
        urls = [f"--prefill-url={server.url}" for server in servers]
        ran = pdserve(
            "experiment", "routing", *urls, *smallest.split(), "--prefix-blocks", "2", "--block-size", "16",
            "--output", str(tmp_path / "results"), "--json",
        )  # fmt: skip
    assert ran.code == 0, ran.err
    assert [(policy["policy"], policy["errors"]) for policy in ran.json["policies"]] == [
        ("round_robin", 0), ("session", 0),
    ]  # fmt: skip
    assert any(text.startswith("Left out") and "kv_aware" in text for text in ran.json["caveats"])
    asked = [tuple(each["prompt"][:16]) for server in servers for each in server.requests]
    assert all(server.requests for server in servers)
    assert len(set(asked)) > 4, "each policy has beginnings of its own"
    assert not list((tmp_path / "state").glob("pdserve/*.json")), "the gateways have ended"


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("plan", ("--prefill-url", "http://localhost:1", "--decode-url", "http://localhost:2"), "--prefill-url"),
        ("routing", ("--target", "localhost:1"), "--target"),
        ("plan", ("--set", "worker.engine=vllm"), "--set worker.engine"),
        ("primer", ("--target", "localhost:1"), "--target"),
        ("speculation", ("--target", "localhost:1"), "--target"),
    ],
)
def test_experiments_that_need_services_of_their_own_say_so_before_they_start_any(
    pdserve: Any, name: str, options: tuple[str, ...], told: str
) -> None:
    ran = pdserve("experiment", name, *options)
    assert ran.code == 2
    assert f"{told}: {name} " in ran.err
    assert "starting" not in ran.err
