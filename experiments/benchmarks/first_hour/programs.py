"""Other programs of the repository, run as parts of a step: their output goes to the step's log."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar
from xml.etree import ElementTree

from experiments.benchmarks.first_hour.step import Findings, Options
from experiments.messages import message_of

ROOT = Path(__file__).resolve().parents[3]
T = TypeVar("T")


def run_pytest(
    findings: Findings,
    options: Options,
    *selection: str,
    before: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run pytest on ``selection``, under the command ``before``. Failures are problems, and so is a selection of which
    nothing ran."""
    report = Path(options.folder) / "tests.xml"
    report.unlink(missing_ok=True)
    command = [*before, sys.executable, "-m", "pytest", *selection, "-q", "-rs", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--timeout", "900", f"--junitxml={report}"],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        check=False,
    )
    counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
    failed: list[str] = []
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        found = {child.tag for child in case}
        if found & {"failure", "error"}:
            failed.append(str(case.get("name")))
        counts["failed" if found & {"failure", "error"} else "skipped" if "skipped" in found else "passed"] += 1
    findings.figures["tests"] = counts
    findings.require(done.returncode == 0, f"pytest ended with status {done.returncode}: {', '.join(failed[:5])}")
    findings.require(counts["passed"] > 0, "no test ran: all were skipped")


def last_line(expected: type[T], *command: str) -> T:
    """Run Python with these arguments, and return what its last line of JSON says. RuntimeError if it fails,
    WrongMessage if the line lacks a figure."""
    done = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    sys.stdout.write(done.stdout)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}")
    return message_of(lines[-1].encode(), expected, " ".join(command[:2]))
