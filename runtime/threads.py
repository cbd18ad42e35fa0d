"""Blocking calls beside an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


async def in_thread(name: str, function: Callable[[], T]) -> T:
    """Call ``function`` in a new thread called ``name``, and return its result. The thread ends with the call, unlike
    those of the loop's executor. A cancellation does not stop it."""
    executor = ThreadPoolExecutor(1, name)
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, function)
    finally:
        executor.shutdown(wait=False)
