"""NIXL's Python interface as `nixl_agent` uses it, for agents of one process that copy from memory to memory."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType
from typing import Any

import pytest


class FakeError(Exception):
    """What it raises."""


class FakeNetwork:
    """All its agents, and how their reads go: they end at the ``polls``-th poll, with ``needs_progress`` only after the
    peer made progress since they began, and with ``fails`` in an error."""

    def __init__(self) -> None:
        self.agents: dict[str, _Agent] = {}
        self.polls, self.needs_progress, self.fails = 2, False, False
        self.backends = ["UCX"]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be the module `nixl` from now on."""
        api, bindings = ModuleType("nixl._api"), ModuleType("nixl._bindings")
        api.nixl_agent_config = lambda **options: options  # type: ignore[attr-defined]
        api.nixl_agent = lambda name, _: _Agent(self, name)  # type: ignore[attr-defined]
        bindings.FakeError = FakeError  # type: ignore[attr-defined]
        for module in (ModuleType("nixl"), api, bindings):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setenv("UCX_MODULES", "")  # setting it is undone in the end


class _Read:
    def __init__(self, pairs: list[tuple[tuple[int, int, int], tuple[int, int, int]]], peer: str, seen: int) -> None:
        self.pairs, self.peer, self.seen, self.polls, self.released = pairs, peer, seen, 0, False


class _Agent:
    def __init__(self, network: FakeNetwork, name: str) -> None:
        self.network, self.name, self.progress = network, name, 0
        self.backends = dict.fromkeys(network.backends)
        self.registered: list[tuple[int, int]] = []
        self.peers: set[str] = set()
        self.reads: list[_Read] = []
        network.agents[name] = self

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> tuple[int, int]:
        (address, size, _, _) = regions[0]
        self.registered.append((address, size))
        return address, size

    def deregister_memory(self, registration: tuple[int, int]) -> None:
        self.registered.remove(registration)

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self.peers.add(metadata.decode())
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        self.peers.remove(name)

    def get_xfer_descs(self, places: list[tuple[int, int, int]], kind: str) -> list[tuple[int, int, int]]:
        return places

    def initialize_xfer(self, operation: str, local: Any, remote: Any, peer: str) -> _Read:
        if peer not in self.peers:
            raise FakeError("NOT_FOUND")
        for agent, places in ((self, local), (self.network.agents[peer], remote)):
            for address, size, _ in places:
                assert any(a <= address and address + size <= a + s for a, s in agent.registered)
        self.reads.append(_Read(list(zip(local, remote, strict=True)), peer, self.network.agents[peer].progress))
        return self.reads[-1]

    def transfer(self, read: _Read) -> str:
        return "PROC"

    def check_xfer_state(self, read: _Read) -> str:
        assert not read.released
        if read.peer not in self.peers:
            raise FakeError("NOT_FOUND")
        if self.network.fails:
            return "ERR"
        read.polls += 1
        if read.polls < self.network.polls:
            return "PROC"
        if self.network.needs_progress and self.network.agents[read.peer].progress == read.seen:
            return "PROC"
        for (into, size, _), (start, _, _) in read.pairs:
            ctypes.memmove(into, start, size)
        return "DONE"

    def release_xfer_handle(self, read: _Read) -> None:
        assert not read.released
        read.released = True

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        self.progress += 1
        return {}
