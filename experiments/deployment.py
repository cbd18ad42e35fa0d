"""The service under measurement: started with the settings that a cell needs, or the one that ``--target`` names."""

from __future__ import annotations

import asyncio
import atexit
import functools
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar

from ops.launch.detach import start_detached, stop_detached
from ops.launch.state import target_here
from pdserve.client.async_client import AsyncClient
from pdserve.client.status import ServiceStatus
from pdserve.client.target import AccessOptions, Target
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import LaunchError, NotReady


class Service(TypedDict, total=False):
    """Where a service is, or how it is started."""

    target: str | None
    """The running service to measure (host:port). Without it services are started and ended again."""
    access: AccessOptions | None
    """How to reach services; not kept in folders."""
    config: Path | None
    settings: Mapping[str, Any] | None
    """Dotted settings of every service that is started, on top of the file ``config``."""


_DRAIN_S = 5.0
_LINK_TIMEOUT_S = 30.0
_NAMED_PAIRS = 4


class Deployment:
    """One service at a time, as a context manager, which ends the service that it started. Given a ``target``, it never
    starts or ends one. ``config`` and ``settings`` (dotted keys) apply to every service it starts, ``access`` is how to
    reach one."""

    def __init__(
        self,
        target: str | None = None,
        *,
        access: AccessOptions | None = None,
        config: Path | None = None,
        settings: Mapping[str, Any] | None = None,
        report: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self.attached = target is not None
        self._access = AccessOptions() if access is None else access
        self._target = None if target is None else self.reached(target)
        self._config, self._base, self._report = config, dict(settings or {}), report
        self._port: int | None = None
        self._settings: dict[str, Any] | None = None

    def reached(self, target: str) -> Target:
        """The service at ``target``, with the access that was given."""
        return Target.of(target, **self._access)

    def provide(self, settings: Mapping[str, Any]) -> Target:
        """The target of a service with these settings. Takes down the current one if it has others. Blocks until the
        new one is ready; raises the error that kept it from starting."""
        if self._target is not None and self.attached:
            return self._target
        if self._target is None or self._settings != dict(settings):
            self.stop()
            chosen = {**self._base, **settings}
            self._report(", ".join(f"{key}={value}" for key, value in chosen.items()) or "defaults")
            self._target, self._settings = self._start(chosen), dict(settings)
        return self._target

    def configuration(self, settings: Mapping[str, Any]) -> PdserveConfig:
        """That of a service with these settings. ConfigError names a wrong key or value."""
        return PdserveConfig.load(self._config, {**self._base, **settings})

    def status(self) -> ServiceStatus | None:
        """The status of the current service; None if there is none. Waits until every prefill worker has a link to
        every decode worker, so that the links' ceilings are known; NotReady names pairs that get none."""
        return None if self._target is None else run_in_loop(_linked_status(self._target))

    def notes(self) -> tuple[str, ...]:
        """The notes of the current service (`ServiceStatus.notes`). NotReady if it does not answer any more."""
        return () if self._target is None else run_in_loop(_status(self._target)).notes

    def stop(self) -> None:
        """End the service that was started, if there is one; if it has already ended, report that. After an
        interruption it can be called again."""
        if not self.attached:
            try:
                self._end()
            except LaunchError as error:
                self._report(str(error))
            self._target = self._settings = None

    def _start(self, settings: Mapping[str, Any]) -> Target:
        """Start a service with these settings on top of the configuration; its target once it is ready."""
        config = PdserveConfig.load(self._config, {"gateway.port": 0, **settings})
        self._port = start_detached(config)
        return self.reached(target_here(config.gateway, self._port))

    def _end(self) -> None:
        """End what `_start` started, if anything."""
        if self._port is not None:
            try:
                stop_detached(self._port, _DRAIN_S)
            except LaunchError:
                self._port = None
                raise
            self._port = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        except KeyboardInterrupt:
            self.stop()
            raise


async def _status(target: Target) -> ServiceStatus:
    async with AsyncClient(target) as client:
        return await client.status()


async def _linked_status(target: Target) -> ServiceStatus:
    deadline_s = time.monotonic() + _LINK_TIMEOUT_S
    async with AsyncClient(target) as client:
        while missing := _missing_links(status := await client.status()):
            if time.monotonic() > deadline_s:
                raise NotReady(
                    f"the service at {target} has no link between {', '.join(missing[:_NAMED_PAIRS])}"
                    f"{f' and {len(missing) - _NAMED_PAIRS} other pairs' if len(missing) > _NAMED_PAIRS else ''} after "
                    f"{_LINK_TIMEOUT_S:g} s; see `pdserve status` for its workers, and the gateway's log for the reason"
                )
            await asyncio.sleep(0.1)
        return status


def _missing_links(status: ServiceStatus) -> list[str]:
    """The pairs of a prefill and a decode worker of the service that have no link, also of workers that it awaits, but
    not of those that hand no KV over."""
    present = [
        worker
        for worker in status.workers
        if worker.state not in ("lost", "retiring") and (worker.transports or worker.state == "awaited")
    ]
    return [
        f"{prefill.worker_id} and {decode.worker_id}"
        for prefill in present
        for decode in present
        if (prefill.role, decode.role) == ("prefill", "decode")
        and decode.worker_id not in {link.worker_id for link in prefill.links}
    ]


T = TypeVar("T")


def run_in_loop(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, but always in the same event loop: grpc.aio goes on using the first one that it has seen, and
    complains about each call after that was closed."""
    return _runner().run(work)


@functools.cache
def _runner() -> asyncio.Runner:
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    atexit.register(runner.close)
    return runner
