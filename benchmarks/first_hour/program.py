"""Runs one step in a process of its own: ``python -m benchmarks.first_hour.program STEP OPTIONS RESULT``.

A hung or poisoned GPU ends this process and not the run. OPTIONS are JSON, and the findings go to the file RESULT."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import msgspec

from benchmarks.first_hour.catalogue import STEPS
from benchmarks.first_hour.step import Findings, Options
from runtime.process import end_with_parent


def main() -> None:
    """The whole process."""
    end_with_parent()
    name, options, result = sys.argv[1:]
    step = next(each for each in STEPS if each.name == name)
    try:
        findings = step.run(msgspec.json.decode(options, type=Options))
    except Exception as error:  # noqa: BLE001 - whatever it was, it is the step's finding
        traceback.print_exc()
        findings = Findings(problems=[f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"])
    Path(result).write_bytes(msgspec.json.encode(findings))


if __name__ == "__main__":
    main()
