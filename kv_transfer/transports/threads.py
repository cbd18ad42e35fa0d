"""Blocking calls, kept off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


async def in_thread(name: str, function: Callable[[], T]) -> T:
    """What ``function`` returns or raises, called in a thread that ends with it (the loop's own executor would keep
    one). Cancelling this does not stop the thread."""
    executor = ThreadPoolExecutor(1, name)
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, function)
    finally:
        executor.shutdown(wait=False)
