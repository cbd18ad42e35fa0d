"""`pdserve scale` gives workers another role, on Ray and under load."""

from __future__ import annotations

import contextlib
import json

import psutil
import pytest

from pdserve.client.status import ServiceStatus
from tests.e2e.conftest import RunningService
from tests.e2e.test_membership import Load, wait_for
from tests.local_cluster import leaked_blocks

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
BORN = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "decode"}


def ready_roles(status: ServiceStatus) -> dict[str, str]:
    return {worker.worker_id: worker.role for worker in status.workers if worker.state == "ready"}


def scale(service: RunningService, prefill: int, decode: int) -> str:
    wanted = ("--prefill", str(prefill), "--decode", str(decode))
    done = service.cli.run("scale", *wanted, "--target", service.target)
    assert done.returncode == 0, done.stderr
    assert f"scaled: {prefill}P{decode}D" in done.stderr
    return done.stderr


def test_workers_take_another_role_and_keep_it_over_a_restart(service: RunningService) -> None:
    with contextlib.closing(Load(service.target)) as load:
        told = scale(service, 3, 1)
        (flipped,) = [name for name in ("decode-0", "decode-1") if f"{name} is a prefill worker now" in told]
        now = {**BORN, flipped: "prefill"}
        assert ready_roles(wait_for(service.operator, "flipped", lambda status: True)) == now, "when scale returns"
        shown = service.cli.run("status", "--target", service.target)
        assert "role" in shown.stdout
        assert json.loads(service.cli.run("list", "--json").stdout)["services"][0]["workers"] == "3P1D"

        # Ray starts it again as it was born; the gateway's first answer says what it is.
        before = wait_for(service.operator, "pid", lambda status: True)
        (pid,) = [worker.pid for worker in before.workers if worker.worker_id == flipped]
        psutil.Process(pid).kill()
        wait_for(
            service.operator,
            "back with its role",
            lambda status: ready_roles(status) == now and pid not in {worker.pid for worker in status.workers},
        )
        told = scale(service, 2, 2)
        assert f"{flipped} is a decode worker now" in told, "the one that was born a decode worker"
        wait_for(service.operator, "as before", lambda status: ready_roles(status) == BORN)
        load.close()
        load.check()
    assert leaked_blocks(wait_for(service.target, "blocks back", lambda status: leaked_blocks(status) == 0)) == 0
