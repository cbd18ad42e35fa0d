"""Anonymous memory files whose size is fixed, so that another process may map and read them without fear: a page cut
off under a reader would kill it."""

from __future__ import annotations

import fcntl
import os

# Neither commands nor seals are in Python's fcntl yet; these are the kernel's numbers.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_F_SEAL_SHRINK, _F_SEAL_GROW = 2, 4


def create(name: str) -> int:
    """The descriptor of a new, empty one; `seal` it once it has its size."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal(fd: int) -> None:
    """Fix its size for good."""
    fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)


def is_sealed(fd: int) -> bool:
    """Whether its size is fixed; False for whatever is no memory file."""
    try:
        return bool(fcntl.fcntl(fd, _F_GET_SEALS) & _F_SEAL_SHRINK)
    except OSError:
        return False
