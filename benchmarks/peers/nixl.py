"""NIXL with its UCX backend: the target reads from the source's registered memory."""

from __future__ import annotations

from benchmarks.peers.environment import PeerEnvironment
from benchmarks.peers.library_pair import LibraryPair
from experiments.pairs.buffer import MEMORY_VARIABLE
from experiments.pairs.child_process import ChildProcess
from experiments.pairs.endpoint import Done, Rest, Serve
from experiments.pairs.process_pair import TIMEOUT_S


class Nixl(LibraryPair):
    """``tcp_only`` forces TCP, as between two hosts without RDMA; otherwise UCX takes the best transport, which on one
    host is shared memory or reading the other process's memory. Sockets use the loopback interface. ``private_memory``
    uses buffers in private memory instead of memory files."""

    module = "benchmarks.peers.nixl_program"
    requirement = "nixl-cu12==1.5.1"

    def __init__(self, environment: PeerEnvironment, *, tcp_only: bool = False, private_memory: bool = False) -> None:
        super().__init__(environment)
        self.name = "nixl" + "_tcp" * tcp_only + "_private" * private_memory
        self.environment = {"UCX_NET_DEVICES": "lo"}
        if tcp_only:
            self.environment["UCX_TLS"] = "tcp"
        if private_memory:
            self.environment[MEMORY_VARIABLE] = "private"

    def _transfer(self, source: ChildProcess, target: ChildProcess, num_bytes: int) -> float:
        """Seconds at the target, from posting the read until it is done."""
        source.ask(TIMEOUT_S, Serve(), Done)
        seconds = super()._transfer(source, target, num_bytes)
        source.ask(TIMEOUT_S, Rest(), Done)
        return seconds
