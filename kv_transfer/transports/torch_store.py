"""The store through which the two ends of a link find each other: its keys travel over the link's own connection.

c10d's TCPStore would do the same on another port, but looks up host names in DNS whenever it connects; where DNS does
not answer, that makes each first handshake take five seconds and more. NCCL keeps its store for as long as it lives, so
it gets a TCPStore; this one then tells where that is.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _Store: Any = object
else:
    from torch.distributed import Store as _Store


class ExchangeStore(_Store):  # type: ignore[misc, unused-ignore]
    """What either end sets, both can get. ``publish`` brings a key to the peer, whose `receive` takes it; c10d
    calls the other methods, from its threads."""

    def __init__(self, publish: Callable[[bytes, bytes], None], timeout_s: float) -> None:
        super().__init__()
        self._publish, self._timeout_s = publish, timeout_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    def set(self, key: str, value: bytes) -> None:
        """Set a key at both ends."""
        self.receive(key, value)
        self._publish(key.encode(), value)

    def get(self, key: str) -> bytes:
        """A key's value, once it has one; RuntimeError after the timeout or `close`."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Return once all keys are set; RuntimeError as in `get`."""
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._values.keys() >= set(keys), timeout_s)
            if not self._values.keys() >= set(keys):
                raise RuntimeError("the peer left" if self._closed else "the peer timed out")

    def receive(self, key: str, value: bytes) -> None:
        """Take a key in that the peer set."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def close(self) -> None:
        """Let whoever waits for the peer give up."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
