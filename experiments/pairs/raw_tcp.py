"""The ceiling of network transports: one blocking loopback socket between two processes."""

from __future__ import annotations

from experiments.pairs.process_pair import ProcessPair


class RawTcp(ProcessPair):
    """The source writes its buffer to the socket, the target reads right into its own."""

    name = "tcp"
    module = "experiments.pairs.raw_tcp_program"
