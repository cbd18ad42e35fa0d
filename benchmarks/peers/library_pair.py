"""A pair of processes that run a third-party library, which may be missing or not work on this machine."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.environment import PeerEnvironment
from experiments.pairs.child_process import ChildProcess
from experiments.pairs.endpoint import Move, Moved
from experiments.pairs.pair import PairFailed, PairUnavailable
from experiments.pairs.process_pair import TIMEOUT_S, ProcessPair

_DEBIAN_PACKAGES = {
    "libibverbs.so": "libibverbs1",
    "librdmacm.so": "librdmacm1",
    "libnuma.so": "libnuma1",
    "liburing.so": "liburing2",
    "libcurl.so": "libcurl4",
}


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
