"""What a run shows of its progress."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time

import pytest
from rich.console import Console

from experiments.cli.progress import RunProgress
from experiments.experiment import Cell


@pytest.mark.parametrize(("finished", "words"), [(0, "3 cells; loads and pairs take up to 2.0 min"), (2, "1 cell; ")])
def test_the_planned_time_of_the_loads_is_printed(finished: int, words: str) -> None:
    output = io.StringIO()
    cells = [Cell("idle", {}), Cell("rate-1", {}, sending_s=30.0), Cell("rate-2", {}, sending_s=90.0)]
    RunProgress(Console(file=output, width=200), "added-ttft").begin(cells, finished)
    assert words in output.getvalue()


def test_the_time_that_is_left_follows_from_the_cells_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    output, now_s = io.StringIO(), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    progress = RunProgress(Console(file=output, width=200), "added-ttft")
    cells = [Cell("a", {}), Cell("b", {}, sending_s=50.0), Cell("c", {}, sending_s=20.0)]
    progress.begin(cells, 0)
    for cell, at_s in zip(cells, (100.0, 120.0, 240.0), strict=True):
        now_s = at_s
        progress.cell(cell)
    lines = output.getvalue().splitlines()
    # The first cell counts as 10 s and took 20 s; those to come count as 60 s and 30 s.
    assert lines[1:] == [
        "added-ttft 1/3 a  (0 s)",
        "added-ttft 2/3 b  (20 s, about 3 min left)",
        "added-ttft 3/3 c  (140 s, about 60 s left)",
    ]


def test_without_loads_no_time_is_planned() -> None:
    output = io.StringIO()
    RunProgress(Console(file=output, width=200), "primer").begin([Cell("a", {})], 0)
    assert output.getvalue() == ""


def test_a_fork_beside_grpc_logs_nothing_into_the_progress() -> None:
    """gRPC logs a line for a fork while its threads are at work, unless the command has told it not to care."""
    script = """
import os, threading
from concurrent import futures
from ops.cli.main import main
try:
    main(["--version"])
except SystemExit:
    pass
import grpc  # reads its environment now
server = grpc.server(futures.ThreadPoolExecutor(2))
port = server.add_insecure_port("localhost:0")
server.start()
ended = threading.Event()
def call():
    with grpc.insecure_channel(f"localhost:{port}") as channel:
        while not ended.is_set():
            try:
                channel.unary_unary("/a/b")(b"", timeout=5)
            except grpc.RpcError:
                pass
threads = [threading.Thread(target=call) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(20):
    pid = os.fork() or os._exit(0)
    os.waitpid(pid, 0)
    ended.wait(0.02)
ended.set()
for thread in threads:
    thread.join()
server.stop(0)
"""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    ran = subprocess.run([sys.executable, "-c", script], env=plain, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")
