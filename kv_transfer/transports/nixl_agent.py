"""A NIXL agent with its UCX backend, as the transport uses it: memory registered by address, reads of a peer's memory.

NIXL is imported by the first agent and not before. Its errors become this project's here.
"""

from __future__ import annotations

import importlib
import logging
import mmap
import os
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from kv_transfer.shared_memory import SharedMemory, address_of
from pdserve.core.errors import ConfigError, PeerLost

T = TypeVar("T")

_INSTALL = "pip install nixl, or '.[nixl]' in place of '.'"
NAME_BYTES = 16


class Staging:
    """Registered memory of ``size`` bytes, into which a peer's memory is read; `NixlAgent.stage` makes it."""

    def __init__(self, size: int) -> None:
        self.view = memoryview(mmap.mmap(-1, size))
        self.address = address_of(self.view)
        self.registration: Any = None


class NixlAgent:
    """Reads into this process, and lets peers read ``memory``, whoever has this agent's metadata. ConfigError if NIXL
    or its UCX backend is not to be had. Made in any thread, then used by one at a time: it has no locks, and no thread
    that makes progress either (which would take a core for good): see `progress`."""

    def __init__(self, memory: SharedMemory | None = None) -> None:
        api, self._errors = _load()
        self.name = secrets.token_hex(NAME_BYTES // 2)
        """Different for each agent, of NAME_BYTES characters."""
        failures: tuple[type[Exception], ...] = (*self._errors, RuntimeError)
        self._peers: Counter[str] = Counter()
        self._abandoned: list[Staging] = []
        try:
            config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent: Any = api.nixl_agent(self.name, config)
            if "UCX" not in self._agent.backends:
                raise ConfigError("transfer.transport: nixl cannot be used: this build of NIXL has no UCX backend")
            self._pool = None if memory is None else self._register(memory.address, memory.size)
            self.metadata: bytes = self._agent.get_agent_metadata()
            """What a peer needs to read from here."""
        except failures as error:
            raise ConfigError(f"transfer.transport: nixl cannot be used: its UCX backend fails ({error})") from None

    def stage(self, size: int) -> Staging:
        """Memory to read into; PeerLost if it cannot be registered."""
        staging = Staging(size)
        staging.registration = self._guard("registering memory", lambda: self._register(staging.address, size))
        return staging

    def unstage(self, staging: Staging) -> None:
        """Nothing is read into it any more, unless a read into it was abandoned: then it lives as long as the agent."""
        if staging not in self._abandoned:
            with suppress(*self._errors):
                self._agent.deregister_memory(staging.registration)

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Make another agent known, once more (a peer may have several links). PeerLost if its metadata are wrong."""
        if not self._peers[name]:
            known = self._guard("learning of the peer", lambda: self._agent.add_remote_agent(metadata))
            if (known.decode() if isinstance(known, bytes) else known) != name:
                raise PeerLost("the peer's metadata are another agent's")
        self._peers[name] += 1

    def remove_peer(self, name: str) -> None:
        """Undo one `add_peer`; the last one forgets the peer, and disconnects."""
        self._peers[name] -= 1
        if not self._peers[name]:
            del self._peers[name]
            with suppress(*self._errors):  # it may have gone before
                self._agent.remove_remote_agent(name)

    def read(self, peer: str, places: Sequence[tuple[int, int]], into: int) -> Any:
        """Begin to read ``places`` (address and size each) of the peer's memory, one after the other to address
        ``into``; a handle for `done`. PeerLost if that cannot be begun."""
        local, remote, end = [], [], into
        for address, size in places:
            local.append((end, size, 0))
            remote.append((address, size, 0))
            end += size

        def begin() -> Any:
            agent = self._agent
            descriptors = (agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "DRAM"))
            handle = agent.initialize_xfer("READ", *descriptors, peer)
            agent.transfer(handle)  # a failure shows in the handle's state
            return handle

        return self._guard("reading", begin)

    def done(self, handle: Any) -> bool:
        """Whether a read has ended, whose handle is then released; PeerLost if it failed. Makes progress."""
        state = self._guard("reading", lambda: self._agent.check_xfer_state(handle))
        if state == "PROC":
            return False
        if state != "DONE":
            raise PeerLost("reading the peer's memory failed")
        self._guard("reading", lambda: self._agent.release_xfer_handle(handle))
        return True

    def abandon(self, handle: Any, staging: Staging) -> None:
        """Give up a read. UCX cannot take one back, whatever NIXL says when it is released: ``staging`` may be written
        until the agent ends, and lives as long."""
        self._abandoned.append(staging)
        with suppress(*self._errors):  # then it goes with the agent
            self._agent.release_xfer_handle(handle)

    def progress(self) -> None:
        """Do a bit of what peers need done here, where no hardware does it; PeerLost if that fails."""
        self._guard("serving reads", self._agent.get_new_notifs)

    def close(self) -> None:
        """Forget all peers, deregister all memory, end the backend."""
        for name in list(self._peers):
            self._peers[name] = 1
            self.remove_peer(name)
        if self._pool is not None:
            with suppress(*self._errors):
                self._agent.deregister_memory(self._pool)
        self._agent = None
        self._abandoned.clear()  # only now does nothing write there any more

    def _register(self, address: int, size: int) -> Any:
        return self._agent.register_memory([(address, size, 0, "")], "DRAM")

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
