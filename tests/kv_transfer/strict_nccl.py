"""NCCL's process groups without a GPU, over the streams of `tests.strict_streams`. They raise `CudaMisuse` where NCCL
would hang, or use another GPU than its own."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kv_transfer.transports.torch_groups import Communicators
from tests.strict_cuda import CudaMisuse
from tests.strict_streams import StrictStream, current_stream

PEER_S = 10.0
_DEFAULT_CTAS = 32


class Wire:
    """What one communicator carries: messages that are sent, and whether it was aborted. Sends and receives meet, as
    those of large messages do."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sent: deque[torch.Tensor] = deque()
        self._num_sent = self._num_taken = 0
        self.aborted = False

    def send(self, tensor: torch.Tensor) -> None:
        """Wait until a receive has taken it, or for an abort."""
        with self._changed:
            self._sent.append(tensor)
            self._num_sent += 1
            number = self._num_sent
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.aborted or self._num_taken >= number, PEER_S)

    def recv(self, tensor: torch.Tensor) -> None:
        """Wait for a message, or an abort, after which ``tensor`` is as it was."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.aborted or bool(self._sent), PEER_S)
            if self.aborted:
                return
            sent = self._sent.popleft()
            if sent.numel() != tensor.numel():
                raise CudaMisuse(f"{sent.numel()} bytes are received as {tensor.numel()}")
            tensor.copy_(sent)
            self._num_taken += 1
            self._changed.notify_all()

    def abort(self) -> None:
        """End what waits."""
        with self._changed:
            self.aborted = True
            self._changed.notify_all()


class StrictNccl:
    """NCCL between processes. ``made`` are the groups so far. ``largest`` is the most operations that were enqueued and
    not done on one side of a wire."""

    def __init__(self) -> None:
        self.made: list[StrictGroup] = []
        self.largest = 0
        self._wires: dict[tuple[int, str], Wire] = defaultdict(Wire)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put it in NCCL's place."""

        def make(store: tuple[str, int], rank: int, size: int, options: Any) -> StrictGroup:
            group = StrictGroup(self, self._wires[store[1], store[0]], store[0], rank, options)
            self.made.append(group)
            return group

        def options() -> SimpleNamespace:
            return SimpleNamespace(config=SimpleNamespace())

        make.Options = options  # type: ignore[attr-defined]
        monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", make, raising=False)
        monkeypatch.setattr(torch.distributed, "PrefixStore", lambda prefix, store: (prefix, store))


class StrictGroup:
    """A `ProcessGroupNCCL` of two ranks. ``calls`` are its calls, with the GPU that was the current one."""

    def __init__(self, nccl: StrictNccl, wire: Wire, name: str, rank: int, options: Any) -> None:
        self._nccl, self.wire, self.name, self._rank, self.options = nccl, wire, name, rank, options
        self._internal: StrictStream | None = None  # from `eager_connect_single_device` on
        self._enqueued = 0
        self.calls: list[tuple[Any, ...]] = []

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Noted. From here on the group has a stream of torch's."""
        stream = self._stream()
        self._internal = stream.cuda.torch_stream(stream.index)
        self.calls.append(("connect", stream.index))

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> StrictGroup:
        """Enqueue a send on the group's stream, for which the current one waits."""
        self._on_internal("send", tensors[0], peer, self.wire.send)
        return self

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> StrictGroup:
        """Enqueue a receive on the group's stream, for which the current one waits."""
        self._on_internal("recv", tensors[0], peer, self.wire.recv)
        return self

    def alltoall_base(
        self,
        output: torch.Tensor,
        sent: torch.Tensor,
        output_sizes: list[int],
        sent_sizes: list[int],
        options: Any,
    ) -> None:
        """Enqueue a send and a receive, of which one is empty, on the current stream."""
        if options.asyncOp:
            raise CudaMisuse("an asynchronous all-to-all runs on the group's stream")
        if (sum(output_sizes), sum(sent_sizes)) != (output.numel(), sent.numel()):
            raise CudaMisuse("split sizes that are not those of the tensors")
        if output_sizes[self._rank] or sent_sizes[self._rank]:
            raise CudaMisuse("a rank sends to itself")
        peer = 1 - self._rank
        for what, tensor, work in (("send", sent, self.wire.send), ("recv", output, self.wire.recv)):
            if tensor.numel():
                self._enqueue(what, tensor, peer, work, self._stream())

    def wait(self) -> None:
        """Only the stream waits."""

    def abort(self) -> None:
        """End the operations, which look complete to their streams."""
        self.wire.abort()

    def _on_internal(self, what: str, tensor: torch.Tensor, peer: int, work: Any) -> None:
        if self._internal is None:
            raise CudaMisuse("the first operation connects, and its payload pays for it")
        if peer == self._rank:
            raise CudaMisuse("a rank sends to itself")
        current, internal = self._stream(), self._internal
        before = current.length
        internal.add(lambda: current.run(before))
        self._enqueue(what, tensor, peer, work, internal)
        end = internal.length
        current.add(lambda: internal.run(end))

    def _enqueue(self, what: str, tensor: torch.Tensor, peer: int, work: Any, stream: StrictStream) -> None:
        if self._internal is None:
            raise CudaMisuse("the first operation connects, and its payload pays for it")
        self.calls.append((what, tensor.numel(), peer, stream.index))
        self._enqueued += 1
        self._nccl.largest = max(self._nccl.largest, self._enqueued)

        def run() -> None:
            with stream.cuda.resident(getattr(self.options.config, "max_ctas", _DEFAULT_CTAS), PEER_S):
                work(tensor)
            self._enqueued -= 1

        stream.add(run)

    @staticmethod
    def _stream() -> StrictStream:
        stream = current_stream()
        if stream is None:
            raise CudaMisuse("an operation of NCCL on the default stream: it would wait for copies, and they for it")
        return stream


def communicators(rank: int, index: int, cuda: Any, link: int = 0) -> Communicators:
    """One end of link ``link``, after `StrictNccl.install`."""
    return Communicators(link, rank, index, cuda)
