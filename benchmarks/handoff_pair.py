"""Our own side of the transfer benchmark: whole hand-offs of blocks (for bare transports see
`experiments.pairs.transport_pair`)."""

from __future__ import annotations

from benchmarks.handoff_program import DEVICE_VARIABLE, SHAPE_VARIABLE, layout_of
from experiments.pairs.loop_endpoint import TRANSPORT_VARIABLE
from experiments.pairs.process_pair import ProcessPair
from runtime.secret import ServiceSecret


class HandoffPair(ProcessPair):
    """Hand-offs of a model's blocks (``shape``: 135m or 8b) over ``transport``: scattered blocks of one pool, read,
    hashed, sent, verified and put into scattered blocks of the other. With the ``device`` cuda the pools are in the
    memory of two GPUs; their blocks are empty, and hand-offs have to be `unchecked`."""

    module = "benchmarks.handoff_program"

    def __init__(self, shape: str, transport: str, *, probe: bool = True, device: str = "cpu") -> None:
        super().__init__()
        self.probe = probe
        self.name = f"{shape} blocks over {transport}"
        settings = {TRANSPORT_VARIABLE: transport, SHAPE_VARIABLE: shape, DEVICE_VARIABLE: device}
        self.environment = {**settings, **ServiceSecret.new().environment()}
        self.layout = layout_of(shape)

    def unchecked(self, num_bytes: int) -> float:
        """`seconds`, without touching the target's blocks before."""
        return self._move(num_bytes)
