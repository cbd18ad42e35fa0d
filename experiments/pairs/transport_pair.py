"""A bare link of one of our transports."""

from __future__ import annotations

from experiments.pairs.child_process import ChildProcess
from experiments.pairs.loop_endpoint import TRANSPORT_VARIABLE
from experiments.pairs.process_pair import TIMEOUT_S, ProcessPair
from pdserve.core.secret import ServiceSecret


class TransportPair(ProcessPair):
    """A link of ``transport`` between two processes: memory to memory."""

    module = "experiments.pairs.transport_program"

    def __init__(self, transport: str) -> None:
        super().__init__()
        self.name = transport
        self.environment = {TRANSPORT_VARIABLE: transport, **ServiceSecret.new().environment()}

    def _transfer(self, source: ChildProcess, target: ChildProcess, num_bytes: int) -> float:
        """Seconds from before the source's first message until the target has everything: both read the same clock."""
        target.send(bytes=num_bytes)
        target.receive(TIMEOUT_S)  # it says so before it reads
        started_s = float(source.ask(TIMEOUT_S, bytes=num_bytes)["seconds"])
        return float(target.receive(TIMEOUT_S)["seconds"]) - started_s
