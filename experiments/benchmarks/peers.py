"""Pairs of processes that run a third-party library, NIXL or Mooncake, in a virtual environment of their own. The
library may be missing, or not work on this machine. The module is also the program of their ends:
`python -m experiments.benchmarks.peers LIBRARY [MEMORY] ROLE MAX_BYTES`."""

from __future__ import annotations

import base64
import functools
import importlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.child_process import ROOT
from experiments.pairs.endpoint import CannotRun, Reader
from experiments.pairs.pair import Pair, PairUnavailable

_MAKE_S, _INSTALL_S, _READ_S = 120.0, 600.0, 50.0
_BASE = ("numpy>=1.26", "msgspec>=0.19", "psutil>=5.9")
"""What the programs of both ends import themselves."""
_PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1", "--no-deps")
PythonWith = Callable[[str], Path]
"""Gives a Python that has a library; PairUnavailable if there is none."""


def peer_python(requirement: str, folder: Path = ROOT / "out" / "peers" / "venv", *, installs: bool = True) -> Path:
    """The Python of the virtual environment in ``folder``, which is made and filled when it is first asked for;
    PairUnavailable if that fails, which is tried once, or if the library is not there yet and nothing ``installs`` it.
    The library's own requirements are left out: the peers import without them, and they are big."""
    if problem := _problem(requirement, folder, installs):
        raise PairUnavailable(problem)
    return folder / "bin" / "python"


@functools.cache
def _problem(requirement: str, folder: Path, installs: bool) -> str:
    """Why the environment has no such library; empty if it has."""
    installed, pip = folder / f".installed {' '.join((*_BASE, requirement))}", folder / "bin" / "pip"
    if installed.exists():
        return ""
    if not installs:
        return f"{requirement} is not installed, and a quick run installs nothing"
    make = ("making a virtual environment", _MAKE_S, (sys.executable, "-m", "venv", "--clear", folder))
    fill = (f"installing {requirement}", _INSTALL_S, (folder / "bin" / "python", *_PIP, *_BASE, requirement))
    for what, timeout_s, command in (fill,) if pip.exists() else (make, fill):
        try:
            subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                timeout=timeout_s, check=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"{what} took longer than {timeout_s:g} s"
        except subprocess.CalledProcessError as error:
            return f"{what} failed: {(error.stdout.strip() or str(error)).splitlines()[-1]}"
    installed.touch()
    return ""


def nixl(python_with: PythonWith, *, tcp_only: bool = False, private_memory: bool = False) -> Pair:
    """``tcp_only`` forces TCP, as between two hosts without RDMA; otherwise UCX takes the best transport, which on one
    host is shared memory or reading the other process's memory. Sockets use the loopback interface. ``private_memory``
    uses private memory instead of memory files."""
    return Pair(
        "nixl" + "_tcp" * tcp_only + "_private" * private_memory,
        "experiments.benchmarks.peers",
        "nixl",
        "private" if private_memory else "shared",
        environment={"UCX_NET_DEVICES": "lo", **({"UCX_TLS": "tcp"} if tcp_only else {})},
        pulls=True,
        python=lambda: python_with("nixl-cu12==1.5.1"),
    )


def mooncake_tcp(python_with: PythonWith) -> Pair:
    """Two engines that shake hands with each other, with no metadata server, and the library's own settings (keeping
    connections, or more of them, made it no faster). It takes free ports, and knows no way to listen on the loopback
    interface alone."""
    return Pair(
        "mooncake_tcp",
        "experiments.benchmarks.peers",
        "mooncake",
        environment={"MC_TCP_BIND_ADDRESS": "127.0.0.1"},
        pulls=True,
        python=lambda: python_with("mooncake-transfer-engine-non-cuda==0.3.13.post1"),
    )


class NixlEndpoint(Reader):
    """An agent with one registered buffer. Metadata travel with the calls, so no agent listens. There is no progress
    thread, which would occupy a core and be slower on few cores; both sides poll during a transfer."""

    def __init__(self, role: str, max_bytes: int, kind: str) -> None:
        library = importlib.import_module("nixl_cu12._api")
        super().__init__(role, max_bytes, kind)
        config = library.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent: Any = library.nixl_agent(role, config)
        if "UCX" not in self._agent.backends:
            raise CannotRun("NIXL has no UCX backend here")
        at = self.memory.ctypes.data
        self._agent.register_memory([(at, max_bytes, 0, "")], "DRAM")
        self.address = base64.b64encode(self._agent.get_agent_metadata()).decode(), at

    def connect(self, address: tuple[str, int]) -> None:
        """Make the other agent and its memory known to this one."""
        name = self._agent.add_remote_agent(base64.b64decode(address[0]))
        self._peer, self._at = name.decode() if isinstance(name, bytes) else name, address[1]

    def serve(self) -> None:
        """Poll for notifications, which makes an agent answer."""
        while not self.called():
            self._agent.get_new_notifs()

    def reader(self, num_bytes: int) -> Callable[[], object]:
        """A transfer, from posting it until it is done."""
        local, remote = (self._agent.get_xfer_descs([(at, num_bytes, 0)], "DRAM") for at in (self.address[1], self._at))
        handle = self._agent.initialize_xfer("READ", local, remote, self._peer)

        def read() -> None:
            state, until_s = self._agent.transfer(handle), time.perf_counter() + _READ_S
            while state == "PROC" and time.perf_counter() < until_s:
                state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise RuntimeError(f"a read of {num_bytes} bytes is in state {state}")
            self._agent.release_xfer_handle(handle)

        return read


class MooncakeEndpoint(Reader):
    """An engine with one registered buffer; it finds a free port itself, and connects with its first transfer."""

    def __init__(self, role: str, max_bytes: int) -> None:
        library = importlib.import_module("mooncake.engine")
        super().__init__(role, max_bytes)
        self._engine, at = library.TransferEngine(), self.memory.ctypes.data
        if status := self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise CannotRun(f"the transfer engine does not start (status {status})")
        if status := self._engine.register_memory(at, max_bytes):
            raise CannotRun(f"the transfer engine does not register memory (status {status})")
        self.address = f"127.0.0.1:{self._engine.get_rpc_port()}", at

    def connect(self, address: tuple[str, int]) -> None:
        """Keep the other engine's address."""
        self._peer = address

    def reader(self, num_bytes: int) -> Callable[[], object]:
        """A synchronous read."""

        def read() -> None:
            host, at = self._peer
            if status := self._engine.transfer_sync_read(host, self.address[1], at, num_bytes):
                raise RuntimeError(f"a read of {num_bytes} bytes failed (status {status})")

        return read


if __name__ == "__main__":
    ends: dict[str, type[Reader]] = {"nixl": NixlEndpoint, "mooncake": MooncakeEndpoint}
    ends[sys.argv.pop(1)].run()
