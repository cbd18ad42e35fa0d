"""A probe stands in for a worker: it listens on the worker's ports, opens KV ends as the worker does, and measures
links over them. It runs in a process (`ops.doctor.probes`) or a Ray actor (`ops.doctor.ray_host`)."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from checkpoints.source import resolve_model
from kv_transfer.base import KVTransport
from kv_transfer.factory import choose, create_transport, offered_transports
from kv_transfer.handshake import check_block_size, introduce, survey
from kv_transfer.memory import DeviceMemory
from kv_transfer.pool import Pool
from kv_transfer.receiver import KVReceiver
from kv_transfer.transports.shaped import Shape
from ops.doctor.network import Obstacle, PingServer, dial
from ops.doctor.node_report import report_node
from ops.doctor.report import Endpoints, Finding, Meeting, fail, port_taken
from ops.launch.node_tasks import show_gpus
from ops.launch.state import listeners
from ops.model_memory import layout_of
from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import (
    ConfigError,
    DeadlineExceeded,
    LaunchError,
    LayoutMismatch,
    PdserveError,
    TransferError,
    TransferTimeout,
    to_wire,
)
from pdserve.core.handoff import KVEndpoint
from pdserve.core.kv_layout import MAX_PROBE_AREA_BYTES, KVLayout
from runtime.plane_tls import plane_tls
from runtime.secret import ServiceSecret
from runtime.threads import in_thread
from worker.addresses import Interface, resolve_interface
from worker.spec import WorkerSpec

EPOCH = "doctor"
LEASE_S = 30.0
_CLOSE_S = 10.0
_SURVEY_S = 30.0  # longest survey, on a very slow link
_POOL_BLOCKS = 2  # no request is handed over to a probe
_BY_TCP = ("tcp", "grpc_stream", "torch_dist")
T = TypeVar("T")


class WorkerProbe:
    """The probe of one worker. Executes one `call` at a time, until `close`. ``hidden_gpus``: Ray hides the GPUs from
    this process."""

    def __init__(self, hidden_gpus: bool = False) -> None:
        if hidden_gpus:
            show_gpus()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="doctor-kv", daemon=True)
        self._thread.start()
        self._ping: PingServer | None = None
        self._pool: Pool | None = None
        self._transports: list[KVTransport] = []
        self._receiver: KVReceiver | None = None
        self._spec: WorkerSpec | None = None
        self._findings: list[Finding] = []

    def call(self, what: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Call a method by name. Returns ``{"value": …}`` in plain values, or ``{"error": (kind, message)}`` for a
        `PdserveError`."""
        calls: dict[str, Callable[..., Any]] = {
            "report": report_node,
            "open": self._open,
            "meet": self._meet,
            "dial": dial,
            "close": self._close,
        }
        try:
            return {"value": msgspec.to_builtins(calls[what](**arguments))}
        except PdserveError as error:
            return {"error": to_wire(error)}

    def close(self) -> None:
        """Close all ends. Closing twice is fine."""
        self._close()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_S)
            if not self._thread.is_alive():  # else the daemon thread keeps its loop
                self._loop.close()

    # --- calls -------------------------------------------------------------------------------------------------------

    def _open(self, spec: dict[str, Any], device: str, secret: str, model_hash: str) -> Endpoints:
        """Listen on the ports of the worker ``spec``, or on free ones where they are taken, which is a finding.
        ``device`` is the worker's (``cuda:1``), ``secret`` the examination's in hexadecimal, without which the probe
        opens and accepts no link, ``model_hash`` the node's hash of the weights."""
        self._close()
        worker = self._spec = WorkerSpec.from_wire(spec)
        self._findings = []
        control = self._listen_control(worker)
        interface: Interface | None = None
        endpoints: tuple[KVEndpoint, ...] = ()
        try:
            interface = resolve_interface(worker.config.transfer.interface, worker.host)
            endpoints = self._listen_kv(worker, device, ServiceSecret.from_hex(secret), model_hash, interface.address)
        except ConfigError as error:
            check, remedy = "transport", "choose another transfer.transport, or auto"
            if str(error).startswith("cluster.tls"):
                check, remedy = "access", "see docs/security.md; each host needs the files"
            elif interface is None:
                check, remedy = "interface", "name a device, network or address that every host has"
            self._findings.append(fail(check, self._where, str(error), remedy))
        except PdserveError as error:  # the model cannot be read, or a port was taken since it was checked
            remedy = "its KV ends cannot be opened, so the worker would not start"
            self._findings.append(fail("kv", self._where, str(error), remedy))
        return Endpoints(worker.worker_id, control, interface, endpoints, tuple(self._findings))

    def _meet(self, worker_id: str, endpoints: list[Any], for_s: float, timeout_s: float) -> Meeting:
        """Open a link to another probe, shake hands, and measure for ``for_s`` seconds (0: one round trip)."""
        peer = msgspec.convert(endpoints, tuple[KVEndpoint, ...])
        return self._on_loop(self._meet_over_link(worker_id, peer, for_s, timeout_s), 3 * timeout_s + _SURVEY_S)

    def _close(self) -> None:
        if self._ping is not None:
            self._ping.close()
            self._ping = None
        if self._thread.is_alive():
            self._on_loop(self._close_ends(), _CLOSE_S)
        self._pool = None

    @property
    def _where(self) -> str:
        return f"{self._spec.worker_id} on {self._spec.node}" if self._spec else ""

    # --- implementation ----------------------------------------------------------------------------------------------

    def _on_loop(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise DeadlineExceeded(f"not done within {timeout_s:.0f} s") from None

    def _listen_control(self, worker: WorkerSpec) -> str:
        for port in (worker.port, 0):
            try:
                self._ping = PingServer(worker.host, port)
            except OSError as error:
                what = f"cannot listen on {worker.host}:{port} (control): {error.strerror}"
                self._findings.append(port_taken(self._where, what, port))
                continue
            return self._ping.address
        return ""

    def _listen_kv(
        self, worker: WorkerSpec, device: str, secret: ServiceSecret, model_hash: str, address: str
    ) -> tuple[KVEndpoint, ...]:
        transfer = worker.config.transfer
        if not worker.config.moves_kv:
            return ()
        tls = plane_tls(worker.config.cluster)
        shape = Shape.of(transfer)
        names = offered_transports(
            transfer.transport, device=device, shared_device=worker.device_share < 1, shaped=shape is not None
        )
        source = resolve_model(worker.config.model.path, served=worker.config.has_own_engines)
        layout = layout_of(source, worker.config, model_hash)
        check_block_size(layout)
        self._pool = _small_pool(layout, device)
        if isinstance(self._pool.memory, DeviceMemory):  # where the worker opens memory of another engine
            self._pool.memory.imported = not worker.config.has_own_engines
        for port in dict.fromkeys((worker.kv_port, 0)):
            self._transports = [
                create_transport(name, self._pool.memory, secret, tls=tls, shape=shape) for name in names
            ]
            self._receiver = KVReceiver(
                self._pool,
                self._transports,
                transfer,
                worker_id=worker.worker_id,
                epoch=EPOCH,
                clock=MonotonicClock(),
                eos_token_ids=source.shape.eos_token_ids,
            )
            try:
                return self._on_loop(self._receiver.start(address, port), LEASE_S)
            except TransferError as error:
                self._on_loop(self._close_ends(), _CLOSE_S)
                taken = next((each for each in range(port, port + len(names)) if each and listeners(each)), port)
                self._findings.append(port_taken(self._where, str(error), taken))
        return ()

    async def _meet_over_link(
        self, worker_id: str, endpoints: tuple[KVEndpoint, ...], for_s: float, timeout_s: float
    ) -> Meeting:
        assert self._spec is not None, "call open first"
        if self._pool is None or self._receiver is None:
            return Meeting(obstacle=Obstacle.NOT_TRIED, what=f"{self._spec.worker_id} has no KV end")
        try:
            transport, endpoint, reason = choose(self._transports, endpoints, worker_id)
        except ConfigError as error:
            return Meeting(obstacle=Obstacle.NO_TRANSPORT, what=str(error))
        met = Meeting(transport.name, endpoint.address, reason)
        try:
            link = await transport.connect(endpoint, timeout_s)
        except PdserveError as error:
            # Plain TCP tells more precisely what is wrong, if the transport has a TCP address.
            address, obstacle = endpoint.address, Obstacle.NONE
            if endpoint.transport in _BY_TCP:
                obstacle = await in_thread("doctor-dial", lambda: dial(address, timeout_s))
            if obstacle is Obstacle.NONE:
                obstacle = Obstacle.TIMED_OUT if isinstance(error, TransferTimeout) else Obstacle.BROKEN
            return replace(met, obstacle=obstacle, what=str(error))
        hello = self._receiver.hello(link)
        try:
            async with asyncio.timeout(timeout_s):
                await introduce(link, hello, worker_id)
            async with asyncio.timeout(timeout_s + _SURVEY_S):
                return replace(met, figures=await survey(link, self._pool, for_s, MonotonicClock()))
        except LayoutMismatch as error:
            return replace(met, obstacle=Obstacle.LAYOUT, what=str(error))
        except TransferError as error:
            return replace(met, obstacle=Obstacle.BROKEN, what=str(error))
        except TimeoutError:
            what = f"{worker_id} accepted a connection at {endpoint.address} and then did not answer"
            return replace(met, obstacle=Obstacle.TIMED_OUT, what=what)
        finally:
            await link.aclose()

    async def _close_ends(self) -> None:
        receiver, transports = self._receiver, self._transports
        self._receiver, self._transports = None, []
        if receiver is not None:
            await receiver.aclose()
        await asyncio.gather(*(transport.aclose() for transport in transports))


def _small_pool(layout: KVLayout, device: str) -> Pool:
    """A pool on ``device`` (``cpu``, ``cuda:0``, …), where the worker's pool would be. LaunchError if the device cannot
    hold it."""
    if device != "cpu":
        import torch

        if not torch.cuda.is_available():
            raise LaunchError("torch sees no GPU here")
        try:
            return Pool.create(layout, _POOL_BLOCKS, device, MAX_PROBE_AREA_BYTES)
        except torch.OutOfMemoryError:
            need_mb = (_POOL_BLOCKS * layout.block_bytes + MAX_PROBE_AREA_BYTES) / 2**20
            raise LaunchError(f"{device} has no {need_mb:.0f} MiB free") from None
    return Pool.create(layout, _POOL_BLOCKS, device, MAX_PROBE_AREA_BYTES)


def main() -> None:
    """Run a probe in this process: `ops.doctor.probes.ProbeProcess` has the other end."""
    logging.basicConfig(level=logging.ERROR)
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # keeps output of libraries out of the answers
    probe = WorkerProbe()
    for line in sys.stdin:
        what, arguments = json.loads(line)
        answers.write(json.dumps(probe.call(what, arguments)) + "\n")
    probe.close()


if __name__ == "__main__":
    main()
