"""A proxy that forgets connections over which nothing has passed for a while, as NATs and load balancers do."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self


class IdleProxy:
    """Forwards connections to ``port`` of this host, and resets those that are idle for ``idle_s``. ``forgotten``
    counts these."""

    def __init__(self, port: int, idle_s: float) -> None:
        self.forgotten = 0
        self._port = port
        self._idle_s = idle_s
        self._writers: set[asyncio.StreamWriter] = set()
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    @property
    def target(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await self._all_ended.wait()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        loop = asyncio.get_running_loop()
        writers, last_s = {writer, far_writer}, loop.time()
        self._writers |= writers
        self._all_ended.clear()

        async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            nonlocal last_s
            while data := await source.read(65_536):
                last_s = loop.time()
                sink.write(data)
                await sink.drain()

        passing = [asyncio.create_task(pass_on(reader, far_writer)), asyncio.create_task(pass_on(far_reader, writer))]
        try:
            while (left_s := last_s + self._idle_s - loop.time()) > 0:
                done, _ = await asyncio.wait(passing, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    return
            self.forgotten += 1
        finally:
            for task in passing:
                task.cancel()
            await asyncio.gather(*passing, return_exceptions=True)
            for each in writers:
                each.transport.abort()
                with contextlib.suppress(OSError):
                    await each.wait_closed()
            self._writers -= writers
            if not self._writers:
                self._all_ended.set()
