"""The outputs of a request on a worker as an async iterator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from pdserve.core.errors import PdserveError
from pdserve.core.request import Request
from pdserve.core.worker import TokenOutput


class QueueSink:
    """A sink (`pdserve.core.worker.OutputSink`) that queues what it is given."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[TokenOutput | PdserveError] = asyncio.Queue()

    def output(self, output: TokenOutput) -> None:
        """Queue an output."""
        self.items.put_nowait(output)

    def failed(self, error: PdserveError) -> None:
        """Queue the error."""
        self.items.put_nowait(error)


async def sent(begin: Callable[..., None], request: Request, *arguments: object) -> AsyncGenerator[TokenOutput, None]:
    """The outputs of a request that is sent with ``begin``, one of `contract.control.WorkerHandle`'s methods, when the
    first is asked for. Raises the error that ends it."""
    sink = QueueSink()
    begin(request, *arguments, sink)
    while True:
        item = await sink.items.get()
        if isinstance(item, PdserveError):
            raise item
        yield item
        if item.finish_reason is not None or begin.__name__ == "push":
            return
