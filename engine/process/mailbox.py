"""Commands that threads of an engine's process give to its engine."""

from __future__ import annotations

import contextlib
import os
from collections import deque

from engine.messages import Command


class Mailbox:
    """A queue of commands. `fileno` is readable while it is not empty, so that one poll waits for it and for pipes."""

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """A file descriptor to poll for reading."""
        return self._fd

    def put(self, command: Command) -> None:
        """Add a command. May be called by any thread."""
        self._commands.append(command)
        self.wake()

    def wake(self) -> None:
        """End a wait for commands. May be called by any thread."""
        os.eventfd_write(self._fd, 1)

    def take(self) -> list[Command]:
        """Remove and return the commands, in order."""
        with contextlib.suppress(BlockingIOError):  # empty
            os.eventfd_read(self._fd)  # before the queue is read, so that nothing stays behind unannounced
        return [self._commands.popleft() for _ in range(len(self._commands))]
