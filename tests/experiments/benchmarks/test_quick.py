"""Every benchmark that `make` names runs in its smallest form, `--quick`. It ends well, and its last line has all
figures.

No test looks at what a figure is, except for counts of failures, which are 0 on every machine."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import psutil
import pytest

from experiments.benchmarks.bare_grpc import bare_server
from experiments.child_process import ChildFailed
from experiments.hosts import missing

ROOT = Path(__file__).resolve().parents[3]
MAKEFILE = (ROOT / "Makefile").read_text()
PROGRAM = re.compile(
    r"^(?:bench|validate)-(\w+):.*\n\t\$\(BIN\)/python -m (experiments\.benchmarks\.[^$\n]*?)( --vllm.*|\$\(if .*)?$",
    re.MULTILINE,
)
PROGRAMS = {target: program.split() for target, program, _ in PROGRAM.findall(MAKEFILE)}
"""The programs of the targets, with their arguments."""
TIMEOUT_S = 500.0

Keys = tuple[str, ...]


def rows(text: str) -> list[Keys]:
    """The figures whose keys, level by level, are one of those between the slashes of a line. ``*`` stands for any key,
    of which there is at least one."""
    return [keys for line in text.strip().splitlines()
            for keys in itertools.product(*(level.split() for level in line.split("/")))]  # fmt: skip


FIGURES = {
    "abuse": rows(
        """
        abuse / resets beyond-limits h2-resets / longest_gap_ms without_ms beside_ms
        abuse / http-lists / longest_gap_ms without_ms
        abuse / * / answers first_attempt wrong memory_mb memory_after_mb cpu_after_s
        fairness / alone beside / answers first_p50_ms first_p99_ms last_p50_ms last_p99_ms
        fairness / alone beside / waited_p50_ms waited_p99_ms computed_p50_ms computed_p99_ms
        fairness / ratio_first ratio_last refused retried queued
        burst / * / answered refused other refused_p50_ms refused_p99_ms
        burst / * / memory_before_mb memory_after_mb memory_growth
        """
    ),
    "api": rows(
        """
        ttft_p50_ms gateway_cpu_us_per_token / grpc http
        added_ttft_p50_ms cpu_ratio requests tokens
        added_ttft_mean_ms / mean lo hi n
        """
    ),
    "choices": rows(
        """
        right of
        settings / * / loss
        settings / * / factor factor_simulated / *
        """
    ),
    "codec": rows(
        """
        alone / lossless int8 / encode_gbs decode_gbs ratio
        served / * / ttft_decode_ms exposed_ms wire_mb ratio same_tokens logprob_error
        prompt_tokens
        """
    ),
    "dispatch": rows(
        """
        idle / pairs colocated_ttft_ms added_ttft_ms added_ttft_decode_ms cpu_ms_per_token
        streaming / streams cpu_ms_per_token
        decode_busy / idle_ttft_ms busy_ttft_ms ratio colocated_ratio
        """
    ),
    "engine": rows(
        """
        prefill decode mixed / * / ms x_transformers x_floor transformers_ms floor_ms
        ready_s peak_over_weights_and_kv rounds bare_product_gflops read_gbs
        """
    ),
    "flips": rows(
        """
        bears / 1P2D 2P1D / prompts_per_s ttft_ms outputs_per_s itl_ms
        ttft_ms itl_ms
        rates / outputs prompts
        off roles / requests errors retried
        off roles / windows / * / sent_per_s goodput_per_s
        """
    ),
    "gateways": rows(
        """
        gateways / s4 s128 / us_per_request_1 us_per_request_2 x
        gateways / resumed resume_p50_s resume_max_s
        """
    ),
    "overload": rows(
        """
        windows / * / sent_per_s goodput_per_s refused other_errors first_p50_ms first_p99_ms
        peak_goodput_per_s overload_sent_per_s overload_goodput_per_s goodput_ratio answered
        refusals / * / count within_50_ms
        gateway_mb / begin end
        gateway_grown_mb leaked_blocks
        left / queued running
        cancel_to_free_ms / queued prefilling transferring decoding / p50 max
        """
    ),
    "plan": rows(
        """
        steps_error blocks_equal
        median_error worst_error / ttft ttft_p99 itl itl_p99 tokens_per_s
        loads / * / requests failed ttft_ms ttft_simulated_ms ttft_error ttft_p99_ms ttft_p99_simulated_ms
        loads / * / ttft_p99_error itl_ms itl_simulated_ms itl_error itl_p99_ms itl_p99_simulated_ms itl_p99_error
        loads / * / tokens_per_s tokens_per_s_simulated tokens_per_s_error blocks blocks_simulated
        published / prompts rate published_rate rate_error closed_rate closed_rate_error
        published / long_share published_long_share egress_gbit published_egress_gbit
        loads / *pd / prefill_steps_error decode_steps_error
        loads / *colocated / both_steps_error
        """
    ),
    "router": rows(
        """
        router / s4 / requests_per_s echo_requests_per_s requests_per_s_by_wall echo_requests_per_s_by_wall
        router / s128 / messages_per_s echo_messages_per_s messages_per_s_by_wall echo_messages_per_s_by_wall
        router / s4 s128 / x_echo
        router / s4 s128 / cpu_us / gateway echo
        router / added_latency_p50_ms
        router / flat / workers waiting / few many ratio
        router / flat / workers waiting / us / few many
        """
    ),
    "sampling": rows(
        """
        cases / * / rows ms least_ms
        vocabulary rounds
        """
    ),
    "served": rows(
        """
        requests output_tokens
        ready_s / pdserve
        pdserve / 16 / ttft ttft_decode itl added_ttft added_ttft_decode
        """
    ),
    "strangers": rows(
        """
        strangers / connections ports kv_refused
        strangers / windows / without elsewhere with / * / requests ttft_p50_ms latency_p50_ms latency_p99_ms
        strangers / windows / without elsewhere with / * / cpu_ms_per_s opened
        strangers / ratios / ttft_p50_ms latency_p50_ms latency_p99_ms / without elsewhere
        """
    ),
    "transfer": rows(
        """
        ceiling / memcpy_gbs tcp_gbs
        ceilings / memcpy tcp / 1
        transports / shm tcp grpc_stream torch_dist / 1
        end_to_end end_to_end_tcp / 135m / 64 / gbs x_bare
        first_to_hundredth / shm tcp
        overlap / layer / prefill_ms prefill_alone_ms x_prefill exposed_ms exposed_share wire_ms export_ms
        overlap / layer / import_ms messages
        """
    ),
    "vllm": rows(
        """
        proxy / ratios / 16 / token_1 token_2 last_token
        proxy / tokens_per_s / pdserve proxy
        proxy / outputs equal_outputs
        connectors / exposed_ms / 16 / nixl_0 pdserve_1
        connectors / ratio / 16
        connectors / computed_by_decode / nixl_0 pdserve_1
        connectors / requests prompt_tokens
        kills / requests equal failed kills retried blocks_in_use
        meter / added_to_token_2_ms / plain_before meter plain_after / median lo hi n
        meter / intervals_meet
        idle / ratios / ttft itl
        idle / idle_cores / with without
        """
    ),
}
"""By target: numbers that the last line has."""
MAY_BE_MISSING = {
    "abuse": rows(  # the other server speaks no HTTP/1.1, and a burst may be answered whole
        """
        abuse / http-lists / beside_ms
        abuse / * / errors / *
        burst / * / refused_p50_ms refused_p99_ms
        """
    ),
    "api": rows("added_ttft_mean_ms / lo hi"),  # a quick run has too few pairs for an interval
    "flips": rows("off roles / actions / * / *"),  # the controller may have had no reason to act
    "overload": rows("refusals / * / p50_ms p90_ms p99_ms p100_ms"),  # None if there were none
    "transfer": rows(  # an extra, which need not be installed, and what a quick run does not install
        """
        transports / nixl / 1
        peers / nixl nixl_private nixl_tcp mooncake_tcp / 1
        """
    ),
}
FAILURES = {
    "abuse": rows(
        """
        abuse / * / wrong
        fairness / refused retried
        burst / * / other
        """
    ),
    "flips": rows("off roles / errors"),
    "overload": rows(
        """
        leaked_blocks
        left / queued running
        """
    ),
    "plan": rows("loads / * / failed"),
    "vllm": rows("kills / failed blocks_in_use"),
}
"""By target: those of its figures that are 0."""


# --- running a benchmark ---------------------------------------------------------------------------------------------


def run(program: Sequence[str], state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A quick run to its end. Its services have their state in ``state``, where nothing may be left."""
    environment = {**os.environ, "XDG_STATE_HOME": str(state)}
    process = subprocess.Popen(
        [sys.executable, "-m", *program, "--quick", *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # it ends its services
        out, err = process.communicate(timeout=90)
        pytest.fail(f"{program[0]} was not done within {TIMEOUT_S:.0f} s:\n{out[-2000:]}{err[-4000:]}")
    finally:
        process.kill()
    assert not list(state.glob("pdserve/*.json")), "a service is left"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def check(target: str, state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A quick run of a target's program, and its figures."""
    done = run(PROGRAMS[target], state, *arguments)
    said = f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert done.returncode == 0, said
    assert "Traceback" not in done.stderr, said  # of a process that it started
    *tables, last = done.stdout.splitlines()
    assert tables
    found = dict(leaves(json.loads(last)))
    declared, optional = FIGURES[target], MAY_BE_MISSING.get(target, [])
    for path in declared:
        assert any(fits(each, path) for each in found), f"{'.'.join(path)} is missing in {last}"
    for path, value in found.items():
        if isinstance(value, str):
            continue  # a model, a version, or why something is unavailable
        name = ".".join(path)
        if value is None:
            assert any(fits(path, each) for each in optional), f"{name} is None"
            continue
        assert any(fits(path, each) for each in (*declared, *optional)), f"{name} is not declared here"
        assert math.isfinite(value), f"{name} is {value}"
        if any(fits(path, each) for each in FAILURES.get(target, ())):
            assert value == 0, f"{name} is {value}:\n{said}"
    return done


def leaves(value: Any, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """The plain values of a JSON object, by their keys. Items of a list have their index."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*path, str(key)))
    else:
        yield path, value


def fits(path: Keys, pattern: Keys) -> bool:
    return len(path) == len(pattern) and all(map(fnmatchcase, path, pattern))


# --- the targets -----------------------------------------------------------------------------------------------------


def test_every_target_is_run_here() -> None:
    targets = re.findall(r"^(?:bench|validate)-(\w+):", MAKEFILE, re.MULTILINE)
    assert len(targets) > 10
    assert set(targets) == PROGRAMS.keys() == FIGURES.keys()


ENDLESS = """
import time
from experiments.benchmarks.frame import run

def measure():
    try:
        print("began", flush=True)
        time.sleep(600)
    finally:
        print("stopped its services", flush=True)

run(measure)
"""


@pytest.mark.parametrize("shell", ["", "trap '' INT;"], ids=["terminal", "background"])
def test_a_benchmark_that_is_ended_stops_its_services(shell: str) -> None:
    """Also one that a script has put in the background, which ignores Ctrl-C."""
    command = ["sh", "-c", f'{shell} exec "$0" -c "$1"', sys.executable, ENDLESS]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        try:
            assert program.stdout.readline() == "began\n"
            program.terminate()
            assert program.stdout.read() == "stopped its services\n"
            assert program.wait(30) != 0
        finally:
            program.kill()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", sorted(FIGURES.keys() - {"vllm"}))
@pytest.mark.ray
@pytest.mark.cluster
def test_a_benchmark_runs(tmp_path: Path, target: str) -> None:
    if target == "router" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("it needs a second core, and this process may use one only")
    if target == "choices" and (problem := missing()):
        pytest.skip(problem)
    done = check(target, tmp_path)
    if target == "served":
        assert "vLLM is not measured: no --vllm was given" in done.stderr


@pytest.mark.timeout(1200)
@pytest.mark.ray
@pytest.mark.cluster
def test_the_benchmark_around_vllm(tmp_path: Path) -> None:
    venv, proxy = os.environ.get("VLLM", ""), os.environ.get("VLLM_PROXY", "")
    if not (venv and proxy):
        pytest.skip("needs VLLM=VENV, and vLLM's toy_proxy_server.py as VLLM_PROXY, in the environment")
    check("vllm", tmp_path, "--vllm", venv, "--proxy", proxy, "--logs", str(tmp_path))


@pytest.mark.timeout(1200)
@pytest.mark.ray
@pytest.mark.cluster
def test_vllm_is_measured_as_well(tmp_path: Path) -> None:
    venv = os.environ.get("VLLM", "")
    if not venv:
        pytest.skip("needs a virtual environment with vLLM's CPU build: VLLM=VENV in the environment")
    done = run(PROGRAMS["served"], tmp_path, "--vllm", venv, "--logs", str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1])["ratios"]["16"].keys() == {
        "ttft", "ttft_decode", "itl", "added_ttft", "added_ttft_decode",
    }  # fmt: skip


# --- what a benchmark refuses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["", "no/such/folder"])
def test_a_wrong_environment_of_vllm_is_refused_at_once(tmp_path: Path, given: str) -> None:
    done = run(PROGRAMS["served"], tmp_path, "--vllm", given)
    assert done.returncode == 2
    assert f"--vllm: {str(Path(given))!r} has no bin/vllm; give the virtual environment" in done.stderr
    assert "make bench-served VLLM=VENV" in done.stderr


def test_a_server_that_ends_is_an_error() -> None:
    before = psutil.Process().children()
    with (
        pytest.raises(ChildFailed, match=r"the server of kind nothing ended \(exit status 1\)"),
        bare_server("nothing"),
    ):
        pass
    assert psutil.Process().children() == before
