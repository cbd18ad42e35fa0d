"""Threads beside an event loop: for one blocking call, and with a loop of their own."""

from __future__ import annotations

import asyncio
import threading
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


class LoopThread:
    """A daemon thread called ``name`` that runs the event loop ``loop``, from `start` to `stop`."""

    def __init__(self, name: str) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)

    @property
    def runs(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def stop(self, timeout_s: float) -> None:
        """Stop the loop, and wait at most ``timeout_s`` until the thread has ended. If it has, or never ran, the loop
        is closed; a daemon thread that goes on keeps its loop."""
        if self.runs:
            self.loop.call_soon_threadsafe(self.loop.stop)
            await asyncio.to_thread(self._thread.join, timeout_s)
        if not self.runs:
            self.loop.close()
