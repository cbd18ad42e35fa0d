"""The peers that need nothing installed, and what is said of those that cannot run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from experiments.benchmarks.handoff_pair import handoff_pair, layout_of
from experiments.benchmarks.peers import PythonWith, mooncake_tcp, nixl, peer_python
from experiments.benchmarks.transfer import MB, rates_gbs
from experiments.child_process import ChildFailed, ChildProcess, program
from experiments.messages import Done, WrongMessage
from experiments.pairs.pair import Pair, PairUnavailable, memcpy, socket

ROOT = Path(__file__).resolve().parents[3]


class LazyPair(Pair):
    """Of large transfers, moves all bytes but the last."""

    def _move(self, num_bytes: int) -> float:
        return super()._move(num_bytes - (num_bytes >= MB))


class DeadPair(Pair):
    """Starts, and moves nothing more."""

    def _move(self, num_bytes: int) -> float:
        if num_bytes < MB:
            return super()._move(num_bytes)
        raise ChildFailed(f"{self.name} moved {num_bytes} bytes, and the target has none of them")


CEILINGS = "experiments.pairs.ceilings"


def lazy_memcpy() -> Pair:
    return LazyPair("memcpy", CEILINGS, "memcpy", pulls=True)


def script(path: Path, *lines: str) -> Path:
    """A shell script in place of a Python."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(("#!/bin/sh", *lines)) + "\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("kind", [memcpy, socket])
def test_it_moves_bytes(kind: Callable[[], Pair]) -> None:
    with kind() as pair:
        pair.start(MB + 3)
        for num_bytes in (1, 4097, MB + 3, MB + 3):  # a size's first transfer checks the content, the second does not
            assert 0 < pair.seconds(num_bytes) < 60
        with pytest.raises(ChildFailed, match="cannot move 1048580 bytes"):
            pair.seconds(MB + 4)
        pids = pair.pids
        assert len(pids) == 2
        assert all(map(psutil.pid_exists, pids))
    assert not any(map(psutil.pid_exists, pids))
    with pytest.raises(ChildFailed, match="its buffers have 0"):
        pair.seconds(1)


def test_wrong_bytes_are_noticed() -> None:
    with lazy_memcpy() as pair:
        pair.start(MB)
        with pytest.raises(ChildFailed, match="the target has others than the source"):
            pair.seconds(MB)


def test_processes_end_with_the_one_that_started_them() -> None:
    program = (
        "import sys; from experiments.pairs.pair import socket\n"
        "pair = socket(); pair.start(4096)\n"
        "sys.stdout.write(' '.join(map(str, pair.pids)) + '\\n'); sys.stdout.flush(); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as starter:
        assert starter.stdout is not None
        children = [psutil.Process(int(pid)) for pid in starter.stdout.readline().split()]
        starter.kill()
    assert len(children) == 2
    _, left = psutil.wait_procs(children, timeout=10)
    assert not left


def test_a_dead_process_is_an_error() -> None:
    with socket() as pair:
        pair.start(MB)
        os.kill(pair.pids[0], signal.SIGKILL)
        with pytest.raises(ChildFailed, match=r"socket's (source|target) ended \(exit status -?\d+\)"):
            pair.seconds(MB)


def test_a_silent_process_is_an_error(tmp_path: Path) -> None:
    python = script(tmp_path / "python", "echo deep in thought >&2", "exec cat")
    with ChildProcess("it", program("module", python=python)) as child:
        assert child.ask(10, Done("0a"), Done) == Done("0a")
        with pytest.raises(ChildFailed, match=r"(?s)it did not answer within 0.05 s.*deep in thought"):
            child.receive(0.05, Done)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ('{"kind": "Unavailable"}', "Object missing required field `reason`"),
        ("hello", "JSON is malformed: invalid character (byte 0)"),
    ],
)
def test_an_answer_of_the_wrong_shape_is_an_error_with_its_text(tmp_path: Path, said: str, reason: str) -> None:
    python = script(tmp_path / "python", f"echo '{said}'", "exec cat >&2")
    pair = mooncake_tcp(lambda requirement: python)
    with pytest.raises(WrongMessage) as raised:
        pair.start(MB)
    wanted = "mooncake_tcp's source was to send Done(value) or Unavailable(reason), and sent"
    assert str(raised.value) == f"{wanted} {said.encode()!r}: {reason}"
    assert not pair.pids


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_hand_off_moves_whole_blocks(transport: str) -> None:
    with handoff_pair("135m", transport) as pair:
        size = 3 * layout_of("135m").block_bytes
        pair.start(size)
        assert 0 < pair.seconds(size) < 60


def test_a_program_that_ends_quotes_its_log() -> None:
    with pytest.raises(ChildFailed, match=r"(?s)lost's source ended \(exit status 1\).*no_such_program"):
        Pair("lost", "experiments.no_such_program").start(MB)


@pytest.mark.parametrize(("kind", "module"), [(nixl, "nixl_cu12"), (mooncake_tcp, "mooncake")])
def test_a_library_that_is_not_there(kind: Callable[[PythonWith], Pair], module: str) -> None:
    with (
        kind(lambda requirement: Path(sys.executable)) as pair,
        pytest.raises(PairUnavailable, match=f"No module named '{module}"),
    ):
        pair.start(MB)
    assert not pair.pids


def test_an_installation_that_fails_is_tried_once(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    script(folder / "bin" / "python", f"echo tried >>{tmp_path}/tries", "echo ERROR: no such thing >&2", "exit 1")
    (folder / "bin" / "pip").touch()
    python_with = partial(peer_python, folder=folder)
    for tcp_only in (False, True):
        with pytest.raises(PairUnavailable, match=r"installing nixl-cu12.* failed: ERROR: no such thing"):
            nixl(python_with, tcp_only=tcp_only).start(MB)
    assert (tmp_path / "tries").read_text() == "tried\n"


def test_a_quick_run_installs_nothing(tmp_path: Path) -> None:
    with pytest.raises(PairUnavailable, match=r"nixl-cu12.* is not installed, and a quick run installs nothing"):
        nixl(partial(peer_python, folder=tmp_path / "venv", installs=False)).start(MB)
    assert not list(tmp_path.iterdir())


def test_a_transfer_of_ours_that_fails_ends_the_benchmark() -> None:
    with pytest.raises(ChildFailed, match="the target has others than the source"):
        rates_gbs([lazy_memcpy()], {"1": MB}, 1)


def test_a_measurement_goes_on_without_what_cannot_run() -> None:
    peers = [nixl(lambda requirement: Path(sys.executable)), DeadPair("dead", CEILINGS, "memcpy", pulls=True)]
    result = rates_gbs([memcpy(), *peers], {"1": MB, "2": 2 * MB}, 2, peers)
    assert set(result["memcpy"]) == {"1", "2"}
    assert result["nixl"] == {"unavailable": "No module named 'nixl_cu12'"}
    assert result["dead"] == {"unavailable": "dead moved 1048576 bytes, and the target has none of them"}
