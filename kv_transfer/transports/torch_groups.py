"""The process groups of one link, and the store through which its two ends find each other: everything of the
torch_dist transport that talks to torch. All of it blocks.

The end that connected is rank 1, the one that listened is rank 0. NCCL gets one group per direction: the operations of
one communicator run one after the other, so two ends that send at once would wait for each other.
"""

from __future__ import annotations

import datetime
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed

from kv_transfer.fetch import Payload
from kv_transfer.memory import DeviceMemory, Memory
from kv_transfer.transports.nccl import Communicators

if TYPE_CHECKING:
    _Store: Any = object
else:
    from torch.distributed import Store as _Store

Backend = Literal["gloo", "nccl"]
_log = logging.getLogger(__name__)


class Groups:
    """The group (Gloo) or groups (NCCL) of one link. ``on_device``: payloads are tensors on the device."""

    def __init__(
        self,
        backend: Backend,
        store: ExchangeStore,
        rank: int,
        hosts: tuple[str, str],
        timeout_s: float,
        *,
        on_device: bool,
        index: int = 0,
    ) -> None:
        """Build the groups together with the peer. ``hosts`` are the addresses of this end and the peer, ``index`` is
        the GPU of the pool. RuntimeError if the peer does not join in time. `connect` must follow."""
        dist: Any = torch.distributed
        self._rank, self._peer_rank = rank, 1 - rank
        self._aborted = False
        self._index = index
        self._nccl: Communicators | None = None
        self._on_device = on_device
        self.fails_alone = backend == "gloo"
        """Whether an operation ends by itself when the peer is gone or too slow. With NCCL it does not."""
        timeout = datetime.timedelta(seconds=timeout_s)
        if backend == "gloo":
            options = dist.ProcessGroupGloo._Options()
            options._timeout, options._threads = timeout, 1
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=hosts[0])]
            group = dist.ProcessGroupGloo(store, rank, 2, options)
            self._by_sender: list[Any] = [group, group]
            self._streams: list[Any] | None = None
            return
        if rank == 0:
            tcp = dist.TCPStore(hosts[0], 0, is_master=True, timeout=timeout, wait_for_workers=False)
            store.set("port", b"%d" % tcp.port)
        else:
            tcp = dist.TCPStore(hosts[1], int(store.get("port")), is_master=False, timeout=timeout)
        self._nccl = Communicators(tcp, rank, index, timeout_s)
        self._by_sender, self._streams = self._nccl.by_sender, self._nccl.streams

    def connect(self) -> None:
        """Connect the groups, if building them has not. Blocks; RuntimeError if that fails, or after `abort`."""
        if self._nccl is not None:
            self._nccl.connect()
            self._check()

    def joined(self, payload: Payload, memory: Memory) -> torch.Tensor:
        """A contiguous copy of the payload, for `send`. Blocks until a copy on a device is complete."""
        if not isinstance(memory, DeviceMemory) or not self._on_device:
            return torch.frombuffer(bytearray().join(payload.parts), dtype=torch.uint8)
        views = [memory.view(region) for region in payload.regions]
        whole: torch.Tensor = torch.cat(views) if len(views) > 1 else views[0].clone()
        if whole.is_cuda:
            torch.cuda.current_stream(whole.device).synchronize()
        return whole

    def send(self, payload: torch.Tensor) -> None:
        """Send a payload from `joined`. RuntimeError if the group fails, times out (Gloo) or is aborted."""
        if self._streams is None:
            self._gloo(self._rank).send([payload], self._peer_rank, self._rank).wait()
            return
        group, stream = self._by_sender[self._rank], self._streams[0]
        self._check()
        with torch.cuda.device(self._index), torch.cuda.stream(stream):
            group.send([payload], self._peer_rank, self._rank).wait()
        stream.synchronize()
        self._check()

    def recv(self, size: int) -> memoryview | torch.Tensor:
        """Receive a payload of ``size`` bytes; RuntimeError as in `send`."""
        if self._streams is None:
            tensor: torch.Tensor = torch.empty(size, dtype=torch.uint8)
            self._gloo(self._peer_rank).recv([tensor], self._peer_rank, self._peer_rank).wait()
            content: memoryview = tensor.numpy().data
            return tensor if self._on_device else content
        group, stream = self._by_sender[self._peer_rank], self._streams[1]
        self._check()
        with torch.cuda.device(self._index), torch.cuda.stream(stream):
            tensor = torch.empty(size, dtype=torch.uint8, device=f"cuda:{self._index}")
            group.recv([tensor], self._peer_rank, self._peer_rank).wait()
        stream.synchronize()
        self._check()
        return tensor

    def abort(self) -> None:
        """Close the groups without waiting. With NCCL, operations in progress raise RuntimeError."""
        self._aborted = True
        if self._streams is None:
            self._by_sender = []  # the sockets close with the last operation
        else:
            for group in self._by_sender:  # in threads: one abort may wait for the other's kernel
                threading.Thread(target=_abort, args=(group,), name="kv-torch-abort", daemon=True).start()

    def _gloo(self, sender: int) -> Any:
        try:
            return self._by_sender[sender]
        except IndexError:
            raise RuntimeError("the group was aborted") from None

    def _check(self) -> None:
        """Raise RuntimeError if the groups were aborted: on the stream, an aborted operation looks complete."""
        if self._aborted:
            raise RuntimeError("the group was aborted")


def _abort(group: Any) -> None:
    try:
        group.abort()
    except RuntimeError as error:
        _log.error("a communicator could not be aborted: %s (torch_dist)", error)


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
