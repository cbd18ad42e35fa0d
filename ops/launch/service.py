"""The composition root: starts and stops Ray, gateway, and workers in the order of their dependencies."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from engine.model.folder import check_weight_files, tokenizer_note
from engine.model.source import ModelSource, resolve_model
from gateway.security import security_of
from ops.launch.dtype import hosts_of, service_dtype
from ops.launch.gateway_actor import GatewayActor
from ops.launch.leftovers import ProcessId, clear_leftovers, end_processes, identify
from ops.launch.log_files import LogPart, ProcessPlace, locate, log_path, read_log
from ops.launch.members import CHECK_EVERY_S, STOP_TIMEOUT_S, Member, Members, Report
from ops.launch.plan import Bundle, Node, in_words, resolve_device, roles_of, worker_bundles
from ops.launch.ports import free_port, port_base
from ops.launch.ray_session import RaySession, one_line
from ops.launch.shutdown import StartCancelled
from pdserve.core.clock import MonotonicClock
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import LaunchError, from_wire
from pdserve.core.plane_tls import plane_tls
from pdserve.core.secret import ServiceSecret
from pdserve.core.worker import Role
from pdserve.pb import inference_pb2 as pb

MISSED_CHECKS = 3
"""Checks in a row that have to fail before Ray counts as gone."""
NODES_TIMEOUT_S = 60.0
"""How long to wait for missing nodes of a Ray that was joined, unless `cluster.nodes` is set."""
NODES_POLL_S = 0.5
PLACE_TIMEOUT_S = 5.0
"""After this time an added worker without a node counts as waiting for one."""
PLACE_REPORT_S = 2.0
"""After this time a worker without a node is reported, with the resources it waits for."""
DRAIN_ANSWER_S = 10.0
STATUS_ANSWER_S = 5.0

log = logging.getLogger(__name__)


class RayLost(LaunchError):
    """The Ray that the service runs on is gone, or cannot start workers any more."""


class Service:
    """A whole pdserve service on one Ray: `prepare`, then `start`, which returns when requests can be served. `stop`
    leaves nothing behind."""

    def __init__(
        self, config: PdserveConfig, report: Report = lambda stage: None, note: Report = lambda text: None
    ) -> None:
        """``report`` gets the stages of start-up, ``note`` what users have to know about the service."""
        self.config = config
        self._report, self._note = report, note
        self._notes: dict[str, list[str]] = {}  # by worker id; notes on the whole service are under the service's id
        self._session = RaySession(config.cluster.address)
        self._members: Members | None = None
        self._gateway: Any = None
        self._id = uuid.uuid4().hex
        self._secret = ServiceSecret.new()
        self._changing = threading.Lock()
        self._cancelled = threading.Event()
        self._draining = 0  # requests in progress at the gateway's last answer
        self._missed = 0  # failed checks of Ray in a row
        self.port = config.gateway.port
        self._processes: tuple[ProcessId, ...] = ()
        self.model = ""
        self._source: ModelSource | None = None

    @property
    def owns_ray(self) -> bool:
        """Whether the service starts its own Ray."""
        return self._session.owned

    @property
    def ray_folder(self) -> str:
        """The folder of the service's own Ray; empty if it joins one."""
        return str(self._session.folder or "")

    @property
    def ray_address(self) -> str:
        """The address of the service's Ray, once it is running."""
        return self._session.address

    @property
    def counts(self) -> dict[Role, int]:
        """Workers of each role, including those that wait for a node."""
        members = self._members
        return {role: len(members.of(role)) if members else 0 for role in Role}

    def prepare(self) -> None:
        """Check the configuration and the model's files, and choose the port and Ray's folder, so that the state file
        can name them before anything is started. PdserveError if the service cannot start."""
        model = self._source = resolve_model(self.config.model.path)
        self.model = model.name
        if model.folder is not None and self.owns_ray:  # on a cluster, each host has its own files
            check_weight_files(model.folder)
        if note := tokenizer_note(model.folder):
            self._note(note)  # the gateway adds it to its status itself
        roles_of(self.config.cluster)
        gateway = self.config.gateway
        security_of(gateway, MonotonicClock())  # its files are read again by the gateway
        plane_tls(self.config.cluster)  # those of this host; each worker reads its own
        self.port = free_port(gateway.host, gateway.port)
        if gateway.served_http_port:
            free_port(gateway.host, gateway.served_http_port, "gateway.http_port")

    def start(self) -> None:
        """Start everything. On an error everything is stopped again and a PdserveError raised."""
        with self._changing:
            self._check()
            try:
                address = self.config.cluster.address
                self._report("starting Ray" if self.owns_ray else f"joining Ray at {address}")
                self._session.start(check=self._check, report=self._report)
                self._check()
                self._start_gateway()
                self._start_workers()
                self._check()
            except ray.exceptions.RayError as error:
                self.stop(STOP_TIMEOUT_S)
                raise LaunchError(f"Ray failed while the service was starting: {one_line(error)}") from None
            except BaseException:
                self.stop(0.0)
                raise

    def cancel(self) -> None:
        """Have `start` end with StartCancelled as soon as possible."""
        self._cancelled.set()

    def status(self) -> pb.GetStatusResponse:
        """The status for operators, with addresses and processes. LaunchError if the gateway does not answer."""
        if self._gateway is None or not self._session.is_alive():
            raise LaunchError("the service has no gateway now")
        try:
            return pb.GetStatusResponse.FromString(ray.get(self._gateway.status.remote(), timeout=STATUS_ANSWER_S))
        except ray.exceptions.RayError as error:
            raise LaunchError(f"the gateway does not answer: {one_line(error)}") from None

    def drain(self) -> int:
        """Have the gateway refuse new requests. Returns the number of requests in progress."""
        if self._gateway is None or not self._session.is_alive():
            return 0
        try:
            self._draining = ray.get(self._gateway.drain.remote(), timeout=DRAIN_ANSWER_S)
        except ray.exceptions.RayActorError:
            return 0  # the gateway and its streams have ended
        except ray.exceptions.RayError as error:
            log.warning("the gateway does not answer: %s", one_line(error))
            return max(1, self._draining)  # requests go on until the drain's deadline
        return self._draining

    def stop(self, patience_s: float = STOP_TIMEOUT_S) -> None:
        """End workers, gateway, placement groups, and a Ray of our own. Gateway and workers are asked to stop, and
        killed after ``patience_s`` each (0, or after a failure of Ray: at once)."""
        patience_s = 0.0 if self._session.trouble() else patience_s
        if ray.is_initialized() and self._session.is_alive():
            gateway, self._gateway = self._gateway, None
            with contextlib.suppress(ray.exceptions.RayError):
                if gateway is not None:
                    if patience_s > 0:
                        ray.wait([gateway.stop.remote()], timeout=patience_s)
                    ray.kill(gateway, no_restart=True)
            if self._members is not None:
                self._members.remove(self._members.all, patience_s)
        self._gateway = self._members = None
        self._session.stop()
        clear_leftovers("", self._processes)  # a Ray that was joined does not wait for them
        end_children()

    def scale(
        self, wanted: Mapping[Role, int], drain_s: float, report: Report, oversubscribe: bool = False
    ) -> list[str]:
        """Bring the service to ``wanted`` workers of each role; other roles stay as they are. Removed workers finish
        their requests first, for at most ``drain_s``. Added workers serve when this returns, except the returned ones,
        which wait for a node that Ray was asked for. With ``oversubscribe``, workers without a free device slot share
        one. On a LaunchError no worker was added, but removed workers are gone."""
        if not self._changing.acquire(blocking=False):
            raise LaunchError("the service is starting or being scaled; try again later")
        try:
            return self._scale(wanted, drain_s, report, oversubscribe or self.config.cluster.oversubscribe)
        except ray.exceptions.RayError as error:
            raise LaunchError(f"Ray failed while the service was being scaled: {one_line(error)}") from None
        finally:
            self._changing.release()

    def tend(self) -> None:
        """Periodic maintenance: send the service's members to the gateway, which may have been restarted. RayLost if
        Ray's control service or this node's raylet is gone."""
        if trouble := self._session.trouble():
            self._missed += 1
            if self._missed >= MISSED_CHECKS:
                raise RayLost(f"{trouble}: the service cannot go on without it")
            return
        self._missed = 0
        if not self._changing.locked():
            self._send_members()

    def processes(self) -> tuple[ProcessId, ...]:
        """Gateway, workers, and engines on this host of a service that joined a Ray, where nothing else identifies
        them. While Ray does not answer, the last known ones."""
        if self.owns_ray or self._gateway is None or self._session.trouble():
            return self._processes
        found = []
        for actor in self._actors().values():
            place = locate(actor)
            if place is not None and place.node_id == ray.get_runtime_context().get_node_id():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(place.pid)
                    found += [identify(each) for each in (process, *process.children(recursive=True))]
        self._processes = tuple(sorted(found))
        return self._processes

    def logs(self) -> dict[str, tuple[str, str]]:
        """Node and path of the logs of gateway and workers, without those that have no process yet."""
        return {name: (place.node, log_path(place)) for name, place in self._places().items()}

    def read_log(self, name: str, path: str, offset: int) -> LogPart:
        """The part of the log of the gateway or a worker at ``offset``, or its first part if the log is not at ``path``
        (any more). LaunchError if there is none."""
        place = self._places().get(name)
        if place is None:
            raise LaunchError(f"{name} has no log: it does not exist, or has no process yet")
        return read_log(place, path, offset)

    def _places(self) -> dict[str, ProcessPlace]:
        """The processes of gateway and workers, without those that have none yet; empty while Ray does not answer."""
        if self._gateway is None or self._session.trouble():
            return {}
        located = {name: locate(actor) for name, actor in self._actors().items()}
        return {name: place for name, place in located.items() if place is not None}

    def _actors(self) -> dict[str, Any]:
        members = self._members.all if self._members else ()
        return {"gateway": self._gateway, **{member.worker_id: member.actor for member in members}}

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise StartCancelled("the service was asked to stop while it was starting")

    def _scale(self, wanted: Mapping[Role, int], drain_s: float, report: Report, oversubscribe: bool) -> list[str]:
        members = self._members
        if members is None:
            raise LaunchError("the service is not running")
        for role, count in wanted.items():
            present = len(members.of(role))
            if bool(count) != bool(present):
                raise LaunchError(f"{role}: {present} workers cannot become {count}: a service keeps its initial roles")
        leaving = [member for role, count in wanted.items() for member in _to_leave(members.of(role), count)]
        coming = [role for role, count in wanted.items() for _ in range(count - len(members.of(role)))]
        if leaving:
            report(f"{_names(leaving)}: finishing requests")
            retiring = self._gateway.retire.remote([member.worker_id for member in leaving], drain_s)
            ray.get(retiring, timeout=drain_s + STOP_TIMEOUT_S)
            members.remove(leaving)
            for member in leaving:
                self._notes.pop(member.worker_id, None)
        waiting: list[Member] = []
        if coming:
            added = members.add(coming, self._session.nodes(), share=oversubscribe)
            report(f"{_names(added)}: starting")
            try:
                waiting = members.unplaced(added, PLACE_TIMEOUT_S)
                if waiting and self.owns_ray:
                    hint = (
                        "a GPU's memory is divided when the service starts, so restart it with that many workers"
                        if members.device == "cuda" or oversubscribe
                        else "let workers share slots with --oversubscribe"
                    )
                    raise LaunchError(
                        f"no free slot for {_names(waiting)}, and the service's own Ray gets no more nodes; {hint}"
                    )
                placed = [member for member in added if member not in waiting]
                notes = members.wait_ready(placed, self.config.cluster.start_timeout_s, report)
                self._take_notes(notes, report)
            except BaseException:
                members.remove(added)
                raise
        self._send_members()
        return [member.worker_id for member in waiting]

    def _start_gateway(self) -> None:
        host = "127.0.0.1" if self.owns_ray else ray.util.get_node_ip_address()
        base = port_base(self.config.cluster)
        self._registry_address = f"{host}:{free_port(host, base, 'cluster.port_base')}"
        self._report(f"starting the gateway on port {self.port}")
        gateway_config = self.config.gateway.model_copy(update={"port": self.port})
        self._placed_config = self.config.model_copy(update={"gateway": gateway_config})
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        gateway: Any = GatewayActor
        self._gateway = gateway.options(
            num_cpus=0, max_restarts=-1, max_concurrency=8, scheduling_strategy=here
        ).remote(self._placed_config.model_dump(mode="json"), self._registry_address, self._id, self._secret.hex())

    def _start_workers(self) -> None:
        model = self._source
        assert model is not None, "call prepare first"
        cluster = self.config.cluster
        nodes, device, bundles = self._await_nodes()
        choice = service_dtype(self.config, model.shape.dtype, device, hosts_of(nodes, bundles), self._session.owned)
        self._take_notes({self._id: [choice.note] if choice.note else []})
        model_config = self.config.model.model_copy(update={"dtype": choice.dtype})
        self._placed_config = self._placed_config.model_copy(update={"model": model_config})
        self._report(f"placing {cluster.prefill} prefill and {cluster.decode} decode workers")
        members = self._members = Members(
            self._placed_config,
            device,
            bundles,
            registry_address=self._registry_address,
            service=self._id,
            secret=self._secret,
            port_base=port_base(cluster),
            host="127.0.0.1" if self.owns_ray else "",
        )
        added = members.add(roles_of(cluster), nodes)
        timeout_s = cluster.start_timeout_s
        self._await_placed(members, added, timeout_s)
        self._await_gateway(self._gateway.wait_started.remote(), timeout_s)
        self._report(f"loading {self.model} in {choice.dtype} on {len(added)} workers ({device})")
        self._take_notes(members.wait_ready(added, timeout_s, self._report, self._check))
        self._await_gateway(self._gateway.wait_serving.remote(timeout_s), timeout_s)
        self._send_members()

    def _await_placed(self, members: Members, added: Sequence[Member], timeout_s: float) -> None:
        """Wait until all workers have a node, and report what is missing."""
        began_s = time.monotonic()
        reported = ""
        while waiting := members.unplaced(added, CHECK_EVERY_S):
            self._check()
            waited_s = time.monotonic() - began_s
            by_bundle: dict[str, list[Member]] = {}
            for member in waiting:
                by_bundle.setdefault(in_words(member.bundle), []).append(member)
            wants = "; ".join(f"{bundle} for {_names(group)}" for bundle, group in by_bundle.items())
            if waited_s > timeout_s:
                raise LaunchError(
                    f"Ray could not place {_names(waiting)} within {timeout_s:.0f} s: no node has {wants} to spare; "
                    "`ray status` shows what is taken"
                )
            if waited_s > PLACE_REPORT_S:
                free = "; ".join(f"{node.ip} has {in_words(node.available)}" for node in self._session.nodes())
                if reported != (reported := f"waiting for room: {wants}; now free: {free}"):
                    self._report(reported)

    def _await_gateway(self, answer: Any, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s + STOP_TIMEOUT_S
        while not ray.wait([answer], timeout=CHECK_EVERY_S)[0]:
            self._check()
            if time.monotonic() > deadline_s:
                raise LaunchError(f"the gateway did not answer within {timeout_s:.0f} s")
        result = ray.get(answer)
        if "error" in result:
            raise from_wire(*result["error"])

    def _await_nodes(self) -> tuple[list[Node], str, dict[Role, Bundle]]:
        """The nodes, the device, and the workers' bundles. Waits for missing nodes of a Ray that was joined, because
        nodes join some time after `ray up` has returned."""
        cluster = self.config.cluster
        deadline_s = time.monotonic() + (cluster.start_timeout_s if cluster.nodes else NODES_TIMEOUT_S)
        reported = ""
        while True:
            self._check()
            nodes = self._session.nodes()
            try:
                if len(nodes) < (cluster.nodes or 0) and not self.owns_ray:
                    raise LaunchError(f"cluster.nodes: {cluster.nodes} are wanted, and Ray has {len(nodes)}")
                device = resolve_device(cluster, nodes)
                return nodes, device, worker_bundles(cluster, device, nodes)
            except LaunchError as error:
                if self.owns_ray or time.monotonic() > deadline_s:
                    raise
                if reported != str(error):
                    reported = str(error)
                    self._report(f"waiting for nodes: {reported}")
                time.sleep(NODES_POLL_S)

    def _take_notes(self, notes: Mapping[str, list[str]], report: Report | None = None) -> None:
        """Report notes to the user, and keep them for the service's status."""
        self._notes.update(notes)
        for text in (text for texts in notes.values() for text in texts):
            (report or self._note)(text)

    def _send_members(self) -> None:
        members = self._members.all if self._members else ()
        notes = [text for texts in self._notes.values() for text in texts]
        self._gateway.expect.remote({member.worker_id: str(member.role) for member in members}, notes)


def _to_leave(members: Sequence[Member], stay: int) -> list[Member]:
    """The workers to remove so that ``stay`` remain: those without a node first, then the latest."""
    first_to_stay = sorted(members, key=lambda member: not member.node_id)  # stable
    return first_to_stay[stay:]


def _names(members: Sequence[Member]) -> str:
    return ", ".join(member.worker_id for member in members)


def end_children() -> None:
    """End the remaining descendants of this process by process id."""
    children = psutil.Process(os.getpid()).children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()
    end_processes(children, 3.0)
