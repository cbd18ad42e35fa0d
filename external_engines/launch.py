"""What a worker starts as the server of its engine, and how that is reached."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx2

from checkpoints.source import ModelSource
from external_engines.adapter import Adapter
from external_engines.server import client_of
from pdserve.core.address import join_address
from pdserve.core.errors import LaunchError, ModelError
from worker.spec import WorkerSpec


class Place(NamedTuple):
    """What a server has for itself: a folder of this user alone, the address of its host that others of the service
    reach, and a port there at which decode finds its KV."""

    folder: Path
    host: str
    kv_port: int

    @property
    def kv_address(self) -> str:
        """The ``host:port`` at which decode finds its KV."""
        return join_address(self.host, self.kv_port)


class Launch(NamedTuple):
    """A server to start, which is spoken to by ``adapter``: at a Unix ``socket``, or at ``url`` for callers with the
    ``key``."""

    command: Sequence[str]
    environment: Mapping[str, str]
    adapter: Adapter
    url: str = "http://engine"
    socket: str | None = None
    key: str | None = None

    def client(self) -> httpx2.AsyncClient:
        """Calls the server."""
        return client_of(self.url, self.socket, self.key)


Launcher = Callable[[WorkerSpec, ModelSource, Place], Launch]
"""How the server of a worker is started, by the service's configuration. LaunchError or ModelError if it cannot be."""


def folder_of(spec: WorkerSpec, source: ModelSource) -> Path:
    """The folder that the worker's server loads. ModelError if the model has no files, LaunchError if there is no such
    engine here."""
    config = spec.config
    if source.folder is None:
        raise ModelError(f"model.path: {config.model.path} has no folder that {config.worker.engine} could load")
    if shutil.which(program := config.worker.program) is None:
        raise LaunchError(
            f"worker.command: there is no program {program!r} on {spec.node}; install {config.worker.engine} there, or "
            "name its path"
        )
    return source.folder


def given(options: Mapping[str, object]) -> list[str]:
    """Options of a command line, without those that are None. True: an option without a value."""
    parts: list[str] = []
    for option, value in options.items():
        if value is not None:
            parts += [option] if value is True else [option, str(value)]
    return parts


def environment(spec: WorkerSpec, variables: Mapping[str, str]) -> Mapping[str, str]:
    """The environment of a server: this process's, with ``variables``. This process's prevail where they say how
    threads wait."""
    # Else the threads of an idle server keep its cores busy.
    waiting = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"} if spec.device == "cpu" else {}
    return {**waiting, **os.environ, **variables}


def free_port(host: str) -> int:
    """A port that is free now: the server that gets it has no way to say which one it took."""
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
