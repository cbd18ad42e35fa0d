"""Registers the servers that a configuration names as workers, as long as they answer, and looks at their load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

import httpx2

from checkpoints.source import ModelSource
from external_engines.server import Server, client_of
from pdserve.core.clock import Clock
from pdserve.core.errors import PdserveError
from pdserve.core.worker import Links, Role
from router.registry import WorkerRegistry

log = logging.getLogger(__name__)


class EngineDirectory:
    """The servers at ``urls``, which serve the model ``source`` in ``dtype`` (auto: the checkpoint's). They are asked
    every ``pause_s`` seconds. Prefill servers are linked to those decode servers that can fetch their KV."""

    def __init__(
        self,
        registry: WorkerRegistry,
        urls: Mapping[Role, Sequence[str]],
        source: ModelSource,
        dtype: str,
        pause_s: float,
        clock: Clock,
    ) -> None:
        self._registry = registry
        self._pause_s = pause_s
        self._servers = [
            Server(f"{role}-{number}", role, client_of(url), source, dtype, clock)
            for role in Role
            for number, url in enumerate(urls.get(role, ()))
        ]
        self._problems: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def expected(self) -> dict[str, Role]:
        """The role of each server, by worker id."""
        return {server.worker_id: server.role for server in self._servers}

    @property
    def notes(self) -> list[str]:
        """The servers that cannot be used, and why."""
        return [f"{worker_id}: {problem}" for worker_id, problem in sorted(self._problems.items())]

    def start(self) -> None:
        """Ask all servers from now on."""
        self._tasks = [asyncio.create_task(self._watch(server)) for server in self._servers]

    async def close(self) -> None:
        """Ask no more, and close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self._servers:
            if server.worker is not None:
                await server.worker.aclose()
            await server.http.aclose()

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
        for prefill in self._servers:  # which may have a link to it now
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
        decode = [other.worker.info for other in self._servers if other.role is Role.DECODE and other.worker]
        return {info.worker_epoch: server.link_to(info.peer) for info in decode}
