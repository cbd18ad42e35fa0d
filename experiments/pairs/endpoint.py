"""One side of a pair, as a separate program. It needs only the standard library, numpy and msgspec.

The program gets its role and the size of its memory as its last arguments. It sends `Done` with its address once it is
ready (or `Unavailable`), then an answer to each `Call` of its input, and ends with its input."""

from __future__ import annotations

import hashlib
import mmap
import os
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import msgspec
import numpy as np

from experiments.messages import Done, Message, message_of, reserve_output, say


class Call(Message):
    """A method of the endpoint, and its argument."""

    method: str
    argument: Any = None


class Expecting(Message):
    """The other side may go on."""


class Unavailable(Message):
    """The endpoint cannot run on this machine."""

    reason: str


class CannotRun(RuntimeError):
    """The endpoint does not work on this machine; the message says why."""


def shared(num_bytes: int) -> Any:
    """Bytes in a memory file, as pools are, which two processes (an engine and what serves its transfers) share."""
    fd = os.memfd_create("pair")
    os.ftruncate(fd, num_bytes)
    try:
        return np.frombuffer(mmap.mmap(fd, num_bytes), np.uint8)
    finally:
        os.close(fd)


def fill(memory: Any, role: str) -> Any:
    """Give all pages of a source the same random bytes in every process, those of a target zeros."""
    memory[:] = np.frombuffer(np.random.default_rng(1).bytes(len(memory)), np.uint8) if role == "source" else 0
    return memory


class Endpoint(ABC):
    """Some memory and a way to transfer it; ``role`` is "source" (its bytes are transferred) or "target". Calls are of
    `connect`, `transfer`, `clear`, `digest` and `rest`."""

    address: Any = None
    """What the other side has to know, of any type that JSON can carry."""
    pinned: ClassVar[bool] = False
    """Whether the process is bound to its first allowed core (source) or last one (target). The kernel tends to wake
    one side on the core of the other, so that both share it while another is idle. Libraries with threads of their own
    (NIXL, Mooncake) are faster without."""
    _calls: queue.SimpleQueue[bytes]

    def __init__(self, role: str, max_bytes: int, kind: str = "") -> None:
        self.role = role
        if self.pinned:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[0] if role == "source" else cores[-1]})
        self.memory = self.allocated(max_bytes, kind)

    def allocated(self, num_bytes: int, kind: str) -> Any:
        """The memory; of the ``kind`` private, a process's own, in huge pages where the kernel has them."""
        return fill(np.empty(num_bytes, np.uint8) if kind == "private" else shared(num_bytes), self.role)

    def connect(self, address: Any) -> None:  # noqa: B027 - some need nothing
        """Get ready for transfers from or to the endpoint with this `address`."""

    @abstractmethod
    def transfer(self, num_bytes: int) -> float:
        """This side's part of a transfer of the first bytes; says `Expecting` if the other side begins. Returns when
        the source began, or the target had everything, on the host's clock. Where the target measures the whole, the
        source returns 0."""

    def views(self, num_bytes: int) -> Iterable[memoryview]:
        """The memory of a transfer."""
        return [self.memory[:num_bytes].data]

    def clear(self, num_bytes: int) -> None:
        """Zero the memory of a transfer."""
        for view in self.views(num_bytes):
            view[:] = bytes(len(view))

    def digest(self, num_bytes: int) -> str:
        """A digest of the memory of a transfer."""
        digest = hashlib.sha256()
        for view in self.views(num_bytes):
            digest.update(view)
        return digest.hexdigest()

    def rest(self, nothing: None) -> None:  # noqa: B027 - most sources do nothing
        """Ends the part of a source whose target reads."""

    def called(self) -> bool:
        """Whether there is a next call."""
        return not self._calls.empty()

    @classmethod
    def run(cls) -> None:
        """The whole program."""
        reserve_output()
        cls._calls = queue.SimpleQueue()
        threading.Thread(target=_read, args=(cls._calls,), daemon=True).start()
        *arguments, role, max_bytes = sys.argv[1:]
        try:
            endpoint = cls(role, int(max_bytes), *arguments)
        except (ImportError, CannotRun) as error:
            say(Unavailable(str(error)))
            cls._calls.get()  # the end of the input ends the program
            return
        say(Done(msgspec.to_builtins(endpoint.address)))
        while True:
            call = message_of(cls._calls.get(), Call, "the parent")
            say(Done(getattr(endpoint, call.method)(call.argument)))


class Reader(Endpoint):
    """An endpoint whose target reads the source's memory, and measures that alone."""

    def transfer(self, num_bytes: int) -> float:
        """The seconds of a read."""
        if self.role == "source":
            say(Expecting())
            self.serve()
            return 0.0
        read = self.reader(num_bytes)
        started_s = time.perf_counter()
        read()
        return time.perf_counter() - started_s

    def serve(self) -> None:
        """What the source does meanwhile."""

    @abstractmethod
    def reader(self, num_bytes: int) -> Callable[[], object]:
        """A function that reads the first bytes."""


def _read(calls: queue.SimpleQueue[bytes]) -> None:
    """Queue the lines of the input. When the input ends, the program exits at once, because some libraries crash while
    the interpreter is finalized."""
    with open(0, "rb") as lines:  # not sys.stdin, whose lock the end of the interpreter needs
        for line in lines:
            calls.put(line)
    os._exit(0)
