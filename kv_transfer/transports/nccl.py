"""NCCL communicators of one link: one per direction, because the operations of a communicator run one after another.

They are connected when the link is, and not by the first payload, whose time would then count as the link's. All
operations on torch's process groups run with the pool's GPU as the current one of their thread. An operation is
enqueued on a stream, and an event tells when the GPU has passed it, so that the next one follows without a gap.
"""

from __future__ import annotations

import datetime
import logging
import os
import threading
from typing import Any

import torch
import torch.distributed

from kv_transfer.fetch import Payload
from kv_transfer.memory import DeviceMemory, Memory
from runtime.cuda import Cuda, Event, Stream
from runtime.poison import ends_if_poisoned
from runtime.torch_cuda import TorchCuda

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


def set_defaults() -> None:
    """Set NCCL's environment variables that the user has not set. Call it before the first communicator."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


class Communicators:
    """The two communicators of rank ``rank`` (0 or 1) on GPU ``index``: see `torch_groups.Groups`.

    ``store`` is a c10d store that both ends share, for as long as they use it. Nothing is connected before `connect`.
    Whoever uses them bounds each operation, and ends it by `abort`. Payloads are gathered, sent and received on a
    stream each, so that none of them waits for the others, nor for the copies of received payloads, which use the
    default stream."""

    fails_alone = False

    def __init__(self, store: Any, rank: int, index: int, cuda: Cuda | None = None) -> None:
        distributed: Any = torch.distributed
        set_defaults()
        self._cuda = cuda or TorchCuda()
        self._rank, self._index, self._device = rank, index, self._cuda.init(index)
        self._aborted = False
        self._by_sender: list[Any] = []
        for sender in range(2):
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = datetime.timedelta(seconds=_WATCHDOG_S)
            options.config.blocking = 0
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
            operation.wait()

    def gather(self, payload: Payload, memory: Memory) -> torch.Tensor:
        """A contiguous copy of the payload. Returns when the GPU has copied it."""
        assert isinstance(memory, DeviceMemory)
        with ends_if_poisoned(), self._cuda.on(self._gathering):
            gathered = torch.cat([memory.view(region) for region in payload.regions])
            self._cuda.record(self._index).synchronize()
        return gathered

    def send(self, gathered: torch.Tensor) -> Transfer:
        """Enqueue a send. Does not wait for the peer."""
        self._check()
        with ends_if_poisoned(), self._cuda.on(self._sending):
            self._by_sender[self._rank].send([gathered], 1 - self._rank, self._rank).wait()
            return Transfer(self, gathered, self._sending, self._cuda.record(self._index))

    def recv(self, size: int) -> Transfer:
        """Enqueue a receive. Does not wait for the peer."""
        self._check()
        with ends_if_poisoned(), self._cuda.on(self._receiving):
            tensor = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._by_sender[1 - self._rank].recv([tensor], 1 - self._rank, 1 - self._rank).wait()
            return Transfer(self, tensor, self._receiving, self._cuda.record(self._index))

    def abort(self) -> None:
        """Abort both communicators without waiting. Operations in progress raise RuntimeError."""
        self._aborted = True
        for group in self._by_sender:  # in threads: one abort may wait for the other's kernel
            threading.Thread(target=_abort, args=(group,), name="kv-torch-abort", daemon=True).start()

    def end(self, stream: Stream, ended: Event) -> None:
        """Wait until the GPU has passed an event of a stream. RuntimeError if the communicators were aborted: on the
        stream, an aborted operation looks complete."""
        with ends_if_poisoned(), self._cuda.on(stream):
            ended.synchronize()
        self._check()

    def _check(self) -> None:
        if self._aborted:
            raise RuntimeError("the group was aborted")


class Transfer:
    """A send or receive of ``tensor`` that is enqueued on a stream; ``ended`` is an event after it."""

    def __init__(self, communicators: Communicators, tensor: torch.Tensor, stream: Stream, ended: Event) -> None:
        self._communicators, self._tensor, self._stream, self._ended = communicators, tensor, stream, ended

    def wait(self) -> torch.Tensor:
        """Wait until it has ended. RuntimeError if it was aborted."""
        self._communicators.end(self._stream, self._ended)
        return self._tensor


def _abort(group: Any) -> None:
    try:
        group.abort()
    except RuntimeError as error:
        _log.error("a communicator could not be aborted: %s (torch_dist)", error)
