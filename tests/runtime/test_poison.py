"""Which errors end a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pdserve.core.errors import TransferError
from runtime.poison import POISONED_STATUS, end_if_poisoned, is_poison

ROOT = Path(__file__).resolve().parents[2]
ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported asynchronously"


@pytest.mark.parametrize(
    ("error", "poison"),
    [
        (torch.AcceleratorError(ILLEGAL), True),
        (RuntimeError(ILLEGAL), True),
        (RuntimeError("CUDA driver error: unspecified launch failure"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("NCCL error in: NCCLUtils.cpp: unhandled cuda error (run with NCCL_DEBUG=INFO)"), False),
        (RuntimeError("the group was aborted"), False),
        (ValueError("the memory is closed"), False),
        (TransferError("CUDA error: what a peer has written"), False),
    ],
    ids=str,
)
def test_errors_of_the_gpu_are_poison(error: Exception, poison: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_poison(error) is poison
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    end_if_poisoned(error)
    assert ended == [POISONED_STATUS] * poison


def test_a_cause_counts() -> None:
    error = ValueError("cannot be copied")
    error.__cause__ = RuntimeError(ILLEGAL)
    assert is_poison(error)


def test_the_process_ends_with_a_reason_and_without_clean_up() -> None:
    code = (
        "import atexit; from runtime.poison import end_if_poisoned\n"
        "atexit.register(lambda: print('cleaned up'))\n"
        f"end_if_poisoned(RuntimeError({ILLEGAL!r}))\n"
        "print('still here')"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (POISONED_STATUS, "")
    assert "illegal memory access" in ended.stderr
