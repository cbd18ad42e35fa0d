"""The engine process: ``python -m engine.process.loop SPEC COMMANDS_FD EVENTS_FD KV_EVENTS_FD MEMORY_FD``.

Its one thread runs the steps of an `engine.core.EngineCore` and moves messages (`contract.engine`) between it and three
pipes. It ends when the command pipe closes, and when its parent dies.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from contract.engine import (
    AnyCommand,
    EngineEvent,
    Failed,
    FrameReader,
    KVEvent,
    Ping,
    Pong,
    PoolMemory,
    WantsPool,
    encode_frame,
)
from engine.core import EngineCore, Outbox, Runner
from engine.scheduling.baselines import scheduler_class
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.structures import Structures
from engine.spec import EngineSpec
from pdserve.core.clock import Clock, MonotonicClock
from pdserve.core.errors import LaunchError, PdserveError, to_wire
from runtime.logs import set_up_logging
from runtime.process import end_with_parent, freeze_heap, no_collection

_READ_BYTES = 2**20
_MAX_MESSAGE_CHARS = 1000

MakeCore = Callable[[Scheduler, Runner, Clock, Outbox, bool, Structures], EngineCore]


class ParentGone(Exception):
    """The worker process closed its end of a pipe, because the engine is to end, or died."""


class WorkerPipe:
    """The engine's end of the three pipes. Commands also come from the engine's own threads (`put`)."""

    def __init__(self, commands_fd: int, events_fd: int, kv_events_fd: int) -> None:
        self._own_commands: deque[AnyCommand] = deque()
        self._woken_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._commands_fd = commands_fd
        self._events_fd = events_fd
        self._kv_events_fd = kv_events_fd
        self._sending_kv = threading.Lock()  # the layers of a step on a GPU are announced by a thread
        self._frames: FrameReader[AnyCommand] = FrameReader(AnyCommand)  # type: ignore[arg-type]  # a union
        self._poll = select.poll()
        self._poll.register(commands_fd, select.POLLIN | select.POLLHUP)
        self._poll.register(self._woken_fd, select.POLLIN)
        os.set_blocking(commands_fd, False)

    def put(self, command: AnyCommand) -> None:
        """Add a command. May be called by any thread."""
        self._own_commands.append(command)
        self.wake()

    def wake(self) -> None:
        """End a wait for commands. May be called by any thread."""
        os.eventfd_write(self._woken_fd, 1)

    def receive(self, wait: bool) -> list[AnyCommand]:
        """Return the commands that have arrived; with ``wait``, at least one, or none after `wake`. `ParentGone`
        at the end of the pipe."""
        commands: list[AnyCommand] = []
        while True:
            ready = [fd for fd, _ in self._poll.poll(None if wait and not commands else 0)]
            if self._woken_fd in ready:
                os.eventfd_read(self._woken_fd)  # before the queue is read, so that nothing stays behind unannounced
                commands += [self._own_commands.popleft() for _ in range(len(self._own_commands))]
            if self._commands_fd not in ready:
                return commands
            data = os.read(self._commands_fd, _READ_BYTES)
            if not data:
                raise ParentGone
            commands += self._frames.feed(data)

    def send(self, *events: EngineEvent) -> None:
        """Send events to the control loop. Blocks while the pipe is full. `ParentGone` if it is closed."""
        self._write(self._events_fd, events)

    def send_kv(self, *events: KVEvent) -> None:
        """Send events to the KV thread. Blocks while the pipe is full. `ParentGone` if it is closed. May be called by
        any thread."""
        with self._sending_kv:
            self._write(self._kv_events_fd, events)

    @staticmethod
    def _write(fd: int, events: Sequence[EngineEvent | KVEvent]) -> None:
        data = memoryview(b"".join(encode_frame(event) for event in events))
        try:
            while data:
                data = data[os.write(fd, data) :]
        except BrokenPipeError:
            raise ParentGone from None


def serve(pipe: WorkerPipe, core: EngineCore) -> NoReturn:
    """Alternate commands and steps until `ParentGone`."""
    busy = False
    while True:
        for command in pipe.receive(wait=not busy):
            if isinstance(command, Ping):
                pipe.send(Pong())
            elif not isinstance(command, PoolMemory):  # which comes before the engine is ready
                core.take(command)
        busy = core.step()


def main(make_core: MakeCore = EngineCore) -> NoReturn:
    """Run the engine process around the core that ``make_core`` returns. Exits with 0, or with 1 after `Failed`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when the engine ends
    end_with_parent()
    set_up_logging()
    spec_json, commands_fd, events_fd, kv_events_fd, memory_fd = sys.argv[1:]
    pipe = WorkerPipe(int(commands_fd), int(events_fd), int(kv_events_fd))
    status = 0
    try:
        _run(pipe, EngineSpec.from_json(spec_json), int(memory_fd), make_core)
    except ParentGone:
        pass
    except Exception as error:  # the worker needs to know of any error
        kind, message = to_wire(error)
        with contextlib.suppress(ParentGone):
            pipe.send(Failed(kind, " ".join(message.split())[:_MAX_MESSAGE_CHARS]))
        if not isinstance(error, PdserveError):
            raise
        status = 1
    logging.shutdown()
    # Skips the interpreter's clean-up, which takes 0.3 s with torch and frees only what the kernel frees anyway.
    os._exit(status)


def _run(pipe: WorkerPipe, spec: EngineSpec, memory_fd: int, make_core: MakeCore) -> None:
    if spec.cores:
        try:
            os.sched_setaffinity(0, spec.cores_of(0))
        except OSError as error:
            raise LaunchError(f"cannot bind the engine to cores {list(spec.cores)}: {error.strerror}") from None
    with no_collection():  # after binding: torch counts the cores when it is imported
        from engine.process.build import build_engine, make_connector

    def pool_memory(num_bytes: int) -> list[Any]:
        pipe.send(WantsPool(num_bytes))
        [answer] = pipe.receive(wait=True)
        assert isinstance(answer, PoolMemory), "the worker sends nothing else before the engine is ready"
        return answer.share

    built = build_engine(spec, memory_fd, woken=pipe.wake, pool_memory=pool_memory)
    clock = MonotonicClock()
    connector = make_connector(spec, built.runner.pool, clock, pipe.put)
    kind = scheduler_class(spec.batching, spec.chunk_tokens)
    scheduler = kind(built.scheduler_config, clock, connector, built.drafter)
    core = make_core(scheduler, built.runner, clock, pipe, spec.runs_ahead, built.structures)
    freeze_heap()
    with contextlib.suppress(ParentGone):
        pipe.send(built.ready)
        serve(pipe, core)
    connector.close()
    built.runner.synchronize()


if __name__ == "__main__":
    main()
