"""The controller of roles on a service of Ray: it moves workers to the role that is short, shows what it did, and costs
no request anything."""

from __future__ import annotations

import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from pdserve.client.status import ServiceStatus
from tests.e2e.conftest import Cli, wait_for
from tests.load import Load
from tests.local_cluster import free_port, leaked_blocks
from tests.made_up_profile import write_profile

pytestmark = [pytest.mark.ray, pytest.mark.cluster, pytest.mark.timeout(300)]
# No first token can meet the objective of TTFT, every gap meets that of ITL. So a role is short as soon as requests
# wait for its workers, however fast this machine is.
CONFIG = """
engine: {block_size: 16, num_blocks: 256, max_num_seqs: 4, prefix_caching: false}
scaling: {controller: roles, ttft_ms: 1, itl_ms: 60000, interval_s: 0.5, hold_s: 2}
"""


def acted(target: str, actions: int) -> ServiceStatus:
    """The status once the controller has done so much."""
    return wait_for(target, "acted", lambda s: s.scaling is not None and sum(s.scaling.actions.values()) >= actions)


def test_workers_follow_the_load_and_nothing_is_lost(cli: Cli, tmp_path: Path) -> None:
    port, http_port = free_port(), free_port()
    target = f"127.0.0.1:{port}"
    config = tmp_path / "pdserve.yaml"
    config.write_text(f"gateway: {{http_port: {http_port}}}\n{CONFIG}")
    arguments = (
        "--model",
        "tiny",
        "--set",
        "model.dtype=float32",
        "--prefill",
        "1",
        "--decode",
        "2",
        "--oversubscribe",
    )
    cli.done("up", "-c", str(config), *arguments, "--port", str(port), "--detach")
    try:
        long = [[(number + 31 * i) % 4000 + 1 for i in range(600)] for number in range(4)]
        with Load(target, long, clients=4, max_tokens=2, mode="pd") as prompts:
            status = acted(target, 1)
        scaling = status.scaling
        assert scaling is not None
        assert scaling.last_action in ("decode-0 becomes a prefill worker", "decode-1 becomes a prefill worker")
        assert "of first tokens met the objective of TTFT, and prefill workers are busy" in scaling.reason
        assert Counter(worker.role for worker in status.workers) == {"prefill": 2, "decode": 1}
        with Load(target, [prompt[:16] for prompt in long], clients=12, max_tokens=200, mode="pd") as outputs:
            status = acted(target, 2)
        scaling = status.scaling
        assert scaling is not None
        assert scaling.last_action.endswith("becomes a decode worker")
        assert "requests wait for room on decode workers" in scaling.reason
        assert scaling.actions == {"flip prefill": 1, "flip decode": 1}
        for load in (prompts, outputs):
            assert load.check() == 1
        status = wait_for(target, "blocks back", lambda status: not leaked_blocks(status))
        born = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
        assert {worker.worker_id: worker.role for worker in status.workers} == born
        assert "controller of roles: 2 actions, the last " in cli.run("status", "--target", target).stdout
        with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/metrics", timeout=30) as answer:
            text = str(answer.read(), "utf-8")
        assert 'pdserve_scaling_actions_total{action="flip prefill"} 1.0' in text
        assert 'pdserve_objective_total{figure="ttft",met="yes"} 0.0' in text
        assert 'pdserve_objective_total{figure="itl",met="no"} 0.0' in text
        assert acted(cli.noted(port).operator, 2), "operators see it, too"
    finally:
        cli.run("down", "--target", target)


def test_a_forecast_of_no_gain_moves_no_worker(cli: Cli, tmp_path: Path) -> None:
    """No number of workers makes first tokens come within 1 ms."""
    write_profile(tmp_path)
    target = f"127.0.0.1:{(port := free_port())}"
    config = tmp_path / "pdserve.yaml"
    config.write_text(CONFIG.replace("controller: roles", f"controller: roles, profile: {tmp_path}"))
    settings = ("--set", "model.dtype=float32", "--prefill", "1", "--decode", "2", "--oversubscribe")
    cli.done("up", "-c", str(config), "--model", "tiny", *settings, "--port", str(port), "--detach")
    try:
        long = [[(number + 31 * i) % 4000 + 1 for i in range(600)] for number in range(4)]
        with Load(target, long, clients=4, max_tokens=2, mode="pd") as prompts:
            status = wait_for(target, "forecast", lambda s: s.scaling is not None and "expected" in s.scaling.verdict)
        assert prompts.check() == 1
        assert status.scaling is not None
        assert "expected of 1P2D is TTFT 0%, ITL 100%, of 2P1D TTFT 0%, ITL 100%" in status.scaling.verdict
        assert not status.scaling.actions
    finally:
        cli.run("down", "--target", target)
