"""Checks engine and hand-off on a machine with a GPU: runs their tests there, then the benchmark. Needs no Ray.

python scripts/gpu_check.py

The last line is one JSON object: versions, date, passed checks, and the benchmark's own last line if it is JSON. The
exit status is 1 after a failure, and 2 without a GPU."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
BENCHMARK = ROOT / "benchmarks" / "engine.py"


def main() -> int:
    """Run the checks; returns the exit status."""
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _triton_version(),
    }
    if not torch.cuda.is_available():
        _say(json.dumps(report | {"error": "torch sees no GPU"}))
        return 2
    report["gpu"] = torch.cuda.get_device_name()
    for name, value in report.items():
        _say(f"{name}: {value}")
    tests, _ = _run("-m", "pytest", "tests/engine", "tests/e2e/test_gpu.py", "-m", "cuda", "-q", "--timeout", "600")
    report["tests"] = "passed" if tests == 0 else f"failed ({tests})"
    failed = tests != 0
    if BENCHMARK.is_file():
        status, last = _run(str(BENCHMARK), "--cuda")
        failed |= status != 0
        report["benchmark"] = _json_or_none(last) if status == 0 else f"failed ({status})"
    _say(json.dumps(report))
    return int(failed)


def _run(*arguments: str) -> tuple[int, str]:
    """Run Python in the repository and pass its output on; its exit status and its last line."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    last = ""
    with subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            _say(line.rstrip("\n"))
            last = line.strip() or last
    return process.returncode, last


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _json_or_none(line: str) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def _triton_version() -> str | None:
    try:
        import triton
    except ModuleNotFoundError:
        return None
    return str(triton.__version__)


if __name__ == "__main__":
    sys.exit(main())
