"""Turns heartbeats into connected workers: makes handles, shakes hands for every pair, closes what is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any

from pdserve.core.errors import PdserveError
from pdserve.core.worker import Role, WorkerInfo, WorkerLoad
from router.handles import WorkerHandle
from router.registered_worker import RegisteredWorker
from router.registry import WorkerRegistry

log = logging.getLogger(__name__)

Connect = Callable[[WorkerInfo], Awaitable[WorkerHandle]]
"""Opens the control connection to a worker."""


class WorkerDirectory:
    """Keeps the router's registry true. Whatever fails is tried again with the next heartbeat, and logged once."""

    def __init__(self, registry: WorkerRegistry, connect: Connect) -> None:
        self._registry = registry
        self._connect = connect
        self._joining: dict[str, str] = {}  # worker id → the epoch being connected
        self._shaking: set[tuple[RegisteredWorker, RegisteredWorker]] = set()
        self._told: dict[tuple[str, ...], str] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def heard(self, info: WorkerInfo, load: WorkerLoad) -> bool:
        """A heartbeat: the first of an incarnation registers it. False: it has been superseded and has to end."""
        if self._registry.is_superseded(info.life):
            return False
        if self._registry.heartbeat(info.worker_id, load, info):
            self._introduce(info.worker_id)
        elif self._joining.get(info.worker_id) != info.epoch:
            self._joining[info.worker_id] = info.epoch
            self._spawn(self._join(info, load))
        return True

    async def retire(self, worker_ids: Collection[str], drain_s: float) -> None:
        """Let these workers finish what they have, for ``drain_s`` at most, then part with them: requests that are
        still there go on elsewhere."""
        leaving = [worker for worker_id in worker_ids if (worker := self._registry.get(worker_id)) is not None]
        beats = {worker: worker.heartbeat_s for worker in leaving}
        changed = asyncio.Event()

        def is_done(worker: RegisteredWorker) -> bool:
            if worker.lost:
                return True
            if worker.outstanding_requests:
                beats[worker] = worker.heartbeat_s
            # Its tokens are out before its last blocks have arrived: the next heartbeat tells whether it holds any.
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
        """Drop those whose heartbeats stopped: closing the connection fails what still runs there."""
        for worker in self._registry.expire():
            log.warning("worker %s is lost: %s", worker.worker_id, worker.lost)
            self._spawn(worker.handle.aclose())

    async def close(self) -> None:
        """Stop what is under way and close all connections."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self._registry.workers:
            self._registry.lost(worker.worker_id, "the gateway stops")
            await worker.handle.aclose()

    async def _join(self, info: WorkerInfo, load: WorkerLoad) -> None:
        try:
            handle = await self._connect(info)
        except PdserveError as error:
            self._tell_once((info.worker_id, info.epoch), f"worker {info.worker_id}: cannot connect: {error}")
            return
        finally:
            superseded = self._joining.get(info.worker_id) != info.epoch
            if not superseded:
                del self._joining[info.worker_id]
        # Another process may have taken its name while the connection was made, or it was retired.
        if superseded or self._registry.is_superseded(info.life):
            await handle.aclose()
            return
        replaced = self._registry.get(info.worker_id)
        self._spawn(self._watch_connection(self._registry.add(handle, load)))
        log.info("worker %s is there: %s on %s", info.worker_id, info.device, info.node)
        if replaced is not None:
            await replaced.handle.aclose()
        self._introduce(info.worker_id)

    async def _watch_connection(self, worker: RegisteredWorker) -> None:
        await worker.handle.wait_closed()
        if self._are_current(worker):
            log.warning("worker %s is lost: its control connection broke", worker.worker_id)
            self._registry.lost(worker.worker_id)
            await worker.handle.aclose()

    def _introduce(self, worker_id: str) -> None:
        """Have every pair with this worker in it that is not connected shake hands."""
        live = [worker for worker in self._registry.workers if not worker.lost]
        for prefill in (worker for worker in live if worker.role is Role.PREFILL):
            for decode in (worker for worker in live if worker.role is Role.DECODE):
                pair = (prefill, decode)
                if worker_id not in (prefill.worker_id, decode.worker_id) or pair in self._shaking:
                    continue
                if not prefill.is_connected_to(decode.worker_id):
                    self._shaking.add(pair)
                    self._spawn(self._shake(prefill, decode))

    async def _shake(self, prefill: RegisteredWorker, decode: RegisteredWorker) -> None:
        names = (prefill.worker_id, decode.worker_id)
        try:
            await prefill.handle.connect_peer(decode.info.peer)
        except PdserveError as error:
            if self._are_current(prefill, decode):
                self._registry.not_connected(*names, error)
                self._tell_once(names, f"workers {names[0]} and {names[1]} cannot be paired: {error}")
        else:
            if self._are_current(prefill, decode):
                self._registry.connected(*names)
                self._told.pop(names, None)
        finally:
            self._shaking.discard((prefill, decode))

    def _are_current(self, *workers: RegisteredWorker) -> bool:
        return all(self._registry.get(worker.worker_id) is worker and not worker.lost for worker in workers)

    def _tell_once(self, key: tuple[str, ...], message: str) -> None:
        if self._told.get(key) != message:
            self._told[key] = message
            log.warning("%s (tried again with every heartbeat)", message)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
