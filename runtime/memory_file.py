"""Anonymous memory files of fixed size, which other processes can map safely: if a file shrank, reading a missing page
would kill the reader."""

from __future__ import annotations

import fcntl
import os

# Constants of the Linux kernel that Python's fcntl does not define.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_F_SEAL_SHRINK, _F_SEAL_GROW = 2, 4


def create(name: str) -> int:
    """The descriptor of a new, empty memory file; call `seal` once it has its size."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal(fd: int) -> None:
    """Fix the size of a memory file."""
    fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)


def is_sealed(fd: int) -> bool:
    """Whether the size is fixed; False for a descriptor that is not of a memory file."""
    try:
        return bool(fcntl.fcntl(fd, _F_GET_SEALS) & _F_SEAL_SHRINK)
    except OSError:
        return False
