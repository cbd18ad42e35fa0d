"""A whole pdserve without Ray, for tests: gateway and workers as real processes of this one, real sockets between them.

What Ray adds (placement, restarts) has tests of its own; everything else is the same code.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from pdserve import Client, Generation
from pdserve.client.status import ServiceStatus
from pdserve.core.config import PdserveConfig
from pdserve.core.worker import Role
from runtime.secret import ServiceSecret
from tests.planted import delays
from worker.spec import WorkerSpec

ROOT = Path(__file__).resolve().parents[1]


KV_MEMORY_MB = 64
"""Of each worker, unless a test sets it: an engine starts in four fifths of the time that it takes with 512."""

# Below the ports that kernels hand out by themselves, above those that Ray's workers take.
_PORTS = range(22_000, 32_000)
_claims: list[socket.socket] = []
_next_port = _PORTS.start


def free_port() -> int:
    """A port of 127.0.0.1 that is free now, and that no test of this host gets again while this process runs."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of ``count`` such ports in a row, free on 127.0.0.2 as well."""
    global _next_port
    while _next_port + count <= _PORTS.stop:
        first, claims = _next_port, []
        for port in range(first, first + count):
            _next_port = port + 1
            claim = _claimed(port)
            if claim is None:
                break
            claims.append(claim)
        _claims.extend(claims)
        if len(claims) == count:
            return first
    raise AssertionError(f"no {count} ports in a row are left")


def _claimed(port: int) -> socket.socket | None:
    """A socket that keeps other test processes off the port; None if one has it, or the port is not free."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0pdserve-test-port-{port}")
        for host in ("127.0.0.1", "127.0.0.2"):
            with socket.socket() as probe:
                probe.bind((host, port))
    except OSError as error:
        claim.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return claim


class LocalCluster:
    """Gateway and workers, ended by id in `close`. ``settings`` are sections of the configuration file; ``in_worker``
    runs in the named process before it becomes a worker. ``delays_ms`` are planted by stage (`tests.planted`).
    ``token`` is what the gateway asks for, if it does. ``gpus`` is the GPU that each named worker sees (default: all
    share the first one). ``gateways`` are the processes ``gateway``, ``gateway-1``, and so on."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        prefill: int = 1,
        decode: int = 1,
        in_worker: Mapping[str, Callable[[], None]] | None = None,
        device: str = "cpu",
        delays_ms: Mapping[str, float] | None = None,
        token: str = "",
        gpus: Mapping[str, int] | None = None,
        gateways: int = 1,
    ) -> None:
        self._gpus = dict(gpus or {})
        gateway = {"host": "127.0.0.1", "port": free_ports(gateways)}
        workers = {"prefill": prefill, "decode": decode, "device": device, "oversubscribe": True}
        self.config = PdserveConfig.parse(
            {
                **settings,
                "engine": {"kv_memory_mb": KV_MEMORY_MB, **settings.get("engine", {})},
                "gateway": {**gateway, **settings.get("gateway", {})},
                "cluster": {**settings.get("cluster", {}), **workers},
            }
        )
        self.secret = ServiceSecret.new()
        self.registries = tuple(f"127.0.0.1:{free_port()}" for _ in range(gateways))
        self.targets = [f"127.0.0.1:{self.config.gateway.port + number}" for number in range(gateways)]
        self.target = self.targets[0]
        self._folder = tempfile.TemporaryDirectory(prefix="pdserve-test-")  # only for this user
        self.operator = f"unix:{self._folder.name}/operator"
        """Where the gateway tells addresses and processes."""
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._device = device
        self._in_worker = dict(in_worker or {})
        self._delays_ms = delays_ms
        self._token = token
        self._num_slots = prefill + decode
        names = [(Role.PREFILL, i) for i in range(prefill)] + [(Role.DECODE, i) for i in range(decode)]
        self.members = {f"{role}-{index}": role for role, index in names}
        for number in range(gateways):
            self.start_gateway(number)
        for role, index in names:
            self.start_worker(role, index)

    def start_gateway(self, number: int = 0) -> None:
        """Start a gateway (again)."""
        module = "gateway" if self._delays_ms is None else "tests.planted.gateway"
        gateway = self.config.gateway.model_copy(update={"port": self.config.gateway.port + number})
        config = self.config.model_copy(update={"gateway": gateway}).model_dump_json()
        operator = [self.operator.removeprefix("unix:")] if number == 0 else []
        self._spawn(gateway_name(number), module, config, self.registries[number], *operator)

    def start_worker(self, role: Role, index: int, **changes: Any) -> None:
        """Start a worker (again); ``changes`` replace sections of its configuration."""
        worker_id = f"{role}-{index}"
        self.members.setdefault(worker_id, role)
        config = PdserveConfig.parse({**self.config.model_dump(mode="json"), **changes})
        spec = WorkerSpec(
            worker_id=worker_id,
            role=role,
            host="127.0.0.1",
            node="127.0.0.1",
            device=self._device,
            device_share=self._share(worker_id),
            registry_addresses=self.registries,
            version="test",
            num_slots=self._num_slots,
            config=config,
        )
        module = "ops.launch.worker"
        if self._delays_ms is not None:
            spec = replace(spec, engine_module=delays.ENGINE_MODULE)
            module = "tests.planted.worker"
        self._spawn(worker_id, module, json.dumps(spec.to_wire()))

    def _share(self, worker_id: str) -> float:
        """The worker's share of its device."""
        if self._device == "cpu":
            return 1.0
        sharing = list(self._gpus.values()).count(self._gpus[worker_id]) if self._gpus else self._num_slots
        return 1.0 if sharing == 1 else 0.8 / sharing

    def _spawn(self, name: str, module: str, *arguments: str) -> None:
        self.processes[name] = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            env={
                **os.environ,
                **delays.environment(self._delays_ms or {}),
                **self.secret.environment(),
                "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
                **({"CUDA_VISIBLE_DEVICES": _gpu_of(self._gpus[name])} if name in self._gpus else {}),
            },
            stdin=subprocess.DEVNULL,
            preexec_fn=self._in_worker.get(name),
        )

    def wait_ready(self, timeout_s: float = 180.0, target: str = "") -> None:
        """Return once every worker that runs is ready for the gateway at ``target`` (default: the first one), and each
        prefill worker connected to each decode worker; AssertionError at once if a process ended instead."""
        deadline_s = time.monotonic() + timeout_s
        with Client(target or self.target, token=self._token) as client:
            while not (client.ready(1.0) and self._all_met(client.status())):
                ended = [name for name, process in self.processes.items() if process.poll() is not None]
                assert not ended, f"{ended} ended while starting"
                assert time.monotonic() < deadline_s, f"not ready within {timeout_s} s"
                time.sleep(0.05)

    def _all_met(self, status: ServiceStatus) -> bool:
        names = {name for name in self.processes if not name.startswith("gateway")}
        decode = {name for name in names if self.members[name] is Role.DECODE}
        ready = {worker.worker_id: worker for worker in status.workers if worker.state == "ready"}
        return names <= ready.keys() and all(
            ready[name].role == self.members[name]
            and (name in decode or decode <= {link.worker_id for link in ready[name].links})
            for name in names
        )

    def kill(self, name: str, signum: int = signal.SIGKILL) -> None:
        """Send a signal to a process; after SIGKILL it is reaped."""
        self.processes[name].send_signal(signum)
        if signum == signal.SIGKILL:
            self.processes[name].wait(10)

    def inside(self) -> ServiceStatus:
        """The status with the addresses and processes of workers."""
        with Client(self.operator) as client:
            return client.status()

    def wait_idle(self, timeout_s: float = 60.0, target: str = "") -> ServiceStatus:
        """The status of the gateway at ``target`` (default: the first one) once no block is in use;
        AssertionError if that does not happen in time."""
        deadline_s = time.monotonic() + timeout_s
        with Client(target or self.target, token=self._token) as client:
            while leaked_blocks(status := client.status()):
                assert time.monotonic() < deadline_s, status
                time.sleep(0.1)
            return status

    def up_to_date(self) -> ServiceStatus:
        """The idle service's status, with each worker's second heartbeat from now: the first may have left before."""
        seen: dict[str, list[float]] = {}
        while True:
            status = self.wait_idle()
            now_s = time.monotonic()
            for worker in status.workers:
                beats, beat_s = seen.setdefault(worker.worker_id, []), now_s - worker.heartbeat_age_s
                if not beats or beat_s > beats[-1] + 0.05:
                    beats.append(beat_s)
            if all(len(beats) > 2 for beats in seen.values()):
                return status
            time.sleep(0.05)

    def engine_pid(self, worker_id: str) -> int:
        """The process of a worker's engine."""
        return next(worker.engine_pid for worker in self.inside().workers if worker.worker_id == worker_id)

    def wait_restarted(self, worker_id: str, before: int) -> None:
        """Return once the worker is ready with an engine that is another process than ``before``."""
        deadline_s = time.monotonic() + 120
        with Client(self.operator) as client:
            while not any(
                (worker.worker_id, worker.state) == (worker_id, "ready") and worker.engine_pid != before
                for worker in client.status().workers
            ):
                assert time.monotonic() < deadline_s, client.status()
                time.sleep(0.05)
        self.wait_ready()

    def resumed(self, client: Client, prompt: str | Sequence[int], **options: Any) -> Generation:
        """The answer of a request whose engine on ``decode-0``, the only decode worker, was killed after its first
        tokens. The worker is ready again afterwards."""
        for _ in range(20):  # until it is killed before its last token
            before = self.engine_pid("decode-0")
            stream = client.generate(prompt, mode="pd", timeout_s=60, **options)
            for _ in range(5):
                next(stream)
            psutil.Process(before).kill()
            result = stream.result()
            self.wait_restarted("decode-0", before)
            if result.attempts >= 2:
                return result
        raise AssertionError("every stream was over before its engine died")

    def close(self) -> None:
        """End everything, by id."""
        family = [psutil.Process(p.pid) for p in self.processes.values() if p.poll() is None]
        for process in list(family):
            with contextlib.suppress(psutil.NoSuchProcess):
                family += process.children(recursive=True)
        for popen in self.processes.values():
            popen.send_signal(signal.SIGCONT)
            popen.terminate()
        for popen in self.processes.values():
            try:
                popen.wait(15)
            except subprocess.TimeoutExpired:
                popen.kill()
                popen.wait()
        self._folder.cleanup()
        _, alive = psutil.wait_procs(family, timeout=5)
        for process in alive:
            process.kill()
        assert not alive, f"left running: {alive}"


def gateway_name(number: int) -> str:
    """The name of a gateway's process."""
    return f"gateway-{number}" if number else "gateway"


def leaked_blocks(status: ServiceStatus) -> int:
    """Blocks that are not free, over all workers."""
    return sum(worker.num_blocks - worker.free_blocks for worker in status.workers)


@contextlib.contextmanager
def local_cluster(settings: Mapping[str, Any], **options: Any) -> Iterator[LocalCluster]:
    """A `LocalCluster` that is ready, and gone afterwards."""
    cluster = LocalCluster(settings, **options)
    try:
        for target in cluster.targets:
            cluster.wait_ready(target=target)
        yield cluster
    finally:
        cluster.close()


def _gpu_of(number: int) -> str:
    """GPU ``number`` of those that this process may use, for ``CUDA_VISIBLE_DEVICES``."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[number].strip() if visible else str(number)
