"""`pdserve bench` against a scripted service and a real one; what it prints is what a user sees."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ops.launch.state import ServiceState, last_report
from tests.command_line import PDSERVE
from tests.local_cluster import LocalCluster
from tests.pdserve.scripted_service import ScriptedService


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--rate", "1", "--concurrency", "2"], 2, "error: concurrency: "),
        (["--input-len", "2048"], 2, "error: input_len: "),
        (["--input-len", "2000", "--output-len", "100"], 2, "error: output_len: "),
        (["--input-len", "1000", "--output-len", "100"], 1, "error: input_len and output_len: "),
        (["--goodput", "ttft:200", "--slo", "ttft=1"], 2, "error: slo: is the same as --goodput"),
        (["--goodput", "ttft=200"], 2, "error: slo: "),
        (["ttft:200"], 2, "error: ttft:200: bench takes options only"),
        (["--ramp", "3"], 2, "error: ramp: '3' is not of the form A:B"),
        (["--dataset", "trace", "--dataset-path", "/no/such"], 2, "error: dataset_path: /no/such cannot be"),
        (["--dataset", "mooncake-conv"], 2, "scale the outputs by 0.2"),
    ],
)
def test_mistakes_are_one_line(
    service: ScriptedService, pdserve: Any, arguments: list[str], code: int, message: str
) -> None:
    ran = pdserve("bench", *arguments, "--target", service.target)
    assert ran.code == code
    assert message in ran.err
    assert ran.err.count("\n") == 1
    assert not ran.out


def test_bench_counts_refusals(service: ScriptedService, pdserve: Any) -> None:
    service.servicer.refuse_ms = "250"
    options = ("--target", service.target, "--requests", "4", "--input-len", "20", "--output-len", "3")
    ran = pdserve("bench", *options)
    assert ran.code == 1
    assert "refused     4 requests; retry after 250 ms (median)" in ran.out
    ran = pdserve("bench", *options, "--json")
    assert ran.json["refused"] == {"requests": 4, "retry_after_ms": 250}


def test_bench_reports_even_if_the_service_goes_before_its_blocks_are_counted(
    service: ScriptedService, pdserve: Any
) -> None:
    service.servicer.status_after_requests = False
    ran = pdserve("bench", "--target", service.target, "--requests", "4", "--input-len", "20", "--output-len", "3")
    assert ran.code == 1
    assert "KV blocks could not be counted: the service at" in ran.err
    assert "TTFT_DECODE" in ran.out
    assert "leaked      unknown" in ran.out


def interrupted_bench(service: ScriptedService, *options: str) -> subprocess.Popen[str]:
    """A bench of very many requests that got Ctrl-C when a few had finished, and has said so."""
    bench = subprocess.Popen(
        [*PDSERVE, "bench", "--target", service.target, "--requests", "100000", "--concurrency", "4", "--input-len",
         "20", "--output-len", "3", *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline_s = time.monotonic() + 60
    while len(service.servicer.requests) < 20:
        assert bench.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    service.servicer.free_blocks -= 2  # to be waited for
    bench.send_signal(signal.SIGINT)
    assert bench.stderr is not None
    assert any("interrupted" in line for line in iter(bench.stderr.readline, ""))
    return bench


def test_ctrl_c_in_bench_reports_and_keeps_what_had_finished(service: ScriptedService, tmp_path: Path) -> None:
    with interrupted_bench(service, "--output", str(tmp_path)) as bench:
        service.servicer.free_blocks += 2
        out, err = bench.communicate(timeout=60)
    assert bench.returncode == 130
    assert "Traceback" not in err
    partial = re.search(r"partial +interrupted when (\d+) of 100000 requests had finished", out)
    assert partial is not None
    assert 16 <= int(partial[1]) <= len(service.servicer.requests)
    for word in ("TTFT_DECODE", "throughput", "failures    none", "leaked      0 blocks"):
        assert word in out
    (folder,) = (tmp_path / "bench").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["partial"]
    assert summary["arms"]["auto"]["requests"] == int(partial[1])
    assert len((folder / "requests.jsonl").read_text().splitlines()) == int(partial[1])
    assert "was interrupted" in (folder / "report.html").read_text()


def test_a_second_ctrl_c_waits_for_nothing(service: ScriptedService) -> None:
    with interrupted_bench(service, "--json") as bench:
        bench.send_signal(signal.SIGINT)
        out, err = bench.communicate(timeout=60)
    assert bench.returncode == 130
    assert "Traceback" not in err
    result = json.loads(out)
    assert (result["partial"], result["planned"], result["failed"]) == (True, 100_000, 0)
    assert 16 <= result["requests"] <= len(service.servicer.requests)
    assert result["ttft_ms"]["count"] == result["requests"]
    assert result["leaked_blocks"] is None  # not waited for


def test_ctrl_c_ends_the_comparison_of_both_modes(service: ScriptedService) -> None:
    with interrupted_bench(service, "--json", "--mode", "both") as bench:
        service.servicer.free_blocks += 2
        out, err = bench.communicate(timeout=60)
    assert bench.returncode == 130
    assert "Traceback" not in err
    result = json.loads(out)
    assert (result["partial"], result["leaked_blocks"]) == (True, 0)
    assert result["arms"]["pd"]["requests"] >= 16
    assert result["arms"]["colocated"]["requests"] == 0


def test_bench(service: ScriptedService, pdserve: Any) -> None:
    options = ("--target", service.target, "--requests", "8", "--input-len", "20", "--output-len", "3")
    ran = pdserve("bench", *options, "--mode", "both", "--slo", "ttft=2000")
    assert ran.code == 0, ran.err
    for word in ("TTFT_DECODE", "TPOT", "goodput", "100.0 %", "added", "leaked      0 blocks"):
        assert word in ran.out
    ran = pdserve("bench", *options, "--rate", "200", "--json")
    assert ran.code == 0, ran.err
    assert (ran.json["requests"], ran.json["failed"], ran.json["leaked_blocks"]) == (8, 0, 0)
    assert ran.json["ttft_ms"]["p50"] > 4


def test_percentiles_and_a_rate_show(service: ScriptedService, pdserve: Any) -> None:
    options = ("--target", service.target, "--input-len", "10:20", "--output-len", "1:3")
    ran = pdserve("bench", *options, "--rate", "50", "--burstiness", "0.5", "--duration", "1", "--percentiles", "99.9")
    assert ran.code == 0, ran.err
    for word in ("p99.9", "std", "E2E", "lag  ", "10 to 20 tokens, uniform", "failures    none"):
        assert word in ran.out
    assert "p50  " not in ran.out.splitlines()[0]
    lengths = {len(request.token_ids.ids) for request in service.servicer.requests}
    assert lengths <= set(range(10, 21))
    assert len(lengths) > 3


def test_both_modes_under_load_have_no_added_figure(service: ScriptedService, pdserve: Any) -> None:
    options = ("--target", service.target, "--requests", "6", "--input-len", "20", "--output-len", "3")
    ran = pdserve("bench", *options, "--mode", "both", "--concurrency", "3", "--slo", "e2e=2000")
    assert ran.code == 0, ran.err
    assert "added" not in ran.out
    assert ran.out.count("goodput") == 2
    assert re.search(r"TTFT +pd .*\n +colocated ", ran.out)
    assert "pd (alone on the service)" in ran.out


@pytest.mark.parametrize("goodput", [("ttft:2000", "e2el:3000"), ("ttft:2000,e2el:3000",), ("ttft:2000 e2el:3000",)])
def test_the_option_names_of_vllm(
    service: ScriptedService, pdserve: Any, goodput: tuple[str, ...], tmp_path: Path
) -> None:
    ran = pdserve(
        *("bench", "--target", service.target, "--num-prompts", "5", "--request-rate", "inf", "--dataset-name"),
        *("random", "--random-input-len", "30", "--random-output-len", "2", "--random-prefix-len", "16"),
        *("--save-result", "--result-dir", str(tmp_path), "--goodput", *goodput, "--json"),
    )
    assert ran.code == 0, ran.err
    assert (ran.json["requests"], ran.json["slo_ms"]) == (5, {"ttft": 2000, "e2e": 3000})
    requests = service.servicer.requests
    assert {len(request.token_ids.ids) for request in requests} == {46}
    assert len({tuple(request.token_ids.ids[:16]) for request in requests}) == 1
    assert len({request.salt for request in requests}) == 1
    (folder,) = (tmp_path / "bench").iterdir()
    assert last_report().resolve() == (folder / "report.html").resolve()


def test_prompts_of_text_measure_the_characters_per_token(
    service: ScriptedService, pdserve: Any, tmp_path: Path
) -> None:
    path = tmp_path / "text"
    path.write_text("one line\nand another\n" * 200)
    ran = pdserve(
        *("bench", "--target", service.target, "--dataset", "sonnet", "--dataset-path", str(path), "--input-len", "50"),
        *("--output-len", "2", "--requests", "4"),
    )
    assert ran.code == 0, ran.err
    assert "1.00 characters per token" in ran.out, "the scripted service counts bytes"
    assert [len(request.text) for request in service.servicer.requests[1:]] == [50] * 4


def test_a_trace_is_sent_at_its_own_times(service: ScriptedService, pdserve: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 200 * i, "input_length": 600 + i, "output_length": 2, "hash_ids": [1, 9 + i]} for i in range(4)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    options = ("bench", "--target", service.target, "--dataset", "trace", "--dataset-path", str(path), "--json")
    ran = pdserve(*options, "--speed", "2", "--requests", "3")
    assert ran.code == 0, ran.err
    assert ran.json["requests"] == 3
    assert ran.json["duration_s"] > 0.2
    starts = {tuple(request.token_ids.ids[:512]) for request in service.servicer.requests}
    assert len(starts) == 1
    assert [len(request.token_ids.ids) for request in service.servicer.requests] == [600, 601, 602]
    assert "requests: the trace has 4" in pdserve(*options, "--requests", "5").err


def test_pairs_know_what_other_processes_used(
    service: ScriptedService, pdserve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("bench", "--target", service.target, "--mode", "both", "--requests", "6", "--input-len", "20", "--json")
    unknown = pdserve(*options, "--output", str(tmp_path / "unknown"))
    assert unknown.json["added_ms"]["ttft"]["disturbed"] is None, "which processes are the service's is not known"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    port = int(service.target.rpartition(":")[2])
    ServiceState(os.getpid(), psutil.Process().create_time(), port, "", target=service.target).claim()
    known = pdserve(*options, "--output", str(tmp_path / "known"))
    assert known.json["added_ms"]["ttft"]["disturbed"] is not None
    (path,) = (tmp_path / "known").glob("bench/*/requests.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["others_cpu_s"] >= 0 for row in rows] == [True] * 12
    loads = pdserve(*options, "--concurrency", "2", "--output", str(tmp_path / "loads"))
    assert loads.code == 0, loads.err
    (path,) = (tmp_path / "loads").glob("bench/*/requests.jsonl")
    assert {json.loads(line)["others_cpu_s"] for line in path.read_text().splitlines()} == {None}


def test_a_real_service_is_compared_with_itself(pdserve: Any, tcp_service: LocalCluster) -> None:
    """A real service: pairs leave no blocks behind, and both figures of the comparison are there."""
    options = ("bench", "--target", tcp_service.target, "--input-len", "40:60", "--output-len", "4", "--json")
    pairs = pdserve(*options, "--requests", "3", "--mode", "both", "--warmup", "1")
    assert pairs.code == 0, pairs.err
    assert (pairs.json["requests"], pairs.json["leaked_blocks"]) == (6, 0)
    assert None not in pairs.json["added_ms"].values()
    arms = pdserve(*options, "--requests", "6", "--mode", "both", "--concurrency", "3", "--slo", "ttft=60s")
    assert arms.code == 0, arms.err
    assert [arm["goodput"]["share"] for arm in arms.json["arms"].values()] == [1.0, 1.0]
    talk = pdserve(*options, "--requests", "2", "--turns", "3", "--pause", "0.05", "--rate", "20")
    assert talk.code == 0, talk.err
    assert (talk.json["requests"], talk.json["planned"]) == (6, 6)
