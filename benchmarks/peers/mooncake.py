"""Mooncake's Transfer Engine over TCP: the target reads from the source's registered memory."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.peers.library_pair import LibraryPair


class MooncakeTcp(LibraryPair):
    """Two engines that shake hands with each other, with no metadata server, and the library's own settings (keeping
    connections, or more of them, made it no faster). It takes free ports, and knows no way to listen on the loopback
    interface alone."""

    name = "mooncake_tcp"
    module = "benchmarks.peers.mooncake_program"
    requirement = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
    environment: Mapping[str, str] = {"MC_TCP_BIND_ADDRESS": "127.0.0.1"}
