"""An interrupted start in the background leaves nothing behind."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

import psutil
import pytest

from ops.launch import detach
from ops.launch.leftovers import wait_ended
from pdserve.core.config import PdserveConfig

DEAF = """#!{python}
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
subprocess.Popen([{python!r}, "-c", ignores])
os.write(int(sys.argv[-2]), b'{{"stage": "starting"}}\\n')
time.sleep(60)
"""


class Interrupted:
    """A report that notes the processes started since, at the stage ``at``, and is interrupted then."""

    def __init__(self, at: str) -> None:
        self.at = at
        self._before = set(psutil.Process().children(recursive=True))  # of services that other tests share
        self.family: list[psutil.Process] = []
        self.ray_folder = ""

    def __call__(self, stage: str) -> None:
        if stage.startswith(self.at):
            self.family = [p for p in psutil.Process().children(recursive=True) if p not in self._before]
            arguments = ""
            for process in self.family:
                with contextlib.suppress(psutil.NoSuchProcess):  # a short-lived helper of Ray that has just ended
                    arguments += " ".join(process.cmdline()) + " "
            found = re.search(r"/tmp/pdserve-ray-\w+", arguments)
            self.ray_folder = found.group() if found else ""
            raise KeyboardInterrupt


@pytest.mark.ray
def test_an_interrupted_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    config = PdserveConfig.parse({"gateway": {"host": "127.0.0.1", "port": 0}})
    report = Interrupted("starting 1 prefill")
    with pytest.raises(KeyboardInterrupt):
        detach.start_detached(config, report)
    assert len(report.family) > 2, "Ray was running"
    assert not wait_ended(report.family, 0.0)
    assert report.ray_folder.startswith("/tmp/")
    assert not Path(report.ray_folder).exists()
    assert not list((tmp_path / "pdserve").glob("*.json"))


def test_a_start_that_does_not_listen_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(detach, "STOP_TIMEOUT_S", 0.2)
    deaf = tmp_path / "deaf"
    deaf.write_text(DEAF.format(python=sys.executable))
    deaf.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(deaf))
    report = Interrupted("starting")
    with pytest.raises(KeyboardInterrupt):
        detach.start_detached(PdserveConfig(), report)
    assert len(report.family) == 2
    assert not wait_ended(report.family, 0.0)
