"""`pdserve up --address` on a Ray that is there already: it is used, and left as it was."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Cli
from tests.local_cluster import free_port

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


@contextlib.contextmanager
def ray_head(home: Path) -> Iterator[str]:
    """A Ray head node with a token of its own, ended by process id: `ray stop` would end others' too."""
    with tempfile.TemporaryDirectory(prefix="pdserve-head-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        port = free_port()
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
        options = ["--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}"]
        head = subprocess.Popen(
            [*command, *options, "--object-store-memory=100000000"],
            env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield f"127.0.0.1:{port}"
        finally:
            family = [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)]
            head.terminate()
            head.wait(20)
            _, alive = psutil.wait_procs(family, timeout=5)
            for process in alive:
                process.kill()
            psutil.wait_procs(alive, timeout=5)


def test_joins_and_leaves(cli: Cli, tmp_path: Path) -> None:
    at_home = Cli({**cli.env, "HOME": str(tmp_path)})
    port = free_port()
    with ray_head(tmp_path) as address:
        deadline_s = time.monotonic() + 60
        while (up := at_home.run("up", "--address", address, "--port", str(port), "--detach")).returncode:
            assert "cluster.address" in up.stderr, up.stderr  # the head is still coming up
            assert time.monotonic() < deadline_s, up.stderr
        answer = at_home.run("generate", "import os", "--target", f"localhost:{port}", "--max-tokens", "3", "--json")
        result = json.loads(answer.stdout)
        assert result["kv_bytes"] == result["kv_bytes_expected"] > 0
        assert at_home.run("down", "--target", f"localhost:{port}").returncode == 0
        again = at_home.run("up", "--address", address, "--port", str(port), "--detach")  # all resources are free again
        assert again.returncode == 0, again.stderr
        assert at_home.run("down", "--target", f"localhost:{port}").returncode == 0
