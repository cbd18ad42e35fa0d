"""Threads that all clients share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class SharedThreads:
    """``count`` threads. Each client has at most as many jobs in line for them, so that others do not wait for all that
    it sends."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Free places in line by client, kept by its jobs alone."""

    async def run(self, client: str, job: Callable[[], T]) -> T:
        """The result of a job of ``client``."""
        places = self._places.setdefault(client, asyncio.Semaphore(self._count))
        async with places:
            return await asyncio.get_running_loop().run_in_executor(self._threads, job)
