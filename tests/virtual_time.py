"""An event loop whose clock stands still while anything is computed, and jumps to the next timer when nothing is left
to do. Tests on it are exact and wait for nothing, however slow or busy the machine. They must not use threads or
sockets."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Mapping

import pytest

IN_VIRTUAL_TIME = pytest.mark.asyncio(loop_factories=["virtual_time"])
"""For tests of folders whose conftest imports `pytest_asyncio_loop_factories`."""


class _Selector(selectors.DefaultSelector):
    """Moves the clock instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1_000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready now; if nothing is, ``timeout`` passes at once. Without any timer left, it is a hang."""
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "every task waits for another, and no timer is left to wake one"
            self.now_s += max(timeout, 0.0)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """The loop; use it as a loop factory."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Virtual seconds."""
        return self._virtual.now_s

    def compute(self, seconds: float) -> None:
        """Let time pass as if the running callback computed for so long."""
        self._virtual.now_s += seconds


class LoopClock:
    """`pdserve.core.clock.Clock` of the running loop."""

    def now(self) -> float:
        """Virtual seconds."""
        return asyncio.get_running_loop().time()


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop of a test: the usual one, unless it is `IN_VIRTUAL_TIME`."""
    marker = item.get_closest_marker("asyncio")
    is_virtual = marker is not None and "loop_factories" in marker.kwargs
    return {"virtual_time": VirtualTimeLoop} if is_virtual else {"real_time": asyncio.new_event_loop}
