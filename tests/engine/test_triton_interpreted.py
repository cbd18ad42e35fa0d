"""The kernels of GPUs, without one: Triton's interpreter runs `tests/engine/cuda` on CPU tensors."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "cuda"


@pytest.mark.timeout(900)
@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed")
def test_the_kernels_in_the_interpreter() -> None:
    """In a process of its own: Triton decides at its import whether it compiles."""
    command = [sys.executable, "-m", "pytest", str(FOLDER), "-q", "-x", "-p", "no:cacheprovider"]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, cwd=FOLDER.parents[2], env=env, capture_output=True, text=True, timeout=880, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
