"""A NIXL agent with the UCX backend: it registers memory, and reads a peer's memory into it.

The first agent imports NIXL. NIXL's errors become errors of pdserve here.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kv_transfer.memory import DeviceMemory, Memory
from pdserve.core.errors import ConfigError, PeerLost
from pdserve.core.kv_layout import Region

T = TypeVar("T")

_INSTALL = "pip install nixl, or '.[nixl]' in place of '.'"
NAME_BYTES = 16


class RemoteMemory(NamedTuple):
    """A peer's registered memory: the name of its agent, the address in the peer's process, the size in bytes, and the
    index of the device in the peer's process (0 on the host)."""

    agent: str
    address: int
    size: int
    device: int


class NixlAgent:
    """Registers ``memory``, reads into it, and lets peers that have its metadata read from it. ConfigError if NIXL or
    its UCX backend is not available.

    It has no locks: one thread uses it at a time. It has no thread that makes progress, which would take a core: see
    `progress`. Without ``memory``, it only tests whether an agent can be created."""

    def __init__(self, memory: Memory | None = None) -> None:
        api, self._errors = _load()
        self.name = secrets.token_hex(NAME_BYTES // 2)
        """A random name of NAME_BYTES characters."""
        failures: tuple[type[Exception], ...] = (*self._errors, RuntimeError)
        self._peers: Counter[str] = Counter()
        try:
            config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent: Any = api.nixl_agent(self.name, config)
            if "UCX" not in self._agent.backends:
                raise ConfigError("transfer.transport: nixl cannot be used: this build of NIXL has no UCX backend")
            self._kind, self._device = ("VRAM", memory.index) if isinstance(memory, DeviceMemory) else ("DRAM", 0)
            self._memory = memory
            self._registration = None
            if isinstance(memory, DeviceMemory) and memory.imported:
                raise ConfigError(
                    "transfer.transport: nixl cannot be used: the engine has allocated its pool itself; vLLM uses NIXL "
                    "with worker.connector: nixl"
                )
            if memory is not None:
                places = [(memory.address, memory.size, self._device, "")]
                self._registration = self._agent.register_memory(places, self._kind)
            self.metadata: bytes = self._agent.get_agent_metadata()
            """The bytes that a peer needs to read from this agent."""
        except failures as error:
            raise ConfigError(f"transfer.transport: nixl cannot be used: its UCX backend fails ({error})") from None

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Add another agent, once for each of its links. PeerLost if its metadata are wrong."""
        if not self._peers[name]:
            known = self._guard("learning of the peer", lambda: self._agent.add_remote_agent(metadata))
            if (known.decode() if isinstance(known, bytes) else known) != name:
                raise PeerLost("the peer's metadata are another agent's")
        self._peers[name] += 1

    def hold_peer(self, name: str) -> None:
        """Keep a peer that was added, because a read of its memory is in progress."""
        self._peers[name] += 1

    def remove_peer(self, name: str) -> None:
        """Undo one `add_peer` or `hold_peer`. The last one removes the peer and disconnects."""
        self._peers[name] -= 1
        if not self._peers[name]:
            del self._peers[name]
            with suppress(*self._errors):  # it may have disconnected
                self._agent.remove_remote_agent(name)

    def read(self, peer: RemoteMemory, pairs: Sequence[tuple[Region, Region]]) -> Any:
        """Begin to read regions of the peer's memory (the second of each pair) into regions of this memory (the first).
        Returns a handle for `state`. PeerLost if the read cannot begin."""
        assert self._memory is not None, "an agent without memory cannot read"
        base = self._memory.address
        local = [(base + ours.offset, ours.size, self._device) for ours, _ in pairs]
        remote = [(peer.address + theirs.offset, theirs.size, peer.device) for _, theirs in pairs]

        def begin() -> Any:
            agent = self._agent
            descriptors = (agent.get_xfer_descs(local, self._kind), agent.get_xfer_descs(remote, self._kind))
            handle = agent.initialize_xfer("READ", *descriptors, peer.agent)
            agent.transfer(handle)  # a failure shows in the handle's state
            return handle

        return self._guard("reading", begin)

    def state(self, handle: Any) -> str:
        """Make progress, and return the state of a read: PROC while it is in progress, DONE at its end, another word
        if it failed. After the end its handle is released. PeerLost if the state is unknown. Releasing the handle of a
        read in progress would not cancel it."""
        state: str = self._guard("reading", lambda: self._agent.check_xfer_state(handle))
        if state != "PROC":
            self._guard("reading", lambda: self._agent.release_xfer_handle(handle))
        return state

    def progress(self) -> None:
        """Serve peers' reads for a moment, where no hardware does. PeerLost if that fails."""
        self._guard("serving reads", self._agent.get_new_notifs)

    def close(self) -> None:
        """Remove all peers, deregister the memory, and end the backend."""
        for name in list(self._peers):
            self._peers[name] = 1
            self.remove_peer(name)
        if self._registration is not None:
            with suppress(*self._errors):
                self._agent.deregister_memory(self._registration)
        self._agent = None

    def _guard(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except self._errors as error:
            raise PeerLost(f"{what} failed: {error}") from None


def check_nixl() -> None:
    """Raise ConfigError if no agent can be created. Takes one or two seconds."""
    NixlAgent().close()


def _load() -> tuple[Any, tuple[type[Exception], ...]]:
    """NIXL's Python interface, and the types of its errors, which have no common base."""
    if not Path("/sys/class/infiniband").exists():
        # The RDMA module of UCX in NIXL's wheels crashes the process at exit. Without RDMA devices it is not needed.
        os.environ.setdefault("UCX_MODULES", "^ib")
    raise_exceptions = logging.raiseExceptions
    try:
        importlib.import_module("nixl")  # selects the build for this CUDA version, and aliases its modules
        api, bindings = importlib.import_module("nixl._api"), importlib.import_module("nixl._bindings")
    except ImportError as error:
        raise ConfigError(
            f"transfer.transport: nixl cannot be used: NIXL cannot be imported ({error}); {_INSTALL}"
        ) from None
    # The import configures logging to stdout and changes `logging.raiseExceptions`. Undo both.
    logging.raiseExceptions = raise_exceptions
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    errors = (each for each in vars(bindings).values() if isinstance(each, type) and issubclass(each, Exception))
    return api, tuple(errors)
