"""Runs a `Gateway` with connections to real workers on a thread and event loop of its own, in a Ray actor or a
process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from checkpoints.source import resolve_model
from gateway.gateway import Gateway
from gateway.load_meter import GatewayLoad
from gateway.scaling_report import ScalingReport
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import LaunchError
from pdserve.core.worker import Role
from pdserve.pb import inference_pb2 as pb
from runtime.plane_tls import plane_tls
from runtime.process import freeze_heap
from runtime.secret import ServiceSecret
from worker.client import WorkerClient

log = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 5.0

T = TypeVar("T")


class GatewayThread:
    """A gateway of the service with this ``secret``, on a thread of this process. ``cache_key``, ``restarted``: see
    `Gateway`. ModelError if the model cannot be read, ConfigError if a file for TLS or tokens cannot be used. Methods
    raise LaunchError if the gateway does not answer."""

    def __init__(
        self,
        config: PdserveConfig,
        registry_address: str,
        version: str,
        secret: ServiceSecret,
        service: str = "",
        cache_key: bytes | None = None,
        restarted: bool = False,
    ) -> None:
        tls = plane_tls(config.cluster)
        model = resolve_model(config.model.path, log.info)
        self._gateway = Gateway(
            config,
            model_name=model.name,
            model_folder=model.folder,
            context_length=model.shape.max_position_embeddings,
            checkpoint_dtype=model.shape.dtype,
            connect=partial(WorkerClient.connect, secret=secret, tls=tls),
            secret=secret,
            tls=tls,
            registry_address=registry_address,
            version=version,
            service=service,
            cache_key=cache_key,
            restarted=restarted,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gateway", daemon=True)

    def start(self) -> None:
        """Start the thread. Returns when both servers listen; LaunchError if a port is in use."""
        self._thread.start()
        self._on_loop(self._gateway.start(), START_TIMEOUT_S)
        freeze_heap()

    def wait_serving(self, timeout_s: float) -> None:
        """See `Gateway.wait_serving`."""
        self._on_loop(self._gateway.wait_serving(timeout_s), timeout_s + 5.0)

    def expect(
        self,
        members: Mapping[str, Role],
        notes: Sequence[str] = (),
        version: int = 0,
        scaling: ScalingReport | None = None,
    ) -> None:
        """See `Gateway.expect`."""
        self._loop.call_soon_threadsafe(self._gateway.expect, members, notes, version, scaling)

    def load(self) -> GatewayLoad:
        """See `Gateway.load`."""
        return self._ask(self._gateway.load)

    def wait_roles(self, worker_ids: Collection[str], timeout_s: float) -> list[str]:
        """See `Gateway.wait_roles`."""
        return self._on_loop(self._gateway.wait_roles(worker_ids, timeout_s), timeout_s + ANSWER_TIMEOUT_S)

    def retire(self, worker_ids: Collection[str], drain_s: float) -> None:
        """See `Gateway.retire`."""
        self._on_loop(self._gateway.retire(worker_ids, drain_s), drain_s + 5.0)

    def dismiss(self, worker_ids: Collection[str]) -> None:
        """See `Gateway.dismiss`."""
        self._on_loop(self._gateway.dismiss(worker_ids), ANSWER_TIMEOUT_S)

    def drain(self) -> int:
        """See `Gateway.drain`."""
        return self._ask(self._gateway.drain)

    def status(self) -> pb.GetStatusResponse:
        """See `Gateway.status`."""
        return self._ask(self._gateway.status)

    def stop(self, grace_s: float = 1.0) -> None:
        """See `Gateway.stop`."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(LaunchError):
            self._on_loop(self._gateway.stop(grace_s), grace_s + 5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    def _ask(self, question: Callable[[], T]) -> T:
        """The answer of the gateway, which is asked on its thread."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(lambda: future.set_result(question()))
        try:
            return future.result(ANSWER_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            raise LaunchError(f"the gateway did not answer within {ANSWER_TIMEOUT_S:.0f} s") from None

    def _on_loop(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise LaunchError(f"the gateway did not answer within {timeout_s:.0f} s") from None
