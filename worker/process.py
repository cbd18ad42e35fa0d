"""A worker as the content of a process: of a Ray actor, or of one started by hand (`python -m prefill_worker`).

Ray itself is known to the two `actor.py` files alone: it adds placement and supervision to what is here.
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
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pdserve.core.errors import LaunchError, PdserveError, to_wire
from pdserve.core.process import end_with_parent
from pdserve.core.worker import WorkerInfo
from worker import messages
from worker.cores import claim_cores, leave_engine_cores, sharing_notes
from worker.request_table import Role
from worker.spec import WorkerSpec
from worker.worker import Worker

log = logging.getLogger(__name__)

END_PAUSE_S = 1.0
SWITCH_INTERVAL_S = 0.0005
"""Python's thread switch interval here: control must not wait 5 ms for a thread that copies KV."""


class WorkerThread:
    """A worker on a thread with an event loop of its own. The thread starts at once; `wait_ready` tells how that went.
    ``on_end`` is called when the worker fails later, or (``restarted``: `wait_ready` is not called) at its first start,
    a pause later."""

    def __init__(
        self,
        spec: WorkerSpec,
        roles: Mapping[type[messages.Work], Role],
        on_end: Callable[[], None] | None = None,
        *,
        restarted: bool = False,
    ) -> None:
        self._spec = spec
        self._roles = roles
        self._on_end = on_end
        self._restarted = restarted
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
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
        worker = Worker(self._spec, self._roles)
        worker.started.add_done_callback(self._pass_on)
        try:
            await worker.run()
        except Exception as error:
            nobody_asks = self._restarted or (worker.started.done() and worker.started.exception() is None)
            log.log(
                logging.ERROR, "%s ends: %s", self._spec.worker_id, error, exc_info=not isinstance(error, PdserveError)
            )
            if nobody_asks and self._on_end is not None:
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
            self._ready.set_result(started.result())

    def wait_ready(self, timeout_s: float) -> WorkerInfo:
        """The worker's info once its first engine is ready; what kept it from starting otherwise. LaunchError after
        ``timeout_s``."""
        try:
            return self._ready.result(timeout_s)
        except concurrent.futures.TimeoutError:
            raise LaunchError(f"worker {self._spec.worker_id} was not ready within {timeout_s:.0f} s") from None

    def stop(self, timeout_s: float = 10.0) -> None:
        """End worker and engine; returns when both are gone or after ``timeout_s``."""
        if self._thread.is_alive():
            task = self._task
            if task is not None:
                with contextlib.suppress(RuntimeError):  # the loop may close at this very moment
                    self._loop.call_soon_threadsafe(task.cancel)
            self._thread.join(timeout_s)


class WorkerProcess:
    """A worker whose process this is: it claims cores for its engine, keeps off those of all engines, and ends the
    process when it fails. ``restarted``: its process died before and was started again, perhaps on another host, and
    `wait_ready` is not called. ``notes`` is what its user has to know."""

    def __init__(self, spec: WorkerSpec, roles: Mapping[type[messages.Work], Role], *, restarted: bool = False) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        spec, self._claim = claim_cores(spec)
        self.notes = sharing_notes(spec, self._claim.others)
        for note in self.notes:
            log.warning("%s", note)
        leave_engine_cores(spec)
        self._start_timeout_s = spec.config.cluster.start_timeout_s
        self._worker = WorkerThread(spec, roles, on_end=lambda: os._exit(1), restarted=restarted)

    def wait_ready(self) -> None:
        """Return once the engine is ready; raises what kept it from starting."""
        self._worker.wait_ready(self._start_timeout_s)

    def stop(self) -> None:
        """End worker and engine, in order."""
        self._worker.stop()
        self._claim.close()


class ActorBody:
    """What both Ray actors are made of: a `WorkerProcess`, and answers that survive a trip through Ray. ``node`` is the
    address that Ray knows this host by."""

    def __init__(
        self, spec: dict[str, Any], roles: Mapping[type[messages.Work], Role], *, node: str, restarted: bool
    ) -> None:
        parsed = WorkerSpec.from_wire(spec)
        self._process = WorkerProcess(replace(parsed, host=parsed.host or node, node=node), roles, restarted=restarted)

    def wait_ready(self) -> dict[str, Any]:
        """``{"notes": [what its user has to know]}`` once the engine is ready, or ``{"error": (kind, message)}``."""
        try:
            self._process.wait_ready()
        except PdserveError as error:
            return {"error": to_wire(error)}
        return {"notes": self._process.notes}

    def stop(self) -> None:
        """End worker and engine, in order."""
        self._process.stop()


def serve(roles: Mapping[type[messages.Work], Role]) -> None:
    """Run the worker whose spec, as JSON, is this program's argument, until SIGTERM or the end of the parent process.
    Exits with 1 and one line on stderr if the worker cannot start."""
    end_with_parent(signal.SIGTERM)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: stop.set())
    worker = WorkerProcess(WorkerSpec.from_wire(json.loads(sys.argv[1])), roles)
    try:
        worker.wait_ready()
    except PdserveError as error:
        sys.exit(f"error: {error}")
    stop.wait()
    worker.stop()
