"""The process groups of one link, and the store through which its two ends find each other: everything of the
torch_dist transport that talks to torch. All of it blocks.

The end that connected is rank 1, the one that listened is rank 0. There is one group per direction, because the
operations of a group run one after another.
"""

from __future__ import annotations

import datetime
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
import torch.distributed

from kv_transfer.fetch import Payload
from kv_transfer.memory import DeviceMemory, Memory
from kv_transfer.transports.inbox import Content
from runtime.cuda import Cuda, Stream
from runtime.poison import ends_if_poisoned

if TYPE_CHECKING:
    _Store: Any = object
else:
    from torch.distributed import Store as _Store

Backend = Literal["gloo", "nccl"]
_SPARE_BUFFERS = 2
_MAX_CTAS = 8
"""The most thread blocks of a communicator, each of which holds a multiprocessor while it waits for the peer. NCCL
would take up to 32: two directions of one link would fill the multiprocessors that MPS leaves to transfers (a quarter,
33 of an H100), and a link that waits would hold back the others."""


JOIN_S = 90.0
"""Time limit of connecting the communicators of a link. The first one of a process takes seconds; with
NCCL_CUMEM_ENABLE, and GPUs that CUDA_VISIBLE_DEVICES hides, up to half a minute."""

_DEFAULTS = {
    # An operation that times out would end the whole process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Memory of cuMem makes the first operation of a process take 4 to 30 s where CUDA_VISIBLE_DEVICES hides GPUs.
    "NCCL_CUMEM_ENABLE": "0",
    # A connection attempt whose peer died cannot be aborted while it blocks.
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": f"{JOIN_S:.0f}",
    # After a failure the watchdog would wait to dump traces, and the monitor of another link's group end the process.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
_WATCHDOG_S = 3600.0
"""When PyTorch's watchdog takes an operation for failed. The link does so earlier, and aborts the communicators."""

_log = logging.getLogger(__name__)

Operation: TypeAlias = Callable[[], Content]
"""Waits for the end of a send or receive that has begun, and returns the payload. RuntimeError if it failed, timed out
(Gloo) or was aborted."""


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
    memory: Memory,
) -> Groups:
    """Build groups together with the peer. ``hosts`` are the addresses of this end and the peer, ``memory`` is that of
    the pool. ``on_device``: payloads are tensors on the device. ``timeout_s`` bounds Gloo's operations; whoever uses
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
    assert isinstance(memory, DeviceMemory)
    return Communicators(tcp, rank, memory.index, memory.cuda or Cuda())


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

        def wait() -> Content:
            work.wait()
            if not self._on_device:
                self._spare.append(gathered)
            return b""

        return wait

    def recv(self, size: int) -> Operation:
        tensor: torch.Tensor = torch.empty(size, dtype=torch.uint8)
        work = self._group(1 - self._rank).recv([tensor], 1 - self._rank, 1 - self._rank)

        def wait() -> Content:
            work.wait()
            content: memoryview = tensor.numpy().data
            return tensor if self._on_device else content

        return wait

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

    def _group(self, sender: int) -> Any:
        try:
            return self._by_sender[sender]
        except IndexError:
            raise RuntimeError("the group was aborted") from None


def set_defaults() -> None:
    """Set NCCL's environment variables that the user has not set. Call it before the first communicator."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


class Communicators:
    """NCCL communicators of rank ``rank`` (0 or 1) on GPU ``index``: see `Groups`.

    They are connected when the link is, and not by the first payload, whose time would then count as the link's. All
    operations run with the pool's GPU as the current one of their thread. An operation is enqueued on a stream, and an
    event tells when the GPU has passed it, so that the next one follows without a gap.

    ``store`` is a c10d store that both ends share, for as long as they use it. Nothing is connected before `connect`.
    Whoever uses them bounds each operation, and ends it by `abort`. Payloads are gathered, sent and received on a
    stream each, so that none of them waits for the others, nor for the copies of received payloads, which use the
    default stream. No other link uses these streams: a send whose peer has stopped holds its stream until the abort.
    The links of a process share ``cuda``, which keeps the streams of a link that has ended for the next one."""

    fails_alone = False

    def __init__(self, store: Any, rank: int, index: int, cuda: Cuda) -> None:
        distributed: Any = torch.distributed
        set_defaults()
        self._cuda = cuda
        self._rank, self._index, self._device = rank, index, self._cuda.init(index)
        self._aborted = False
        self._by_sender: list[Any] = []
        for sender in range(2):
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = datetime.timedelta(seconds=_WATCHDOG_S)
            options.config.blocking = 0
            options.config.max_ctas = _MAX_CTAS
            prefixed = distributed.PrefixStore(f"kv{sender}", store)
            self._by_sender.append(distributed.ProcessGroupNCCL(prefixed, rank, 2, options))
        self._gathering, self._sending, self._receiving = (self._cuda.stream(index) for _ in range(3))

    def connect(self) -> None:
        """Connect both communicators, and send one byte each way. RuntimeError if they fail or are aborted. Unbounded:
        abort the groups when the time is over."""
        with self._cuda.on(self._sending):
            for group in self._by_sender:
                group.eager_connect_single_device(self._device)
            byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        begun = [(self.send(byte) if sender == self._rank else self.recv(1)) for sender in range(2)]
        for operation in begun:
            operation()

    def gather(self, payload: Payload, memory: Memory) -> torch.Tensor:
        """A contiguous copy of the payload. Returns when the GPU has copied it."""
        assert isinstance(memory, DeviceMemory)
        with ends_if_poisoned(), self._cuda.on(self._gathering):
            gathered = torch.cat([memory.view(region) for region in payload.regions])
            self._cuda.record(self._index).synchronize()
        return gathered

    def send(self, gathered: torch.Tensor) -> Operation:
        """Enqueue a send. Does not wait for the peer."""
        self._check()
        with ends_if_poisoned(), self._cuda.on(self._sending):
            self._exchange(self._rank, sent=gathered, received=self._empty(0))
            return self._end_of(gathered, self._sending)

    def recv(self, size: int) -> Operation:
        """Enqueue a receive. Does not wait for the peer."""
        self._check()
        with ends_if_poisoned(), self._cuda.on(self._receiving):
            tensor = self._empty(size)
            self._exchange(1 - self._rank, sent=self._empty(0), received=tensor)
            return self._end_of(tensor, self._receiving)

    def abort(self) -> None:
        """Abort both communicators without waiting. Operations in progress raise RuntimeError."""
        self._aborted = True
        # In threads: one abort may wait for the other's kernel.
        aborts = [threading.Thread(target=_abort, args=(group,), daemon=True) for group in self._by_sender]
        for each in aborts:
            each.start()
        threading.Thread(target=self._return_streams, args=(aborts,), name="kv-torch-abort", daemon=True).start()

    def _exchange(self, sender: int, sent: torch.Tensor, received: torch.Tensor) -> None:
        """Enqueue a transfer between this rank and the other one on the current stream.

        `ProcessGroupNCCL.send` and ``recv`` would use a stream of the group, which is one of torch's 32 and may be
        another link's. An all-to-all that is not asynchronous uses the current one, and is for NCCL a send or a receive
        where all but one of its parts are empty."""
        sizes = [[0 if rank == self._rank else tensor.numel() for rank in range(2)] for tensor in (received, sent)]
        options = torch.distributed.AllToAllOptions()
        options.asyncOp = False
        self._by_sender[sender].alltoall_base(received, sent, *sizes, options)

    def _empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _return_streams(self, aborts: list[threading.Thread]) -> None:
        """Give the streams back once nothing is left on them. An abort that never ends keeps them."""
        for each in aborts:
            each.join()
        self._cuda.init(self._index)
        for stream in (self._gathering, self._sending, self._receiving):
            with ends_if_poisoned():
                stream.synchronize()
            self._cuda.give_back(stream, self._index)

    def _end_of(self, tensor: torch.Tensor, stream: Stream) -> Operation:
        """Wait until the GPU has passed what was enqueued on a stream, and return the tensor. RuntimeError if the
        communicators were aborted: on the stream, an aborted operation looks complete."""
        ended = self._cuda.record(self._index)

        def wait() -> torch.Tensor:
            with ends_if_poisoned(), self._cuda.on(stream):
                ended.synchronize()
            self._check()
            return tensor

        return wait

    def _check(self) -> None:
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
