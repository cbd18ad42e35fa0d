"""The command line run in this process, and the scripted service that it talks to: fixtures of `tests.ops` and
`tests.experiments`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from ops.cli.main import main
from tests.pdserve.scripted_service import ScriptedService

PDSERVE = (sys.executable, "-c", "from ops.cli.main import main; main()")


@dataclass(frozen=True)
class Run:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def pdserve(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """Runs a command in this process, with a state folder of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))

    def run(*arguments: str) -> Run:
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        code = exit_.value.code
        captured = capsys.readouterr()
        return Run(0 if code is None else int(code), captured.out, captured.err)

    return run


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    """The scripted service, which commands and benchmarks talk to."""
    with ScriptedService() as service:
        yield service
