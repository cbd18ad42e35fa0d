"""Mooncake's Transfer Engine over TCP: the target reads from the source's registered memory."""

from __future__ import annotations

from benchmarks.peers.library_pair import LibraryPair


class MooncakeTcp(LibraryPair):
    """Two engines that shake hands with each other; no metadata server. Connections are kept, not made per transfer."""

    name = "mooncake_tcp"
    module = "benchmarks.peers.mooncake_program"
    requirement = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
    environment = {  # noqa: RUF012 - ProcessPair's is not to be changed either
        "MC_TCP_BIND_ADDRESS": "127.0.0.1",
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",
        "MC_FORCE_TCP": "1",
    }
