"""What other processes of this host use, and which processes are the measurement's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ops.launch.leftovers import end_processes
from ops.launch.state import ServiceState
from ops.machine_load import LOAD, CpuUse, MachineLoad, beside_text, own_processes
from pdserve.client.target import Target

PORT = 50999


@pytest.fixture
def foreign() -> Iterator[psutil.Process]:
    """A process that is no descendant of this one."""
    begin = "import subprocess, sys; print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid)"
    process = psutil.Process(int(subprocess.check_output([sys.executable, "-c", begin])))
    yield process
    end_processes([process], 0.0)


def test_the_processes_of_a_service_that_was_running_already_are_the_measurements_own(
    foreign: psutil.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    service = Target.of(f"localhost:{PORT}")
    own, complete = own_processes(service)
    assert foreign not in own
    assert not complete
    assert MachineLoad.begin(service).facts()[LOAD]["during_cores"] is None
    ServiceState(foreign.pid, foreign.create_time(), PORT, "", target=f"localhost:{PORT}").claim()
    own, complete = own_processes(service)
    assert foreign in own
    assert psutil.Process() in own
    assert complete
    facts = MachineLoad.begin(service).facts()[LOAD]
    assert all(facts[key] >= 0 for key in ("cores", "before_cores", "during_cores"))


def test_servers_that_a_service_has_for_workers_are_the_measurements_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    serve = (
        "import socket, subprocess, sys, time; s = socket.create_server(('127.0.0.1', 0));"
        "child = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL);"
        "print(s.getsockname()[1], child.pid, flush=True); time.sleep(60)"
    )
    begin = (
        "import subprocess, sys;"
        "server = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE);"
        "print(server.stdout.readline().decode(), server.pid)"
    )
    output = subprocess.check_output([sys.executable, "-c", begin, serve], text=True)
    port, *pids = map(int, output.split())
    servers = {psutil.Process(pid) for pid in pids}  # no descendants of this process, as the one between has ended
    try:
        assert not servers & {*own_processes()[0]}
        this = psutil.Process()
        state = ServiceState(this.pid, this.create_time(), PORT, "", target=f"localhost:{PORT}")
        for servers_at, expected in (
            (f"http://192.0.2.1:{port}", set()),
            ("http://localhost:1", set()),
            (f"http://localhost:{port}", servers),
        ):
            state.update(servers=(servers_at,))
            assert servers & {*own_processes()[0]} == expected
    finally:
        end_processes(list(servers), 0.0)


def test_load_is_named_from_a_quarter_of_a_core_on() -> None:
    assert beside_text({LOAD: {"cores": 2, "before_cores": 0.1, "during_cores": 1.24}}) == (
        "beside other load: 1.2 of 2 cores"
    )
    assert beside_text({LOAD: {"cores": 2, "before_cores": 0.3, "during_cores": None}}) == (
        "beside other load: 0.3 of 2 cores"
    )
    assert beside_text({LOAD: {"cores": 2, "before_cores": 0.1, "during_cores": 0.2}}) == ""
    assert beside_text({}) == ""


def test_what_other_processes_use_is_counted_apart_from_the_measurements_own() -> None:
    burn = "import time\nwhile time.process_time() < 0.5: pass\ninput()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE) as child:
        process = psutil.Process(child.pid)
        without, own = [psutil.Process()], [psutil.Process(), process]
        before, before_own = CpuUse.now(without), CpuUse.now(own)
        while sum(process.cpu_times()[:2]) < 0.45:
            process.is_running()
        after_own, after = CpuUse.now(own), CpuUse.now(without)
        child.communicate(b"\n")
    assert after.others_s(before) - after_own.others_s(before_own) >= 0.3
    assert after.others_cores(before) == pytest.approx(after.others_s(before) / (after.at_s - before.at_s))
