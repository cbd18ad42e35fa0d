"""The composition root: Ray, placement, gateway and workers, in the order they need each other; and back again."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from core.config import PdserveConfig
from core.errors import LaunchError, from_wire
from core.worker import Role
from decode_worker.actor import DecodeWorkerActor
from engine.model_source import resolve_model
from pdserve.launch.gateway_actor import GatewayActor
from pdserve.launch.leftovers import end_processes
from pdserve.launch.placement import Place, Placement, place_workers
from pdserve.launch.ray_session import RaySession
from pdserve.version import VERSION
from prefill_worker.actor import PrefillWorkerActor
from worker.spec import WorkerSpec

STOP_TIMEOUT_S = 10.0
ACTORS: dict[Role, Any] = {Role.PREFILL: PrefillWorkerActor, Role.DECODE: DecodeWorkerActor}
Report = Callable[[str], None]


class Service:
    """A whole pdserve on one Ray. `start` returns when requests can be served; `stop` leaves nothing behind."""

    def __init__(self, config: PdserveConfig, report: Report = lambda stage: None) -> None:
        self.config = config
        self._report = report
        self._session = RaySession(config.cluster.address)
        self._placement: Placement | None = None
        self._gateway: Any = None
        self._workers: dict[str, Any] = {}
        self.port = config.gateway.port

    @property
    def ray_folder(self) -> str:
        """Where the Ray of its own keeps its files; empty if it joined one."""
        return str(self._session.temp_dir or "")

    def start(self) -> None:
        """Bring everything up; PdserveError (and nothing left running) if it cannot be."""
        model = resolve_model(self.config.model.path)
        self.port = free_port(self.config.gateway.host, self.config.gateway.port)
        try:
            self._report("starting Ray" if self._session.owned else f"joining Ray at {self.config.cluster.address}")
            self._session.start()
            self._start_actors(model.name)
            self._await_ready()
        except ray.exceptions.RayError as error:
            self.stop()
            raise LaunchError(f"Ray failed while the service started: {_one_line(error)}") from None
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End workers, gateway, placement and (if it is ours) Ray; afterwards no process of ours is left."""
        if ray.is_initialized():
            actors = [*self._workers.values(), *([self._gateway] if self._gateway else [])]
            with contextlib.suppress(ray.exceptions.RayError):
                ray.wait([actor.stop.remote() for actor in actors], num_returns=len(actors), timeout=STOP_TIMEOUT_S)
            for actor in actors:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.kill(actor, no_restart=True)
            if self._placement is not None:
                with contextlib.suppress(ray.exceptions.RayError):
                    self._placement.remove()
        self._workers.clear()
        self._gateway = self._placement = None
        self._session.stop()
        end_children()

    def _start_actors(self, model_name: str) -> None:
        cluster = self.config.cluster
        nodes = self._session.nodes()
        host = "127.0.0.1" if self._session.owned else ray.util.get_node_ip_address()
        registry_address = f"{host}:{free_port(host, 0)}"
        self._report(f"starting the gateway on port {self.port}")
        config = self.config.model_copy(update={"gateway": self.config.gateway.model_copy(update={"port": self.port})})
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        gateway: Any = GatewayActor
        self._gateway = gateway.options(
            num_cpus=0, max_restarts=-1, max_concurrency=8, scheduling_strategy=here
        ).remote(config.model_dump(mode="json"), registry_address)
        self._report(f"placing {cluster.prefill} prefill and {cluster.decode} decode workers")
        self._placement = place_workers(cluster, nodes)
        for place in self._placement.places:
            self._workers[place.worker_id] = self._start_worker(place, config, registry_address)
        self._report(f"loading {model_name} on {len(self._workers)} workers ({self._placement.device})")

    def _start_worker(self, place: Place, config: PdserveConfig, registry_address: str) -> Any:
        assert self._placement is not None
        spec = WorkerSpec(
            worker_id=place.worker_id,
            role=place.role,
            host="127.0.0.1" if self._session.owned else place.node.ip,
            node=place.node.ip,
            device=self._placement.device,
            registry_address=registry_address,
            version=VERSION,
            slot=place.slot,
            num_slots=self._placement.workers_on(place.node),
            device_share=min(1.0, self._placement.bundle.get("GPU", 1.0)),
            config=config,
        )
        bundle = dict(self._placement.bundle)
        return (
            ACTORS[place.role]
            .options(
                name=f"pdserve-{self.port}-{place.worker_id}",
                num_cpus=bundle.pop("CPU", 0.0),
                num_gpus=bundle.pop("GPU", 0.0),
                resources=bundle or None,
                max_restarts=-1,
                max_concurrency=8,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement.group, place.bundle_index),
            )
            .remote(spec.to_wire())
        )

    def _await_ready(self) -> None:
        waiting = {actor.wait_ready.remote(): name for name, actor in self._workers.items()}
        waiting[self._gateway.wait_started.remote()] = "gateway"
        timeout_s = self.config.cluster.start_timeout_s
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=timeout_s)
            if not done:
                raise LaunchError(f"{', '.join(sorted(waiting.values()))}: not ready within {timeout_s:.0f} s")
            name = waiting.pop(done[0])
            try:
                answer = ray.get(done[0])
            except ray.exceptions.RayError as error:
                raise LaunchError(f"{name} did not start: {_one_line(error)}") from None
            if "error" in answer:
                raise from_wire(*answer["error"])
            self._report(f"{name} is up")
        answer = ray.get(self._gateway.wait_serving.remote(timeout_s))
        if "error" in answer:
            raise from_wire(*answer["error"])


def free_port(host: str, port: int) -> int:
    """``port`` if it can be listened on, or (0) a free one; LaunchError if it is taken. ``host`` is a name or an
    address, of either IP version."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
            bound: int = probe.getsockname()[1]
            return bound
    except OSError as error:
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if isinstance(error, socket.gaierror):
            raise LaunchError(f"gateway.host: cannot listen on {where}: {error.strerror}; choose another") from None
        raise LaunchError(
            f"gateway.port: cannot listen on {where}: {error.strerror}; choose another with --port"
        ) from None


def end_children() -> None:
    """End, by id, what is left of this process's descendants."""
    children = psutil.Process(os.getpid()).children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()
    end_processes(children, 3.0)


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
