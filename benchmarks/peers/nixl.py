"""NIXL with its UCX backend: the target reads from the source's registered memory."""

from __future__ import annotations

from benchmarks.peers.environment import PeerEnvironment
from benchmarks.peers.library_pair import LibraryPair


class Nixl(LibraryPair):
    """``tcp_only``: as between two hosts without RDMA; else UCX takes the best that it finds, on one host that is
    shared memory or one process reading the other's. Its sockets are the loopback interface's in both cases."""

    module = "benchmarks.peers.nixl_program"
    requirement = "nixl-cu12==1.5.1"

    def __init__(self, environment: PeerEnvironment, *, tcp_only: bool = False) -> None:
        super().__init__(environment)
        self.name = "nixl_tcp" if tcp_only else "nixl"
        self.environment = {"UCX_NET_DEVICES": "lo"} | ({"UCX_TLS": "tcp"} if tcp_only else {})
