"""Logs of a process, as text and as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

CODE = """
import asyncio, logging
from pdserve.core.config import LoggingConfig
from runtime.logs import bind_request, set_up_logging

set_up_logging({config})

async def serve(request_id):
    bind_request(request_id, request_id + "#1")
    await asyncio.sleep(0)
    logging.getLogger("worker").warning("request %s goes on", request_id)

async def main():
    logging.getLogger("worker").info("idle")
    await asyncio.gather(serve("a"), serve("b"))
    try:
        1 / 0
    except ZeroDivisionError:
        logging.getLogger("worker").exception("unexpected")

asyncio.run(main())
"""


def logged(config: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(config=config)], capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_text_has_the_ids_of_the_request_that_a_line_is_about() -> None:
    idle, first, second, failure, *trace = logged("LoggingConfig()")
    assert idle.endswith("INFO worker: idle")
    assert first.endswith("WARNING worker: request a goes on [request_id=a attempt_id=a#1]")
    assert second.endswith("WARNING worker: request b goes on [request_id=b attempt_id=b#1]")
    assert failure.endswith("ERROR worker: unexpected")
    assert trace[0] == "Traceback (most recent call last):"
    assert trace[-1].startswith("ZeroDivisionError")


def test_json_has_an_object_per_line() -> None:
    idle, first, _, failure = (json.loads(line) for line in logged("LoggingConfig(format='json')"))
    assert idle.keys() == {"event", "level", "logger", "timestamp"}
    assert (first["event"], first["level"]) == ("request a goes on", "warning")
    assert (first["request_id"], first["attempt_id"]) == ("a", "a#1")
    assert "ZeroDivisionError" in failure["exception"]


@pytest.mark.parametrize(("variable", "lines"), [("WARNING/json", 3), ("INFO/json", 4)])
def test_children_log_as_their_parents_do(variable: str, lines: int) -> None:
    assert len([json.loads(line) for line in logged("", PDSERVE_LOGGING=variable)]) == lines
