"""One thing a check found, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """FAIL: a service would not start, or not serve. WARN: it would, worse than it could or than its figures say."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """``check`` is a name of the table in docs/doctor.md, ``where`` a node, a worker, a pair, or the service. Only what
    is OK has no ``remedy``."""

    level: Level
    check: str
    where: str
    what: str
    remedy: str = ""


def ok(check: str, where: str, what: str) -> Finding:
    """Something worth saying that needs nobody to act."""
    return Finding(Level.OK, check, where, what)


def warn(check: str, where: str, what: str, remedy: str) -> Finding:
    """It works, but."""
    return Finding(Level.WARN, check, where, what, remedy)


def fail(check: str, where: str, what: str, remedy: str) -> Finding:
    """It would not work."""
    return Finding(Level.FAIL, check, where, what, remedy)
