"""A bare link of one of our transports."""

from __future__ import annotations

from experiments.pairs.loop_endpoint import TRANSPORT_VARIABLE
from experiments.pairs.process_pair import ProcessPair
from runtime.secret import ServiceSecret


class TransportPair(ProcessPair):
    """A link of ``transport`` between two processes: memory to memory."""

    module = "experiments.pairs.transport_program"

    def __init__(self, transport: str) -> None:
        super().__init__()
        self.name = transport
        self.environment = {TRANSPORT_VARIABLE: transport, **ServiceSecret.new().environment()}
