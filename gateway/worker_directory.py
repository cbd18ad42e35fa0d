"""Registers workers by their heartbeats: connects to them, decides which roles and KV links they should have, and
removes lost and retired ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any

from contract.control import BEATS, Beat, BeatAnswer, WorkerHandle
from contract.message import encode
from pdserve.core.chance import SYSTEM
from pdserve.core.errors import PdserveError
from pdserve.core.handoff import KVPeer
from pdserve.core.worker import Role, WorkerInfo
from router.registered_worker import RegisteredWorker
from router.registry import WorkerRegistry

log = logging.getLogger(__name__)

Connect = Callable[[WorkerInfo, str], Awaitable[WorkerHandle]]
"""Opens the control connection to a worker, for the gateway of an epoch."""


class WorkerDirectory:
    """Keeps the router's registry up to date, with the workers of ``service``. Failures are retried with the next
    heartbeat, and logged once."""

    def __init__(
        self, registry: WorkerRegistry, connect: Connect, service: str = "", chance: random.Random = SYSTEM
    ) -> None:
        self._registry = registry
        self._service = service
        self._gateway_epoch = chance.randbytes(16).hex()
        self._connect = connect
        self._joining: dict[str, Beat] = {}  # the last heartbeats of workers being connected, by worker id
        self._logged: dict[tuple[str, ...], str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._members: Mapping[str, Role] = {}
        self._version = 0

    def expect(self, members: Mapping[str, Role], version: int) -> bool:
        """Set the service's members and the roles that they should have, unless a later ``version`` of them is known.
        Workers with another role get the new one by the answer to their next heartbeat, which is requested. Others than
        members get no more requests: a worker may leave while this gateway is restarted. Returns whether the members
        are set."""
        if version < self._version:
            return False
        self._members, self._version = dict(members), version
        self._registry.set_members(members)
        for worker in self._registry.workers:
            if not worker.lost and members.get(worker.worker_id, worker.role) is not worker.role:
                worker.handle.request_heartbeat()
        return True

    async def wait_roles(self, worker_ids: Collection[str], timeout_s: float) -> list[str]:
        """Wait until these workers have the roles that they should have, and the links that follow from them. Returns
        those that do not after ``timeout_s``."""
        await self._wait(lambda: not self._without_roles(worker_ids), timeout_s)
        return self._without_roles(worker_ids)

    def _without_roles(self, worker_ids: Collection[str]) -> list[str]:
        """Those of the workers that have not their role; all of them as long as any links are missing."""
        if self._without_links():
            return list(worker_ids)
        workers = {worker_id: self._registry.get(worker_id) for worker_id in worker_ids}
        return [
            worker_id
            for worker_id, worker in workers.items()
            if worker is None or worker.lost or worker.role is not self._members.get(worker_id)
        ]

    async def serve(self, requests: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Serve one worker's stream: each heartbeat registers the worker, or renews its registration, and is answered
        with the role and the links that the worker should have. PdserveError if a message is unreadable."""
        async for data in requests:
            yield encode(self._answer(BEATS.decode(data)))

    def _answer(self, beat: Beat) -> BeatAnswer:
        info = beat.info
        # A worker of an earlier service at this address, or of a misconfigured one, may serve another model.
        is_ours = info.service == self._service
        if not is_ours:
            log.warning("worker %s belongs to another service and is told to end", info.worker_id)
        if not (is_ours and self._heard(beat)):
            return BeatAnswer(self._gateway_epoch, superseded=True)
        return BeatAnswer(
            self._gateway_epoch,
            superseded=False,
            peers=self._decode_peers() if info.role is Role.PREFILL else [],
            blocks_after=self._registry.blocks_after(info.worker_id),
            role=self._members.get(info.worker_id),
            version=self._version,
        )

    def _decode_peers(self) -> list[KVPeer]:
        """The workers that a prefill worker should have KV links to: all live decode workers."""
        live = (worker for worker in self._registry.workers if not worker.lost)
        return [worker.info.peer for worker in live if worker.role is Role.DECODE]

    def _heard(self, beat: Beat) -> bool:
        """Take a heartbeat; the first one of an incarnation registers it. False if the worker is superseded and has to
        end."""
        info = beat.info
        if self._registry.is_superseded(info.life):
            return False
        known = self._registry.get(info.worker_id)
        role = None if known is None else known.role
        if self._registry.heartbeat(info.worker_id, beat.load, info, beat.links, beat.blocks):
            if role is not info.role:
                log.info("worker %s is a %s worker now", info.worker_id, info.role)
                self._request_heartbeats()
            self._log_failures(info.worker_id)
            return True
        joining = self._joining.get(info.worker_id)
        self._joining[info.worker_id] = beat
        if joining is None or joining.info.epoch != info.epoch:
            self._spawn(self._join(info))
        return True

    async def retire(self, worker_ids: Collection[str], drain_s: float) -> None:
        """Send these workers no more requests. Returns when they have finished those of all gateways, at the latest
        after ``drain_s``."""
        leaving = [worker for worker_id in worker_ids if (worker := self._registry.get(worker_id)) is not None]
        beats = {worker: worker.heartbeat_s for worker in leaving}

        def is_done(worker: RegisteredWorker) -> bool:
            if worker.lost:
                return True
            if worker.outstanding_requests or worker.hand_offs:
                beats[worker] = worker.heartbeat_s
            # Tokens arrive before the last blocks are released, so wait for a heartbeat that reports no blocks in use.
            load = worker.load
            is_idle = load.free_blocks >= worker.info.num_blocks and not load.others_requests
            return worker.heartbeat_s > beats[worker] and is_idle

        for worker in leaving:
            self._registry.retire(worker.worker_id)
        await self._wait(lambda: all([is_done(worker) for worker in leaving]), drain_s)

    async def _wait(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        """Return when ``is_done`` after a change of the workers, or after ``timeout_s``."""
        changed = asyncio.Event()
        unsubscribe = self._registry.subscribe(changed.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while not is_done():
                        changed.clear()
                        await changed.wait()
        finally:
            unsubscribe()

    async def dismiss(self, worker_ids: Collection[str]) -> None:
        """Remove these workers, which end by the answer to their next heartbeat. Remaining requests continue on other
        workers."""
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
            handle = await self._connect(info, self._gateway_epoch)
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
        for worker in self._without_links():
            worker.handle.request_heartbeat()

    def _without_links(self) -> list[RegisteredWorker]:
        """The prefill workers that have reported neither a link to a live decode worker nor why there is none."""
        wanted = {(peer.worker_id, peer.epoch) for peer in self._decode_peers()}
        return [
            worker
            for worker in self._registry.workers
            if worker.role is Role.PREFILL
            and not worker.lost
            and not all(key in worker.linked or key in worker.failed for key in wanted)
        ]

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
