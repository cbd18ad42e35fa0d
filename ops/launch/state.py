"""The services of this user on this host: one state file per gRPC port, by which `pdserve down`, `list`, `logs` and
`scale` find what `pdserve up` started."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
import psutil

from ops.launch.leftovers import OPERATOR_FOLDER_PREFIX, ProcessId, clear_leftovers, family_of, find, identify
from pdserve.core.address import is_loopback, join_address, split_address, stays_on_this_host, target_of
from pdserve.core.config import GatewayConfig
from pdserve.core.errors import InvalidRequest, LaunchError

Phase = Literal["starting", "ready", "restarting", "stopping"]


def state_folder() -> Path:
    """The folder of the state files: ``$XDG_STATE_HOME/pdserve`` or ``~/.local/state/pdserve``."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "pdserve"


@contextlib.contextmanager
def writable_state() -> Iterator[Path]:
    """The folder, created for this user alone if missing. LaunchError if it, or a file that the block writes there, is
    not writable."""
    folder = state_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if stat.S_IMODE(folder.stat().st_mode) & 0o077:  # an earlier version made it
            folder.chmod(0o700)
        yield folder
    except OSError as error:
        raise LaunchError(
            f"cannot write to {error.filename or folder}, the folder of state files: {error.strerror}; "
            "make it writable, or set XDG_STATE_HOME to a folder that is"
        ) from None


def last_report() -> Path:
    """A link to the report of this user's last run on this host; missing if there is none."""
    return state_folder() / "last_report.html"


def note_report(page: Path) -> None:
    """Let `last_report` lead to ``page``. LaunchError if the state folder is not writable."""
    with writable_state() as folder:
        link = folder / f"last_report.{os.getpid()}"
        link.symlink_to(page.absolute())
        link.replace(last_report())


CACHE_KEY_BYTES = 32


def cache_key() -> bytes:
    """The key that separates the KV of tenants in the folders of `engine.offload_folder`. It is made once for each
    user of this host, so that a service that starts again finds its blocks. LaunchError if others can read it."""
    with writable_state() as folder:
        path = folder / "cache_key"
        if not path.exists():
            with tempfile.NamedTemporaryFile(dir=folder) as made:  # with mode 600
                made.write(secrets.token_bytes(CACHE_KEY_BYTES))
                made.flush()
                with contextlib.suppress(FileExistsError):  # another service of this user was quicker
                    os.link(made.name, path)
        if (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
            raise LaunchError(f"{path}: others can read or change it (mode {mode:o}); delete it, and a new one is made")
        return path.read_bytes()


def private(path: str, flags: int) -> int:
    """An ``opener`` for `open`: a file that it creates is accessible to this user alone from the beginning."""
    return os.open(path, flags, 0o600)


def target_here(gateway: GatewayConfig, port: int) -> str:
    """The target of a service's gRPC or HTTP ``port`` for clients on its own host."""
    host = "localhost" if gateway.host in ("", "0.0.0.0", "::") else gateway.host
    return f"{'https://' if gateway.tls_cert else ''}{join_address(host, port)}"


def new_socket() -> str:
    """A path for the operator's socket, in a folder that does not exist yet."""
    return f"/tmp/{OPERATOR_FOLDER_PREFIX}{secrets.token_hex(4)}/socket"


@dataclass(frozen=True, slots=True)
class ServiceState:
    """A service, identified by its supervisor (``pid`` and ``create_time``)."""

    pid: int
    create_time: float
    port: int  # of the first gateway; the others use those after it
    log: str
    ray_folder: str = ""  # of its own Ray; empty: it joined one
    socket: str = ""  # the operator's
    start_timeout_s: float = 180.0  # how long workers may take to start
    target: str = ""
    model: str = ""
    workers: str = ""
    phase: Phase = "ready"
    ray_address: str = ""
    since_s: float = 0.0  # since 1970
    processes: tuple[ProcessId, ...] = ()  # those on this host that are not found by Ray's folder
    gateways: int = 1
    servers: tuple[str, ...] = ()  # URLs of its workers, if it does not start them

    @property
    def targets(self) -> list[str]:
        """Where clients reach the gateways."""
        address, tls = target_of(self.target)
        host, scheme = split_address(address)[0], "https://" if tls else ""
        return [f"{scheme}{join_address(host, self.port + number)}" for number in range(self.gateways)]

    @property
    def operator(self) -> str:
        """The target at which clients of this user get the status with addresses and processes."""
        return f"unix:{self.socket}"

    @staticmethod
    def path(port: int) -> Path:
        """The state file of the service on ``port``."""
        return state_folder() / f"{port}.json"

    def claim(self) -> None:
        """Write the state file of a service that is about to start. LaunchError if another service of this user has the
        port, or the file cannot be written."""
        with _locked():
            before = None
            with contextlib.suppress(FileNotFoundError, LaunchError):
                before = self.load(self.path(self.port))
            again = before is not None and (before.pid, before.create_time) == (self.pid, self.create_time)
            if before is not None and before.process() is not None and not again:
                raise before.in_the_way("gateway.port", self.port, "choose another with --port")
            if before is not None and not again:
                before._clear()
            self._write()

    def update(self, **changes: Any) -> ServiceState:
        """Write changed fields; returns the new state."""
        changed = replace(self, **changes)
        if changed != self:
            changed._write()
        return changed

    @classmethod
    def read(cls, port: int) -> ServiceState:
        """The service with a gateway on ``port``; LaunchError if none was started on this host."""
        try:
            return cls.load(cls.path(port))
        except FileNotFoundError:
            for state in cls.all():
                if state.port < port < state.port + state.gateways:
                    return state
            others = ", ".join(str(state.port) for state in cls.all())
            there_are = f"; services of this user use port {others}" if others else ""
            raise LaunchError(f"no service was started on this host with port {port}{there_are}") from None

    @classmethod
    def of(cls, target: str) -> ServiceState:
        """The service of this host that a user means by a target (of several gateways: the first). LaunchError if none
        was started here, such as for the target of another host."""
        address, _ = target_of(target.partition(",")[0])
        try:
            host, port = split_address(address)
        except ValueError as error:
            raise InvalidRequest(f"target: {error}") from None
        state = cls.read(port)
        if not (_is_here(host) or state._is_at(address)):
            raise LaunchError(
                f"{address} is on another host; call this on the host that the service was started on, or give the "
                f"port of a service of this one (--port {port})"
            )
        return state

    @classmethod
    def load(cls, path: Path) -> ServiceState:
        """Read a state file; FileNotFoundError, or LaunchError if it is malformed."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except msgspec.DecodeError:
            raise LaunchError(f"{path}: not a service's state file; remove it") from None

    @classmethod
    def all(cls) -> list[ServiceState]:
        """All services of this user on this host by port, including killed ones."""
        states = []
        for path in state_folder().glob("[0-9]*.json"):
            with contextlib.suppress(FileNotFoundError, LaunchError):  # removed meanwhile, or malformed
                states.append(cls.load(path))
        return sorted(states, key=lambda state: state.port)

    def remove(self) -> None:
        """Remove the state file after the service has ended."""
        with contextlib.suppress(OSError, LaunchError):
            noted = self.load(self.path(self.port))
            if (noted.pid, noted.create_time) == (self.pid, self.create_time):  # else another service has the port now
                self.path(self.port).unlink()

    def clear(self) -> str:
        """Clean up after a service that could not: end what is left of it. Returns a description of the remains."""
        with _locked():
            return self._clear()

    @classmethod
    def at(cls, address: str) -> ServiceState | None:
        """The running service that clients reach at ``address``; None if it is none of this user's on this host."""
        for state in cls.all():
            ports = range(state.port, state.port + state.gateways)
            ours = stays_on_this_host(address) and any(address.endswith(f":{port}") for port in ports)
            if (ours or state._is_at(address)) and state.process() is not None:
                return state
        return None

    @classmethod
    def using(cls, port: int) -> ServiceState | None:
        """The running service of this user, other than that of this process, that has ``port`` for its gateways or a
        process that listens there."""
        running = [
            (state, process)
            for state in cls.all()
            if state.pid != os.getpid() and (process := state.process()) is not None
        ]
        for state, _ in running:
            if state.port <= port < state.port + state.gateways:
                return state
        owners: set[int] = set()
        for listener in listeners(port):
            with contextlib.suppress(psutil.Error):
                owners.update(each.pid for each in (listener, *listener.parents()))
        for state, process in running:
            if owners & {process.pid, *(pid for pid, _ in state.processes)}:
                return state
        return None

    def in_the_way(self, key: str, port: int, hint: str) -> LaunchError:
        """The error of a start that wants a ``port`` of this service for the configuration's ``key``."""
        return LaunchError(
            f"{key}: a service of yours (process {self.pid}, {self.phase}; see `pdserve list`) uses port {port}; "
            f"{hint}, or end it with `pdserve down --target localhost:{self.port}`"
        )

    def _is_at(self, address: str) -> bool:
        """Whether that is the address of one of its gateways."""
        return bool(self.target) and address in [target_of(target)[0] for target in self.targets]

    def process(self) -> psutil.Process | None:
        """The supervisor's process, if it is still running."""
        return find((self.pid, self.create_time))

    def running_processes(self) -> set[psutil.Process]:
        """Its processes on this host, and those of the `servers` that run here."""
        folder = Path(self.ray_folder) if self.ray_folder else None
        noted = [(self.pid, self.create_time), *self.processes]
        for url in map(urlsplit, self.servers):
            if url.port and url.hostname and _is_here(url.hostname):
                noted += map(identify, listeners(url.port))
        return family_of(folder, noted)

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
            with open(draft, "wb", opener=private) as file:
                file.write(msgspec.json.encode(self))
            draft.replace(self.path(self.port))


def _is_here(host: str) -> bool:
    """Whether that is this host, by its name or an address."""
    addresses = (each.address for found in psutil.net_if_addrs().values() for each in found)
    return is_loopback(host) or host == socket.gethostname() or host in addresses


def listeners(port: int) -> list[psutil.Process]:
    """The processes that listen on TCP ``port`` of this host, as far as this user may know."""
    found = []
    for each in psutil.net_connections("tcp"):
        if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(each.pid))
    return found


def clear_dead_services() -> dict[int, str]:
    """Clean up after the services of this user whose supervisors were killed. Returns descriptions by port."""
    return {state.port: state.clear() for state in ServiceState.all() if state.process() is None}


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Serializes removing and claiming of ports between processes."""
    with contextlib.ExitStack() as stack:
        with writable_state() as folder:
            lock = stack.enter_context(open(folder / "lock", "a", opener=private))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
