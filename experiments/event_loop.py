"""The event loop in which a process measures."""

from __future__ import annotations

import asyncio
import atexit
import functools
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, but always in the same event loop: grpc.aio goes on using the first one that it has seen, and
    complains about each call after that was closed."""
    return _runner().run(work)


@functools.cache
def _runner() -> asyncio.Runner:
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    atexit.register(runner.close)
    return runner
