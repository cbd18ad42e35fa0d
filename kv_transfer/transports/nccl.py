"""NCCL communicators of one link: one per direction, because the operations of a communicator run one after another.

They are connected when the link is, and not by the first payload, whose time would then count as the link's. All
operations on torch's process groups run with the pool's GPU as the current one of their thread.
"""

from __future__ import annotations

import datetime
import logging
import os
from typing import Any

import torch
import torch.distributed

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
}
_log = logging.getLogger(__name__)


def set_defaults() -> None:
    """Set NCCL's environment variables that the user has not set. Call it before the first communicator."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


class Communicators:
    """The two communicators of rank ``rank`` (0 or 1) on GPU ``index``: ``by_sender[r]`` carries what rank r sends.
    ``store`` is a c10d store that both ends share, for as long as they use it. Nothing is connected before `connect`.
    ``timeout_s`` bounds an operation."""

    def __init__(self, store: Any, rank: int, index: int, timeout_s: float) -> None:
        dist: Any = torch.distributed
        set_defaults()
        self._rank, self._index, self._device = rank, index, torch.device("cuda", index)
        self.by_sender: list[Any] = []
        for sender in range(2):
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = datetime.timedelta(seconds=timeout_s)
            options.config.blocking = 0
            self.by_sender.append(dist.ProcessGroupNCCL(dist.PrefixStore(f"kv{sender}", store), rank, 2, options))
        cuda: Any = torch.cuda
        with cuda.device(index):
            self.streams: list[Any] = [cuda.Stream(self._device), cuda.Stream(self._device)]

    def connect(self) -> None:
        """Connect both communicators, and send one byte each way. RuntimeError if they fail or are aborted. Unbounded:
        abort the groups when the time is over."""
        cuda: Any = torch.cuda
        with cuda.device(self._index):
            for group in self.by_sender:
                group.eager_connect_single_device(self._device)
            for sender, group in enumerate(self.by_sender):
                sends = sender == self._rank
                with cuda.stream(self.streams[0 if sends else 1]):
                    byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
                    (group.send if sends else group.recv)([byte], 1 - self._rank, sender).wait()
            for stream in self.streams:
                stream.synchronize()
