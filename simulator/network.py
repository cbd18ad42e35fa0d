"""Processes on hosts, and the connections between them: messages arrive in order after a delay; a connection breaks
when one of its ends dies, or when no message could cross it for too long."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from contract.control import Serve
from pdserve.core.errors import PdserveError
from simulator.loop import Interrupted, Mailbox, World, WorldLoop

API = "/api"
"""The address of a gateway's API ends with this."""
CONNECT_AGAIN_S = 0.5
"""How often a connection is asked for again that gets no answer."""
KEEPALIVE_S = 10.0
"""After so long without a way between its ends, a connection breaks at both."""
MOST_OFFSET_S = 500.0
"""How far the clocks of hosts are from the world's at most, before they step."""


class HostClock:
    """The monotonic clock of a host, which is ``offset_s`` ahead of the world's (`pdserve.core.clock.Clock`)."""

    def __init__(self, world: World, offset_s: float) -> None:
        self._world, self.offset_s = world, offset_s

    def now(self) -> float:
        """See `Clock`."""
        return self._world.now_s + self.offset_s


class Process:
    """A process called ``name`` on ``host``: threads that are paused and killed together."""

    def __init__(self, network: Network, name: str, host: str) -> None:
        self.network, self.name, self.host = network, name, host
        self.world, self.clock = network.world, network.clock(host)
        self.loops: list[WorldLoop] = []
        self.children: list[Process] = []
        """Processes that die with it."""
        self.alive = True
        self.connections: set[Connection] = set()
        self.on_death: list[Callable[[], None]] = []

    def loop(self, name: str) -> WorldLoop:
        """A new thread."""
        loop = WorldLoop(self.world, f"{self.name}/{name}")  # type: ignore[abstract]  # what the product calls
        self.loops.append(loop)
        return loop

    def pause(self) -> None:
        """Stop all threads, as SIGSTOP does."""
        for loop in self.loops:
            loop.pause()

    def resume(self) -> None:
        """Go on."""
        if self.alive:
            for loop in self.loops:
                loop.resume()

    def kill(self) -> None:
        """End it at once, as SIGKILL does, with its children."""
        if not self.alive:
            return
        self.alive = False
        for loop in self.loops:
            loop.kill()
        for child in self.children:
            child.kill()
        for connection in sorted(self.connections, key=lambda each: each.number):
            connection.lost(self)
        for told in self.on_death:
            told()


class Network:
    """What processes of different hosts can reach. ``chance`` draws the delay of each message, between the two of
    ``latency_s``. ``break_share``: so many streams to addresses of the service's API break at the server's end, which
    then waits for something, in the moment when that has come."""

    def __init__(
        self, world: World, chance: random.Random, latency_s: tuple[float, float], break_share: float = 0.0
    ) -> None:
        self.world, self._chance, self._latency_s, self._break_share = world, chance, latency_s, break_share
        self.servers: dict[str, tuple[Process, WorldLoop, Any]] = {}
        """By address: who listens there, on which thread, and what it does with a connection."""
        self._clocks: dict[str, HostClock] = {}
        self._blocked: set[tuple[str, str]] = set()
        self._connections = 0
        self.open: dict[int, Connection] = {}

    def clock(self, host: str) -> HostClock:
        """The clock of a host."""
        if host not in self._clocks:
            self._clocks[host] = HostClock(self.world, self._chance.uniform(-MOST_OFFSET_S, MOST_OFFSET_S))
        return self._clocks[host]

    def delay_s(self) -> float:
        """Of one message."""
        least_s, most_s = self._latency_s
        return least_s + (most_s - least_s) * self._chance.random()

    def breaks_at(self, address: str) -> int:
        """At which wait of its server a stream to ``address`` breaks; 0: it does not."""
        if not self._break_share or not address.endswith(API) or self._chance.random() >= self._break_share:
            return 0
        return self._chance.randint(1, 12)

    def blocked(self, source: Process, target: Process) -> bool:
        """Whether no message of ``source`` reaches ``target`` now."""
        return (source.host, target.host) in self._blocked

    def block(self, source: str, target: str) -> None:
        """Let no message from host ``source`` reach host ``target``."""
        self._blocked.add((source, target))
        for connection in list(self.open.values()):
            connection.watch()

    def unblock(self, source: str, target: str) -> None:
        """End `block`; what was sent meanwhile arrives."""
        self._blocked.discard((source, target))
        for connection in list(self.open.values()):
            connection.flush()

    def connection(self, client: Process, server: Process) -> Connection:
        """A new connection."""
        self._connections += 1
        connection = self.open[self._connections] = Connection(self, self._connections, client, server)
        client.connections.add(connection)
        server.connections.add(connection)
        connection.watch()
        return connection

    async def reach(self, client: Process, address: str, timeout_s: float) -> tuple[Process, WorldLoop, Any]:
        """What listens at ``address``, after a round trip. PdserveError if nothing answers within ``timeout_s``."""
        await asyncio.sleep(self.delay_s())
        found = self.servers.get(address)
        if found is None or not found[0].alive:
            raise PdserveError(f"{address}: connection refused")
        until_s = self.world.now_s + timeout_s
        while self.blocked(client, found[0]) or self.blocked(found[0], client):
            if (left_s := until_s - self.world.now_s) <= 0:
                raise PdserveError(f"{address}: no answer")
            await asyncio.sleep(min(left_s, CONNECT_AGAIN_S))
        await asyncio.sleep(self.delay_s())
        if not found[0].alive:
            raise PdserveError(f"{address}: connection reset")
        return found


class Connection:
    """Two directions of ordered messages between ``client`` and ``server``. ``ends`` are what the two do with a message
    or the end, each on its own thread."""

    def __init__(self, network: Network, number: int, client: Process, server: Process) -> None:
        self.network, self.number = network, number
        self.processes = (client, server)
        self.ends: list[tuple[WorldLoop, Callable[[Any], None], Callable[[str], None]] | None] = [None, None]
        self.closed = False
        self._last_s = [0.0, 0.0]  # when the last message of each direction arrives
        self._held: tuple[deque[Any], deque[Any]] = (deque(), deque())
        self._early: tuple[deque[Any], deque[Any]] = (deque(), deque())  # for an end that is not attached yet
        self._attached = [False, False]
        self._early_end = ""  # why it ended before both ends were attached
        self._held_end: tuple[int, str] | None = None  # for which end, and why, behind what is held back
        self._watched = False

    def __hash__(self) -> int:
        return self.number

    def attach(
        self, side: int, loop: WorldLoop, on_message: Callable[[Any], None], on_end: Callable[[str], None]
    ) -> None:
        """Have the end ``side`` (0: the client's) get messages, and the reason of the end."""
        self.ends[side] = loop, on_message, on_end
        self._attached[side] = True
        early = self._early[1 - side]
        while early:
            self._deliver(1 - side, early.popleft(), self.network.delay_s())
        if self._early_end:
            self._end_later(side, self._early_end)

    def send(self, side: int, message: Any) -> None:
        """Send a message from ``side`` to the other one."""
        if self.closed:
            return
        if self._held[side] or self.network.blocked(self.processes[side], self.processes[1 - side]):
            self._held[side].append(message)
            return
        self._deliver(side, message, self.network.delay_s())

    def _deliver(self, side: int, message: Any, delay_s: float) -> None:
        end = self.ends[1 - side]
        if end is None:
            if not self._attached[1 - side]:
                self._early[side].append(message)
            return
        loop, on_message, _ = end
        when_s = self._last_s[side] = max(self._last_s[side], self.network.world.now_s + delay_s)
        loop.call_at(when_s, self._arrive, on_message, message)

    def _arrive(self, on_message: Callable[[Any], None], message: Any) -> None:
        if not self.closed:
            on_message(message)

    def is_held(self, side: int) -> bool:
        """Whether the end ``side`` has not closed the connection, and its process is alive."""
        return self.processes[side].alive and self.ends[side] is not None

    def flush(self) -> None:
        """Send what was held back, where nothing blocks it any more."""
        for side, held in enumerate(self._held):
            if held and not self.network.blocked(self.processes[side], self.processes[1 - side]):
                while held:
                    self._deliver(side, held.popleft(), self.network.delay_s())
                if self._held_end is not None and self._held_end[0] == 1 - side:
                    self._end_later(*self._held_end)
                    self._forget()

    def watch(self) -> None:
        """Break the connection if its ends cannot reach each other for `KEEPALIVE_S`."""
        client, server = self.processes
        if self._watched or self.closed or not self._severed(client, server):
            return
        self._watched = True
        loop = next((end[0] for end in self.ends if end is not None and not end[0].dead), None)
        if loop is not None:
            loop.call_later(KEEPALIVE_S, self._look)

    def _severed(self, client: Process, server: Process) -> bool:
        return self.network.blocked(client, server) or self.network.blocked(server, client)

    def _look(self) -> None:
        self._watched = False
        if self._severed(*self.processes):
            self.close("keepalive: no answer")

    def lost(self, process: Process) -> None:
        """End the connection because ``process`` has died: the other one notices as soon as it can be reached."""
        side = self.processes.index(process)
        other = self.processes[1 - side]
        self._forget()
        if self.closed or not other.alive:
            self.closed = True
            return
        if self.network.blocked(process, other):
            end = self.ends[1 - side]
            if end is not None:
                end[0].call_later(KEEPALIVE_S, self._end, 1 - side, "keepalive: no answer")
            return
        self.ends[side] = None
        self._end_later(1 - side, "connection reset")

    def close(self, why: str, by: int | None = None) -> None:
        """End the connection: the ends notice, except ``by``, which has closed it. The other one first gets what a
        partition holds back of ``by``."""
        if self._held_end is not None and by is not None:  # nobody is left who could get it
            self.ends[by] = None
            self._forget()
        if self.closed or self._held_end is not None:
            return
        for side, end in enumerate(self.ends):
            if by == 1 - side and self._held[by] and end is not None:  # the end does not overtake what is held back
                self._held_end = side, why
                end[0].call_later(KEEPALIVE_S, self._end, side, "keepalive: no answer")
            elif side != by:
                self._end_later(side, why)
        if by is not None:
            self.ends[by] = None
        if self._held_end is None:
            self._forget()

    def _end_later(self, side: int, why: str) -> None:
        """After the messages on their way."""
        end = self.ends[side]
        if end is not None:
            when_s = max(self._last_s[1 - side], self.network.world.now_s + self.network.delay_s())
            end[0].call_at(when_s, self._end, side, why)
        elif not self._attached[side]:
            self._early_end = why

    def _end(self, side: int, why: str) -> None:
        end, self.ends[side] = self.ends[side], None
        self._forget()
        if end is not None:
            end[2](why)

    def _forget(self) -> None:
        self.network.open.pop(self.number, None)
        for process in self.processes:
            process.connections.discard(self)


class StreamWire:
    """A `worker.authentication.Wire`: streams of ``client``'s thread that runs to the server at ``address``."""

    def __init__(self, network: Network, client: Process, address: str) -> None:
        self._network, self._client, self._address = network, client, address
        self._open: list[Connection] = []

    async def open(self, requests: AsyncIterator[bytes], *, timeout_s: float = 5.0) -> AsyncIterator[bytes]:
        """Open a stream. PdserveError if that fails."""
        server, server_loop, serve = await self._network.reach(self._client, self._address, timeout_s)
        connection = self._network.connection(self._client, server)
        self._open.append(connection)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, WorldLoop), "a world runs it"
        answers: Mailbox[bytes | PdserveError | None] = Mailbox()

        def ended(why: str) -> None:
            answers.put(PdserveError(f"{self._address}: {why}") if why else None)

        connection.attach(0, loop, answers.put, ended)
        _serve(connection, server_loop, serve, self._network.breaks_at(self._address))
        sending = loop.create_task(_pump(connection, requests))
        return _answers(connection, answers, sending)

    async def aclose(self) -> None:
        """Break all streams."""
        for connection in self._open:
            connection.close("connection reset", by=0)
        self._open.clear()


def _serve(connection: Connection, loop: WorldLoop, serve: Serve, breaks_at: int) -> None:
    """Serve the server's end of a stream on ``loop``."""
    arrived: Mailbox[bytes | None] = Mailbox()
    task: list[asyncio.Task[None]] = []

    async def requests() -> AsyncIterator[bytes]:
        while (data := await arrived.get()) is not None:
            yield data

    async def run() -> None:
        why = ""
        try:
            async with aclosing(serve(requests())) as answers:
                async for answer in answers:
                    connection.send(1, answer)
        except PdserveError as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001 - at once, and not when the task is freed
            loop.call_exception_handler({"message": "a stream is served", "exception": error})
        finally:
            connection.close(why, by=1)

    def ended(_: str) -> None:
        if task:
            task[0].cancel()

    connection.attach(1, loop, arrived.put, ended)
    loop.call_soon(lambda: task.append(loop.create_task(Interrupted(run(), breaks_at) if breaks_at else run())))


async def _pump(connection: Connection, requests: AsyncIterator[bytes]) -> None:
    async for data in requests:
        connection.send(0, data)
    connection.send(0, None)


async def _answers(
    connection: Connection, arrived: Mailbox[bytes | PdserveError | None], sending: asyncio.Task[None]
) -> AsyncIterator[bytes]:
    try:
        while (answer := await arrived.get()) is not None:
            if isinstance(answer, PdserveError):
                raise answer
            yield answer
    finally:
        sending.cancel()
        connection.close("connection reset", by=0)
