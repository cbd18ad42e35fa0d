"""What a run of the first hour leaves: one archive that a person can send, and the rows of a page about it."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.child_process import ROOT

REPORT = "report.json"
_SUFFIX = ".tar.gz"
_SHOWN = "torch", "triton", "transformers", "flashinfer-python", "nixl"


def origin() -> dict[str, Any]:
    """The commit of the code (empty without git), whether files differ from it, and the versions of all packages."""
    packages = sorted((each.name.lower(), each.version) for each in importlib.metadata.distributions())
    return {"commit": _git("rev-parse", "HEAD"), "modified": _git("status", "--short"), "versions": dict(packages)}


def pack(folder: Path, report: Mapping[str, Any]) -> Path:
    """Write the report and all files of ``folder`` to an archive in it. Returns its path."""
    (folder / REPORT).write_text(json.dumps(report))
    path = folder / f"pdserve-first-hour-{report['date'].replace(':', '')}{_SUFFIX}"
    files = [each for each in sorted(folder.iterdir()) if each.is_file() and not each.name.endswith(_SUFFIX)]
    with tarfile.open(path, "w:gz") as archive:
        for each in files:
            archive.add(each, f"first-hour/{each.name}")
    return path


def results_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The rows of a page about a `REPORT`: the run, its steps, and their figures."""
    versions, changed = report["versions"], " with changes" if report["modified"] else ""
    yield "date", report["date"]
    yield "device", f"{report['gpu'] or report['device']}{', a quick run' if report['quick'] else ''}"
    yield "commit", f"{report['commit']}{changed}"
    yield "versions", ", ".join(f"{name} {versions[name]}" for name in _SHOWN if name in versions)
    for name, step in report["steps"].items():
        why = step.get("skipped") or "; ".join((*step.get("problems", ()), *step.get("below", ())))
        verdict = f"{step['verdict']} in {step['seconds'] / 60:.1f} min{f': {why}' if why else ''}"
        yield f"`{name}`: {step['shows']}", verdict.replace("|", "/")
        for what, value in step.get("figures", {}).items():
            if isinstance(value, int | float):
                yield f"{name}: {what}", f"{value:g}"


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
