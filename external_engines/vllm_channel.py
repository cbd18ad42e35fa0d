"""The connections to pdserve's connectors in a vLLM server (`external_engines.vllm_connector`): what they say, the
memory that they are given, and what they are told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from contract.engine import Abort, Computed, FrameReader, KVEvent, KVReady, Rejected, Release, Reserved, encode_frame
from contract.message import Message
from engine.process.client import EventReader
from kv_transfer.memory import DeviceMemory, HostMemory, Memory
from pdserve.core.errors import LaunchError
from pdserve.core.kv_layout import probe_area
from runtime.threads import in_thread

SEND_S = 5.0
"""Limit: a vLLM server that reads no commands of its worker. Then: it is killed, and the worker starts another one."""


class Scheduler(Message, frozen=True):
    """The first message of the connector in vLLM's scheduler."""


class Caches(Message, frozen=True):
    """The first message of a connector where the model runs: vLLM's KV cache."""

    num_blocks: int
    num_layers: int
    layer_bytes: int
    """Of one layer in a block. Each of ``ranks`` processes has its heads there."""
    block_size: int
    dtype: str
    ranks: int
    order: str
    """Names the attention kernels, which choose the order of a layer's numbers in a block."""
    num_spare: int
    """The last blocks of a GPU's cache, which no request gets: see `kv_transfer.pool.Pool`'s probe area."""
    handle: list[Any]
    """Opens the memory of a cache on a GPU (`kv_transfer.memory.DeviceMemory.open`). Empty: it gets memory of the
    host."""


class Idle(Message, frozen=True):
    """Whether vLLM's last step computed nothing. Sent when it changes."""

    idle: bool


class Stepped(Message, frozen=True):
    """The steps since vLLM's start that have computed something, and the seconds that they took. Sent after a step with
    which a request ends, after an idle step, and else at most every `vllm_connector._STEPPED_EVERY_S` seconds."""

    steps: int
    busy_s: float


class Considered(Message, frozen=True):
    """vLLM's scheduler looks for blocks for a request, for the first time."""

    attempt_id: str


class Scheduled(Message, frozen=True):
    """The first step that computes something for a request begins, at ``time_s`` of the host's monotonic clock. The KV
    of ``computed_tokens`` of its prompt was cached or received."""

    attempt_id: str
    time_s: float
    computed_tokens: int


_First: TypeAlias = Scheduler | Caches
_Said: TypeAlias = Idle | Stepped | Considered | Scheduled | Rejected | Reserved | Computed


class VLLMChannel:
    """The connections to one server, created by `accept`: vLLM has a connector in its scheduler, and another one in
    each process that runs the model."""

    def __init__(
        self, scheduler: socket.socket, runners: Sequence[socket.socket], caches: Caches, memory: Memory
    ) -> None:
        self._scheduler, self._runners = scheduler, runners
        self.caches = caches
        self.memory = memory
        """The memory of the KV cache."""
        self._sending = threading.Lock()

    @classmethod
    async def accept(cls, listener: socket.socket) -> VLLMChannel:
        """Wait for all connectors at the non-blocking ``listener``, and share the memory of the KV cache. LaunchError
        if one of them ends before, TransferRefused if a GPU's memory cannot be opened."""
        scheduler: socket.socket | None = None
        runners: list[socket.socket] = []
        shared: tuple[Caches, Memory] | None = None
        with contextlib.ExitStack() as stack:
            while scheduler is None or shared is None or len(runners) < shared[0].ranks:
                connection, first = await _accept(listener)
                stack.enter_context(connection)
                if isinstance(first, Scheduler):
                    scheduler = connection
                    continue
                if shared is None:
                    memory = await in_thread("vllm-memory", partial(_memory, first))
                    shared = first, stack.enter_context(contextlib.closing(memory))
                if isinstance(shared[1], HostMemory):
                    socket.send_fds(connection, [b"m"], [shared[1].fd])
                runners.append(connection)
            stack.pop_all()
        return cls(scheduler, runners, *shared)

    def tell(self, command: KVReady | Release | Abort) -> None:
        """Tell the connectors that nothing accesses the blocks of a request any more, from any thread. The scheduler's
        is told first, because it has to know token 1 before a runner's reports that the KV has come. TimeoutError if
        the server reads nothing for `SEND_S`; it can be used no longer. Ignored after its end."""
        frame = encode_frame(command)
        with self._sending:
            for connection in (self._scheduler, *self._runners):
                try:
                    _send(connection, frame)
                except TimeoutError:
                    raise
                except OSError:  # the server has ended, or this was closed
                    return

    def kv_events(self, others: Callable[[Any], object]) -> VLLMKVEvents:
        """The events about blocks. ``others`` gets the other messages, on the loop that follows the events."""
        return VLLMKVEvents(_reader(self._scheduler), [_reader(runner) for runner in self._runners], others)

    def close(self) -> None:
        """Close the connections and the memory."""
        with self._sending:
            for connection in (self._scheduler, *self._runners):
                connection.close()
        self.memory.close()


class VLLMKVEvents:
    """The events about blocks among what the connectors say, in the order in which they say it
    (`contract.engine.KVEventReader`). The ranks of a model send the same events, each for its own heads; an event
    counts once all have sent it."""

    def __init__(
        self, scheduler: EventReader[Any], runners: Sequence[EventReader[Any]], others: Callable[[Any], object]
    ) -> None:
        self._scheduler, self._runners, self._others = scheduler, runners, others
        self._received = [0] * len(runners)

    def follow(self, on_event: Callable[[KVEvent], None]) -> None:
        """See `KVEventReader`."""

        def take(message: Any) -> None:
            if not isinstance(message, Computed):
                self._others(message)
            if isinstance(message, Reserved | Computed):
                on_event(message)

        def take_from(rank: int, event: KVEvent) -> None:
            self._received[rank] += 1
            if min(self._received) == self._received[rank]:
                on_event(event)

        self._scheduler.follow(take)
        for rank, runner in enumerate(self._runners):
            runner.follow(partial(take_from, rank))

    def close(self) -> None:
        """See `KVEventReader`."""
        for reader in (self._scheduler, *self._runners):
            reader.close()


async def _accept(listener: socket.socket) -> tuple[socket.socket, Any]:
    """A connector that connects, and its first message."""
    loop = asyncio.get_running_loop()
    connection, _ = await loop.sock_accept(listener)
    with contextlib.ExitStack() as stack:
        stack.enter_context(connection)
        connection.setblocking(False)
        frames: FrameReader[Any] = FrameReader(_First)  # type: ignore[arg-type]  # a union
        while not (messages := frames.feed(data := await loop.sock_recv(connection, 4096))):
            if not data:
                raise LaunchError("pdserve's connector in vLLM has ended; see the worker's log")
        stack.pop_all()
    return connection, messages[0]


def _send(connection: socket.socket, data: bytes) -> None:
    """Send all of ``data``. The connector always reads."""
    while data:
        try:
            data = data[connection.send(data) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(connection, select.POLLOUT)
            if not poll.poll(SEND_S * 1e3):
                raise TimeoutError(f"vLLM has read nothing for {SEND_S:.0f} s") from None


def _reader(connection: socket.socket) -> EventReader[Any]:
    return EventReader(os.dup(connection.fileno()), _Said)  # type: ignore[arg-type]  # a union


def _memory(caches: Caches) -> Memory:
    if caches.handle:
        return DeviceMemory.open(caches.handle)
    area = probe_area(caches.num_blocks * caches.num_layers * caches.layer_bytes)
    return HostMemory.create(area.offset + area.size)
