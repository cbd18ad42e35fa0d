"""One side of a pair, as a separate program. It needs only the standard library, numpy and msgspec.

The program gets its role and the size of its buffer as its last arguments. It sends `Ready` once it is ready (or
`Unavailable`), then the answers to each `Command` of its input, and ends with its input."""

from __future__ import annotations

import hashlib
import mmap
import os
import queue
import sys
import threading
from abc import ABC, abstractmethod
from typing import Any

import msgspec
import numpy as np

from experiments.messages import Message, line_of, message_of


class Ready(Message):
    """The endpoint can be connected. ``address`` is what the other one's `Endpoint.connect` gets."""

    address: msgspec.Raw


class Unavailable(Message):
    """The endpoint cannot run on this machine."""

    reason: str


class Connect(Message):
    """Get ready for transfers from or to the endpoint with this address. Answered with `Expecting`."""

    address: msgspec.Raw


class Move(Message):
    """Do this side's part of a transfer. The side that does not begin answers with `Expecting` first; both answer with
    `Moved` at the end."""

    num_bytes: int


class Rest(Message):
    """Ends the part of a source whose target reads. No answer of its own."""


class Digest(Message):
    """Answered with `Digested`, of the first bytes of the buffer. ``clear``: zero them before."""

    num_bytes: int
    clear: bool = False


Command = Connect | Move | Rest | Digest


class Expecting(Message):
    """The other side may go on."""


class Moved(Message):
    """``seconds``: when the source began, or the target had everything, on the host's clock. Where the target measures
    the whole, the source's are 0."""

    seconds: float


class Digested(Message):
    """A digest in hexadecimal."""

    digest: str


class CannotRun(RuntimeError):
    """The peer does not work on this machine; the message says why."""


class Buffer:
    """``num_bytes`` of memory whose pages are all present. ``filled``: with the same random bytes in every process,
    else with zeros. ``private``: a process's own memory, in huge pages where the kernel has them; else a memory file,
    as it has to be where two processes (an engine and what serves its transfers) share a pool."""

    def __init__(self, num_bytes: int, *, filled: bool, private: bool = False) -> None:
        self.array = np.empty(num_bytes, dtype=np.uint8) if private else _shared(num_bytes)
        if filled:
            words = np.random.default_rng(1).integers(0, 2**64, -(-num_bytes // 8), dtype=np.uint64)
            self.array[:] = words.view(np.uint8)[:num_bytes]
        else:
            self.array[:] = 0

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self.array.ctypes.data

    @property
    def view(self) -> memoryview:
        """The whole buffer, readable and writable."""
        return self.array.data

    def clear(self, num_bytes: int) -> None:
        """Zero the first bytes."""
        self.array[:num_bytes] = 0

    def digest(self, num_bytes: int) -> str:
        """Digest of the first bytes, in hexadecimal."""
        return hashlib.sha256(self.view[:num_bytes]).hexdigest()


def _shared(num_bytes: int) -> Any:
    fd = os.memfd_create("buffer")
    os.ftruncate(fd, num_bytes)
    try:
        return np.frombuffer(mmap.mmap(fd, num_bytes), dtype=np.uint8)
    finally:
        os.close(fd)


class Endpoint(ABC):
    """A buffer and a way to transfer it; ``role`` is "source" (its bytes are transferred) or "target"."""

    buffer: Buffer

    def __init__(self, role: str, max_bytes: int, *arguments: str) -> None:
        self.role = role
        self.buffer = Buffer(max_bytes, filled=role == "source", private="private" in arguments)

    @property
    @abstractmethod
    def address(self) -> Any:
        """What the other side has to know, of any type that JSON can carry."""

    @abstractmethod
    def connect(self, address: bytes) -> None:
        """Get ready for transfers from or to the endpoint whose `address` that is, as JSON."""

    @abstractmethod
    def transfer(self, num_bytes: int) -> float:
        """This side's part of a transfer; returns what `Moved` tells."""

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
        *arguments, role, max_bytes = sys.argv[1:]
        try:
            endpoint = cls(role, int(max_bytes), *arguments)
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
                self.answer(Expecting())
            case Move(num_bytes):
                self.answer(Moved(self.transfer(num_bytes)))
            case Digest(num_bytes, clear):
                if clear:
                    self.buffer.clear(num_bytes)
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
