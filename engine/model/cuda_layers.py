"""A layer hook on a GPU, where a layer that was launched is not done yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch


class CudaLayers:
    """Calls ``done`` for a group of layers when the GPU has computed it, which is looked at when the next group has
    been launched: so the GPU always has work, and the launching thread waits where it would have waited anyway."""

    def __init__(self, done: Callable[[int], None]) -> None:
        self._done = done
        self._launched: deque[tuple[int, torch.cuda.Event]] = deque()

    def __call__(self, num_layers: int) -> None:
        """The first ``num_layers`` layers have been launched."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._launched.append((num_layers, event))
        if len(self._launched) > 1:
            before, event = self._launched.popleft()
            event.synchronize()
            self._done(before)
