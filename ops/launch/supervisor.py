"""The process that owns a running service: notes it for `pdserve down`, starts it, and takes it down when told to.

`python -m ops.launch.supervisor CONFIG_JSON REPORT_FD LOG` is what `pdserve up --detach` leaves behind. It tells
its progress as JSON lines on ``REPORT_FD``: ``{"stage": …}`` and ``{"note": …}`` any number of times, then
``{"ready": port}`` or ``{"error": [kind, message]}``, and closes it.
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
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import psutil

from ops.launch.discovery import prepare_environment
from ops.launch.shutdown import Shutdown
from ops.launch.state import ServiceState, clear_dead_services
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import LaunchError, PdserveError, to_wire
from pdserve.core.worker import Role

if TYPE_CHECKING:
    from ops.launch.service import Service

log = logging.getLogger(__name__)

TEND_EVERY_S = 2.0
TEND_TIMEOUT_S = 5.0
LOOK_EVERY_S = 0.1
"""How often the main thread looks whether a signal has come."""
MAX_RESTARTS = 3
"""A Ray of the service's own that is lost more often than this is not started again, unless it ran for
`RESTART_FORGET_S` in between."""
RESTART_FORGET_S = 600.0
RESTART_VARIABLE = "PDSERVE_RESTART"


class Interrupted(LaunchError):
    """A signal came while the service started. ``signum`` says which."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum


@dataclass(frozen=True, slots=True)
class Restart:
    """What a supervisor tells itself over an exec. A process that has lost its Ray cannot start another one: Ray's
    library may end it at any call. So it replaces itself, and keeps its id and its port.

    ``port`` is the one to take again (None: this is the first start), ``count`` how often Ray was lost of late,
    ``last_s`` when, in seconds since 1970.
    """

    port: int | None = None
    count: int = 0
    last_s: float = 0.0

    @classmethod
    def told(cls) -> Restart:
        """What this process was told, once."""
        value = os.environ.pop(RESTART_VARIABLE, "")
        return cls(**json.loads(value)) if value else cls()

    def after(self, lost: LaunchError, service: Service) -> Restart | None:
        """How to go on after Ray was lost; None: not at all, because the Ray was joined, or is lost too often."""
        now_s = time.time()
        count = self.count + 1 if now_s - self.last_s < RESTART_FORGET_S else 1
        return Restart(service.port, count, now_s) if service.owns_ray and count <= MAX_RESTARTS else None

    def execute(self) -> None:
        """Begin the program anew, with the arguments it was started with. Does not return."""
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
    know. Raises PdserveError if it cannot start (Interrupted if a signal was why), or if the Ray it runs on is gone.

    Must be called on the main thread. A signal during start-up ends that too; afterwards the first one lets requests
    in progress go on for `shutdown.DRAIN_S`, the second does not.
    """
    prepare_environment(config.cluster.address)
    shutdown, restart = Shutdown(report), Restart.told()
    if restart.port is not None:
        config = config.model_copy(update={"gateway": config.gateway.model_copy(update={"port": restart.port})})
    with shutdown.caught() as renew_handlers:
        for port, left in clear_dead_services().items():
            report(f"removed what a killed service on port {port} had left{f': {left}' if left else ''}")
        from ops.launch.service import Service, StartCancelled  # brings in Ray

        service = Service(config, report, note)
        service.prepare()
        try:
            _Supervisor(service, shutdown, restart, renew_handlers, log_path).run(on_ready)
        except StartCancelled as cancelled:
            if not shutdown.signum:
                raise
            raise Interrupted(str(cancelled), shutdown.signum) from None


class _Supervisor:
    """One run of a service: notes it, starts it, watches its Ray, drains it, and clears up."""

    def __init__(
        self,
        service: Service,
        shutdown: Shutdown,
        restart: Restart,
        renew_handlers: Callable[[], None],
        log_path: str,
    ) -> None:
        from ops.launch.operator import OperatorServer, new_socket

        self._service, self._shutdown, self._restart = service, shutdown, restart
        self._renew_handlers = renew_handlers
        self._noting = threading.Lock()
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
            self._operator = OperatorServer(service, shutdown, self._state.socket, self._note_members, log_path)
        except BaseException:
            self._state.clear()
            raise

    def run(self, on_ready: Callable[[int], None]) -> None:
        again: Restart | None = None
        try:
            self._start()
            self._note(phase="ready", ray_address=self._service.ray_address)
            on_ready(self._service.port)
            if (lost := self._serve()) is not None:
                again = self._restart.after(lost, self._service)
                # Told before anything else is done: what follows may end this process (see `RaySession.stop`).
                self._shutdown.tell(f"{lost}; {'starting it again' if again else 'ending the service'}")
                self._note(phase="restarting" if again else "stopping")
                if again is None:
                    raise lost
            else:
                self._drain()
                self._shutdown.tell("stopping")
        finally:
            try:
                self._service.stop()
                if self._shutdown.is_requested():
                    again = None
                if again is None:
                    self._state.remove()  # not if the service could not be stopped: `down` finds it then
            finally:
                self._shutdown.end()
                self._operator.stop()
        if again is not None:
            again.execute()

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
        from ops.launch.service import RayLost

        lost: list[LaunchError] = []
        ending = threading.Event()

        def tend() -> None:
            while not ending.is_set():
                try:
                    self._service.tend()
                    self._note_members()
                except RayLost as error:
                    lost.append(error)
                    return
                except Exception:  # Ray may fail at any of these calls; if it is lost, the next round tells
                    log.exception("unexpected error while the service was looked after")
                ending.wait(TEND_EVERY_S)

        tending = threading.Thread(target=tend, name="tend", daemon=True)
        tending.start()
        while not lost and not self._shutdown.is_requested():
            time.sleep(LOOK_EVERY_S)
        ending.set()
        tending.join(TEND_TIMEOUT_S)
        return None if self._shutdown.is_requested() else lost[0]

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

    def _note_members(self) -> None:
        counts = self._service.counts
        self._note(workers=f"{counts[Role.PREFILL]}P{counts[Role.DECODE]}D", processes=self._service.processes())

    def _note(self, **changes: object) -> None:
        with self._noting:
            try:
                self._state = self._state.update(**changes)
            except LaunchError as error:
                log.warning("%s", error)


def main() -> None:
    """Entry point of the detached supervisor."""
    config_json, report_fd, log_path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    pipe = None
    if RESTART_VARIABLE not in os.environ:  # else the one who listened was told that the service is ready long ago
        os.set_inheritable(report_fd, False)
        pipe = os.fdopen(report_fd, "w", buffering=1, encoding="utf-8")

    def tell(message: dict[str, object]) -> None:
        log.info("%s", message)
        if pipe is not None and not pipe.closed:
            try:
                pipe.write(json.dumps(message) + "\n")
            except BrokenPipeError:
                log.warning("nobody listens to the start-up report any more")

    def on_ready(port: int) -> None:
        tell({"ready": port})
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # what could not be written
                pipe.close()

    try:
        supervise(
            PdserveConfig.parse(json.loads(config_json)),
            lambda stage: tell({"stage": stage}),
            on_ready,
            log_path,
            lambda text: tell({"note": text}),
        )
    except Interrupted as error:
        tell({"error": to_wire(LaunchError(str(error)))})
        sys.exit(128 + error.signum)
    except PdserveError as error:
        tell({"error": to_wire(error)})
        sys.exit(1)


if __name__ == "__main__":
    main()
