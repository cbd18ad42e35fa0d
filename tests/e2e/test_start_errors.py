"""What keeps a service from starting is told in one line, with the key or file, and leaves nothing running."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Cli
from tests.local_cluster import ROOT, free_port

pytestmark = pytest.mark.timeout(180)


def check(cli: Cli, expected: str, *arguments: str) -> None:
    port = free_port()
    started_by = {"PDSERVE_TEST_START": str(port)}  # every process of the start inherits it, and nothing else has it
    answer = Cli({**cli.env, **started_by}).run("up", "--port", str(port), "--detach", *arguments)
    assert answer.returncode != 0
    assert expected in answer.stderr
    assert "Traceback" not in answer.stderr
    left = [
        p
        for p in psutil.process_iter(["environ", "cmdline"])
        if started_by.items() <= (p.info["environ"] or {}).items()
    ]
    assert not left, [p.info["cmdline"] for p in left]


def test_corrupt_safetensors(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(ROOT / "models" / "tiny", folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    check(cli, "model.safetensors", "--model", str(folder))


@pytest.mark.ray
def test_more_workers_than_slots(cli: Cli) -> None:
    check(cli, "--oversubscribe", "--prefill", "40", "--decode", "40")


@pytest.mark.cluster
def test_no_ray_at_the_address(cli: Cli) -> None:
    address = f"127.0.0.1:{free_port()}"
    check(cli, f"cluster.address: cannot join Ray at '{address}': ", "--address", address)


def test_tokens_that_everybody_reads(cli: Cli, tmp_path: Path) -> None:
    tokens, config = tmp_path / "tokens.yaml", tmp_path / "pdserve.yaml"
    tokens.write_text("tokens: []\n")
    tokens.chmod(0o644)
    config.write_text("gateway: {tokens: tokens.yaml}\n")  # relative to the folder of the one who starts it
    check(
        Cli({**cli.env, "XDG_STATE_HOME": str(tmp_path)}),
        f"gateway.tokens: every user of this host can read or change {tokens}",
        "-c",
        str(config),
    )
