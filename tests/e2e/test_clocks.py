"""Hosts whose clocks differ: each worker runs in a time namespace of its own, hours apart from the others."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pdserve import Client
from pdserve.client.generation import Generation
from pdserve.core.timeline import UNATTRIBUTED, Figure
from tests.local_cluster import local_cluster, undisturbed
from tests.random_models import save_random_model

CLONE_NEWTIME = 0x80


def shifted(seconds: int) -> None:
    """Move this process's children (and whatever it becomes by exec) to a monotonic clock that many seconds ahead."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWTIME) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWTIME)")
    Path("/proc/self/timens_offsets").write_text(f"monotonic {seconds} 0\n")


def time_namespaces_problem() -> str | None:
    """Why clocks cannot be shifted here; None if they can."""
    read = [sys.executable, "-c", "import time; print(time.monotonic())"]
    try:
        ahead = float(subprocess.run(read, preexec_fn=lambda: shifted(100_000), capture_output=True, check=True).stdout)
    except (OSError, subprocess.SubprocessError) as error:
        return f"time namespaces need root and a kernel that has them: {error}"
    behind = float(subprocess.run(read, capture_output=True, check=True).stdout)
    return None if ahead - behind > 90_000 else "this kernel does not switch time namespaces on exec"


def test_offsets_are_measured_and_corrected(tmp_path: Path) -> None:
    if (problem := time_namespaces_problem()) is not None:
        pytest.skip(problem)
    settings = {
        "model": {"path": str(save_random_model(tmp_path, "gqa")), "dtype": "float32"},
        "engine": {"block_size": 16, "num_blocks": 64},
    }
    ahead = {"prefill-0": lambda: shifted(7_000), "decode-0": lambda: shifted(50_000)}

    def check(results: Sequence[Generation]) -> None:
        for result in results:
            for figure, breakdown in result.breakdowns.items():
                # In ttft all hops are with one worker, so that its offset cancels; in ttft_decode it does not.
                assert (breakdown.clock_error_ms > 0) == (figure is Figure.TTFT_DECODE)
                assert breakdown.clock_error_ms < 50
                assert abs(breakdown.stages_ms[UNATTRIBUTED]) <= max(2.0, 0.05 * breakdown.total_ms)
                for stage, value_ms in breakdown.stages_ms.items():
                    assert -breakdown.clock_error_ms - 2 <= value_ms <= breakdown.total_ms + 50, (stage, breakdown)

    with local_cluster(settings, in_worker=ahead) as cluster, Client(cluster.target) as client:
        undisturbed(
            lambda: [client.generate([7] * 50, max_tokens=3, mode="pd").result() for _ in range(5)],
            check,
        )
