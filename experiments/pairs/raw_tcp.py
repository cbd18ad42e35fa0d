"""The ceiling of network transports: one blocking loopback socket between two processes."""

from __future__ import annotations

from experiments.pairs.child_process import ChildProcess
from experiments.pairs.process_pair import TIMEOUT_S, ProcessPair


class RawTcp(ProcessPair):
    """The source writes its buffer to the socket, the target reads right into its own."""

    name = "tcp"
    module = "experiments.pairs.raw_tcp_program"

    def _transfer(self, source: ChildProcess, target: ChildProcess, num_bytes: int) -> float:
        """Seconds from before the source's first write until the target has everything: both read the same clock."""
        target.send(bytes=num_bytes)
        target.receive(TIMEOUT_S)  # it says so before it reads
        started_s = float(source.ask(TIMEOUT_S, bytes=num_bytes)["seconds"])
        return float(target.receive(TIMEOUT_S)["seconds"]) - started_s
