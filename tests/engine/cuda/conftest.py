"""The kernels of GPUs run where they are meant to, or on CPU tensors in Triton's interpreter. Which of the two is
settled when Triton is imported: `tests/engine/test_triton_interpreted.py` runs this folder in a process of its own."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_ON_GPU = pytest.param(
    "cuda",
    marks=(
        pytest.mark.cuda,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU; the interpreter runs this too"),
    ),
)

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


@pytest.fixture(scope="session", params=["cpu"] if INTERPRETED else [_ON_GPU])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the kernels run."""
    return torch.device(request.param)
