"""Delays the first messages of a stream, for tests that plant a network delay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

T = TypeVar("T")


async def late_writes(source: AsyncIterator[T], delay_s: float, first: int) -> AsyncGenerator[T, None]:
    """Yield the items of ``source`` in order, the ``first`` ones ``delay_s`` after they were produced. Later items are
    produced meanwhile, as on a long wire."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[tuple[T, float] | BaseException | None] = asyncio.Queue()

    async def pump() -> None:
        left = first
        try:
            async for item in source:
                queue.put_nowait((item, loop.time() + (delay_s if left > 0 else 0.0)))
                left -= 1
            queue.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - raised again where the items are consumed
            queue.put_nowait(error)

    task = asyncio.create_task(pump())
    try:
        while (entry := await queue.get()) is not None:
            if isinstance(entry, BaseException):
                raise entry
            item, due_s = entry
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            yield item
    finally:
        task.cancel()
        await asyncio.wait({task})
