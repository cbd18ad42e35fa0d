"""`pdserve experiment link-sweep --hosts namespaces`: two hosts with a cable that the kernel shapes, and nothing left
of them afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments import hosts
from experiments.link_sweep import LinkSweep, LinkSweepOptions
from experiments.run_folder import RunFolder
from experiments.runner import run_experiment
from tests.experiments.quiet import Quiet

pytestmark = pytest.mark.cluster

GIVEN = {
    "model": "tiny", "prompt_len": 200, "chunk_tokens": 64, "pairs": 2, "pairs_s": 0, "gbps": "0.02,0.2",
    "overlaps": "layer",
    "round_trips_ms": "", "round_trip_gbps": 0.2, "hosts": "namespaces",
}  # fmt: skip


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Skips where hosts cannot be made; afterwards nothing of them may be left."""
    if problem := hosts.missing():
        pytest.skip(problem)
    before = left_over()
    yield
    assert left_over() == before


def left_over() -> set[str]:
    """Names of namespaces and devices that this project makes."""
    listed = hosts.tool("ip", "netns", "list") + hosts.tool("ip", "-brief", "link", "show")
    return {line.split()[0].partition("@")[0] for line in listed.splitlines() if line.startswith(hosts.PREFIX)}


def test_a_sweep_between_two_hosts(tmp_path: Path) -> None:
    options = LinkSweepOptions.choose(GIVEN)
    folder = RunFolder.create(tmp_path, "link-sweep", options.model_dump(mode="json"))
    outcome = run_experiment(LinkSweep(options), folder, Quiet(), settings={"engine.kv_memory_mb": 64})
    assert outcome.failures == []
    assert outcome.summary is not None
    slow, fast = outcome.summary["cells"]
    assert {cell["shaping"] for cell in (slow, fast)} == {"kernel (tc)"}
    assert slow["kv_bytes"] == slow["kv_bytes_expected"] > 0
    least_ms = slow["kv_bytes"] / slow["n"] / (0.02e9 / 8) * 1e3
    # Not the exposed time: on a slow machine, prefill hides most of the transfer.
    assert slow["wire_ms"] > 0.5 * least_ms, "half of it may be in the shaper's bucket"
    (link,) = folder.environment["service"]["links"]
    assert link["transport"] == "tcp"


def test_nothing_is_left_after_ctrl_c(tmp_path: Path) -> None:
    options = [f"--{key.replace('_', '-')}={value}" for key, value in {**GIVEN, "pairs": 1000}.items()]
    with subprocess.Popen(
        [sys.executable, "-m", "ops.command", "experiment", "link-sweep", *options, f"--output={tmp_path}"],
        env=dict(os.environ),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    ) as process:
        try:
            deadline_s = time.monotonic() + 120
            while not any(path.stat().st_size for path in tmp_path.glob("link-sweep/*/requests.jsonl")):
                assert process.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
            assert any(name.startswith(f"{hosts.PREFIX}{process.pid:x}") for name in left_over())
            process.send_signal(signal.SIGINT)
            assert process.wait(60) in (130, 1)
        finally:
            process.kill()


def test_the_next_run_removes_what_a_killed_one_left() -> None:
    made = "import time; from experiments.hosts import TwoHosts; TwoHosts(); print('made', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", made], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "made\n"
        finally:
            process.kill()
    assert any(name.startswith(f"{hosts.PREFIX}{process.pid:x}") for name in left_over())
    hosts.sweep()
