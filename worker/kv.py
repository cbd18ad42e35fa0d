"""The worker's two KV ends on an event loop and thread of their own, so that no bulk copy ever delays control.

All methods are called from the control loop; the ends themselves live on the KV loop. When the engine dies its pool is
gone, and so are these ends: the worker builds new ones, with a new epoch, over the new pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from engine.process.mapped_pool import MappedPool
from kv_transfer.base import KVTransport
from kv_transfer.handoff_over import HandoffOver
from kv_transfer.incoming import ReceivedKV
from kv_transfer.outgoing import SentKV
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from pdserve.core.clock import Clock
from pdserve.core.config import TransferConfig
from pdserve.core.errors import RequestAborted, TransferError, WorkerLost
from pdserve.core.handoff import KVDestination, KVEndpoint, PeerLink

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_TIMEOUT_S = 60.0
"""Above every bound that the ends and their transport have of their own: only a bug gets here."""
JOIN_TIMEOUT_S = 5.0


class KVEnds:
    """A `KVSender` and a `KVReceiver` over one pool and the same transports (best first)."""

    def __init__(
        self,
        pool: MappedPool,
        transports: Sequence[KVTransport],
        config: TransferConfig,
        *,
        worker_id: str,
        epoch: str,
        clock: Clock,
        eos_token_ids: Sequence[int],
        delay_s: float = 0.0,
    ) -> None:
        self._pool = pool
        self._transports = tuple(transports)
        self._closed = False
        self._receiver = KVReceiver(
            pool,
            transports,
            worker_id=worker_id,
            epoch=epoch,
            checksum=config.checksum,
            clock=clock,
            lease_s=config.lease_s,
            delay_s=delay_s,
            eos_token_ids=eos_token_ids,
        )
        self._sender = KVSender(
            pool,
            transports,
            worker_id=worker_id,
            checksum=config.checksum,
            message_bytes=config.message_bytes,
            max_inflight_bytes=config.max_inflight_bytes,
            clock=clock,
            lease_s=config.lease_s,
            connect_timeout_s=config.connect_timeout_s,
            eos_token_ids=eos_token_ids,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"kv-{worker_id}", daemon=True)

    async def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            work.close()
            raise WorkerLost("the engine is gone, and its KV ends with it")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():  # not we were cancelled, but the work on the closing loop
                raise WorkerLost("the engine is gone, and its KV ends with it") from None
            raise

    async def start(self, host: str, port: int = 0) -> tuple[KVEndpoint, ...]:
        """Listen for peers on ``host``, from ``port`` on (0: where the system likes); returns where, for each
        transport."""
        self._thread.start()
        return await self._on_loop(self._receiver.start(host, port))

    async def aclose(self) -> None:
        """End every hand-off, the thread, and the mapping of the pool. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._close_loop()
        finally:
            self._pool.close()

    async def _close_loop(self) -> None:
        if self._thread.is_alive():
            closing = asyncio.run_coroutine_threadsafe(self._close_ends(), self._loop)
            try:
                await asyncio.wait_for(asyncio.wrap_future(closing), CLOSE_TIMEOUT_S)
            except TimeoutError:
                log.error("the KV ends did not close within %.0f s; their thread is stopped", CLOSE_TIMEOUT_S)
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                await asyncio.to_thread(self._thread.join, JOIN_TIMEOUT_S)
        if not self._thread.is_alive():  # one that does not end keeps its loop; it is a daemon
            self._loop.close()

    async def _close_ends(self) -> None:
        await self._sender.aclose()
        await self._receiver.aclose()
        await asyncio.gather(*(transport.aclose() for transport in self._transports))
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    # --- sending -----------------------------------------------------------------------------------------------------

    async def connect(self, worker_id: str, epoch: str, endpoints: Sequence[KVEndpoint]) -> None:
        """Shake hands with a decode worker; ConfigError, LayoutMismatch, TransferTimeout or PeerLost if that fails."""
        await self._on_loop(self._sender.connect(worker_id, epoch, endpoints))

    @property
    def links(self) -> tuple[PeerLink, ...]:
        """To the workers this one has shaken hands with."""
        return self._sender.links()

    @property
    def refused(self) -> Mapping[str, int]:
        """How many messages were refused here, by reason."""
        return self._receiver.refused

    async def begin_send(self, request_id: str, destination: KVDestination, deadline_s: float) -> None:
        """Open a hand-off to ``destination``."""

        async def begin() -> None:
            self._sender.start(request_id, destination, deadline_s)

        await self._on_loop(begin())

    def send_blocks(
        self,
        request_id: str,
        first_slot: int,
        block_ids: Sequence[int],
        layers: range | None = None,
        *,
        last: bool = False,
        trailer: bytes = b"",
    ) -> None:
        """Queue whole blocks (or ``layers`` of them), in order; returns at once. Failures surface in `sent`."""
        blocks = list(block_ids)

        def queue() -> None:
            try:
                self._sender.send_blocks(request_id, first_slot, blocks, layers, last=last, trailer=trailer)
            except HandoffOver:
                return  # given up meanwhile: `sent` has told
            except Exception as error:  # a bug, which must not leave the hand-off open until its deadline
                log.exception("the blocks of %s cannot be sent", request_id)
                why = f"the KV hand-off of {request_id} failed at its sender: {type(error).__name__}: {error}"
                self._sender.fail(request_id, TransferError(why))

        if not self._closed:
            self._loop.call_soon_threadsafe(queue)

    async def sent(self, request_id: str) -> SentKV:
        """Wait until the receiver has confirmed everything; raises the TransferError otherwise."""
        with _gone_is_aborted(request_id):
            return await self._on_loop(self._sender.wait(request_id))

    async def abort_send(self, request_id: str) -> None:
        """Give a hand-off up; the receiver is told."""
        await self._on_loop(self._sender.abort(request_id))

    # --- receiving ---------------------------------------------------------------------------------------------------

    async def expect(
        self, request_id: str, block_ids: Sequence[int], num_skipped: int, deadline_s: float
    ) -> KVDestination:
        """Open a reservation for blocks that the engine has set aside."""

        async def expect() -> KVDestination:
            return self._receiver.expect(request_id, block_ids, num_skipped, deadline_s)

        return await self._on_loop(expect())

    async def received(self, request_id: str) -> ReceivedKV:
        """Wait until every block is verified and in the pool; raises the TransferError otherwise."""
        with _gone_is_aborted(request_id):
            return await self._on_loop(self._receiver.wait(request_id))

    async def abort_receive(self, request_id: str) -> None:
        """Close a reservation; when this returns nothing writes its blocks any more."""
        await self._on_loop(self._receiver.abort(request_id))


@contextlib.contextmanager
def _gone_is_aborted(request_id: str) -> Iterator[None]:
    """RequestAborted for a hand-off that was aborted before this could wait for it."""
    try:
        yield
    except HandoffOver:
        raise RequestAborted(f"the hand-off of {request_id} was given up before anybody waited for it") from None
