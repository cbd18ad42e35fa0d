"""A network whose answers are late: a TCP forwarder with a delay, in front of a server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def late_wire(target: str, delay_s: float) -> Iterator[str]:
    """The ``host:port`` of a forwarder to the server at ``target``. Bytes to it pass at once; bytes from it arrive
    ``delay_s`` after they were sent, and later ones are under way meanwhile."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="late-wire")
    thread.start()
    wire = _LateWire(target, delay_s)
    try:
        yield asyncio.run_coroutine_threadsafe(wire.start(), loop).result(10.0)
    finally:
        asyncio.run_coroutine_threadsafe(wire.aclose(), loop).result(10.0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class _LateWire:
    def __init__(self, target: str, delay_s: float) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._delay_s = delay_s
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def aclose(self) -> None:
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._forward(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            from_server, to_server = await asyncio.open_connection(self._host, self._port)
            writers.append(to_server)
            ways = {
                asyncio.create_task(_pump(reader, to_server, 0.0)),
                asyncio.create_task(_pump(from_server, writer, self._delay_s)),
            }
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        finally:
            for each in writers:
                each.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Pass bytes on until the end of ``reader``, each ``delay_s`` after it was read."""
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[bytes, float]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            data, due_s = await under_way.get()
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            if not data:
                return
            writer.write(data)
            await writer.drain()

    async with asyncio.TaskGroup() as both:
        both.create_task(deliver())
        at_end = False
        while not at_end:
            data = await reader.read(2**16)
            under_way.put_nowait((data, loop.time() + delay_s))
            at_end = not data
