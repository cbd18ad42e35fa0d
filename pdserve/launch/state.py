"""Which services run on this host: a small file per gRPC port, so that `pdserve down` finds what `pdserve up` began."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from core.errors import LaunchError
from pdserve.launch.leftovers import OPERATOR_FOLDER_PREFIX


def state_folder() -> Path:
    """Where the files lie: ``$XDG_STATE_HOME/pdserve`` or ``~/.local/state/pdserve``."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "pdserve"


def port_of(target: str) -> int:
    """The port in ``host:port``; LaunchError if there is none."""
    port = target.rpartition(":")[2]
    if not port.isdigit():
        raise LaunchError(f"--target: {target!r} is not host:port")
    return int(port)


@dataclass(frozen=True, slots=True)
class ServiceState:
    """A running service's supervisor. ``create_time`` tells the process from a later one with the same id;
    ``ray_folder`` is that of a Ray of its own (empty: it joined one), ``socket`` its operator's, ``start_timeout_s``
    how long a worker may take to start."""

    pid: int
    create_time: float
    port: int
    log: str
    ray_folder: str = ""
    socket: str = ""
    start_timeout_s: float = 180.0

    @staticmethod
    def path(port: int) -> Path:
        """The file of the service on ``port``."""
        return state_folder() / f"{port}.json"

    def write(self) -> None:
        """Note the service, and clear up after one on this port that was killed."""
        path = self.path(self.port)
        with contextlib.suppress(FileNotFoundError, LaunchError):
            before = self.load(path)
            if before.process() is None:
                before.clear()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, port: int) -> ServiceState:
        """The service on ``port``; LaunchError if none was started here."""
        try:
            return cls.load(cls.path(port))
        except FileNotFoundError:
            raise LaunchError(f"no service was started on this host with port {port}") from None

    @classmethod
    def load(cls, path: Path) -> ServiceState:
        """The service that a file notes; FileNotFoundError, or LaunchError if it is not such a file."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, ValueError):
            raise LaunchError(f"{path}: not a service's state file; remove it") from None

    def remove(self) -> None:
        """The service is gone."""
        self.path(self.port).unlink(missing_ok=True)

    def clear(self) -> None:
        """The service is gone without having cleared up after itself."""
        folder = Path(self.socket).parent
        if folder.name.startswith(OPERATOR_FOLDER_PREFIX):
            shutil.rmtree(folder, ignore_errors=True)
        self.remove()

    def process(self) -> psutil.Process | None:
        """The supervisor, if it is still the one that was noted."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.create_time) < 1.0
            # One that was killed and is not waited for by anybody stays a zombie.
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None
