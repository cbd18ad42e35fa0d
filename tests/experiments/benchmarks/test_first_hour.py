"""The first hour on a GPU, as far as it goes without one: its judgements, its limits, and some of its steps on CPUs."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from checkpoints.arithmetic import ModelArithmetic
from checkpoints.source import resolve_model
from experiments.benchmarks.first_hour.archive import results_rows
from experiments.benchmarks.first_hour.engine import Comparison, judge_benchmark
from experiments.benchmarks.first_hour.engine import judge as compare
from experiments.benchmarks.first_hour.run import STEPS, judge, main
from experiments.benchmarks.first_hour.service import GPUS, judge_memory
from experiments.benchmarks.first_hour.step import Findings, Options, Step, Verdict, last_line

ROOT = Path(__file__).resolve().parents[3]
MIB = 2**20


def step(name: str) -> Step:
    """A step of the catalogue."""
    return next(each for each in STEPS if each.name == name)


def options(folder: Path, device: str = "cpu", num_gpus: int = 0) -> Options:
    """Of a quick run."""
    return Options(device, num_gpus, 80 * 2**30, True, str(folder))


# --- judgements ------------------------------------------------------------------------------------------------------


def test_the_verdict_is_the_worst_that_applies() -> None:
    assert Findings().verdict is Verdict.PASSED
    below = Findings()
    below.aim("rate", 0.5, 0.8)
    below.aim("wait", 0.5, 0.8, at_most=True)
    assert below.below == ["rate is 0.5, and the goal is at least 0.8"]
    assert below.verdict is Verdict.BELOW
    assert below.figures == {"rate": 0.5, "wait": 0.5}
    failed = Findings(below=below.below)
    failed.require(False, "no tokens")
    assert failed.verdict is Verdict.FAILED


def benchmark_line(decode_share: float, prefill_share: float, arithmetic: ModelArithmetic) -> dict[str, Any]:
    """The JSON line of an engine with these shares, on a device of 100 TFLOP/s and 1000 GB/s."""
    decode_ms = arithmetic.decode(8, 1024).num_bytes / 1e12 / decode_share * 1e3
    prefill_ms = arithmetic.prefill(8192, 8192).flops / 1e14 / prefill_share * 1e3
    return {
        "bare_product_gflops": 1e5,
        "read_gbs": 1000.0,
        "ready_s": 1.0,
        "decode": {"b8_c1024": {"ms": decode_ms, "x_transformers": 1.0}},
        "prefill": {"8192": {"ms": prefill_ms, "x_transformers": 1.0}, "512": {"ms": 1e6, "x_transformers": 1.0}},
        "mixed": {},
    }


@pytest.mark.parametrize(("decode", "prefill", "missed"), [(0.8, 0.7, 0), (0.7, 0.7, 1), (0.7, 0.5, 2)])
def test_shares_of_the_roofline(tmp_path: Path, decode: float, prefill: float, missed: int) -> None:
    arithmetic = ModelArithmetic.of(resolve_model("dummy:8b").shape, "bfloat16")
    line = benchmark_line(decode, prefill, arithmetic)
    findings = judge_benchmark(line, arithmetic, has_goals=True)
    assert len(findings.below) == missed
    assert findings.figures["decode b8_c1024: share of bandwidth"] == pytest.approx(decode, rel=1e-3)
    assert findings.figures["prefill 8192: share of product rate"] == pytest.approx(prefill, rel=1e-3)
    assert judge_benchmark(line, arithmetic, has_goals=False).verdict is Verdict.PASSED


def test_defaults_are_held_against_their_alternatives() -> None:
    times = {
        "on": {"step of 1": 5.0, "step of 32": 10.0, "prefill of 8": 120.0},
        "off": {"step of 1": 5.0, "step of 32": 11.0, "prefill of 8": 100.0},
    }
    rows = [Comparison("run_ahead", "on", "off", "step", 1.02), Comparison("kernel", "on", "off", "prefill", 1.02)]
    findings = Findings()
    compare(findings, times, rows[:1], has_goals=True)
    assert findings.verdict is Verdict.PASSED
    assert findings.figures == {"run_ahead, step of 1": 1.0, "run_ahead, step of 32": 0.9091}
    compare(findings, times, rows, has_goals=True)
    assert findings.below == ["kernel, prefill of 8 is 1.2, and the goal is at most 1.02"]


@pytest.mark.parametrize(
    ("grown", "verdict"),
    [
        ({}, Verdict.PASSED),
        ({"worker": 65 * MIB}, Verdict.FAILED),
        ({GPUS: 65 * MIB}, Verdict.FAILED),
    ],
)
def test_memory_that_grows_in_the_second_half_is_a_failure(grown: dict[str, int], verdict: Verdict) -> None:
    base = {"worker": 1000 * MIB, GPUS: 1000 * MIB}
    start = {**base, "worker": 500 * MIB}  # a start may grow
    end = {name: used + grown.get(name, 0) for name, used in base.items()}
    findings = Findings()
    judge_memory(findings, [start] * 5 + [base] * 10 + [end] * 5)
    assert findings.verdict is verdict
    short = Findings()
    judge_memory(short, [start] * 5 + [base] * 10 + [end] * 5, judged=False)
    assert short.verdict is Verdict.PASSED
    assert short.notes == ["a quick run is too short to judge whether memory is flat"]


def test_a_program_that_fails_is_an_error() -> None:
    assert last_line("-c", "print('a table'); print('{\"read_gbs\": 1.0}')") == {"read_gbs": 1.0}
    with pytest.raises(RuntimeError, match="ended with status 3"):
        last_line("-c", "raise SystemExit(3)")


# --- runs ------------------------------------------------------------------------------------------------------------


def test_steps_are_skipped_with_the_reason(tmp_path: Path) -> None:
    assert judge(step("sanitizer"), options(tmp_path)).skipped == "needs a GPU"
    assert judge(step("links"), options(tmp_path, "cuda", 1)).skipped == "needs 2 GPUs, and torch sees 1"


def test_a_step_of_which_nothing_ran_is_a_failure(tmp_path: Path) -> None:
    """As on a machine whose GPUs torch does not see."""
    findings = judge(step("link-loss"), options(tmp_path, "cuda", 2))
    assert findings.verdict is Verdict.FAILED
    assert "no test ran: all were skipped" in findings.problems


@pytest.mark.parametrize(
    ("name", "limit_s"),
    [
        pytest.param("links", 1.0, id="two processes"),
        pytest.param("soak", 20.0, id="a service", marks=pytest.mark.soak),
    ],
)
def test_a_step_that_takes_too_long_is_ended_with_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, limit_s: float
) -> None:
    monkeypatch.setenv("PDSERVE_TEST_MARK", str(tmp_path))
    findings = judge(msgspec.structs.replace(step(name), quick_s=limit_s), options(tmp_path))
    assert findings.problems == [f"{name} did not answer within {limit_s:g} s"]
    left = [
        each
        for each in psutil.process_iter(["environ"])
        if (each.info["environ"] or {}).get("PDSERVE_TEST_MARK") == str(tmp_path)
    ]
    assert left == []


def test_a_machine_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("torch sees a GPU")
    assert main([]) == 2
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "torch sees no GPU" in said["error"]


def test_a_run_goes_on_after_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With ``--stop`` it does not. ``--from`` goes on where it stopped."""
    steps = [msgspec.structs.replace(step("environment"), quick_s=0.01), step("sanitizer")]
    command = ["--device", "cpu", "--quick", "--folder", str(tmp_path)]
    assert main([*command, "--stop"], steps) == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["stopped"] == "stopped after environment: environment did not answer within 0.01 s"
    assert list(report["steps"]) == ["environment"]
    assert main(command, steps) == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [each["verdict"] for each in report["steps"].values()] == ["failed", "skipped"]
    assert main([*command, "--from", "sanitizer"], steps) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [each["verdict"] for each in report["steps"].values()] == ["failed", "skipped"]


def test_options_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "kernels,colour"])
    assert "unknown steps colour; known: environment" in capsys.readouterr().err
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [each.name for each in STEPS]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(["environment"], id="short"),
        pytest.param(
            [
                "environment",
                "checkpoints",
                "handoff",
                "handoff-model",
                "bench",
                "budgets",
                "sampling",
                "speculation",
                "choices",
                "loss",
                "links",
            ],
            id="long",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_the_script_runs_on_cpus(tmp_path: Path, chosen: list[str]) -> None:
    """From end to end: in the long run with engines, pairs of processes and services."""
    command = [sys.executable, "scripts/gpu_check.py", "--device", "cpu", "--quick", "--only", ",".join(chosen)]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1180,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["counts"] == {"passed": len(chosen), "below goal": 0, "failed": 0, "skipped": 0}
    [path] = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = set(archive.getnames())
        sent = json.load(archive.extractfile("first-hour/report.json"))  # type: ignore[arg-type]
    assert {f"first-hour/{name}.{kind}" for name in chosen for kind in ("json", "log")} <= names
    assert sent == report
    rows = dict(results_rows(sent))
    assert rows[f"`environment`: {step('environment').shows}"].startswith("passed in ")
    assert f"torch {report['versions']['torch']}" in rows["versions"]
    assert rows["commit"].startswith(report["commit"])
    if "choices" in chosen:
        assert report["steps"]["links"]["figures"]["hand-offs, GB/s"] > 0
        assert report["steps"]["sampling"]["figures"]["sampled / greedy, step of 32"] > 0
        assert report["steps"]["choices"]["figures"]["run_ahead on / off, step of 4"] > 0
