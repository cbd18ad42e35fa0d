"""A step of the first hour on a GPU, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec


class Verdict(StrEnum):
    """Of a step. ``below``: it works, and misses a goal. ``skipped``: the machine lacks what it needs."""

    PASSED = "passed"
    BELOW = "below goal"
    FAILED = "failed"
    SKIPPED = "skipped"


class Options(msgspec.Struct, frozen=True):
    """Of a run. ``device`` is ``cuda`` or ``cpu``, ``num_gpus`` those that torch sees, ``gpu_bytes`` the memory of the
    first one. ``quick``: small sizes. ``folder`` is for files. ``soak_s`` is the length of a soak (0: the default)."""

    device: str
    num_gpus: int
    gpu_bytes: int
    quick: bool
    folder: str
    soak_s: float = 0.0

    @property
    def on_gpu(self) -> bool:
        """Whether it is about GPUs. Else the same steps run on CPUs, with small shapes."""
        return self.device == "cuda"

    @property
    def has_goals(self) -> bool:
        """Whether sizes are large enough to hold figures against their goals."""
        return self.on_gpu and not self.quick


class Findings(msgspec.Struct):
    """What a step found. ``problems`` fail it, ``below`` are goals that it misses; ``skipped`` says what was missing
    for it. ``figures`` are plain values."""

    figures: dict[str, object] = msgspec.field(default_factory=dict)
    problems: list[str] = msgspec.field(default_factory=list)
    below: list[str] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)
    skipped: str = ""

    @property
    def verdict(self) -> Verdict:
        """The worst that applies."""
        if self.problems:
            return Verdict.FAILED
        if self.skipped:
            return Verdict.SKIPPED
        return Verdict.BELOW if self.below else Verdict.PASSED

    def require(self, condition: bool, problem: str) -> None:
        """A problem unless ``condition``."""
        if not condition:
            self.problems.append(problem)

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
        if options.num_gpus < self.gpus:
            return f"needs {self.gpus} GPUs, and torch sees {options.num_gpus}"
        return ""
