"""Registers the servers that a configuration names as workers, as long as they answer, and looks at their load."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import httpx2

from checkpoints.source import ModelSource
from external_engines.server import Adapters, Server, client_of
from pdserve.core.clock import Clock
from pdserve.core.errors import PdserveError
from pdserve.core.worker import Links, Role
from router.registry import WorkerRegistry

log = logging.getLogger(__name__)


class ServerAt(NamedTuple):
    """Where the server of a worker is, and its role."""

    role: Role
    url: str


def named(urls: Mapping[Role, Sequence[str]], present: Mapping[str, ServerAt]) -> dict[str, ServerAt]:
    """The servers at ``urls``, by worker id. Those that are ``present`` keep their names, and no other one gets the
    name of one that leaves."""
    names = {server: worker_id for worker_id, server in present.items()}
    servers: dict[str, ServerAt] = {}
    for role, at in urls.items():
        free = (name for number in itertools.count() if (name := f"{role}-{number}") not in present)
        for server in dict.fromkeys(ServerAt(role, url) for url in at):
            servers[names.get(server) or next(free)] = server
    return servers


class EngineDirectory:
    """Servers of the kinds ``adapters`` that serve the model ``source`` in ``dtype`` (auto: the checkpoint's). They are
    asked every ``pause_s`` seconds. Prefill servers are linked to those decode servers that can fetch their KV."""

    def __init__(
        self,
        registry: WorkerRegistry,
        source: ModelSource,
        dtype: str,
        pause_s: float,
        clock: Clock,
        adapters: Adapters,
    ) -> None:
        self._adapters = adapters
        self._registry = registry
        self._source, self._dtype = source, dtype
        self._pause_s = pause_s
        self._clock = clock
        self._servers: dict[str, Server] = {}
        self._problems: dict[str, str] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def notes(self) -> list[str]:
        """The servers that cannot be used, and why."""
        return [f"{worker_id}: {problem}" for worker_id, problem in sorted(self._problems.items())]

    def set(self, servers: Mapping[str, ServerAt]) -> None:
        """Ask these servers from now on, by worker id, and no others. Requests of those that leave continue
        elsewhere."""
        for worker_id in self._servers.keys() - servers.keys():
            watch, server = self._watches.pop(worker_id), self._servers.pop(worker_id)
            watch.cancel()
            self._problems.pop(worker_id, None)
            self._registry.dismiss(worker_id)  # now, because another server may get its name
            leaving = asyncio.create_task(_close(watch, server))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
        for worker_id in servers.keys() - self._servers.keys():
            role, url = servers[worker_id]
            server = Server(worker_id, role, client_of(url), self._source, self._dtype, self._clock, self._adapters)
            self._servers[worker_id] = server
            self._watches[worker_id] = asyncio.create_task(self._watch(server))

    async def close(self) -> None:
        """Ask no more, and close all connections."""
        self.set({})
        await asyncio.gather(*self._leaving, return_exceptions=True)

    async def _watch(self, server: Server) -> None:
        while True:
            problem = ""
            try:
                await self._look(server)
            except httpx2.HTTPError as error:
                problem = f"does not answer ({str(error) or type(error).__name__})"
            except PdserveError as error:
                problem = str(error)
            except Exception as error:
                log.exception("unexpected error while looking at %s", server.worker_id)
                problem = f"{type(error).__name__}: {error}"
            if problem != self._problems.get(server.worker_id, ""):
                log.warning("%s at %s: %s", server.worker_id, server.http.base_url, problem or "answers again")
            self._problems.pop(server.worker_id, None)
            if problem:
                self._problems[server.worker_id] = problem
            await asyncio.sleep(self._pause_s)

    async def _look(self, server: Server) -> None:
        """Ask a server how it is. Registers it if it is new, has restarted, or was lost."""
        if not await server.look() or self._beat(server):
            return
        before, worker = server.worker, server.begin()
        self._registry.add(worker, server.load, self._links(server))
        log.info("%s at %s is %s", server.worker_id, server.http.base_url, dict(worker.info.engine))
        if before is not None:
            await before.aclose()
        for prefill in self._servers.values():  # which may have a link to it now
            self._beat(prefill)

    def _beat(self, server: Server) -> bool:
        """Give the registry the server's last load and its links. False if it is not registered as it is now."""
        if server.worker is None or not server.is_begun:
            return False
        return self._registry.heartbeat(server.worker_id, server.load, server.worker.info, self._links(server))

    def _links(self, server: Server) -> Links:
        """The links of a prefill server, as what it says of itself allows them."""
        if server.role is not Role.PREFILL:
            return {}
        decode = [other.worker.info for other in self._servers.values() if other.role is Role.DECODE and other.worker]
        return {info.worker_epoch: server.link_to(info.peer) for info in decode}


async def _close(watch: asyncio.Task[None], server: Server) -> None:
    await asyncio.wait([watch])
    if server.worker is not None:
        await server.worker.aclose()
    await server.http.aclose()
