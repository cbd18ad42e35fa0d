"""Runs a worker in this process: in a Ray actor, or without Ray (`ops.launch.worker`).

This module does not import Ray; the two `actor.py` files do.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from pdserve.core.errors import LaunchError, PdserveError, to_wire
from pdserve.core.worker import WorkerInfo
from runtime.logs import set_up_logging
from runtime.process import end_with_parent, freeze_heap
from runtime.secret import ServiceSecret
from worker.cores import claim_cores, leave_engine_cores, shared_cores, sharing_note
from worker.mps import MpsMembership, join_mps
from worker.spec import WorkerSpec

log = logging.getLogger(__name__)

END_PAUSE_S = 1.0
SWITCH_INTERVAL_S = 0.0001
"""Python's thread switch interval in this process: the control loop and the KV thread wait so long for each other. With
0.5 ms token 2 came later, at the same CPU time; the default is 5 ms."""


class RunnableWorker(Protocol):
    """A worker that a process can run: `worker.worker.Worker`, or one with another engine. It is made on the event loop
    that it runs on."""

    started: asyncio.Future[WorkerInfo]
    """The worker's info once it can serve, or the error that kept it from starting."""
    notes: list[str]
    """For the user."""

    async def run(self) -> None:
        """Serve until cancelled. Raises the error that ends it."""
        ...


MakeWorker = Callable[[WorkerSpec, ServiceSecret], RunnableWorker]


class WorkerThread:
    """A worker of the service with this ``secret``, as ``make`` makes it, on a thread with an event loop of its own,
    which starts at once.

    ``prepare`` is called first, on that thread. ``on_end`` is called `END_PAUSE_S` after the worker has failed. A
    failure before the worker is ready is raised by `wait_ready` instead, unless ``restarted`` says that `wait_ready`
    will not be called."""

    def __init__(
        self,
        spec: WorkerSpec,
        make: MakeWorker,
        secret: ServiceSecret,
        on_end: Callable[[], None] | None = None,
        *,
        restarted: bool = False,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._spec = spec
        self._prepare = prepare
        self._make = make
        self._secret = secret
        self._on_end = on_end
        self._restarted = restarted
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self.worker: RunnableWorker | None = None
        self._ready: concurrent.futures.Future[WorkerInfo] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._main, name=f"worker-{spec.worker_id}", daemon=True)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self._serve())
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _serve(self) -> None:
        try:
            self._prepare()
        except PdserveError as error:
            log.error("%s cannot start: %s", self._spec.worker_id, error)
            self._ready.set_exception(error)
            if self._restarted and self._on_end is not None:
                self._on_end()
            return
        self.worker = worker = self._make(self._spec, self._secret)
        worker.started.add_done_callback(self._pass_on)
        try:
            await worker.run()
        except Exception as error:
            was_ready = worker.started.done() and worker.started.exception() is None
            log.log(
                logging.ERROR, "%s ends: %s", self._spec.worker_id, error, exc_info=not isinstance(error, PdserveError)
            )
            if (self._restarted or was_ready) and self._on_end is not None:
                await asyncio.sleep(END_PAUSE_S)
                self._on_end()
        finally:
            worker.started.cancel()  # without effect unless it was stopped while starting

    def _pass_on(self, started: asyncio.Future[WorkerInfo]) -> None:
        if started.cancelled():
            self._ready.set_exception(LaunchError(f"worker {self._spec.worker_id} was stopped while starting"))
        elif (error := started.exception()) is not None:
            self._ready.set_exception(error)
        else:
            freeze_heap()
            self._ready.set_result(started.result())

    def wait_ready(self, timeout_s: float) -> WorkerInfo:
        """Wait until the first engine is ready, and return the worker's info. Raises the error that kept it from
        starting, or LaunchError after ``timeout_s``."""
        try:
            return self._ready.result(timeout_s)
        except concurrent.futures.TimeoutError:
            raise LaunchError(f"worker {self._spec.worker_id} was not ready within {timeout_s:.0f} s") from None

    def stop(self, timeout_s: float = 10.0) -> None:
        """End worker and engine. Returns when both have ended, or after ``timeout_s``."""
        if self._thread.is_alive():
            task = self._task
            if task is not None:
                with contextlib.suppress(RuntimeError):  # the loop has just closed
                    self._loop.call_soon_threadsafe(task.cancel)
            self._thread.join(timeout_s)


class WorkerProcess:
    """A worker that owns this process: claims cores for its engine, binds the process to cores without an engine, and
    ends the process when the worker fails. ``restarted`` says that an earlier process of this worker died, and that
    `wait_ready` will not be called. ``notes`` are messages for the user."""

    def __init__(
        self,
        spec: WorkerSpec,
        make: MakeWorker,
        secret: ServiceSecret,
        *,
        restarted: bool = False,
    ) -> None:
        set_up_logging(spec.config.logging)
        spec, self._claim = claim_cores(spec)
        self.notes: list[str] = []
        if note := sharing_note({spec.worker_id: shared_cores(spec)}):
            log.warning("%s", note)
        leave_engine_cores(spec)
        self._spec = spec
        self._mps: MpsMembership | None = None
        self._start_timeout_s = spec.config.cluster.start_limit_s(spec.device)
        self._worker = WorkerThread(
            spec, make, secret, on_end=lambda: os._exit(1), restarted=restarted, prepare=self._join_mps
        )

    def wait_ready(self) -> None:
        """Wait until the engine is ready. Raises the error that kept it from starting."""
        self._worker.wait_ready(self._start_timeout_s)
        if self._worker.worker is not None:
            self.notes += self._worker.worker.notes

    def stop(self) -> None:
        """End the worker, then its engine."""
        self._worker.stop()
        self._claim.close()
        if self._mps is not None:
            self._mps.close()

    def _join_mps(self) -> None:
        """Before CUDA is used in this process or its engine."""
        if self._spec.device.startswith("cuda"):
            cluster = self._spec.config.cluster
            mps = self._mps = join_mps(
                cluster.mps,
                self._spec.device,
                transfer_threads=cluster.mps_transfer_threads,
                memory_mb=cluster.mps_memory_mb,
            )
            # A queue of the device serves several streams in turn, and a send that waits for its peer would hold back
            # others. Clients of MPS have 2 by default, and share a limited number.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8" if mps.is_on else "32")
            self.notes.append(f"MPS is {'on' if mps.is_on else 'off'} on {self._spec.node}: {mps.why}")
            log.info("%s", self.notes[-1])


class ActorBody:
    """The base class of both Ray actors: a `WorkerProcess` whose arguments and answers are plain values. ``secret`` is
    the service's in hexadecimal. ``make`` makes a worker that serves all kinds of requests, so that it can take the
    other role. Ray itself is known to the actors only."""

    ray: Any

    def __init__(self, spec: dict[str, Any], secret: str, make: MakeWorker) -> None:
        node = self.ray.util.get_node_ip_address()
        restarted = self.ray.get_runtime_context().was_current_actor_reconstructed
        parsed = WorkerSpec.from_wire(spec)
        parsed = replace(parsed, host=parsed.host or node, node=node)
        self._process = WorkerProcess(parsed, make, ServiceSecret.from_hex(secret), restarted=restarted)

    def wait_ready(self) -> dict[str, Any]:
        """``{"notes": [messages for the user], "niceness": of this process}`` once the engine is ready, or ``{"error":
        (kind, message)}``."""
        try:
            self._process.wait_ready()
        except PdserveError as error:
            return {"error": to_wire(error)}
        return {"notes": self._process.notes, "niceness": os.getpriority(os.PRIO_PROCESS, 0)}

    def stop(self) -> None:
        """End the worker, then its engine."""
        self._process.stop()


def serve(make: MakeWorker) -> None:
    """Run the worker that ``make`` makes, whose spec, as JSON, is this program's argument, until SIGTERM or the end of
    the parent process. The service's secret comes from the environment. Exits with 1 and one line on stderr if the
    worker cannot start."""
    end_with_parent(signal.SIGTERM)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: stop.set())
    try:
        secret = ServiceSecret.from_environment()
        worker = WorkerProcess(WorkerSpec.from_wire(json.loads(sys.argv[1])), make, secret)
        worker.wait_ready()
    except PdserveError as error:
        sys.exit(f"error: {error}")
    stop.wait()
    worker.stop()
