"""The worker's side of an engine process: starts it, exchanges messages with it, ends it. Does not import torch."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Generic

from contract.engine import (
    AnyCommand,
    EngineEvent,
    Failed,
    FrameReader,
    KVEvent,
    M,
    PoolMemory,
    Ready,
    WantsPool,
    encode_frame,
)
from engine.spec import ENGINE_MODULE, EngineSpec
from pdserve.core.errors import LaunchError, from_wire
from runtime import memory_file
from runtime.mps import engine_environment
from runtime.threads import in_thread

log = logging.getLogger(__name__)

_F_SETPIPE_SZ = 1031
_PIPE_BYTES = 2**20
_EXIT_S = 1.0  # the longest time between the end of the pipe and the end of the process

# Otherwise glibc returns large tensors to the kernel after each use, and every step pays for new pages.
ALLOCATOR_SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_TOP_PAD_": "134217728",
}

_ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads the newer name first
_EXPANDABLE = re.compile(r"(expandable_segments\s*:\s*)(true|1|on|yes)", re.IGNORECASE)


class EngineClient:
    """One engine process, from `start` to `stop`. Belongs to the event loop that started it.

    The kernel kills the engine when the thread that called `start` ends, so this thread must live as long as the
    engine. ``module`` is the module that the process runs.
    """

    def __init__(self, module: str = ENGINE_MODULE) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._commands_fd = self._kv_events_fd = self._memory_fd = -1
        self._unsent = bytearray()
        self._sending = threading.Lock()
        self._reader: EventReader[EngineEvent] | None = None
        self._events: asyncio.Queue[EngineEvent | None] = asyncio.Queue()

    @property
    def pid(self) -> int:
        """Process id of the engine; AssertionError before `start`."""
        assert self._process is not None, "the engine was not started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status of the engine (negative: the signal that ended it), or None while it runs."""
        return None if self._process is None else self._process.poll()

    async def start(
        self, spec: EngineSpec, timeout_s: float, pool_memory: Callable[[int], list[Any]] = lambda num_bytes: []
    ) -> Ready:
        """Spawn the engine and wait until it is ready. An engine on a GPU gets the memory of its pool from
        ``pool_memory``, by its bytes (`contract.engine.PoolMemory`).

        Raises the engine's own error (`ModelError`, `ConfigError`, …), or `LaunchError` if it dies or takes longer than
        ``timeout_s``. The process has ended then.
        """
        try:
            self._spawn(spec)
            async with asyncio.timeout(timeout_s):
                while isinstance(first := await self._events.get(), WantsPool):
                    share = await in_thread("engine-pool", partial(pool_memory, first.num_bytes))
                    self.send(PoolMemory(share))
        except TimeoutError:
            await self.stop(0.0)
            raise LaunchError(f"the engine was not ready within {timeout_s:g} s (model {spec.model})") from None
        except BaseException:
            await self.stop(0.0)
            raise
        if isinstance(first, Ready):
            return first
        await self.stop(1.0)
        if isinstance(first, Failed):
            raise from_wire(first.kind, first.message)
        raise LaunchError(f"the engine process ended while starting (exit status {self.returncode}); see its log")

    def _spawn(self, spec: EngineSpec) -> None:
        self._loop = asyncio.get_running_loop()
        commands_read, self._commands_fd = os.pipe()
        events_read, events_write = os.pipe()
        self._reader = EventReader(events_read, EngineEvent)  # type: ignore[arg-type]  # a union
        self._kv_events_fd, kv_events_write = os.pipe()
        self._memory_fd = memory_file.create("pdserve-kv")
        inherited = (commands_read, events_write, kv_events_write, self._memory_fd)
        try:
            for fd in (self._commands_fd, events_read, self._kv_events_fd):
                _enlarge(fd)
                os.set_blocking(fd, False)
            # -P: do not import folders of the current directory that have the name of one of our packages.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, spec.to_json(), *map(str, inherited)],
                stdin=subprocess.DEVNULL,
                pass_fds=inherited,
                env=_environment(spec),
            )
        finally:
            for fd in (commands_read, events_write, kv_events_write):
                os.close(fd)
        self._reader.follow(self._events.put_nowait, on_end=lambda: self._events.put_nowait(None))

    # --- messages ----------------------------------------------------------------------------------------------------

    def send(self, command: AnyCommand) -> None:
        """Send a command to the engine, from any thread. Never blocks: what does not fit into the pipe is sent later.
        Ignored before `start` and after the end of the engine (see `events`)."""
        if self._loop is None:
            return
        frame = encode_frame(command)
        with self._sending:
            waiting = bool(self._unsent)
            self._unsent += frame
            if waiting or self._write():
                return
        with contextlib.suppress(RuntimeError):  # the loop is closed, and so is the engine
            self._loop.call_soon_threadsafe(self._flush)

    def _write(self) -> bool:
        """Write what fits into the pipe, with the lock held. True if nothing is left or the engine is gone."""
        try:
            while self._unsent and self._commands_fd >= 0:
                del self._unsent[: os.write(self._commands_fd, self._unsent)]
        except BlockingIOError:
            return False
        except BrokenPipeError:
            pass
        self._unsent.clear()
        return True

    def _flush(self) -> None:
        assert self._loop is not None
        with self._sending:
            if self._commands_fd < 0:
                return
            if self._write():
                self._loop.remove_writer(self._commands_fd)
            else:
                self._loop.add_writer(self._commands_fd, self._flush)

    async def events(self) -> AsyncIterator[EngineEvent]:
        """The engine's events after `Ready`, in order, for one reader. Ends when the engine is gone; `returncode` is
        set then."""
        while (event := await self._events.get()) is not None:
            yield event
        self._events.put_nowait(None)
        await self._gone_within(_EXIT_S)

    def take_kv_events(self) -> EventReader[KVEvent]:
        """Hand the reader of KV events over to the caller. AssertionError on a second call."""
        assert self._kv_events_fd >= 0, "the engine was not started, or its KV events have a reader already"
        fd, self._kv_events_fd = self._kv_events_fd, -1
        return EventReader(fd, KVEvent)  # type: ignore[arg-type]  # a union

    @property
    def memory_fd(self) -> int:
        """The memory file of the engine's pool, if the pool is in host memory. This client closes it."""
        return self._memory_fd

    # --- stop --------------------------------------------------------------------------------------------------------

    async def stop(self, timeout_s: float) -> None:
        """Ask the engine to end, kill it after ``timeout_s``, reap it, and close all descriptors.

        May be called twice. Mappings of the pool stay valid until they are closed.
        """
        self._close_commands()
        try:
            if not await self._gone_within(timeout_s) and self._process is not None:
                self._process.terminate()
                await self._gone_within(min(timeout_s, _EXIT_S))
        finally:
            if self._process is not None and self._process.poll() is None:
                self._process.kill()
                self._process.wait()  # the kernel ends it at once
            if self._reader is not None:
                self._reader.close()
            for fd in (self._kv_events_fd, self._memory_fd):
                if fd >= 0:
                    os.close(fd)
            self._kv_events_fd = self._memory_fd = -1

    async def _gone_within(self, timeout_s: float) -> bool:
        if self._process is None or self._process.poll() is not None:
            return True
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        pid_fd = os.pidfd_open(self._process.pid)
        try:
            loop.add_reader(pid_fd, gone.set)
            async with asyncio.timeout(timeout_s):
                await gone.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(pid_fd)
            os.close(pid_fd)
        self._process.wait()  # it has ended; this reaps it
        return True

    def _close_commands(self) -> None:
        with self._sending:
            self._unsent.clear()
            if self._commands_fd >= 0:
                if self._loop is not None:
                    self._loop.remove_writer(self._commands_fd)
                os.close(self._commands_fd)
                self._commands_fd = -1


class EventReader(Generic[M]):
    """Reads the events of one pipe, whose descriptor it owns, on the event loop that calls `follow`. ``kinds`` is the
    union of the events."""

    def __init__(self, fd: int, kinds: type[M]) -> None:
        self._fd = fd
        self._frames = FrameReader(kinds)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_event: Callable[[M], None] = lambda event: None
        self._on_end: Callable[[], None] | None = None

    def follow(self, on_event: Callable[[M], None], on_end: Callable[[], None] | None = None) -> None:
        """Call ``on_event`` for each event, in order, on the running loop, until `close` or the end of the engine.
        Then call ``on_end``."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._on_readable)
        self._on_event, self._on_end = on_event, on_end

    def _on_readable(self) -> None:
        try:
            data = os.read(self._fd, _PIPE_BYTES)
        except BlockingIOError:
            return
        for event in self._frames.feed(data):
            self._on_event(event)
        if not data:
            self.close()

    def close(self) -> None:
        """Stop reading. Call it on the loop of `follow`; a second call has no effect."""
        if self._fd >= 0:
            if self._loop is not None:
                self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
            if self._on_end is not None:
                self._on_end()


def _enlarge(fd: int) -> None:
    with contextlib.suppress(OSError):  # the user's quota for pipes is used up; the default size works too
        fcntl.fcntl(fd, _F_SETPIPE_SZ, _PIPE_BYTES)


def _environment(spec: EngineSpec) -> dict[str, str]:
    settings = shareable_allocator(os.environ) if spec.device != "cpu" else {}
    for name, value in settings.items():
        log.warning(
            "%s=%s is used for the engine: memory of expandable segments cannot be shared with other processes in "
            "containers",
            *(name, value),
        )
    root = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    return {
        **engine_environment(os.environ),
        **ALLOCATOR_SETTINGS,
        **settings,
        "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root,
        "OMP_NUM_THREADS": str(spec.threads),
    }


def shareable_allocator(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of torch's CUDA allocator in ``environment`` that have to change, with expandable segments off.
    CUDA IPC hands such memory over as a file descriptor, by a system call that containers forbid."""
    changed = {name: _EXPANDABLE.sub(r"\1False", environment.get(name, "")) for name in _ALLOCATOR_NAMES}
    return {name: value for name, value in changed.items() if value != environment.get(name, "")}
