"""Which services of this user run on this host: a small file per gRPC port, so that `pdserve down`, `list`, `logs` and
`scale` find what `pdserve up` began."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from ops.launch.leftovers import OPERATOR_FOLDER_PREFIX, ProcessId, clear_leftovers, find
from pdserve.core.errors import LaunchError

Phase = Literal["starting", "ready", "restarting", "stopping"]


def state_folder() -> Path:
    """Where the files lie: ``$XDG_STATE_HOME/pdserve`` or ``~/.local/state/pdserve``."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "pdserve"


@contextlib.contextmanager
def writable_state() -> Iterator[Path]:
    """The folder, made if it is missing. LaunchError if it, or what the block writes into it, cannot be written."""
    folder = state_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except OSError as error:
        raise LaunchError(
            f"cannot write to {error.filename or folder}, where services are noted: {error.strerror}; "
            "make it writable, or set XDG_STATE_HOME to a folder that is"
        ) from None


def port_of(target: str) -> int:
    """The port in ``host:port``; LaunchError if there is none."""
    port = target.rpartition(":")[2]
    if not port.isdigit():
        raise LaunchError(f"--target: {target!r} is not host:port")
    return int(port)


@dataclass(frozen=True, slots=True)
class ServiceState:
    """A service, by its supervisor. ``create_time`` tells the process from a later one with the same id. ``ray_folder``
    is that of a Ray of its own (empty: it joined one), ``socket`` its operator's, ``start_timeout_s`` how long a worker
    may take to start. ``processes`` are those on this host that are not found by the Ray's folder. ``since_s`` is
    seconds since 1970."""

    pid: int
    create_time: float
    port: int
    log: str
    ray_folder: str = ""
    socket: str = ""
    start_timeout_s: float = 180.0
    target: str = ""
    model: str = ""
    workers: str = ""
    phase: Phase = "ready"
    ray_address: str = ""
    since_s: float = 0.0
    processes: tuple[ProcessId, ...] = ()

    @staticmethod
    def path(port: int) -> Path:
        """The file of the service on ``port``."""
        return state_folder() / f"{port}.json"

    def claim(self) -> None:
        """Note a service that is about to start, before it begins anything. LaunchError if another one of this user has
        the port, or if it cannot be noted."""
        with _locked():
            before = None
            with contextlib.suppress(FileNotFoundError, LaunchError):
                before = self.load(self.path(self.port))
            again = before is not None and (before.pid, before.create_time) == (self.pid, self.create_time)
            if before is not None and before.process() is not None and not again:
                raise LaunchError(
                    f"gateway.port: a service of yours (process {before.pid}, {before.phase}) has port {self.port}; "
                    f"choose another with --port, or end it with pdserve down --target localhost:{self.port}"
                )
            if before is not None and not again:
                before._clear()
            self._write()

    def update(self, **changes: Any) -> ServiceState:
        """Note what has changed; returns the new state."""
        changed = replace(self, **changes)
        if changed != self:
            changed._write()
        return changed

    @classmethod
    def read(cls, port: int) -> ServiceState:
        """The service on ``port``; LaunchError if none was started here."""
        try:
            return cls.load(cls.path(port))
        except FileNotFoundError:
            others = ", ".join(str(state.port) for state in cls.all())
            there_are = f"; services of this user have port {others}" if others else ""
            raise LaunchError(f"no service was started on this host with port {port}{there_are}") from None

    @classmethod
    def load(cls, path: Path) -> ServiceState:
        """The service that a file notes; FileNotFoundError, or LaunchError if it is not such a file."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            processes = tuple((int(pid), float(created)) for pid, created in fields.pop("processes", ()))
            return cls(**fields, processes=processes)
        except (TypeError, ValueError, AttributeError):
            raise LaunchError(f"{path}: not a service's state file; remove it") from None

    @classmethod
    def all(cls) -> list[ServiceState]:
        """Every service of this user that is noted on this host, by port: those that were killed, too."""
        states = []
        for path in state_folder().glob("[0-9]*.json"):
            with contextlib.suppress(FileNotFoundError, LaunchError):  # it has just ended, or was never one
                states.append(cls.load(path))
        return sorted(states, key=lambda state: state.port)

    def remove(self) -> None:
        """The service is gone."""
        with contextlib.suppress(OSError, LaunchError):
            noted = self.load(self.path(self.port))
            if (noted.pid, noted.create_time) == (self.pid, self.create_time):  # else another has the port by now
                self.path(self.port).unlink()

    def clear(self) -> str:
        """The service is gone without having cleared up: end what is left of it, and return that in words."""
        with _locked():
            return self._clear()

    def process(self) -> psutil.Process | None:
        """The supervisor, if it is still the one that was noted."""
        return find((self.pid, self.create_time))

    def _clear(self) -> str:
        left = clear_leftovers(self.ray_folder, self.processes)
        folder = Path(self.socket).parent
        if folder.name.startswith(OPERATOR_FOLDER_PREFIX):
            shutil.rmtree(folder, ignore_errors=True)
        self.remove()
        return left

    def _write(self) -> None:
        with writable_state() as folder:
            draft = folder / f"{self.port}.{os.getpid()}.draft"
            draft.write_text(json.dumps(asdict(self)), encoding="utf-8")
            draft.replace(self.path(self.port))


def clear_dead_services() -> dict[int, str]:
    """Remove what services of this user have left whose supervisors were killed: what it was, by port."""
    return {state.port: state.clear() for state in ServiceState.all() if state.process() is None}


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """One process at a time removes what is noted, or notes a port anew."""
    with contextlib.ExitStack() as stack:
        with writable_state() as folder:
            lock = stack.enter_context((folder / "lock").open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
