"""Registers workers by their heartbeats: connects to them, decides which KV links they should have, and removes lost
and retired ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any

from pdserve.core.errors import PdserveError
from pdserve.core.handoff import KVPeer
from pdserve.core.worker import Role, WorkerInfo
from router.handles import WorkerHandle
from router.registered_worker import RegisteredWorker
from router.registry import WorkerRegistry
from worker.messages import Beat

log = logging.getLogger(__name__)

Connect = Callable[[WorkerInfo], Awaitable[WorkerHandle]]
"""Opens the control connection to a worker."""


class WorkerDirectory:
    """Keeps the router's registry up to date. Failures are retried with the next heartbeat, and logged once."""

    def __init__(self, registry: WorkerRegistry, connect: Connect) -> None:
        self._registry = registry
        self._connect = connect
        self._joining: dict[str, Beat] = {}  # the last heartbeats of workers being connected, by worker id
        self._logged: dict[tuple[str, ...], str] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def heard(self, beat: Beat) -> bool:
        """Take a heartbeat; the first one of an incarnation registers it. False if the worker is superseded and has to
        end."""
        info = beat.info
        if self._registry.is_superseded(info.life):
            return False
        if self._registry.heartbeat(info.worker_id, beat.load, info, beat.links):
            self._log_failures(info.worker_id)
            return True
        joining = self._joining.get(info.worker_id)
        self._joining[info.worker_id] = beat
        if joining is None or joining.info.epoch != info.epoch:
            self._spawn(self._join(info))
        return True

    def wanted_links(self, role: Role) -> tuple[KVPeer, ...]:
        """The workers that a worker of ``role`` should have KV links to: all live decode workers for a prefill
        worker."""
        if role is not Role.PREFILL:
            return ()
        live = (worker for worker in self._registry.workers if not worker.lost)
        return tuple(worker.info.peer for worker in live if worker.role is Role.DECODE)

    async def retire(self, worker_ids: Collection[str], drain_s: float) -> None:
        """Send these workers no more requests, and remove them when they have finished, at the latest after
        ``drain_s``. Remaining requests continue on other workers."""
        leaving = [worker for worker_id in worker_ids if (worker := self._registry.get(worker_id)) is not None]
        beats = {worker: worker.heartbeat_s for worker in leaving}
        changed = asyncio.Event()

        def is_done(worker: RegisteredWorker) -> bool:
            if worker.lost:
                return True
            if worker.outstanding_requests:
                beats[worker] = worker.heartbeat_s
            # Tokens arrive before the last blocks are released, so wait for a heartbeat that reports no blocks in use.
            return worker.heartbeat_s > beats[worker] and worker.load.free_blocks >= worker.info.num_blocks

        unsubscribe = self._registry.subscribe(changed.set)
        try:
            for worker in leaving:
                self._registry.retire(worker.worker_id)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    while not all([is_done(worker) for worker in leaving]):
                        changed.clear()
                        await changed.wait()
        finally:
            unsubscribe()
        for worker_id in worker_ids:
            if (dismissed := self._registry.dismiss(worker_id)) is not None:
                log.info("worker %s has left", worker_id)
                await dismissed.handle.aclose()

    def expire(self) -> None:
        """Mark workers without recent heartbeats as lost, and close their connections, which fails their requests."""
        for worker in self._registry.expire():
            log.warning("worker %s is lost: %s", worker.worker_id, worker.lost)
            self._spawn(worker.handle.aclose())

    async def close(self) -> None:
        """Cancel all tasks and close all connections."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self._registry.workers:
            self._registry.lost(worker.worker_id, "the gateway stops")
            await worker.handle.aclose()

    async def _join(self, info: WorkerInfo) -> None:
        try:
            handle = await self._connect(info)
        except PdserveError as error:
            self._log_once((info.worker_id, info.epoch), f"worker {info.worker_id}: cannot connect: {error}")
            return
        finally:
            latest = self._joining.get(info.worker_id)
            if latest is not None and latest.info.epoch == info.epoch:
                del self._joining[info.worker_id]
            else:
                latest = None
        # Meanwhile another process may have taken the name, or the worker may have been retired.
        if latest is None or self._registry.is_superseded(info.life):
            await handle.aclose()
            return
        replaced = self._registry.get(info.worker_id)
        self._spawn(self._watch_connection(self._registry.add(handle, latest.load, latest.links)))
        log.info("worker %s has registered: %s on %s", info.worker_id, info.device, info.node)
        self._log_failures(info.worker_id)
        self._request_heartbeats()
        if replaced is not None:
            await replaced.handle.aclose()

    async def _watch_connection(self, worker: RegisteredWorker) -> None:
        await worker.handle.wait_closed()
        if self._registry.get(worker.worker_id) is worker and not worker.lost:
            log.warning("worker %s is lost: its control connection broke", worker.worker_id)
            self._registry.lost(worker.worker_id)
            await worker.handle.aclose()

    def _request_heartbeats(self) -> None:
        """Request a heartbeat from every prefill worker that lacks links to live decode workers. The answer names
        them."""
        wanted = {(peer.worker_id, peer.epoch) for peer in self.wanted_links(Role.PREFILL)}
        for worker in self._registry.workers:
            known = worker.linked.keys() | worker.failed.keys()
            if worker.role is Role.PREFILL and not worker.lost and not wanted <= known:
                worker.handle.beat_now()

    def _log_failures(self, worker_id: str) -> None:
        """Log the workers that this worker cannot be paired with, each once."""
        if (worker := self._registry.get(worker_id)) is None:
            return
        for peer_id, _ in worker.linked:
            self._logged.pop((worker_id, peer_id), None)
        for (peer_id, _), error in worker.failed.items():
            self._log_once((worker_id, peer_id), f"workers {worker_id} and {peer_id} cannot be paired: {error}")

    def _log_once(self, key: tuple[str, ...], message: str) -> None:
        if self._logged.get(key) != message:
            self._logged[key] = message
            log.warning("%s (tried again with every heartbeat)", message)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
