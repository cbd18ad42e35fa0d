"""`pdserve scale` gives workers another role, on Ray and under load; a worker that is killed costs no request."""

from __future__ import annotations

import json

import psutil
import pytest

from pdserve import Client
from pdserve.client.status import ServiceStatus
from tests.e2e.conftest import RunningService, wait_for
from tests.load import Load
from tests.local_cluster import leaked_blocks

pytestmark = [pytest.mark.ray, pytest.mark.cluster, pytest.mark.timeout(600)]
BORN = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "decode"}
PROMPTS = ["def read_lines(path):", "import os\n\n", "class Queue:\n    def __init__(self", "for name in names:\n"]


def ready_roles(status: ServiceStatus) -> dict[str, str]:
    return {worker.worker_id: worker.role for worker in status.workers if worker.state == "ready"}


def scale(service: RunningService, prefill: int, decode: int) -> str:
    wanted = ("--prefill", str(prefill), "--decode", str(decode))
    said = service.cli.done("scale", *wanted, "--target", service.target).stderr
    assert f"scaled: {prefill}P{decode}D" in said
    return said


def test_workers_take_another_role_and_keep_it_over_a_restart(service: RunningService) -> None:
    with Load(service.target, PROMPTS, max_tokens=24) as load, Client(service.operator) as operator:
        told = scale(service, 3, 1)
        (flipped,) = [name for name in ("decode-0", "decode-1") if f"{name} is a prefill worker now" in told]
        now, before = {**BORN, flipped: "prefill"}, operator.status()
        assert ready_roles(before) == now, "when scale returns"
        assert "role" in service.cli.run("status", "--target", service.target).stdout
        assert json.loads(service.cli.run("list", "--json").stdout)["services"][0]["workers"] == "3P1D"

        # Ray starts it again as it was born; the gateway's first answer says what it is.
        (pid,) = [worker.pid for worker in before.workers if worker.worker_id == flipped]
        psutil.Process(pid).kill()
        wait_for(
            service.operator,
            "back with its role",
            lambda status: ready_roles(status) == now and pid not in {worker.pid for worker in status.workers},
        )
        restarts = {worker.worker_id: worker.worker_restarts for worker in operator.status().workers}
        assert restarts == {name: int(name == flipped) for name in BORN}
        ended = f"{flipped}@{pid}"
        assert service.cli.done("logs", ended, "--target", service.target).stdout
        assert ended in service.cli.done("logs", "--port", str(service.port)).stdout
        told = scale(service, 2, 2)
        assert f"{flipped} is a decode worker now" in told, "the one that was born a decode worker"
        wait_for(service.operator, "as before", lambda status: ready_roles(status) == BORN)
    load.check()
    wait_for(service.target, "blocks back", lambda status: not leaked_blocks(status))
