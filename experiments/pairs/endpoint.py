"""One side of a pair, as a separate program. It needs only the standard library, numpy and msgspec.

The program gets its role and the size of its buffer as arguments. It sends `Ready` once it is ready (or `Unavailable`),
then one answer per `Command` of its input, and ends with its input."""

from __future__ import annotations

import os
import queue
import sys
import threading
from abc import ABC, abstractmethod

import msgspec

from experiments.messages import Message, line_of, message_of
from experiments.pairs.buffer import Buffer


class Ready(Message):
    """The endpoint can be connected. ``address`` is what the other one's `Endpoint.connect` gets."""

    address: msgspec.Raw


class Unavailable(Message):
    """The endpoint cannot run on this machine."""

    reason: str


class Connect(Message):
    """Get ready for transfers from or to the endpoint with this address. Answered with `Done`."""

    address: msgspec.Raw


class Move(Message):
    """Do this side's part of a transfer. Answered with `Moved`; where both sides have a part, the target sends
    `Expecting` before."""

    num_bytes: int


class Serve(Message):
    """Do what the other side's transfer requires, until the next command. Answered with `Done` at its beginning."""


class Rest(Message):
    """End `Serve`. Answered with `Done`."""


class Clear(Message):
    """Zero the first bytes of the buffer. Answered with `Done`."""

    num_bytes: int


class Digest(Message):
    """Answered with `Digested`, of the first bytes of the buffer."""

    num_bytes: int


Command = Connect | Move | Serve | Rest | Clear | Digest


class Done(Message):
    """The command was obeyed."""


class Expecting(Message):
    """The target is ready for the bytes of the source."""


class Moved(Message):
    """``seconds``: what the transfer took, where one side measures it; else when the source began or the target had
    everything, on the host's clock."""

    seconds: float


class Digested(Message):
    """A digest in hexadecimal."""

    digest: str


class CannotRun(RuntimeError):
    """The peer does not work on this machine; the message says why."""


class Endpoint(ABC):
    """A buffer and a way to transfer it; ``role`` is "source" (its bytes are transferred) or "target"."""

    def __init__(self, role: str, max_bytes: int) -> None:
        self.role = role
        self.buffer = Buffer(max_bytes, filled=role == "source")

    @property
    @abstractmethod
    def address(self) -> Message:
        """The address for the other side."""

    @abstractmethod
    def connect(self, address: bytes) -> None:
        """Get ready for transfers from or to the endpoint whose `address` that line is."""

    @abstractmethod
    def transfer(self, num_bytes: int) -> float:
        """This side's part of a transfer; returns what `Moved` tells."""

    def serve(self) -> None:  # noqa: B027 - most endpoints have nothing to do
        """Do what the other side's transfer requires, until the next command."""

    def commanded(self) -> bool:
        """Whether there is a next command."""
        return not self._commands.empty()

    def answer(self, message: Message) -> None:
        """Send a message to the parent."""
        os.write(self._answers, line_of(message))

    _answers = 1
    _commands: queue.SimpleQueue[bytes]

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
            os.write(cls._answers, line_of(Unavailable(str(error))))
            cls._commands.get()  # the end of the input ends the program
            return
        endpoint.answer(Ready(msgspec.Raw(msgspec.json.encode(endpoint.address))))
        while True:
            endpoint._obey(message_of(cls._commands.get(), Command, "the parent"))

    def _obey(self, command: Command) -> None:
        match command:
            case Connect(address):
                self.connect(bytes(address))
                self.answer(Done())
            case Move(num_bytes):
                self.answer(Moved(self.transfer(num_bytes)))
            case Serve():
                self.answer(Done())
                self.serve()
            case Rest():
                self.answer(Done())
            case Clear(num_bytes):
                self.buffer.clear(num_bytes)
                self.answer(Done())
            case Digest(num_bytes):
                self.answer(Digested(self.buffer.digest(num_bytes)))


def _read(commands: queue.SimpleQueue[bytes]) -> None:
    """Queue the lines of the input. When the input ends, the program exits at once, because some libraries crash while
    the interpreter is finalized."""
    rest = b""
    while chunk := os.read(0, 2**16):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            commands.put(line)
    os._exit(0)


def pin(role: str) -> None:
    """Bind this process to its first allowed core (source) or last one (target). The kernel tends to wake one side on
    the core of the other, so that both share it while another is idle. Libraries with threads of their own (NIXL,
    Mooncake) are faster without."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0] if role == "source" else cores[-1]})
