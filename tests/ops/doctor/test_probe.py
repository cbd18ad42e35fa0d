"""A single probe: the peers it can reach, and the obstacles to others."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from ops.doctor.network import Obstacle, PingServer, dial, read_clock
from ops.doctor.node_report import NodeReport
from ops.doctor.probe import WorkerProbe
from ops.doctor.probes import ProbeProcess
from ops.doctor.report import Endpoints, Meeting
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import DeadlineExceeded, WorkerLost
from pdserve.core.worker import Role
from tests.loopback import SECRET
from worker.spec import WorkerSpec

HOST = "127.0.0.1"


def spec(worker_id: str, role: Role, **transfer: Any) -> dict[str, Any]:
    config = PdserveConfig.parse({"transfer": transfer})
    return WorkerSpec(worker_id, role, HOST, HOST, "cpu", (), "", config=config).to_wire()


@contextlib.contextmanager
def probing(worker_id: str, role: Role, **transfer: Any) -> Iterator[tuple[WorkerProbe, Endpoints]]:
    probe = WorkerProbe()
    try:
        opened = probe.call(
            "open",
            {"spec": spec(worker_id, role, **transfer), "device": "cpu", "secret": SECRET.hex(), "model_hash": "m"},
        )
        yield probe, msgspec.convert(opened["value"], Endpoints)
    finally:
        probe.close()
        probe.close()


def meet(probe: WorkerProbe, transport: str, address: str, **changes: Any) -> Meeting:
    arguments = {
        "worker_id": "decode-0",
        "endpoints": [{"transport": transport, "address": address}],
        "for_s": 0.0,
        "timeout_s": 0.5,
        **changes,
    }
    return msgspec.convert(probe.call("meet", arguments)["value"], Meeting)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_two_meet_and_measure(transport: str) -> None:
    with (
        probing("prefill-0", Role.PREFILL, transport=transport) as (prefill, _),
        probing("decode-0", Role.DECODE, transport=transport) as (_, ends),
    ):
        endpoint = ends.kv[0]
        met = meet(prefill, endpoint.transport, endpoint.address, for_s=0.2, timeout_s=5.0)
        assert met.obstacle is Obstacle.NONE
        assert met.transport == ("shm" if transport == "auto" else transport)
        assert met.figures is not None
        assert met.figures.ceiling_gbs >= met.figures.gbs > 0.001
        assert 0 < met.figures.round_trip_s <= met.figures.median_round_trip_s < 0.2
        another = meet(prefill, endpoint.transport, endpoint.address, worker_id="decode-7", timeout_s=5.0)
        assert another.obstacle is Obstacle.BROKEN  # as where two hosts have one address
        assert "another worker than decode-7" in another.what


def test_a_different_layout_is_an_obstacle() -> None:
    with probing("prefill-0", Role.PREFILL) as (prefill, _):
        decode = WorkerProbe()
        try:
            config = PdserveConfig.parse({"engine": {"block_size": 16}})
            told = WorkerSpec("decode-0", Role.DECODE, HOST, HOST, "cpu", (), "", config=config).to_wire()
            arguments = {"spec": told, "device": "cpu", "secret": SECRET.hex(), "model_hash": "m"}
            ends = msgspec.convert(decode.call("open", arguments)["value"], Endpoints)
            met = meet(prefill, ends.kv[0].transport, ends.kv[0].address, timeout_s=5.0)
            assert met.obstacle is Obstacle.LAYOUT
            assert "block_size" in met.what
        finally:
            decode.close()


def test_every_reason_for_an_unreachable_peer_is_named() -> None:
    with probing("prefill-0", Role.PREFILL, transport="tcp") as (probe, _):
        with socket.socket() as closed:
            closed.bind((HOST, 0))  # and does not listen
            refused = meet(probe, "tcp", f"{HOST}:{closed.getsockname()[1]}")
        assert refused.obstacle is Obstacle.REFUSED
        with _full() as address:
            assert meet(probe, "tcp", address).obstacle is Obstacle.TIMED_OUT
        assert meet(probe, "tcp", "no.such.host.invalid:1").obstacle is Obstacle.NO_SUCH_HOST
        assert meet(probe, "tcp", "255.255.255.255:9").obstacle is Obstacle.UNREACHABLE
        with socket.create_server((HOST, 0)) as silent:  # connects, but is none of ours
            met = meet(probe, "tcp", f"{HOST}:{silent.getsockname()[1]}")
            assert met.obstacle is Obstacle.TIMED_OUT
        assert meet(probe, "shm", "somewhere").obstacle is Obstacle.NO_TRANSPORT


@contextlib.contextmanager
def _full() -> Iterator[str]:
    """An address where connections are neither taken nor refused, as behind a firewall that drops."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind((HOST, 0))
        server.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield f"{HOST}:{server.getsockname()[1]}"


def test_dial() -> None:
    with socket.create_server((HOST, 0)) as server:
        address = f"{HOST}:{server.getsockname()[1]}"
        assert dial(address, 1.0) is Obstacle.NONE
    assert dial(address, 1.0) is Obstacle.REFUSED


def test_clocks_are_compared_by_the_shortest_round_trip() -> None:
    server = PingServer(HOST, 0)
    reading = read_clock(server.address)
    assert abs(reading.offset_s) <= reading.error_s < 0.01  # the same clock
    assert abs(reading.wall_s) <= reading.error_s + 0.001
    address = server.address
    server.close()
    server.close()
    with pytest.raises(OSError, match="refused"):
        read_clock(address, 1.0)


def test_a_probe_that_ends_or_hangs_is_an_error() -> None:
    probe = ProbeProcess("the probe", prefix=("sh", "-c", "echo no such luck >&2; exit 3"))
    with pytest.raises(WorkerLost, match="no such luck"):
        probe.call("report", {"model": "tiny"}, 20.0, NodeReport)
    probe.close()
    probe = ProbeProcess("the probe", prefix=("sh", "-c", "exec sleep 60"))
    with pytest.raises(DeadlineExceeded, match="did not answer report within 1 s"):
        probe.call("report", {"model": "tiny"}, 1.0, NodeReport)
    with pytest.raises(WorkerLost, match="ended"):
        probe.call("report", {"model": "tiny"}, 1.0, NodeReport)
    probe.close()
    assert probe._process.poll() is not None
