"""A virtual environment for the peers' libraries, separate from pdserve's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from experiments.pairs.pair import PairUnavailable

ROOT = Path(__file__).resolve().parents[2]
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
