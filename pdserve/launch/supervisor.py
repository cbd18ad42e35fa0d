"""The process that owns a running service: notes it for `pdserve down`, starts it, and takes it down when told to.

`python -m pdserve.launch.supervisor CONFIG_JSON REPORT_FD LOG` is what `pdserve up --detach` leaves behind. It tells
its progress as JSON lines on ``REPORT_FD``: ``{"stage": …}`` any number of times, then ``{"ready": port}`` or
``{"error": [kind, message]}``, and closes it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil

from core.config import PdserveConfig
from core.errors import LaunchError, PdserveError, to_wire
from core.worker import Role
from pdserve.launch.ray_environment import prepare_environment
from pdserve.launch.shutdown import Shutdown
from pdserve.launch.state import ServiceState, clear_dead_services

if TYPE_CHECKING:
    from pdserve.launch.service import Service

log = logging.getLogger(__name__)

TEND_EVERY_S = 2.0
TEND_TIMEOUT_S = 5.0
LOOK_EVERY_S = 0.1
"""How often the main thread looks whether a signal has come."""
MAX_RESTARTS = 3
"""A Ray of the service's own that is lost more often than this is not started again, unless it ran for
`RESTART_FORGET_S` in between."""
RESTART_FORGET_S = 600.0


class Interrupted(LaunchError):
    """A signal came while the service started. ``signum`` says which."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum


def supervise(
    config: PdserveConfig,
    report: Callable[[str], None],
    on_ready: Callable[[int], None],
    log_path: str = "",
) -> None:
    """Run a service until SIGTERM, SIGINT or `pdserve down`. ``on_ready`` gets the port. Raises PdserveError if it
    cannot start (Interrupted if a signal was why), or if the Ray it runs on is gone.

    Must be called on the main thread. A signal during start-up ends that too; afterwards the first one lets requests
    in progress go on for `shutdown.DRAIN_S`, the second does not.
    """
    prepare_environment(config.cluster.address)
    shutdown = Shutdown(report)
    with shutdown.caught() as renew_handlers:
        for port, left in clear_dead_services().items():
            report(f"removed what a killed service on port {port} had left{f': {left}' if left else ''}")
        from pdserve.launch.service import Service, StartCancelled  # brings in Ray

        service = Service(config, report)
        service.prepare()
        try:
            _Supervisor(service, shutdown, renew_handlers, log_path).run(on_ready)
        except StartCancelled as cancelled:
            if not shutdown.signum:
                raise
            raise Interrupted(str(cancelled), shutdown.signum) from None


class _Supervisor:
    def __init__(self, service: Service, shutdown: Shutdown, renew_handlers: Callable[[], None], log_path: str) -> None:
        from pdserve.launch.operator import OperatorServer, new_socket

        self._service, self._shutdown, self._renew_handlers = service, shutdown, renew_handlers
        config = service.config
        host = config.gateway.host
        self._state = ServiceState(
            pid=os.getpid(),
            create_time=psutil.Process().create_time(),
            port=service.port,
            log=log_path,
            ray_folder=service.ray_folder,
            socket=new_socket(),
            start_timeout_s=config.cluster.start_timeout_s,
            target=f"{'localhost' if host in ('', '0.0.0.0', '::') else host}:{service.port}",
            model=service.model,
            workers=f"{config.cluster.prefill}P{config.cluster.decode}D",
            phase="starting",
            ray_address="" if service.owns_ray else config.cluster.address,
            since_s=time.time(),
        )
        self._state.claim()  # before anything is begun, so that nothing can be left that is not noted
        try:
            self._operator = OperatorServer(service, shutdown, self._state.socket, log_path)
        except BaseException:
            self._state.clear()
            raise

    def run(self, on_ready: Callable[[int], None]) -> None:
        restarts, lost_s = 0, -RESTART_FORGET_S
        try:
            while True:
                self._start()
                self._note(phase="ready", ray_address=self._service.ray_address)
                on_ready(self._service.port)
                on_ready = _log_ready  # the one who started it has been told
                if (lost := self._serve()) is None:
                    break
                now_s = time.monotonic()
                restarts = restarts + 1 if now_s - lost_s < RESTART_FORGET_S else 1
                lost_s = now_s
                if not self._service.owns_ray or restarts > MAX_RESTARTS:
                    raise lost
                self._begin_again(lost)
            self._drain()
            self._shutdown.tell("stopping")
        finally:
            try:
                self._service.stop()
                self._state.remove()  # not if the service could not be stopped: `down` finds it then
            finally:
                self._shutdown.end()
                self._operator.stop()

    def _start(self) -> None:
        """`Service.start` on a thread of its own: this one is free for signals, and no signal interrupts Ray."""
        failed: list[BaseException] = []

        def start() -> None:
            try:
                self._service.start()
            except BaseException as error:  # noqa: BLE001 - raised below
                failed.append(error)

        starting = threading.Thread(target=start, name="start")
        if self._shutdown.is_requested():
            self._service.cancel()
        starting.start()
        while starting.is_alive():
            starting.join(LOOK_EVERY_S)
            self._renew_handlers()
            if self._shutdown.is_requested():
                self._service.cancel()
        if failed:
            raise failed[0]

    def _serve(self) -> LaunchError | None:
        """Until the service is to end; what of Ray is lost otherwise. Ray's calls may hang, so they have a thread of
        their own: this one is free for signals."""
        from pdserve.launch.service import RayLost

        lost: list[LaunchError] = []
        ending = threading.Event()

        def tend() -> None:
            while not ending.is_set():
                try:
                    self._service.tend()
                except RayLost as error:
                    lost.append(error)
                    return
                counts = self._service.counts
                self._note(
                    workers=f"{counts[Role.PREFILL]}P{counts[Role.DECODE]}D", processes=self._service.processes()
                )
                ending.wait(TEND_EVERY_S)

        tending = threading.Thread(target=tend, name="tend", daemon=True)
        tending.start()
        while not lost and not self._shutdown.is_requested():
            time.sleep(LOOK_EVERY_S)
        ending.set()
        tending.join(TEND_TIMEOUT_S)
        return None if self._shutdown.is_requested() else lost[0]

    def _begin_again(self, lost: LaunchError) -> None:
        """Take down what is left of a Ray of our own, and have it started anew on the same port."""
        self._shutdown.tell(f"{lost}; starting it again")
        log.error("%s; starting it again", lost)
        self._service.stop(0.0)
        self._service.prepare()
        self._note(phase="restarting", ray_folder=self._service.ray_folder, ray_address="")

    def _drain(self) -> None:
        self._note(phase="stopping")
        told = 0
        while (running := self._service.drain()) and self._shutdown.time_left_s > 0:
            if running != told:
                again = " (once more ends them now)" if self._shutdown.signum else ""
                self._shutdown.tell(f"waiting for requests in progress: {running}{again}")
                told = running
            time.sleep(LOOK_EVERY_S)
        if running:
            self._shutdown.tell(f"ending requests in progress: {running}")

    def _note(self, **changes: object) -> None:
        try:
            self._state = self._state.update(**changes)
        except LaunchError as error:
            log.warning("%s", error)


def _log_ready(port: int) -> None:
    log.info("ready again on port %d", port)


def main() -> None:
    """Entry point of the detached supervisor."""
    config_json, report_fd, log_path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    os.set_inheritable(report_fd, False)
    pipe = os.fdopen(report_fd, "w", buffering=1, encoding="utf-8")

    def tell(message: dict[str, object]) -> None:
        log.info("%s", message)
        if not pipe.closed:
            try:
                pipe.write(json.dumps(message) + "\n")
            except BrokenPipeError:
                log.warning("nobody listens to the start-up report any more")

    def on_ready(port: int) -> None:
        tell({"ready": port})
        with contextlib.suppress(BrokenPipeError):  # what could not be written
            pipe.close()

    try:
        supervise(
            PdserveConfig.parse(json.loads(config_json)), lambda stage: tell({"stage": stage}), on_ready, log_path
        )
    except Interrupted as error:
        tell({"error": to_wire(LaunchError(str(error)))})
        sys.exit(128 + error.signum)
    except PdserveError as error:
        tell({"error": to_wire(error)})
        sys.exit(1)


if __name__ == "__main__":
    main()
