"""Pairs of processes that run a third-party library, NIXL or Mooncake, in a virtual environment of their own. The
library may be missing, or not work on this machine. The module is also the program of their ends:
`python -m experiments.benchmarks.peers LIBRARY [MEMORY] ROLE MAX_BYTES`."""

from __future__ import annotations

import base64
import importlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from experiments.child_process import ROOT
from experiments.messages import message_of
from experiments.pairs.endpoint import CannotRun, Endpoint, Expecting
from experiments.pairs.pair import Pair, PairUnavailable

_MODULE = "experiments.benchmarks.peers"
_MAKE_S = 120.0
_INSTALL_S = 600.0
_READ_S = 50.0
_BASE = ("numpy>=1.26", "msgspec>=0.19")
"""What the programs of both ends import themselves."""


class PeerEnvironment:
    """The virtual environment in ``folder``, made and filled when it is first asked for. Without ``installs``, what is
    not there yet is unavailable."""

    def __init__(self, folder: Path = ROOT / "out" / "peers" / "venv", *, installs: bool = True) -> None:
        self._folder, self._installs = folder, installs
        self._failures: dict[str, str] = {}

    def python_with(self, requirement: str) -> Path:
        """The environment's Python, with that library and `_BASE` installed; PairUnavailable if that fails, which
        is tried once. The library's own requirements are left out: the peers import without them, and they are big."""
        if requirement not in self._failures:
            try:
                return self._installed(requirement)
            except PairUnavailable as error:
                self._failures[requirement] = str(error)
        raise PairUnavailable(self._failures[requirement])

    def _installed(self, requirement: str) -> Path:
        python, made = self._folder / "bin" / "python", self._folder / ".made"
        installed = self._folder / f".installed {' '.join((*_BASE, requirement))}"
        if not self._installs and not installed.exists():
            raise PairUnavailable(f"{requirement} is not installed, and a quick run installs nothing")
        if not made.exists():
            self._run("making a virtual environment", _MAKE_S, sys.executable, "-m", "venv", "--clear", self._folder)
            made.touch()
        if not installed.exists():
            pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1", "--no-deps")
            self._run(f"installing {requirement}", _INSTALL_S, python, *pip, *_BASE, requirement)
            installed.touch()
        return python

    def _run(self, what: str, timeout_s: float, *command: str | Path) -> None:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            raise PairUnavailable(f"{what} took longer than {timeout_s:g} s") from None
        if done.returncode:
            lines = done.stdout.decode(errors="replace").strip().splitlines()
            raise PairUnavailable(f"{what} failed: {lines[-1] if lines else f'exit status {done.returncode}'}")


def nixl(environment: PeerEnvironment, *, tcp_only: bool = False, private_memory: bool = False) -> Pair:
    """``tcp_only`` forces TCP, as between two hosts without RDMA; otherwise UCX takes the best transport, which on one
    host is shared memory or reading the other process's memory. Sockets use the loopback interface. ``private_memory``
    uses buffers in private memory instead of memory files."""
    return Pair(
        "nixl" + "_tcp" * tcp_only + "_private" * private_memory,
        _MODULE,
        "nixl",
        "private" if private_memory else "shared",
        environment={"UCX_NET_DEVICES": "lo", **({"UCX_TLS": "tcp"} if tcp_only else {})},
        pulls=True,
        python=lambda: environment.python_with("nixl-cu12==1.5.1"),
    )


def mooncake_tcp(environment: PeerEnvironment) -> Pair:
    """Two engines that shake hands with each other, with no metadata server, and the library's own settings (keeping
    connections, or more of them, made it no faster). It takes free ports, and knows no way to listen on the loopback
    interface alone."""
    return Pair(
        "mooncake_tcp",
        _MODULE,
        "mooncake",
        environment={"MC_TCP_BIND_ADDRESS": "127.0.0.1"},
        pulls=True,
        python=lambda: environment.python_with("mooncake-transfer-engine-non-cuda==0.3.13.post1"),
    )


# --- the programs ----------------------------------------------------------------------------------------------------


class NixlEndpoint(Endpoint):
    """An agent with one registered buffer. Metadata travel with the commands, so no agent listens. There is no progress
    thread, which would occupy a core and be slower on few cores; both sides poll during a transfer."""

    def __init__(self, role: str, max_bytes: int, *arguments: str) -> None:
        library = importlib.import_module("nixl_cu12._api")
        super().__init__(role, max_bytes, *arguments)
        config = library.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent: Any = library.nixl_agent(role, config)
        if "UCX" not in self._agent.backends:
            raise CannotRun("NIXL has no UCX backend here")
        self._agent.register_memory([(self.buffer.address, max_bytes, 0, "")], "DRAM")

    @property
    def address(self) -> tuple[str, int]:
        """The agent's metadata in base64, and the address of its buffer."""
        return base64.b64encode(self._agent.get_agent_metadata()).decode(), self.buffer.address

    def connect(self, address: bytes) -> None:
        """Make the other agent and its buffer known to this one."""
        metadata, self._remote_address = message_of(address, tuple[str, int], "the other agent")
        name = self._agent.add_remote_agent(base64.b64decode(metadata))
        self._remote_name = name.decode() if isinstance(name, bytes) else name

    def transfer(self, num_bytes: int) -> float:
        """Read from the other agent's buffer: the seconds from posting until done. The source polls for notifications
        meanwhile, which makes an agent answer."""
        if self.role == "source":
            self.answer(Expecting())
            while not self.commanded():
                self._agent.get_new_notifs()
            return 0.0
        local, remote = (
            self._agent.get_xfer_descs([(address, num_bytes, 0)], "DRAM")
            for address in (self.buffer.address, self._remote_address)
        )
        handle = self._agent.initialize_xfer("READ", local, remote, self._remote_name)
        started_s = time.perf_counter()
        state = self._agent.transfer(handle)
        while state == "PROC" and time.perf_counter() - started_s < _READ_S:
            state = self._agent.check_xfer_state(handle)
        seconds = time.perf_counter() - started_s
        if state != "DONE":
            raise RuntimeError(f"a read of {num_bytes} bytes is in state {state} after {seconds:.1f} s")
        self._agent.release_xfer_handle(handle)
        return seconds


class MooncakeEndpoint(Endpoint):
    """An engine with one registered buffer; it finds a free port itself, and connects with its first transfer."""

    def __init__(self, role: str, max_bytes: int, *arguments: str) -> None:
        library = importlib.import_module("mooncake.engine")
        super().__init__(role, max_bytes, *arguments)
        self._engine: Any = library.TransferEngine()
        if status := self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise CannotRun(f"the transfer engine does not start (status {status})")
        if status := self._engine.register_memory(self.buffer.address, max_bytes):
            raise CannotRun(f"the transfer engine does not register memory (status {status})")

    @property
    def address(self) -> tuple[str, int]:
        """Where the engine listens, and the address of its buffer."""
        return f"127.0.0.1:{self._engine.get_rpc_port()}", self.buffer.address

    def connect(self, address: bytes) -> None:
        """Keep the other engine's address."""
        self._remote = message_of(address, tuple[str, int], "the other engine")

    def transfer(self, num_bytes: int) -> float:
        """Read from the other engine's buffer: the seconds it takes."""
        if self.role == "source":
            self.answer(Expecting())
            return 0.0
        host, remote_address = self._remote
        started_s = time.perf_counter()
        status = self._engine.transfer_sync_read(host, self.buffer.address, remote_address, num_bytes)
        seconds = time.perf_counter() - started_s
        if status:
            raise RuntimeError(f"a read of {num_bytes} bytes failed (status {status})")
        return seconds


if __name__ == "__main__":
    {"nixl": NixlEndpoint, "mooncake": MooncakeEndpoint}[sys.argv[1]].run()
