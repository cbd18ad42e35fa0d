"""`pdserve up` is a good neighbour: what it creates, and where its processes listen, is what
docs/security.md tells, other users and hosts have no access to it, and its processes have the niceness it was given."""

from __future__ import annotations

import fnmatch
import ipaddress
import os
import re
import stat
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from ops.launch.leftovers import OPERATOR_FOLDER_PREFIX, RAY_FOLDER_PREFIX
from ops.launch.ports import free_ports as free_ports_for
from pdserve.core.errors import LaunchError
from tests.e2e.conftest import NICER, RunningService
from tests.local_cluster import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

OURS = re.compile(r"pdserve|ray|torch|plasma|prometheus")
"""Names of what a service or its libraries leave in a folder that all programs share."""
RAY_CALLS = (
    "/ray.rpc.CoreWorkerService/PushTask",
    "/ray.rpc.NodeManagerService/RequestWorkerLease",
    "/ray.rpc.ObjectManagerService/Push",
    "/ray.rpc.NodeInfoGcsService/CheckAlive",
)
"""A call of each of Ray's services."""


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading of docs/security.md, without its header."""
    text = (ROOT / "docs" / "security.md").read_text().partition(f"\n## {heading}\n")[2]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table, heading
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.group().splitlines()[2:]]


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_files_and_folders(service: RunningService) -> None:
    told = {path.strip("`"): int(mode, 8) for path, mode in ((row[0].split()[0], row[1]) for row in rows("Files"))}
    own = {Path(service.state.ray_folder), Path(service.state.socket).parent}
    of_others = (RAY_FOLDER_PREFIX, OPERATOR_FOLDER_PREFIX, "pdserve-node-")
    shared = {
        path for path in service.new if path in own or (OURS.search(path.name) and not path.name.startswith(of_others))
    }
    assert own <= shared
    found: set[str] = set()

    def check(path: Path) -> None:
        shown = str(path).replace(str(service.home), "~", 1)
        row = next((each for each in told if fnmatch.fnmatch(shown, each)), None)
        if row is not None:
            found.add(row)
            assert mode_of(path) == told[row], shown
        if path.is_symlink() or mode_of(path) & 0o077 == 0:
            return  # other users get no further
        assert path.is_dir(), f"other users have access to {shown} (mode {mode_of(path):o})"
        for each in path.iterdir():
            check(each)

    for path in (*service.home.iterdir(), *service.temporary.iterdir(), *shared):
        check(path)
    assert found == set(told)
    assert mode_of(Path(service.state.ray_folder, "auth_token")) == 0o600
    private = [*service.home.rglob("pdserve/*"), Path(service.state.ray_folder, "auth_token")]
    assert len(private) >= 4, "a note, a lock and a log"
    assert {mode_of(path) for path in private} == {0o600}, "also where the folder was there before, with another mode"
    assert not (service.home / ".ray").exists()


def test_its_ports_are_known_to_be_its_own(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another start that wants one of them says whose it is."""
    monkeypatch.setenv("XDG_STATE_HOME", str(service.home / ".local" / "state"))
    for key, port in (("gateway.port", service.state.port), ("gateway.http_port", service.http_port)):
        whose = rf"a service of yours \(process {service.state.pid}, ready; see `pdserve list`\) uses port {port}; "
        then = rf"choose another .*, or end it with `pdserve down --target localhost:{service.state.port}`$"
        with pytest.raises(LaunchError, match=rf"^{key}: {whose}{then}"):
            free_ports_for("127.0.0.1", port, key=key)


def name_of(process: psutil.Process) -> str:
    """As in the table."""
    title = " ".join(process.cmdline()).strip()
    return "supervisor" if "ops.launch.supervisor" in title else title if title.startswith("ray::") else process.name()


def test_listening_sockets(service: RunningService) -> None:
    told = {name for row in rows("Ray") for name in re.findall(r"ray::\w+|gcs_server|raylet|supervisor", row[0])}
    listening: dict[str, list[str]] = {}
    for process in service.family:
        for each in process.net_connections("inet"):
            if each.status in (psutil.CONN_LISTEN, psutil.CONN_NONE):  # UDP sockets have no state
                listening.setdefault(name_of(process), []).append(each.laddr.ip)
    assert set(listening) == told
    for name, addresses in listening.items():
        for text in addresses:
            address = ipaddress.ip_address(text)
            mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
            assert (mapped or address).is_loopback, (name, text)


def test_the_seconds_of_each_step_are_told(service: RunningService) -> None:
    for step in (
        "  started Ray",
        "  the gateway listens",
        "  prefill-0 is up",
        "  decode-0 is up",
        "  connected",
        "ready: .*",
    ):
        assert re.search(rf"^{step} \(\d+\.\d s\)$", service.said, re.MULTILINE), (step, service.said)


def test_niceness_is_what_the_user_gave(service: RunningService) -> None:
    expected = os.getpriority(os.PRIO_PROCESS, 0) + NICER
    found = [(name_of(process), process.nice()) for process in service.family]
    assert len(found) > 8
    assert [each for each in found if each[1] != expected] == []


def test_each_of_rays_services_asks_for_the_token(service: RunningService) -> None:
    """By any of its ports: on others the call is unknown."""
    answers: dict[str, set[str]] = {call: set() for call in RAY_CALLS}
    ports = {
        each.laddr.port
        for process in service.family
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
