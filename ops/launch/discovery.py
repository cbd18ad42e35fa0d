"""Decisions made before Ray is imported: its environment variables, and the address to join."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import psutil

from ops.launch.leftovers import is_private_ray
from pdserve.core.errors import LaunchError


def prepare_environment(address: str) -> None:
    """Set the environment variables that Ray and gRPC read when they are imported, for a service on the Ray at
    ``address``. Variables that are set already are kept. LaunchError if other users may read or change the token of a
    Ray that is joined."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # a late call must not start a Ray of its own
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # every fork is followed by exec; gRPC warns otherwise
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # the new behaviour, without a warning
    if address != "local":
        _use_token()


def _use_token() -> None:
    """Have this process use the user's token, if there is one. `ray start` does so by itself."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        return
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:  # Ray says so itself, if it needs the file
        return
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if mode & 0o077 and os.environ["RAY_AUTH_MODE"] == "token":
        raise LaunchError(
            f"other users of this host can read or change Ray's token {path} (mode {mode:o}), and with it run programs "
            f"as the users that Ray runs as; chmod 600 {path}"
        )


ADDRESS_VARIABLE = "RAY_ADDRESS"
CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""The address that `ray start` started or joined last."""

_GCS = re.compile(r"--gcs-address=(\S+)")
_SESSION = re.compile(r"--session[-_]dir=(\S+)")


def find_ray() -> str:
    """Address (``host:port``) of the Ray that `cluster.address: auto` joins: RAY_ADDRESS, or the only Ray on this host.
    Rays that services started for themselves are ignored, as they end with their service. LaunchError if there is none,
    or several without a hint which one to join."""
    if address := os.environ.get(ADDRESS_VARIABLE):
        return address
    running, private = _running()
    try:
        noted = CURRENT_CLUSTER.read_text(encoding="utf-8").strip()
    except OSError:
        noted = ""
    if noted in running:
        return noted
    if len(running) == 1:
        return running.pop()
    if running:
        raise LaunchError(
            f"cluster.address: auto: several Rays run on this host ({', '.join(sorted(running))}); name one of them "
            f"with --address, or in {ADDRESS_VARIABLE}"
        )
    others = f" ({private} private Ray(s) of other services run here, which are not joined)" if private else ""
    raise LaunchError(
        f"cluster.address: auto: no Ray to join runs on this host{others}; start one with `ray start --head`, or let "
        "the service start its own with --address local"
    )


def _running() -> tuple[set[str], int]:
    """The addresses of the Rays that this host is a node of, and the number of private ones besides."""
    joinable: set[str] = set()
    private: set[str] = set()
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] != "raylet":
            continue
        arguments = " ".join(process.info["cmdline"] or ())
        address, session = _GCS.search(arguments), _SESSION.search(arguments)
        if address is not None:
            ours = session is not None and is_private_ray(session[1])
            (private if ours else joinable).add(address[1])
    return joinable, len(private)
