"""A Ray of the service's own, in a process of its own: `python -m ops.launch.ray_head --session-dir=FOLDER`.

The process starts Ray's control service (GCS) and raylet, and ends both when its stdin closes, as it does when the
supervisor is killed. As children of the supervisor they would be killed with it, and Ray's agents would go on for a
minute while they try to report that to the dead control service.

Ray's library has no option to leave out its dashboard, autoscaler and log monitor, which nothing here uses. Therefore
`main` starts the node as `ray start` does, by `ray._private.node.Node`, and not by `ray.init`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import resource
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ops.launch.leftovers import RAY_FOLDER_PREFIX, RAY_FOLDERS, clear_leftovers, end_children
from ops.launch.state import private, writable_state
from pdserve.core.errors import LaunchError

OBJECT_STORE_BYTES = 100 * 2**20
"""Small, because KV does not travel through the object store."""

_MAY_JOIN_HOSTS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With 0, this host's address is 127.0.0.1 for Ray's library, on any system, and all its servers listen there alone."""
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.02
_MAX_OPEN_FILES = 65_536
_SESSION_OPTION = "--session-dir="  # by this option `leftovers` finds the process


class RayHead:
    """The supervisor's side of the process. Only this service knows the ``token`` that Ray asks for."""

    def __init__(self) -> None:
        self.folder = Path(RAY_FOLDERS, f"{RAY_FOLDER_PREFIX}{secrets.token_hex(4)}")
        """Chosen before it is created, so that the state file can name it first."""
        self._process: subprocess.Popen[bytes] | None = None
        self.began_s = 0.0
        """The time of `begin`, by `time.monotonic`."""

    def begin(self) -> None:
        """Create the folder and begin to start Ray. Must be called before this process imports Ray, which reads the
        variables that are set here. LaunchError if the folder cannot be written."""
        self.began_s = time.monotonic()
        token = self.folder / "auth_token"
        try:
            # Ray makes its own folders and sockets accessible to all users.
            self.folder.mkdir(mode=0o700)
            with open(token, "x", opener=private) as file:
                file.write(secrets.token_hex(32))
        except OSError as error:
            raise LaunchError(f"cannot create {error.filename}: {error.strerror}") from None
        os.environ[_MAY_JOIN_HOSTS] = "0"
        # Else the first driver waits until Ray has started a worker for each core. They start anyway when asked for.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # of this process; Ray's own default is 15 more
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
        os.environ.pop("RAY_AUTH_TOKEN", None)  # comes before the path
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ops.launch.ray_head", f"{_SESSION_OPTION}{self.folder}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C is for the supervisor
        )

    def wait_started(self, check: Callable[[], None] = lambda: None) -> str:
        """The address of Ray's control service, once Ray is running. LaunchError if it does not start. ``check`` is
        called repeatedly and may raise, which ends the wait."""
        assert self._process is not None, "call begin first"
        reports = self._process.stdout
        assert reports is not None
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not select.select([reports], [], [], _POLL_S)[0]:
            check()
            if time.monotonic() > deadline_s:
                raise LaunchError(f"{_CANNOT_START}: it is not running after {_START_TIMEOUT_S:.0f} s")
        line = reports.readline()
        if not line:
            code = self._process.wait(_STOP_TIMEOUT_S)
            raise LaunchError(f"{_CANNOT_START}: its process ended (exit code {code})")
        report = json.loads(line)
        if "error" in report:
            raise LaunchError(f"{_CANNOT_START}: {report['error']}")
        address: str = report["address"]
        return address

    def stop(self) -> None:
        """End Ray with all its processes, and remove the folder."""
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_TIMEOUT_S)
        clear_leftovers(str(self.folder))


_CANNOT_START = "cannot start a Ray of our own (cluster.address: local)"


def main() -> None:
    """Start Ray, report ``{"address": …}`` or ``{"error": …}`` as a line of JSON on stdout, and wait for the end."""
    folder = sys.argv[1].removeprefix(_SESSION_OPTION)
    # Ray's processes read the token whenever they start. Programs that remove old files from /tmp (systemd-tmpfiles)
    # leave a locked folder as it is.
    fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_SH)
    supervisor, reports = os.dup(0), os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # Ray's processes inherit these
    os.dup2(2, 1)

    def report(**what: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the supervisor is gone
            reports.write(json.dumps(what) + "\n")

    def follow_supervisor() -> None:
        os.read(supervisor, 1)  # it writes nothing, and closes the pipe when it ends
        os.kill(os.getpid(), signal.SIGTERM)  # also ends a start

    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    threading.Thread(target=follow_supervisor, daemon=True).start()
    node = None
    try:
        node = _started(folder)
        report(address=node.address)
        threading.Event().wait()
    except SystemExit:
        pass
    except Exception as error:  # noqa: BLE001 - Ray raises a plain Exception if its processes start too slowly
        report(error=" ".join(str(error).split()) or type(error).__name__)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if node is not None:
            node.kill_all_processes(check_alive=False, allow_graceful=True)
        end_children()
    os._exit(0)  # the interpreter's clean-up takes 0.3 s with Ray, and frees only what the kernel frees anyway


def _started(folder: str) -> Any:
    """Ray's node, whose processes run."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class Head(Node):  # type: ignore[misc]  # it has no types
        """Without a dashboard. Knows at once when the raylet has registered; `Node` looks once a second."""

        def start_api_server(self, **options: Any) -> None:
            pass

        def start_ray_processes(self) -> None:
            super().start_ray_processes()
            (raylet,) = self.all_processes["raylet"]
            while not self.get_gcs_client().get_all_node_info(timeout=_START_TIMEOUT_S):
                if (code := raylet.process.poll()) is not None:
                    raise RuntimeError(f"its raylet ended (exit code {code}){_kept(self)}")
                time.sleep(_POLL_S)

    logging.getLogger("ray").setLevel(logging.ERROR)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, _MAX_OPEN_FILES), most))  # as `ray.init` does
    options = RayParams(
        num_cpus=len(os.sched_getaffinity(0)),
        object_store_memory=OBJECT_STORE_BYTES,
        temp_dir=f"{folder}/ray",
        dashboard_agent_listen_port=0,  # any: two services may run on a host
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
    )
    return Head(options, head=True, shutdown_at_exit=False, ray_init_cluster=True)


def _kept(node: Any) -> str:
    """Copy the raylet's log out of the folder of its Ray, which is removed. Where it is, or nothing if the raylet ended
    before it had a log."""
    try:
        text = Path(node.get_logs_dir_path(), "raylet.out").read_bytes()
    except FileNotFoundError:
        return ""
    with writable_state() as folder:
        log = folder / f"raylet-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        with open(log, "wb", opener=private) as copy:
            copy.write(text)
    return f"; see {log}"


if __name__ == "__main__":
    main()
