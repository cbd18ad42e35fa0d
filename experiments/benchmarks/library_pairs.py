"""Pairs of processes that run a third-party library, NIXL or Mooncake, in a virtual environment of their own. The
library may be missing, or not work on this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from experiments.benchmarks.frame import ROOT
from experiments.pairs.buffer import MEMORY_VARIABLE
from experiments.pairs.child_process import ChildProcess
from experiments.pairs.endpoint import Done, Move, Moved, Rest, Serve
from experiments.pairs.pair import PairFailed, PairUnavailable
from experiments.pairs.process_pair import TIMEOUT_S, ProcessPair

_DEBIAN_PACKAGES = {
    "libibverbs.so": "libibverbs1",
    "librdmacm.so": "librdmacm1",
    "libnuma.so": "libnuma1",
    "liburing.so": "liburing2",
    "libcurl.so": "libcurl4",
}
_MAKE_S = 120.0
_INSTALL_S = 600.0
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
        if requirement in self._failures:
            raise PairUnavailable(self._failures[requirement])
        try:
            self._install(requirement)
        except PairUnavailable as error:
            self._failures[requirement] = str(error)
            raise
        return self._python

    @property
    def _python(self) -> Path:
        return self._folder / "bin" / "python"

    def _install(self, requirement: str) -> None:
        made = self._folder / ".made"
        installed = self._folder / f".installed {' '.join((*_BASE, requirement))}"
        if not self._installs and not installed.exists():
            raise PairUnavailable(f"{requirement} is not installed, and a quick run installs nothing")
        if not made.exists():
            self._run("making a virtual environment", _MAKE_S, sys.executable, "-m", "venv", "--clear", self._folder)
            made.touch()
        if not installed.exists():
            pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1", "--no-deps")
            self._run(f"installing {requirement}", _INSTALL_S, self._python, *pip, *_BASE, requirement)
            installed.touch()

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


class LibraryPair(ProcessPair):
    """Runs in a `PeerEnvironment` that holds ``requirement``, a line for pip. The target reads, and measures it."""

    requirement: str

    def __init__(self, environment: PeerEnvironment) -> None:
        super().__init__()
        self._environment = environment

    def start(self, max_bytes: int) -> None:
        """See `Pair`. Any failure of the library up to its first transfer makes the pair unavailable."""
        try:
            super().start(max_bytes)
        except (PairFailed, PairUnavailable) as error:
            raise PairUnavailable(f"{error}{_advice(str(error))}") from error

    def _transfer(self, source: ChildProcess, target: ChildProcess, num_bytes: int) -> float:
        return target.ask(TIMEOUT_S, Move(num_bytes), Moved).seconds

    def _python(self) -> Path:
        return self._environment.python_with(self.requirement)


def _advice(reason: str) -> str:
    """What to install, if a shared library is missing."""
    packages = sorted({package for library, package in _DEBIAN_PACKAGES.items() if library in reason})
    if not packages or "cannot open shared object" not in reason:
        return ""
    return f"\ninstall Debian's {' '.join(packages)}"


class Nixl(LibraryPair):
    """``tcp_only`` forces TCP, as between two hosts without RDMA; otherwise UCX takes the best transport, which on one
    host is shared memory or reading the other process's memory. Sockets use the loopback interface. ``private_memory``
    uses buffers in private memory instead of memory files."""

    module = "experiments.benchmarks.nixl_program"
    requirement = "nixl-cu12==1.5.1"

    def __init__(self, environment: PeerEnvironment, *, tcp_only: bool = False, private_memory: bool = False) -> None:
        super().__init__(environment)
        self.name = "nixl" + "_tcp" * tcp_only + "_private" * private_memory
        self.environment = {"UCX_NET_DEVICES": "lo"}
        if tcp_only:
            self.environment["UCX_TLS"] = "tcp"
        if private_memory:
            self.environment[MEMORY_VARIABLE] = "private"

    def _transfer(self, source: ChildProcess, target: ChildProcess, num_bytes: int) -> float:
        """Seconds at the target, from posting the read until it is done."""
        source.ask(TIMEOUT_S, Serve(), Done)
        seconds = super()._transfer(source, target, num_bytes)
        source.ask(TIMEOUT_S, Rest(), Done)
        return seconds


class MooncakeTcp(LibraryPair):
    """Two engines that shake hands with each other, with no metadata server, and the library's own settings (keeping
    connections, or more of them, made it no faster). It takes free ports, and knows no way to listen on the loopback
    interface alone."""

    name = "mooncake_tcp"
    module = "experiments.benchmarks.mooncake_program"
    requirement = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
    environment: Mapping[str, str] = {"MC_TCP_BIND_ADDRESS": "127.0.0.1"}
