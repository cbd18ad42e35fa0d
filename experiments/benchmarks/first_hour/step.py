"""A step of the first hour on a GPU, what comes of it, and programs of the repository that are parts of a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec

from experiments.child_process import ROOT


class Verdict(StrEnum):
    """Of a step. ``below``: it works, and misses a goal. ``skipped``: the machine lacks what it needs."""

    PASSED = "passed"
    BELOW = "below goal"
    FAILED = "failed"
    SKIPPED = "skipped"


class Options(msgspec.Struct, frozen=True):
    """Of a run. ``device`` is ``cuda`` or ``cpu``, ``num_gpus`` those that torch sees, ``gpu_bytes`` the memory of the
    first one. ``quick``: small sizes. ``folder`` is for files. ``soak_s`` is the length of a soak (0: the default).
    ``checkpoints`` are folders of models."""

    device: str
    num_gpus: int
    gpu_bytes: int
    quick: bool
    folder: str
    soak_s: float = 0.0
    checkpoints: tuple[str, ...] = ()

    @property
    def on_gpu(self) -> bool:
        """Whether it is about GPUs. Else the same steps run on CPUs, with small shapes."""
        return self.device == "cuda"

    @property
    def has_goals(self) -> bool:
        """Whether sizes are large enough to hold figures against their goals."""
        return self.on_gpu and not self.quick

    @property
    def model(self) -> str:
        """The model of measurements: the 8b shape where two engines of it fit onto the GPU."""
        if not self.on_gpu:
            return "tiny"
        return "dummy:8b" if self.gpu_bytes >= 70 * 2**30 and not self.quick else "dummy:135m"


class Findings(msgspec.Struct):
    """What a step found. ``problems`` fail it, ``below`` are goals that it misses; ``skipped`` says what was missing
    for it. ``figures`` are plain values."""

    figures: dict[str, Any] = msgspec.field(default_factory=dict)
    problems: list[str] = msgspec.field(default_factory=list)
    below: list[str] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)
    skipped: str = ""

    @property
    def verdict(self) -> Verdict:
        """The worst that applies."""
        if self.problems:
            return Verdict.FAILED
        return Verdict.SKIPPED if self.skipped else Verdict.BELOW if self.below else Verdict.PASSED

    def require(self, condition: bool, problem: str) -> None:
        """A problem unless ``condition``."""
        self.problems += [] if condition else [problem]

    def aim(self, name: str, value: float, goal: float, *, at_most: bool = False, judged: bool = True) -> None:
        """Note a figure that has a goal, and whether it misses it. Not ``judged``: the goal is for other sizes."""
        self.figures[name] = round(value, 4)
        if judged and (value > goal if at_most else value < goal):
            self.below.append(f"{name} is {value:.3g}, and the goal is {'at most' if at_most else 'at least'} {goal:g}")


class Step(msgspec.Struct, frozen=True):
    """One step. ``shows`` says what it must show. It needs ``gpus`` GPUs, and on ``cpu`` it runs as well, unless
    ``not_on_cpu`` says why not. After ``limit_s`` (``quick_s`` of a quick run) it is ended, which fails it."""

    name: str
    shows: str
    run: Callable[[Options], Findings]
    limit_s: float
    quick_s: float
    gpus: int = 1
    not_on_cpu: str = ""

    def obstacle(self, options: Options) -> str:
        """Why it cannot run here; empty if it can."""
        if not options.on_gpu:
            return self.not_on_cpu
        lacks = options.num_gpus < self.gpus
        return f"needs {self.gpus} GPUs, and torch sees {options.num_gpus}" if lacks else ""


def run_pytest(
    options: Options, *selection: str, before: tuple[str, ...] = (), environment: Mapping[str, str] | None = None
) -> Findings:
    """Run pytest on ``selection``, under the command ``before``. Failures are problems, and so is a selection of which
    nothing ran."""
    report = Path(options.folder) / "tests.xml"
    report.unlink(missing_ok=True)
    command = [*before, sys.executable, "-m", "pytest", *selection, "-q", "-rs", "-p", "no:cacheprovider"]
    command += ["--timeout", "900", f"--junitxml={report}"]
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, **(environment or {})}, check=False).returncode
    names: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        found = {child.tag for child in case}
        kind = "failed" if found & {"failure", "error"} else "skipped" if "skipped" in found else "passed"
        names[kind].append(str(case.get("name")))
    findings = Findings({"tests": {kind: len(each) for kind, each in names.items()}})
    findings.require(status == 0, f"pytest ended with status {status}: {', '.join(names['failed'][:5])}")
    findings.require(bool(names["passed"]), "no test ran: all were skipped")
    return findings


def tests(on_gpu: tuple[str, ...], on_cpu: tuple[str, ...], **environment: str) -> Callable[[Options], Findings]:
    """A step that consists of these tests. ``environment`` is that on CPUs."""

    def run(options: Options) -> Findings:
        return run_pytest(options, *on_gpu) if options.on_gpu else run_pytest(options, *on_cpu, environment=environment)

    return run


def last_line(*command: str) -> Any:
    """Run Python with these arguments, and return what its last line of JSON says. RuntimeError if it fails."""
    done = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    sys.stderr.write(done.stdout)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}")
    return json.loads(done.stdout.strip().splitlines()[-1])
