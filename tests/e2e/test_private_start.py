"""`pdserve up` with its defaults is a good neighbour: what it creates, and where its processes listen, is what
docs/security.md tells, other users and hosts have no access to it, and its processes have the niceness it was given."""

from __future__ import annotations

import fnmatch
import ipaddress
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from ops.launch.leftovers import OPERATOR_FOLDER_PREFIX, RAY_FOLDER_PREFIX, clear_leftovers
from ops.launch.ports import free_port as free_port_for
from ops.launch.state import ServiceState
from pdserve.core.errors import LaunchError
from tests.local_cluster import ROOT, free_port

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

UMASK = 0o022
NICER = 1
SHARED_FOLDERS = (Path("/tmp"), Path("/dev/shm"), Path("/var/tmp"))
OURS = re.compile(r"pdserve|ray|torch|plasma|prometheus")
"""Names of what a service or its libraries leave in a folder that all programs share."""
RAY_CALLS = (
    "/ray.rpc.CoreWorkerService/PushTask",
    "/ray.rpc.NodeManagerService/RequestWorkerLease",
    "/ray.rpc.ObjectManagerService/Push",
    "/ray.rpc.NodeInfoGcsService/CheckAlive",
)
"""A call of each of Ray's services."""


@dataclass(frozen=True)
class Started:
    """A service of a user with a new home. ``new`` are the entries of shared folders that were not there before, and
    ``said`` is what `up` has printed."""

    home: Path
    temporary: Path
    http_port: int
    state: ServiceState
    new: frozenset[Path]
    said: str

    @property
    def family(self) -> list[psutil.Process]:
        """All its processes."""
        supervisor = psutil.Process(self.state.pid)
        return [supervisor, *supervisor.children(recursive=True)]


def entries() -> set[Path]:
    return {path for folder in SHARED_FOLDERS for path in folder.iterdir()}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    home, temporary = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("tmp")
    foreign = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "XDG_"))}
    of_another_ray = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "0" * 64}
    env = {**foreign, **of_another_ray, "HOME": str(home), "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    target, http_port = f"127.0.0.1:{free_port()}", free_port()

    def run(*arguments: str) -> str:
        code = f"import os; os.umask({UMASK}); os.nice({NICER}); from ops.cli.main import main; "
        code += f"main({list(arguments)})"
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, cwd=home, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    before = entries()
    said = run(
        "up",
        "--port",
        target.rpartition(":")[2],
        "--set",
        f"gateway.http_port={http_port}",
        "--oversubscribe",
        "--detach",
    )
    (note,) = (home / ".local" / "state" / "pdserve").glob("*.json")
    state = ServiceState.load(note)
    try:
        yield Started(home, temporary, http_port, state, frozenset(entries() - before), said)
    finally:
        run("down", "--target", target)
        clear_leftovers(state.ray_folder)
        shutil.rmtree(Path(state.socket).parent, ignore_errors=True)


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading of docs/security.md, without its header."""
    text = (ROOT / "docs" / "security.md").read_text().partition(f"\n## {heading}\n")[2]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table, heading
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.group().splitlines()[2:]]


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_files_and_folders(started: Started) -> None:
    told = {path.strip("`"): int(mode, 8) for path, mode in ((row[0].split()[0], row[1]) for row in rows("Files"))}
    own = {Path(started.state.ray_folder), Path(started.state.socket).parent}
    of_others = (RAY_FOLDER_PREFIX, OPERATOR_FOLDER_PREFIX, "pdserve-node-")
    shared = {
        path for path in started.new if path in own or (OURS.search(path.name) and not path.name.startswith(of_others))
    }
    assert own <= shared
    found: set[str] = set()

    def check(path: Path) -> None:
        shown = str(path).replace(str(started.home), "~", 1)
        row = next((each for each in told if fnmatch.fnmatch(shown, each)), None)
        if row is not None:
            found.add(row)
            assert mode_of(path) == told[row], shown
        if path.is_symlink() or mode_of(path) & 0o077 == 0:
            return  # other users get no further
        assert path.is_dir(), f"other users have access to {shown} (mode {mode_of(path):o})"
        for each in path.iterdir():
            check(each)

    for path in (*started.home.iterdir(), *started.temporary.iterdir(), *shared):
        check(path)
    assert found == set(told)
    assert mode_of(Path(started.state.ray_folder, "auth_token")) == 0o600
    private = [*started.home.rglob("pdserve/*"), Path(started.state.ray_folder, "auth_token")]
    assert len(private) >= 4, "a note, a lock and a log"
    assert {mode_of(path) for path in private} == {0o600}, "also where the folder was there before, with another mode"
    assert not (started.home / ".ray").exists()


def test_its_ports_are_known_to_be_its_own(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another start that wants one of them says whose it is."""
    monkeypatch.setenv("XDG_STATE_HOME", str(started.home / ".local" / "state"))
    for key, port in (("gateway.port", started.state.port), ("gateway.http_port", started.http_port)):
        whose = rf"a service of yours \(process {started.state.pid}, ready; see `pdserve list`\) uses port {port}; "
        then = rf"choose another .*, or end it with `pdserve down --target localhost:{started.state.port}`$"
        with pytest.raises(LaunchError, match=rf"^{key}: {whose}{then}"):
            free_port_for("127.0.0.1", port, key)


def name_of(process: psutil.Process) -> str:
    """As in the table."""
    title = " ".join(process.cmdline()).strip()
    return "supervisor" if "ops.launch.supervisor" in title else title if title.startswith("ray::") else process.name()


def test_listening_sockets(started: Started) -> None:
    told = {name for row in rows("Ray") for name in re.findall(r"ray::\w+|gcs_server|raylet|supervisor", row[0])}
    listening: dict[str, list[str]] = {}
    for process in started.family:
        for each in process.net_connections("inet"):
            if each.status in (psutil.CONN_LISTEN, psutil.CONN_NONE):  # UDP sockets have no state
                listening.setdefault(name_of(process), []).append(each.laddr.ip)
    assert set(listening) == told
    for name, addresses in listening.items():
        for text in addresses:
            address = ipaddress.ip_address(text)
            mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
            assert (mapped or address).is_loopback, (name, text)


def test_the_seconds_of_each_step_are_told(started: Started) -> None:
    for step in (
        "  started Ray",
        "  the gateway listens",
        "  prefill-0 is up",
        "  decode-0 is up",
        "  connected",
        "ready: .*",
    ):
        assert re.search(rf"^{step} \(\d+\.\d s\)$", started.said, re.MULTILINE), (step, started.said)


def test_niceness_is_what_the_user_gave(started: Started) -> None:
    expected = os.getpriority(os.PRIO_PROCESS, 0) + NICER
    found = [(name_of(process), process.nice()) for process in started.family]
    assert len(found) > 8
    assert [each for each in found if each[1] != expected] == []


def test_each_of_rays_services_asks_for_the_token(started: Started) -> None:
    """By any of its ports: on others the call is unknown."""
    answers: dict[str, set[str]] = {call: set() for call in RAY_CALLS}
    ports = {
        each.laddr.port
        for process in started.family
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }
    for port in ports:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            for call, codes in answers.items():
                asks: Any = channel.unary_unary(call)
                with pytest.raises(grpc.RpcError) as refused:
                    asks(b"", timeout=10.0)
                codes.add(refused.value.code().name)
    for call, codes in answers.items():
        assert "UNAUTHENTICATED" in codes, call
        assert codes <= {"UNAUTHENTICATED", "UNIMPLEMENTED", "UNAVAILABLE", "INTERNAL", "DEADLINE_EXCEEDED"}, call
