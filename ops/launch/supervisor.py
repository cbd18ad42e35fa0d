"""The process that owns a running service: writes its state file, starts it, and takes it down on request.

`python -m ops.launch.supervisor CONFIG_JSON REPORT_FD LOG` is the process behind `pdserve up --detach`. It reports
progress as JSON lines on ``REPORT_FD``: ``{"stage": …}`` and ``{"note": …}`` any number of times, then ``{"ready":
port}`` or ``{"error": [kind, message]}``, after which it closes the descriptor."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import psutil

from ops.launch.discovery import prepare_environment
from ops.launch.leftovers import end_children
from ops.launch.preparation import Preparation, prepare
from ops.launch.shutdown import ServiceShutdown, StartCancelled
from ops.launch.state import ServiceState, clear_dead_services, new_socket, target_here
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import LaunchError, PdserveError, to_wire
from pdserve.core.worker import Role
from runtime.logs import set_up_logging

if TYPE_CHECKING:
    from ops.launch.service import Service

log = logging.getLogger(__name__)

TEND_EVERY_S = 2.0
TEND_TIMEOUT_S = 5.0
LOOK_EVERY_S = 0.1
"""How often the main thread checks for signals."""
MAX_RESTARTS = 3
"""Limit: restarts of the service's own Ray within 10 minutes of each other. Then: the service ends.

The time is `RESTART_FORGET_S`."""
RESTART_FORGET_S = 600.0
RESTART_VARIABLE = "PDSERVE_RESTART"


@dataclass(frozen=True, slots=True)
class Restart:
    """Passed from a supervisor to its successor over exec. A process that has lost its Ray cannot start another one,
    because Ray's library may end the process at any call. The supervisor therefore replaces itself, and keeps its
    process id and port."""

    port: int | None = None  # to reuse; None: this is the first start
    count: int = 0  # recent losses of Ray
    last_s: float = 0.0  # the last one, in seconds since 1970

    @classmethod
    def from_environment(cls) -> Restart:
        """The restart that this process continues, which is then removed from the environment."""
        value = os.environ.pop(RESTART_VARIABLE, "")
        return cls(**json.loads(value)) if value else cls()

    def after(self, service: Service) -> Restart | None:
        """The restart to make after Ray was lost. None if there is none to make: the Ray was joined, or is lost too
        often."""
        now_s = time.time()
        count = self.count + 1 if now_s - self.last_s < RESTART_FORGET_S else 1
        return Restart(service.port, count, now_s) if service.session.owned and count <= MAX_RESTARTS else None

    def execute(self) -> None:
        """Replace this process with a new one that has the same arguments. Does not return."""
        os.environ[RESTART_VARIABLE] = json.dumps(asdict(self))
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def supervise(
    config: PdserveConfig,
    report: Callable[[str], None],
    on_ready: Callable[[int], None],
    log_path: str = "",
    note: Callable[[str], None] = lambda text: None,
) -> None:
    """Run a service until SIGTERM, SIGINT or `pdserve down`. ``on_ready`` gets the port, ``note`` what users have to
    know about the service. Raises PdserveError if it cannot start (StartCancelled if it was
    asked to end meanwhile) or its Ray is lost.

    Must be called on the main thread. A signal during start-up ends the start. Later, the first signal lets requests in
    progress go on for `shutdown.DRAIN_S`; the second ends them."""
    prepare_environment(config.cluster.address)
    shutdown, restart = ServiceShutdown(report), Restart.from_environment()
    if restart.port is not None:
        config = config.model_copy(update={"gateway": config.gateway.model_copy(update={"port": restart.port})})
    with shutdown.caught():
        for port, left in clear_dead_services().items():
            report(f"removed the remains of a killed service on port {port}{f': {left}' if left else ''}")

        def check() -> None:
            if shutdown.is_requested():
                raise StartCancelled("the service was asked to stop before it started")

        try:
            prepared = prepare(config, report, check)
            for text in prepared.notes:
                note(text)
            _Supervisor(prepared, shutdown, restart, log_path, report, note).run(on_ready)
        except StartCancelled as cancelled:
            cancelled.signum = shutdown.signum
            raise


class _Supervisor:
    """One run of a service."""

    def __init__(
        self,
        prepared: Preparation,
        shutdown: ServiceShutdown,
        restart: Restart,
        log_path: str,
        report: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        self._shutdown, self._restart = shutdown, restart
        self._noting = threading.Lock()
        config, head, self._forecaster = prepared.config, prepared.head, prepared.forecaster
        self._state = ServiceState(
            pid=os.getpid(),
            create_time=psutil.Process().create_time(),
            port=config.gateway.port,
            log=log_path,
            ray_folder="" if head is None else str(head.folder),
            socket=new_socket(),
            start_timeout_s=config.cluster.start_limit_s(config.cluster.device),
            target=target_here(config.gateway, config.gateway.port),
            model=config.model.name or prepared.source.name,
            workers=f"{config.cluster.num_prefill}P{config.cluster.num_decode}D",
            phase="starting",
            ray_address="" if head is not None else config.cluster.address,
            since_s=time.time(),
            gateways=config.gateway.replicas,
            servers=config.cluster.servers,
        )
        self._state.claim()  # before anything is started, so that all remains can be found
        try:
            if head is not None:
                report("starting Ray")
                head.begin()
            # They import Ray and the gateway, which takes as long as Ray's start.
            from ops.launch.operator import OperatorServer
            from ops.launch.service import Service

            self._service = Service(prepared, report, note)
            self._operator = OperatorServer(self._service, shutdown, self._state.socket, self._note_members, log_path)
        except BaseException:
            self._state.clear()
            raise

    def run(self, on_ready: Callable[[int], None]) -> None:
        again: Restart | None = None
        try:
            self._start()
            self._note(phase="ready", ray_address=self._service.session.address)
            on_ready(self._service.port)
            if (lost := self._serve()) is not None:
                again = self._restart.after(self._service)
                # Reported first, because the next steps may end this process (see `RaySession.stop`).
                self._shutdown.report(f"{lost}; {'starting it again' if again else 'ending the service'}")
                self._note(phase="restarting" if again else "stopping")
                if again is None:
                    raise lost
            else:
                self._drain()
                self._shutdown.report("stopping")
        finally:
            try:
                self._service.stop()
                end_children()
                if self._shutdown.is_requested():
                    again = None
                if again is None:
                    self._state.remove()  # kept if the service could not be stopped, for `down`
            finally:
                self._shutdown.end()
                self._operator.stop()
        if again is not None:
            again.execute()

    def _start(self) -> None:
        """Run `Service.start` on a thread, so that this thread can handle signals and no signal interrupts Ray."""
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
            self._shutdown.renew_handlers()
            if self._shutdown.is_requested():
                self._service.cancel()
        if failed:
            raise failed[0]

    def _serve(self) -> LaunchError | None:
        """Wait for the shutdown, or return the error if Ray is lost. Calls into Ray may hang, until Ray's library ends
        this process after a minute. So they run on a thread of their own, and another one checks that Ray is there."""
        lost: list[LaunchError] = []
        ending = threading.Event()

        def watch() -> None:
            while not ending.is_set():
                try:
                    self._service.check_ray()
                except LaunchError as error:
                    lost.append(error)
                    return
                ending.wait(TEND_EVERY_S)

        def tend() -> None:
            while not ending.is_set():
                try:
                    self._service.tend()
                    self._note_members()
                except Exception:  # if Ray is lost, `watch` detects it
                    log.exception("unexpected error while tending the service")
                ending.wait(TEND_EVERY_S)

        tending = threading.Thread(target=tend, name="tend", daemon=True)
        tending.start()
        threading.Thread(target=watch, name="watch", daemon=True).start()
        if (config := self._service.config.scaling).controller != "off":
            from router.scaling_loop import ScalingLoop

            scaling = ScalingLoop(self._service, config, time.monotonic, time.time, self._forecaster)

            def scale() -> None:
                scaling.begin()
                while not ending.wait(config.interval_s):
                    try:
                        scaling.look()
                    except Exception:  # if Ray is lost, `watch` detects it
                        log.exception("unexpected error of the scaling controller")

            threading.Thread(target=scale, name="scaling", daemon=True).start()
        while not lost and not self._shutdown.is_requested():
            time.sleep(LOOK_EVERY_S)
        ending.set()
        tending.join(TEND_TIMEOUT_S)
        return None if self._shutdown.is_requested() else lost[0]

    def _drain(self) -> None:
        self._note(phase="stopping")
        reported = 0
        while (running := self._service.drain()) and self._shutdown.time_left_s > 0:
            if running != reported:
                again = " (a second signal ends them now)" if self._shutdown.signum else ""
                self._shutdown.report(f"waiting for requests in progress: {running}{again}")
                reported = running
            time.sleep(LOOK_EVERY_S)
        if running:
            self._shutdown.report(f"ending requests in progress: {running}")

    def _note_members(self) -> None:
        counts = self._service.counts
        self._note(
            workers=f"{counts[Role.PREFILL]}P{counts[Role.DECODE]}D",
            processes=self._service.processes(),
            servers=self._service.servers,
        )

    def _note(self, **changes: object) -> None:
        with self._noting:
            try:
                self._state = self._state.update(**changes)
            except LaunchError as error:
                log.warning("%s", error)


def main() -> None:
    """Entry point of the detached supervisor."""
    config_json, report_fd, log_path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    config = PdserveConfig.parse(json.loads(config_json))
    set_up_logging(config.logging)
    pipe = None
    if RESTART_VARIABLE not in os.environ:  # else the parent got its answer before the restart
        os.set_inheritable(report_fd, False)
        pipe = os.fdopen(report_fd, "w", buffering=1, encoding="utf-8")

    def send(message: dict[str, object]) -> None:
        log.info("%s", message)
        if pipe is not None and not pipe.closed:
            try:
                pipe.write(json.dumps(message) + "\n")
            except BrokenPipeError:
                log.warning("the start-up report is no longer read")

    def on_ready(port: int) -> None:
        send({"ready": port})
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # unwritten output
                pipe.close()

    code = 0
    try:
        supervise(
            config,
            lambda stage: send({"stage": stage}),
            on_ready,
            log_path,
            lambda text: send({"note": text}),
        )
    except PdserveError as error:
        send({"error": to_wire(error)})
        code = 128 + error.signum if isinstance(error, StartCancelled) and error.signum else 1
    logging.shutdown()
    os._exit(code)  # the interpreter's clean-up takes 0.9 s with Ray, and frees only what the kernel frees anyway


if __name__ == "__main__":
    main()
