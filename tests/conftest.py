"""How the suite runs: over several processes, each of which computes in one thread, and with the same examples."""

from __future__ import annotations

import functools
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.certificates import certificates

__all__ = ["certificates"]

# Small models are computed quicker by one thread than by two that wait for each other, above all on a busy machine.
# Engines set their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ray starts its workers with niceness 15. Beside this suite's own processes, they got too little CPU time to be ready
# within their time limit.
os.environ.setdefault("RAY_worker_niceness", "0")

# Tests fork while gRPC's threads run, to start a process in namespaces of its own. gRPC's handlers of forks broke one.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# The same examples every time: what fails here fails again. `--hypothesis-profile explore` draws others.
settings.register_profile("repeatable", derandomize=True, database=None)
settings.register_profile("explore", max_examples=1_000)
settings.load_profile("repeatable")

# Shells ignore Ctrl-C in what they start in the background, and children inherit that. Tests send it to theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Folders whose files take longest: they come first, so that no process is left alone with one of them in the end.
ROOT = Path(__file__).parents[1]
RAY = "all that start a Ray"
LONG = (
    RAY,
    "tests/engine/test_triton_interpreted.py",
    "tests/e2e/",
    "tests/engine/",
    "tests/ops/doctor/",
    "tests/kv_transfer/",
)


@pytest.fixture(autouse=True)
def environment_kept() -> Iterator[None]:
    """Environment variables that a test sets, or has the product set in this process, end with it."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _unit_of(nodeid: str) -> str:
    """What is run by one process, in its order: a file, whose tests share fixtures; all tests that start a Ray, since
    each takes seconds and memory, and two that start at once can be too slow for Ray's own time limits."""
    file, _, test = nodeid.partition("::")
    marked = _start_ray(file)
    return RAY if marked is None or test.partition("[")[0] in marked else file


@functools.cache
def _start_ray(file: str) -> frozenset[str] | None:
    """The tests of a file that are marked as starting a Ray; None: all."""
    text = (ROOT / file).read_text()
    if re.search(r"^pytestmark\b.*pytest\.mark\.ray\b", text, re.MULTILINE):
        return None
    return frozenset(re.findall(r"^@pytest\.mark\.ray\n(?:@.*\n)*(?:async )?def (\w+)", text, re.MULTILINE))


def _rank(unit: str) -> int:
    return next((rank for rank, folder in enumerate(LONG) if unit.startswith(folder)), len(LONG))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """With `-n`: which process runs what."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
        def _split_scope(self, nodeid: str) -> str:
            return _unit_of(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `-n`: what takes long first."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _rank(_unit_of(item.nodeid)))
