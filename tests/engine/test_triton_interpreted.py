"""The kernels of GPUs, without one: Triton's interpreter runs `tests/engine/cuda` on CPU tensors."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "cuda"


pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed")


def interpret(marker: str, timeout_s: float) -> None:
    """Run the tests of that marker in a process of its own: Triton decides at its import whether it compiles."""
    command = [sys.executable, "-m", "pytest", str(FOLDER), "-q", "-x", "-p", "no:cacheprovider", "-m", marker]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, cwd=FOLDER.parents[2], env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(900)
def test_the_kernels_in_the_interpreter() -> None:
    interpret("not soak", 880)


@pytest.mark.soak
@pytest.mark.timeout(1_800)
def test_more_of_the_kernels_in_the_interpreter() -> None:
    interpret("soak", 1_780)
