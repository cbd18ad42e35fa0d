"""How the suite runs: over several processes, each of which computes in one thread, and with the same examples."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import settings

# Small models are computed quicker by one thread than by two that wait for each other, above all on a busy machine.
# Engines set their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples every time: what fails here fails again. `--hypothesis-profile explore` draws others.
settings.register_profile("repeatable", derandomize=True, database=None)
settings.register_profile("explore", max_examples=1_000)
settings.load_profile("repeatable")

# These bring up services and Rays, or look at all that run on this host, so they run one after the other.
SERVICES = ("tests/deploy/test_ready.py", "tests/doctor/", "tests/e2e/", "tests/launch/")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """With `-n`: a file is run by one process, as its tests share fixtures, and all services are run by one."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
        def _split_scope(self, nodeid: str) -> str:
            return "services" if nodeid.startswith(SERVICES) else nodeid.partition("::")[0]

    return Scheduling(config, log)
