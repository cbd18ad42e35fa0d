"""The process that owns a running service: starts it, notes it for `pdserve down`, and takes it down on SIGTERM.

`python -m pdserve.launch.supervisor CONFIG_JSON REPORT_FD LOG` is what `pdserve up --detach` leaves behind. It tells
its progress as JSON lines on ``REPORT_FD``: ``{"stage": …}`` and ``{"note": …}`` any number of times, then
``{"ready": port}`` or ``{"error": [kind, message]}``, and closes it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

import psutil

from core.config import PdserveConfig
from core.errors import PdserveError, to_wire
from pdserve.launch.ray_environment import prepare_environment
from pdserve.launch.state import ServiceState

log = logging.getLogger(__name__)

TEND_EVERY_S = 2.0


def supervise(
    config: PdserveConfig,
    report: Callable[[str], None],
    on_ready: Callable[[int], None],
    log_path: str = "",
    note: Callable[[str], None] = lambda text: None,
) -> None:
    """Run a service until SIGTERM or SIGINT. ``on_ready`` gets the port, ``note`` what users have to know. Raises
    PdserveError if it cannot start, or if the Ray it runs on is gone.

    Must be called on the main thread. A signal during start-up ends that too.
    """
    prepare_environment(config.cluster.address)
    from pdserve.launch.operator import OperatorServer
    from pdserve.launch.service import Service  # brings in Ray

    stop = threading.Event()
    started = False

    def on_signal(signum: int, frame: FrameType | None) -> None:
        if started or stop.is_set():
            stop.set()
            return
        stop.set()
        raise SystemExit(128 + signum)

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    service = Service(config, report, note)
    state: ServiceState | None = None
    operator: OperatorServer | None = None
    try:
        service.start()
        for number in previous:  # Ray puts its own in their place
            signal.signal(number, on_signal)
        started = True
        operator = OperatorServer(service)
        state = ServiceState(
            os.getpid(),
            psutil.Process().create_time(),
            service.port,
            log_path,
            service.ray_folder,
            operator.socket,
            config.cluster.start_timeout_s,
        )
        state.write()
        on_ready(service.port)
        while not stop.wait(TEND_EVERY_S):
            service.tend()
        report("stopping")
    finally:
        started = True  # a second signal must not cut the clean-up short
        if operator is not None:
            operator.stop()
        service.stop()
        if state is not None:
            state.remove()
        for number, handler in previous.items():
            signal.signal(number, handler)


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
        pipe.close()

    try:
        supervise(
            PdserveConfig.parse(json.loads(config_json)),
            lambda stage: tell({"stage": stage}),
            on_ready,
            log_path,
            lambda text: tell({"note": text}),
        )
    except PdserveError as error:
        tell({"error": to_wire(error)})
        sys.exit(1)


if __name__ == "__main__":
    main()
