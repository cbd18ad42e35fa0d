"""The process groups of one link, and the store through which its two ends find each other: everything of the
torch_dist transport that talks to torch. All of it blocks.

The end that connected is rank 1, the one that listened is rank 0. There is one group per direction.
"""

from __future__ import annotations

import datetime
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
import torch.distributed

from kv_transfer.fetch import Payload
from kv_transfer.memory import DeviceMemory, Memory
from kv_transfer.transports.inbox import Content
from kv_transfer.transports.nccl import JOIN_S, Communicators

if TYPE_CHECKING:
    _Store: Any = object
else:
    from torch.distributed import Store as _Store

Backend = Literal["gloo", "nccl"]
_SPARE_BUFFERS = 2


class Operation(Protocol):
    """A send or receive that has begun."""

    def wait(self) -> Content:
        """Wait until it has ended, and return the payload. RuntimeError if it failed, timed out (Gloo) or was
        aborted."""
        ...


class Groups(Protocol):
    """The groups of one link. The operations of one direction run in the order in which they begin. RuntimeError from
    any call after `abort`."""

    fails_alone: bool
    """Whether an operation ends by itself when the peer is gone or too slow. With NCCL it does not."""

    def connect(self) -> None:
        """Connect to the peer, if creating the groups has not. RuntimeError if that fails."""
        ...

    def gather(self, payload: Payload, memory: Memory) -> torch.Tensor:
        """A contiguous copy of the payload, for `send`. When this returns, the payload may change."""
        ...

    def send(self, gathered: torch.Tensor) -> Operation:
        """Begin to send a payload from `gather`, which the operation keeps."""
        ...

    def recv(self, size: int) -> Operation:
        """Begin to receive a payload of ``size`` bytes."""
        ...

    def abort(self) -> None:
        """Close the groups without waiting. With NCCL, this ends operations that have begun."""
        ...


def create_groups(
    backend: Backend,
    store: ExchangeStore,
    rank: int,
    hosts: tuple[str, str],
    timeout_s: float,
    *,
    on_device: bool,
    index: int = 0,
) -> Groups:
    """Build groups together with the peer. ``hosts`` are the addresses of this end and the peer, ``index`` is the GPU
    of the pool. ``on_device``: payloads are tensors on the device. ``timeout_s`` bounds Gloo's operations; whoever uses
    NCCL's groups bounds theirs. RuntimeError if the peer does not join in time. `Groups.connect` must follow."""
    if backend == "gloo":
        return GlooGroups(store, rank, hosts[0], timeout_s, on_device=on_device)
    timeout = datetime.timedelta(seconds=JOIN_S)  # the other end's first call of CUDA or NCCL may take seconds
    distributed: Any = torch.distributed
    if rank == 0:
        tcp = distributed.TCPStore(hosts[0], 0, is_master=True, timeout=timeout, wait_for_workers=False)
        store.set("port", b"%d" % tcp.port)
    else:
        tcp = distributed.TCPStore(hosts[1], int(store.get("port")), is_master=False, timeout=timeout)
    return Communicators(tcp, rank, index)


class GlooGroups:
    """The two groups of one link over Gloo: see `Groups`. ``host`` is the address of this end. With ``on_device``,
    tensors of the host stand for a device's.

    With one group for both directions, two ends whose sends are not received would each wait for the other one to close
    its group. In one direction, either sends or receives can lack their counterparts, and the end that lacks none
    closes its group at once, which ends them."""

    fails_alone = True

    def __init__(self, store: ExchangeStore, rank: int, host: str, timeout_s: float, *, on_device: bool) -> None:
        distributed: Any = torch.distributed
        gloo = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._timeout, options._threads = datetime.timedelta(seconds=timeout_s), 1
        options._devices = [gloo.create_device(hostname=host)]
        self._rank, self._on_device = rank, on_device
        self._by_sender: list[Any] = [
            gloo(distributed.PrefixStore(f"kv{sender}", store), rank, 2, options) for sender in range(2)
        ]
        self._spare: deque[torch.Tensor] = deque(maxlen=_SPARE_BUFFERS)

    def connect(self) -> None:
        """Creating the groups has connected them."""

    def gather(self, payload: Payload, memory: Memory) -> torch.Tensor:
        if isinstance(memory, DeviceMemory) and self._on_device:
            views = [memory.view(region) for region in payload.regions]
            return torch.cat(views)
        gathered, start = self._buffer(payload.size), 0
        whole: np.ndarray[Any, np.dtype[np.uint8]] = gathered.numpy()
        for part in payload.parts:
            # numpy releases the GIL for the copy, and starts no threads.
            np.copyto(whole[start : start + part.nbytes], np.frombuffer(part, dtype=np.uint8))
            start += part.nbytes
        return gathered

    def send(self, gathered: torch.Tensor) -> Operation:
        work = self._group(self._rank).send([gathered], 1 - self._rank, self._rank)
        return _GlooOperation(work, gathered, b"", self._sent)

    def recv(self, size: int) -> Operation:
        tensor: torch.Tensor = torch.empty(size, dtype=torch.uint8)
        content: memoryview = tensor.numpy().data
        work = self._group(1 - self._rank).recv([tensor], 1 - self._rank, 1 - self._rank)
        return _GlooOperation(work, tensor, tensor if self._on_device else content)

    def abort(self) -> None:
        """Drop the groups. The sockets of each close with the last operation that has begun: when the peer closes its
        own group, or at the group's timeout."""
        self._by_sender = []

    def _buffer(self, size: int) -> torch.Tensor:
        """Memory of ``size`` bytes, if possible of a payload that was sent: the pages of new memory cost as much as the
        copy."""
        try:
            spare = self._spare.pop()
        except IndexError:
            spare = torch.empty(0, dtype=torch.uint8)
        if spare.untyped_storage().nbytes() < size:
            spare = torch.empty(size, dtype=torch.uint8)
        buffer: torch.Tensor = spare.set_(spare.untyped_storage(), 0, (size,), (1,))
        return buffer

    def _sent(self, gathered: torch.Tensor) -> None:
        if not self._on_device:
            self._spare.append(gathered)

    def _group(self, sender: int) -> Any:
        try:
            return self._by_sender[sender]
        except IndexError:
            raise RuntimeError("the group was aborted") from None


class _GlooOperation:
    def __init__(
        self, work: Any, tensor: torch.Tensor, content: Content, on_end: Callable[[torch.Tensor], object] | None = None
    ) -> None:
        self._work, self._tensor, self._content, self._on_end = work, tensor, content, on_end

    def wait(self) -> Content:
        self._work.wait()
        if self._on_end is not None:
            self._on_end(self._tensor)
        return self._content


class ExchangeStore(_Store):  # type: ignore[misc, unused-ignore]
    """A c10d store of the two ends of a link. ``publish`` sends a key to the peer, which passes it to `receive`. c10d
    calls the other methods from its threads.

    c10d's TCPStore would need another port, and it looks up host names in DNS at each connect: where DNS does not
    answer, each first handshake takes five seconds and more. NCCL uses its store for as long as it lives, and therefore
    gets a TCPStore, whose port travels through this one.
    """

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
        """Wait for a key's value. RuntimeError after the timeout or `close`."""
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
        """Take a key that the peer has set."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def close(self) -> None:
        """End all waits for the peer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
