"""A NIXL agent with its UCX backend, as the transport uses it: registered memory, and reads of a peer's into it.

NIXL is imported by the first agent and not before. Its errors become this project's here.
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


class ReadFailed(Exception):
    """A read has ended, and not brought what it should have."""


class RemoteMemory(NamedTuple):
    """A peer's registered memory: its agent's name, where the memory lies in its own process, its size, and the number
    of its device there (0 on the host)."""

    agent: str
    address: int
    size: int
    device: int


class NixlAgent:
    """Reads into ``memory``, which peers that have this agent's metadata may read. ConfigError if NIXL or its UCX
    backend is not available. It may be made in any thread, and is then used by one thread at a time: it has no locks,
    and no thread of its own that makes progress (which would take a core): see `progress`. Without ``memory`` it tells
    whether an agent can be made here."""

    def __init__(self, memory: Memory | None = None) -> None:
        api, self._errors = _load()
        self.name = secrets.token_hex(NAME_BYTES // 2)
        """Different for each agent, of NAME_BYTES characters."""
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
            if memory is not None:
                places = [(memory.address, memory.size, self._device, "")]
                self._registration = self._agent.register_memory(places, self._kind)
            self.metadata: bytes = self._agent.get_agent_metadata()
            """What a peer needs to read from here."""
        except failures as error:
            raise ConfigError(f"transfer.transport: nixl cannot be used: its UCX backend fails ({error})") from None

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Make another agent known, once more (a peer may have several links). PeerLost if its metadata are wrong."""
        if not self._peers[name]:
            known = self._guard("learning of the peer", lambda: self._agent.add_remote_agent(metadata))
            if (known.decode() if isinstance(known, bytes) else known) != name:
                raise PeerLost("the peer's metadata are another agent's")
        self._peers[name] += 1

    def hold_peer(self, name: str) -> None:
        """As `add_peer`, for one that is known: a read of its memory is under way."""
        self._peers[name] += 1

    def remove_peer(self, name: str) -> None:
        """Undo one `add_peer`; the last one forgets the peer, and disconnects."""
        self._peers[name] -= 1
        if not self._peers[name]:
            del self._peers[name]
            with suppress(*self._errors):  # it may have gone before
                self._agent.remove_remote_agent(name)

    def read(self, peer: RemoteMemory, pairs: Sequence[tuple[Region, Region]]) -> Any:
        """Begin to read regions of the peer's memory, the second of each pair, into those of the memory here, the
        first; a handle for `done`. PeerLost if that cannot be begun."""
        assert self._memory is not None, "an agent without memory reads nothing"
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

    def done(self, handle: Any) -> bool:
        """Whether a read has ended, whose handle is then released; ReadFailed if it ended without success, PeerLost if
        its state is unknown. Makes progress. A read that is under way cannot be called back, whatever NIXL says when
        its handle is released."""
        state = self._guard("reading", lambda: self._agent.check_xfer_state(handle))
        if state == "PROC":
            return False
        self._guard("reading", lambda: self._agent.release_xfer_handle(handle))
        if state != "DONE":
            raise ReadFailed("reading the peer's memory failed")
        return True

    def progress(self) -> None:
        """Do a bit of what peers need done here, where no hardware does it; PeerLost if that fails."""
        self._guard("serving reads", self._agent.get_new_notifs)

    def close(self) -> None:
        """Forget all peers, deregister all memory, end the backend."""
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
    """ConfigError if no agent can be made here. Takes a second or two."""
    NixlAgent().close()


def _load() -> tuple[Any, tuple[type[Exception], ...]]:
    """NIXL's Python interface, and the types of its errors (which have no base of their own)."""
    if not Path("/sys/class/infiniband").exists():
        # UCX's part for RDMA, as NIXL's wheels bring it, crashes the process as it exits; here it is of no use.
        os.environ.setdefault("UCX_MODULES", "^ib")
    raise_exceptions = logging.raiseExceptions
    try:
        importlib.import_module("nixl")  # it picks the build for this CUDA, and makes its modules known under its name
        api, bindings = importlib.import_module("nixl._api"), importlib.import_module("nixl._bindings")
    except ImportError as error:
        raise ConfigError(
            f"transfer.transport: nixl cannot be used: NIXL cannot be imported ({error}); {_INSTALL}"
        ) from None
    # Importing it sets up logging to stdout and changes a switch of the logging module; a worker has its own.
    logging.raiseExceptions = raise_exceptions
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    errors = (each for each in vars(bindings).values() if isinstance(each, type) and issubclass(each, Exception))
    return api, tuple(errors)
