"""Streams without a GPU: work of a stream is done as late as possible, when the host waits for it. Until then its
results are `POISON`, so that a missing wait shows as wrong data.

torch's operations are deferred while a stream is the current one (`StrictStream.current`), except views, which no GPU
computes. Everything else runs at once, like the work of a default stream that never has to wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

if TYPE_CHECKING:
    from tests.strict_cuda import StrictCuda

POISON = 0xEE
_local = threading.local()


class StrictStream:
    """A side stream of GPU ``index`` of the process ``cuda``."""

    def __init__(self, index: int, cuda: StrictCuda) -> None:
        self.index, self.cuda = index, cuda
        self._work: list[Callable[[], object]] = []
        self._num_done = 0
        self._running = threading.RLock()

    @property
    def length(self) -> int:
        """How much work was added so far."""
        return len(self._work)

    def add(self, work: Callable[[], object]) -> None:
        """Add work. It may block, as a kernel does that waits for a peer."""
        self._work.append(work)

    def run(self, length: int) -> None:
        """Do the first ``length`` works, if they are not done yet."""
        with self._running, _disable_current_modes():
            while self._num_done < length:
                self._num_done += 1
                work, self._work[self._num_done - 1] = self._work[self._num_done - 1], _nothing
                work()

    def is_done(self, length: int) -> bool:
        """Whether the first ``length`` works are done."""
        return self._num_done >= length

    def synchronize(self) -> None:
        """Do all work."""
        self.run(self.length)

    @contextmanager
    def current(self) -> Iterator[None]:
        """A context of this thread, whose operations are work of this stream."""
        before = current_stream()
        _local.stream = self
        try:
            with _Deferring(self):
                yield
        finally:
            _local.stream = before


def current_stream() -> StrictStream | None:
    """The side stream that is this thread's current one; None for the default stream."""
    stream: StrictStream | None = getattr(_local, "stream", None)
    return stream


def _nothing() -> None:
    pass


class _Deferring(TorchDispatchMode):
    def __init__(self, stream: StrictStream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = partial(func, *args, **(kwargs or {}))
        if func.is_view:
            return operation()
        if func._schema.is_mutable:
            self._stream.add(operation)
            return args[0]
        result = operation()
        result.fill_(POISON)
        if "empty" not in func._schema.name:
            self._stream.add(lambda: result.copy_(operation()))
        return result
