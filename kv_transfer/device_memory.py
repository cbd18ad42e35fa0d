"""A pool on a GPU, which a peer that uses the same GPU may open by CUDA IPC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kv_transfer.sink import Stretch
from pdserve.core.errors import TransferRefused

if TYPE_CHECKING:
    import torch


class DeviceMemory:
    """This process's own view ``data`` of the pool (its bytes), and the ``handle`` by which others open it."""

    def __init__(self, handle: Sequence[Any], data: torch.Tensor) -> None:
        self.handle = list(handle)
        self._start, self._size = data.data_ptr(), data.nbytes

    def offset(self, part: Stretch) -> int | None:
        """Where ``part`` begins in the pool; None if it lies elsewhere."""
        offset: int = part.data_ptr() - self._start
        return offset if 0 <= offset <= self._size - part.nbytes else None


def open_cuda(handle: Sequence[Any]) -> torch.Tensor:
    """The bytes of a pool that another process shares; RuntimeError if it cannot be opened here."""
    import torch

    storage = torch.UntypedStorage._new_shared_cuda(*handle)
    return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", handle[0])).set_(storage)


class PeerDeviceMemory:
    """A peer's pool, opened by its ``handle``; ``opened`` is `open_cuda`, or what stands for it in tests."""

    def __init__(self, handle: Sequence[Any], opened: Callable[[Sequence[Any]], torch.Tensor] = open_cuda) -> None:
        try:
            self._data: torch.Tensor | None = opened(handle)
            self.size = self._data.nbytes
        except (RuntimeError, TypeError, ValueError) as error:
            raise TransferRefused(f"the peer's GPU memory cannot be opened: {error}") from None

    def view(self, offset: int, size: int) -> Stretch:
        """A part of it, which must not reach beyond."""
        assert self._data is not None, "it is closed"
        return self._data[offset : offset + size]

    def finish(self) -> None:
        """Wait until all copies out of it are done."""
        if self._data is not None and self._data.is_cuda:
            import torch

            torch.cuda.current_stream(self._data.device).synchronize()

    def close(self) -> None:
        """Let go of it. Closing twice is fine."""
        self._data = None
