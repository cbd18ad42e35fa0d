"""A worker process's side of its engine process: starts it, speaks with it, ends it. No torch here."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from engine.messages import Command, EngineEvent, Failed, FrameReader, KVEvent, Ready, Shutdown, encode
from engine.spec import ENGINE_MODULE, EngineSpec
from pdserve.core import memory_file
from pdserve.core.errors import LaunchError, from_wire

_F_SETPIPE_SZ = 1031
_PIPE_BYTES = 2**20
_EXIT_S = 1.0  # from the end of its pipe to the end of the process

# glibc gives big tensors back to the kernel after each use otherwise, and every step pays for fresh pages.
ALLOCATOR_SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_TOP_PAD_": "134217728",
}


class EngineClient:
    """One engine process, from `start` to `stop`. Belongs to the event loop that started it.

    The engine ends with the thread that called `start` (the kernel kills it then), so that thread must be one that
    lives as long as the engine shall. ``module`` is what the process runs.
    """

    def __init__(self, module: str = ENGINE_MODULE) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._commands_fd = self._events_fd = self._kv_events_fd = self._memory_fd = -1
        self._unsent = bytearray()
        self._sending = threading.Lock()
        self._frames: FrameReader[EngineEvent] = FrameReader(EngineEvent)  # type: ignore[arg-type]  # a union
        self._events: asyncio.Queue[EngineEvent | None] = asyncio.Queue()

    @property
    def pid(self) -> int:
        """The engine's process id; AssertionError before `start`."""
        assert self._process is not None, "the engine was not started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs, then its exit status (negative: the signal that ended it)."""
        return None if self._process is None else self._process.poll()

    async def start(self, spec: EngineSpec, timeout_s: float) -> Ready:
        """Spawn the engine and wait until it is ready. Raises what it failed with (`ModelError`, `ConfigError`, …),
        or `LaunchError` if it dies or takes longer than ``timeout_s``; nothing is left behind then."""
        try:
            self._spawn(spec)
            first = await asyncio.wait_for(self._events.get(), timeout_s)
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
        self._events_fd, events_write = os.pipe()
        self._kv_events_fd, kv_events_write = os.pipe()
        self._memory_fd = memory_file.create("pdserve-kv")
        inherited = (commands_read, events_write, kv_events_write, self._memory_fd)
        try:
            for fd in (self._commands_fd, self._events_fd, self._kv_events_fd):
                _enlarge(fd)
                os.set_blocking(fd, False)
            # -P: a folder named like one of ours in the current directory must not be imported.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, spec.to_json(), *map(str, inherited)],
                stdin=subprocess.DEVNULL,
                pass_fds=inherited,
                env=_environment(spec),
            )
        finally:
            for fd in (commands_read, events_write, kv_events_write):
                os.close(fd)
        self._loop.add_reader(self._events_fd, self._on_readable)

    # --- messages ----------------------------------------------------------------------------------------------------

    def send(self, command: Command) -> None:
        """Hand a command to the engine, from any thread; never blocks (what the pipe does not take at once waits here).
        Ignored before `start` and once the engine is gone, which `events` tells."""
        if self._loop is None:
            return
        frame = encode(command)
        with self._sending:
            waiting = bool(self._unsent)
            self._unsent += frame
            if waiting or self._write():
                return
        with contextlib.suppress(RuntimeError):  # the loop is closed: so is the engine
            self._loop.call_soon_threadsafe(self._flush)

    def _write(self) -> bool:
        """Whether all that waits is written (or nobody reads it any more). Holds the lock."""
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
        """What the engine says after `Ready`, in order, for one reader. Ends when the engine is gone; `returncode` says
        how it went."""
        while (event := await self._events.get()) is not None:
            yield event
        self._events.put_nowait(None)
        await self._gone_within(_EXIT_S)

    def _on_readable(self) -> None:
        try:
            data = os.read(self._events_fd, _PIPE_BYTES)
        except BlockingIOError:
            return
        for message in self._frames.feed(data):
            self._events.put_nowait(message)
        if not data:
            self._close_events()

    def take_kv_events(self) -> KVEventReader:
        """The reader of KV events, which is the caller's from now on; AssertionError the second time."""
        assert self._kv_events_fd >= 0, "the engine was not started, or another reads its KV events"
        fd, self._kv_events_fd = self._kv_events_fd, -1
        return KVEventReader(fd)

    @property
    def memory_fd(self) -> int:
        """The memory file that the engine's pool lies in, if it is on the host; it stays this client's."""
        return self._memory_fd

    # --- the end -----------------------------------------------------------------------------------------------------

    async def stop(self, timeout_s: float) -> None:
        """End the engine: asked for ``timeout_s``, then killed. It is reaped and all descriptors are closed after this;
        stopping twice is fine. Mappings of the pool stay valid until they are closed."""
        self.send(Shutdown())
        try:
            if not await self._gone_within(timeout_s) and self._process is not None:
                self._process.terminate()
                await self._gone_within(min(timeout_s, _EXIT_S))
        finally:
            if self._process is not None and self._process.poll() is None:
                self._process.kill()
                self._process.wait()  # for the kernel alone
            self._close_commands()
            self._close_events()
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
            await asyncio.wait_for(gone.wait(), timeout_s)
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(pid_fd)
            os.close(pid_fd)
        self._process.wait()  # it has ended: this only reaps it
        return True

    def _close_commands(self) -> None:
        with self._sending:
            self._unsent.clear()
            if self._commands_fd >= 0:
                if self._loop is not None:
                    self._loop.remove_writer(self._commands_fd)
                os.close(self._commands_fd)
                self._commands_fd = -1

    def _close_events(self) -> None:
        if self._events_fd >= 0:
            if self._loop is not None:
                self._loop.remove_reader(self._events_fd)
            os.close(self._events_fd)
            self._events_fd = -1
            self._events.put_nowait(None)


class KVEventReader:
    """The engine's KV events, read on an event loop other than the `EngineClient`'s."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._frames: FrameReader[KVEvent] = FrameReader(KVEvent)  # type: ignore[arg-type]  # a union
        self._loop: asyncio.AbstractEventLoop | None = None

    def follow(self, on_event: Callable[[KVEvent], None]) -> None:
        """Call ``on_event`` for each event, in order, on the running loop, until `close` or the engine's end."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._on_readable, on_event)

    def _on_readable(self, on_event: Callable[[KVEvent], None]) -> None:
        try:
            data = os.read(self._fd, _PIPE_BYTES)
        except BlockingIOError:
            return
        for event in self._frames.feed(data):
            on_event(event)
        if not data:
            self.close()

    def close(self) -> None:
        """Read no more; on the loop that follows. Closing twice is fine."""
        if self._fd >= 0:
            if self._loop is not None:
                self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


def _enlarge(fd: int) -> None:
    with contextlib.suppress(OSError):  # over the user's quota for pipes: the default size works too
        fcntl.fcntl(fd, _F_SETPIPE_SZ, _PIPE_BYTES)


def _environment(spec: EngineSpec) -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        **ALLOCATOR_SETTINGS,
        "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root,
        "OMP_NUM_THREADS": str(spec.threads),
    }
