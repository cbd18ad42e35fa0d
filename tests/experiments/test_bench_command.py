"""`pdserve bench` against a scripted service and a real one; what it prints is what a user sees."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from typing import Any

import pytest

from tests.command_line import PDSERVE
from tests.pdserve.scripted_service import ScriptedService


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["bench", "--rate", "1", "--concurrency", "2"], 2, "error: concurrency: "),
        (["bench", "--slo", "speed=1"], 2, "error: slo: "),
        (["bench", "--timeout", "-1"], 2, "error: timeout: "),
        (["bench", "--input-len", "2048"], 2, "error: input_len: "),
        (["bench", "--input-len", "2000", "--output-len", "100"], 2, "error: output_len: "),
        (["bench", "--input-len", "10", "--output-len", "5000000000"], 2, "error: output_len: "),
        (["bench", "--input-len", "1000", "--output-len", "100"], 1, "error: input_len and output_len: "),
    ],
)
def test_mistakes_are_one_line(
    service: ScriptedService, pdserve: Any, arguments: list[str], code: int, message: str
) -> None:
    ran = pdserve(*arguments, "--target", service.target)
    assert ran.code == code
    assert message in ran.err
    assert ran.err.count("\n") == 1
    assert "Traceback" not in ran.err
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


def test_ctrl_c_in_bench_reports_what_had_finished(service: ScriptedService) -> None:
    with interrupted_bench(service) as bench:
        service.servicer.free_blocks += 2
        out, err = bench.communicate(timeout=60)
    assert bench.returncode == 130
    assert "Traceback" not in err
    partial = re.search(r"partial +interrupted when (\d+) of 100000 requests had finished", out)
    assert partial is not None
    assert 16 <= int(partial[1]) <= len(service.servicer.requests)
    for word in ("TTFT_DECODE", "throughput", "failures    none", "leaked      0 blocks"):
        assert word in out


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
