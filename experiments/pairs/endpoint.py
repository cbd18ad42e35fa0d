"""One side of a pair, as a separate program. It needs only the standard library and numpy.

The program gets its role and the size of its buffer as arguments. It answers ``{"address": ...}`` once it is ready (or
``{"unavailable": reason}``), then one JSON line per JSON line of its input, and ends with its input."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from abc import ABC, abstractmethod
from typing import Any

from experiments.pairs.buffer import Buffer


class CannotRun(RuntimeError):
    """The peer does not work on this machine; the message says why."""


class Endpoint(ABC):
    """A buffer and a way to transfer it; ``role`` is "source" (its bytes are transferred) or "target"."""

    def __init__(self, role: str, max_bytes: int) -> None:
        self.role = role
        self.buffer = Buffer(max_bytes, filled=role == "source")

    @property
    @abstractmethod
    def address(self) -> dict[str, Any]:
        """The address for the other side, as JSON."""

    @abstractmethod
    def connect(self, address: dict[str, Any]) -> None:
        """Get ready for transfers from or to the endpoint with that address."""

    @abstractmethod
    def transfer(self, num_bytes: int) -> float:
        """This side's part of a transfer, and its seconds."""

    def serve(self) -> None:  # noqa: B027 - most endpoints have nothing to do
        """Do what the other side's transfer requires, until the next command."""

    def commanded(self) -> bool:
        """Whether there is a next command."""
        return not self._commands.empty()

    def told(self) -> dict[str, Any]:
        """The next line of the input, for a transfer that needs more data."""
        command: dict[str, Any] = json.loads(self._commands.get())
        return command

    def say(self, **values: Any) -> None:
        """Answer with a line."""
        os.write(self._answers, json.dumps(values, allow_nan=False).encode() + b"\n")

    _answers = 1
    _commands: queue.SimpleQueue[str]

    @classmethod
    def run(cls) -> None:
        """The whole program. What else is printed goes to standard error."""
        cls._answers = os.dup(1)
        os.dup2(2, 1)
        cls._commands = queue.SimpleQueue()
        threading.Thread(target=_read, args=(cls._commands,), daemon=True).start()
        try:
            endpoint = cls(sys.argv[1], int(sys.argv[2]))
        except (ImportError, CannotRun) as error:
            os.write(cls._answers, json.dumps({"unavailable": str(error)}).encode() + b"\n")
            cls._commands.get()  # the end of the input ends the program
            return
        endpoint.say(address=endpoint.address)
        while True:
            endpoint._obey(json.loads(cls._commands.get()))

    def _obey(self, command: dict[str, Any]) -> None:
        match command:
            case {"connect": dict(address)}:
                self.connect(address)
                self.say()
            case {"bytes": int(num_bytes)}:
                self.say(seconds=self.transfer(num_bytes))
            case {"serve": True}:
                self.say()
                self.serve()
            case {"serve": False}:
                self.say()
            case {"clear": int(num_bytes)}:
                self.buffer.clear(num_bytes)
                self.say()
            case {"digest": int(num_bytes)}:
                self.say(digest=self.buffer.digest(num_bytes))
            case _:
                raise ValueError(f"unknown command {command}")


def _read(commands: queue.SimpleQueue[str]) -> None:
    """Queue the lines of the input. When the input ends, the program exits at once, because some libraries crash while
    the interpreter is finalized."""
    rest = b""
    while chunk := os.read(0, 2**16):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            commands.put(line.decode())
    os._exit(0)
