"""What the doctor has found: the result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """FAIL: a service would not start or not serve. WARN: it would, but worse than it could."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. ``check`` is a name listed in docs/doctor.md, ``where`` a node, worker, pair, or
    the service. Only a finding of level OK has no ``remedy``."""

    level: Level
    check: str
    where: str
    what: str
    remedy: str = ""


def ok(check: str, where: str, what: str) -> Finding:
    """A remark that needs no action."""
    return Finding(Level.OK, check, where, what)


def warn(check: str, where: str, what: str, remedy: str) -> Finding:
    """A problem that a service can run with."""
    return Finding(Level.WARN, check, where, what, remedy)


def fail(check: str, where: str, what: str, remedy: str) -> Finding:
    """A problem that keeps a service from running."""
    return Finding(Level.FAIL, check, where, what, remedy)
