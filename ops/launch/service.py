"""The composition root: starts and stops Ray, gateway, and workers in the order of their dependencies."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import psutil
import ray

from checkpoints.hub import HubId
from contract.scaling import GatewayLoad, ScalingReport
from external_engines.directory import ServerAt, named
from ops.launch.gateway_actor import GatewayActor
from ops.launch.leftovers import ProcessId, clear_leftovers, identify
from ops.launch.logs import ProcessPlace, locate, log_path, read_log
from ops.launch.members import STOP_TIMEOUT_S, Member, Members
from ops.launch.node_tasks import (
    CHECK_EVERY_S,
    Check,
    Report,
    answers,
    fetch_model,
    hosts_of,
    on_node,
    one_line,
    service_dtype,
)
from ops.launch.plan import Bundle, Node, in_words, resolve_device, roles_of, worker_bundles
from ops.launch.ports import free_ports, port_base
from ops.launch.preparation import Preparation
from ops.launch.ray_session import RaySession
from ops.launch.shutdown import StartCancelled
from ops.launch.state import target_here
from pdserve.core.address import join_address
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import LaunchError, from_wire
from pdserve.core.worker import Role
from pdserve.pb import inference_pb2 as pb
from pdserve.pb import operator_pb2
from runtime.secret import ServiceSecret

MISSED_CHECKS = 3
"""Limit: failed checks of Ray in a row, every 2 s. Then: its own Ray is restarted; on a joined one the service ends.

The time is `ops.launch.supervisor.TEND_EVERY_S`."""
NODES_TIMEOUT_S = 60.0
"""How long to wait for missing nodes of a Ray that was joined, unless `cluster.nodes` is set."""
NODES_POLL_S = 0.5
FLIP_TIMEOUT_S = 10.0
"""Limit: wait of `scale` for a role flip. Then: it says so, and the flip goes on."""
SERVER_TIMEOUT_S = 15.0
"""Limit: wait of `scale` for servers that it adds. Then: an error; they are not added."""
PLACE_TIMEOUT_S = 5.0
"""After this time an added worker without a node counts as waiting for one."""
PLACE_REPORT_S = 2.0
"""After this time a worker without a node is reported, with the resources it waits for."""
DRAIN_ANSWER_S = 10.0
KEPT_LOGS = 20
"""Processes that have ended whose logs are listed."""
STATUS_ANSWER_S = 5.0

OPEN_RAY = (
    "asks for no token: every host and user that reaches its ports can run programs as its users, and read the "
    "service's secret; see docs/security.md"
)

log = logging.getLogger(__name__)


class Service:
    """A whole pdserve service on one Ray. `start` returns when requests can be served; `stop` ends all of it, also the
    Ray of its own that was begun (`RayHead.begin`)."""

    def __init__(
        self, prepared: Preparation, report: Report = lambda stage: None, note: Report = lambda text: None
    ) -> None:
        """``report`` gets the stages of start-up, ``note`` what users have to know about the service."""
        self.config = prepared.config
        self._source = prepared.source
        self._report, self._note = report, note
        self._notes: dict[str, list[str]] = {}  # by worker id; notes on the whole service are under the service's id
        self._told = set(prepared.notes)
        self.session = RaySession(self.config.cluster.address, prepared.head)
        self._members: Members | None = None
        self._servers = named(self.config.cluster.urls, {})
        self._servers_version = 0
        self._gateways: list[Any] = []
        self._id = uuid.uuid4().hex
        self._secret = ServiceSecret.new()
        self._cache_key = prepared.cache_key or self._secret.cache_key
        self._changing = threading.Lock()
        self._cancelled = threading.Event()
        self._draining = 0  # requests in progress at the gateway's last answer
        self._missed = 0  # failed checks of Ray in a row
        self._scaling: ScalingReport | None = None
        self._processes: tuple[ProcessId, ...] = ()
        self._waiting = ""  # what was last reported to be waited for
        self._seen: dict[ProcessPlace, str] = {}  # the processes of gateways and workers so far, by name

    @property
    def port(self) -> int:
        """The port of the first gateway."""
        return self.config.gateway.port

    @property
    def counts(self) -> dict[Role, int]:
        """Workers of each role, including those that wait for a node."""
        members = self._members
        if self._servers:
            return Counter(server.role for server in self._servers.values())
        return {role: len(members.of(role)) if members else 0 for role in Role}

    @property
    def servers(self) -> tuple[str, ...]:
        """The URLs of its workers, if it does not start them."""
        return tuple(sorted(server.url for server in self._servers.values()))

    @property
    def is_changing(self) -> bool:
        """Whether it is starting or being scaled."""
        return self._changing.locked()

    def start(self) -> None:
        """Start everything. On an error everything is stopped again and a PdserveError raised."""
        with self._changing:
            try:
                self._check()
                self.session.start(check=self._check, report=self._report)
                self._start_processes()
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
        """The status for operators, with addresses and processes: that of the first gateway that answers, with the
        requests of all and a list of them. LaunchError if none answers."""
        gateways: list[pb.GatewayStatus] = []
        failure = "the service has no gateway now"
        status: pb.GetStatusResponse | None = None
        for number, one in enumerate(self._ask("status", STATUS_ANSWER_S)):
            target = target_here(self.config.gateway, self.port + number)
            if isinstance(one, Exception):
                failure = f"the gateway at {target} does not answer: {one_line(one)}"
                gateways.append(pb.GatewayStatus(target=target, state="lost"))
                continue
            state = "ready" if one.ready else "not ready"
            figures = {name: getattr(one, name) for name in ("pid", "queued", "running", "uptime_s")}
            gateways.append(pb.GatewayStatus(target=target, state=state, **figures))
            status = status or one
        if status is None:
            raise LaunchError(failure)
        status.queued = sum(gateway.queued for gateway in gateways)
        status.running = sum(gateway.running for gateway in gateways)
        status.gateways.extend(gateways)
        return status

    def drain(self) -> int:
        """Have the gateways refuse new requests. Returns the number of requests in progress."""
        answers = self._ask("drain", DRAIN_ANSWER_S)
        in_progress = sum(answer for answer in answers if isinstance(answer, int))
        # The streams of a gateway that has died have ended. The requests of a silent one go on until the deadline.
        lost = (int, ray.exceptions.RayActorError)
        silent = any(not isinstance(answer, lost) for answer in answers)
        self._draining = max(in_progress, self._draining, 1) if silent else in_progress
        return self._draining

    def stop(self, patience_s: float = STOP_TIMEOUT_S) -> None:
        """End workers, gateway, placement groups, and a Ray of our own. Gateway and workers are asked to stop, and
        killed after ``patience_s`` each (0, or after a failure of Ray: at once)."""
        patience_s = 0.0 if self.session.trouble() else patience_s
        if ray.is_initialized() and self.session.is_alive():
            gateways, self._gateways = self._gateways, []
            with contextlib.suppress(ray.exceptions.RayError):
                if gateways and patience_s > 0:
                    stopping = [gateway.stop.remote() for gateway in gateways]
                    ray.wait(stopping, num_returns=len(stopping), timeout=patience_s)
            for gateway in gateways:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.kill(gateway, no_restart=True)
            if self._members is not None:
                self._members.remove(self._members.all, patience_s)
        self._gateways, self._members = [], None
        self.session.stop()
        clear_leftovers("", self._processes)  # a Ray that was joined does not wait for them

    def scale(
        self,
        wanted: Mapping[Role, int],
        drain_s: float,
        report: Report,
        oversubscribe: bool = False,
        urls: Mapping[Role, Sequence[str]] | None = None,
    ) -> operator_pb2.Scaled:
        """Bring the service to ``wanted`` workers of each role, or to the servers at ``urls``; other roles stay as they
        are. Where one role shrinks and the other grows, workers take the other role, but servers do not. Removed
        workers finish their requests first, for at most ``drain_s``. Added workers serve when this returns, except
        those that wait for a node. With ``oversubscribe``, workers without a free device slot share one. On a
        LaunchError no worker was added, but removed workers are
        gone, and others have taken another role."""
        if not self._changing.acquire(blocking=False):
            raise LaunchError("the service is starting or being scaled; try again later")
        try:
            if urls or self._servers:
                return self._scale_servers(wanted, urls or {}, drain_s, report)
            return self._scale(wanted, drain_s, report, oversubscribe or self.config.cluster.oversubscribe)
        except ray.exceptions.RayError as error:
            raise LaunchError(f"Ray failed while the service was being scaled: {one_line(error)}") from None
        finally:
            self._changing.release()

    def loads(self) -> list[GatewayLoad | None]:
        """The load at each gateway; None of those that do not answer."""
        answers = self._ask("load", STATUS_ANSWER_S)
        return [answer if isinstance(answer, GatewayLoad) else None for answer in answers]

    def rescale(self, wanted: dict[Role, int], drain_s: float) -> list[str]:
        """`scale` for the controller. Returns what was done, in words."""
        done = self.scale(wanted, drain_s, lambda stage: log.info("scaling: %s", stage))
        flips = [f"{worker_id} becomes a {role} worker" for worker_id, role in done.flipped.items()]
        return [*flips, *(f"{worker_id} waits for a node" for worker_id in done.waiting)]

    def report_scaling(self, report: ScalingReport) -> None:
        """Show with the status what the controller has done."""
        self._scaling = report
        self._send_members()

    def check_ray(self) -> None:
        """LaunchError if Ray's control service or this node's raylet is gone. Calls nothing of Ray, which may hang
        then."""
        trouble = self.session.trouble()
        self._missed = self._missed + 1 if trouble else 0
        if self._missed >= MISSED_CHECKS:
            raise LaunchError(f"{trouble}: the service cannot go on without it")

    def tend(self) -> None:
        """Periodic maintenance: send the service's members to the gateways, which may have been restarted, and look at
        the processes, whose logs are shown after their end."""
        if not self._missed and not self._changing.locked():
            self._send_members()
            self._places()

    def processes(self) -> tuple[ProcessId, ...]:
        """Gateway, workers, and engines on this host of a service that joined a Ray, where nothing else identifies
        them. While Ray does not answer, the last known ones."""
        if self.session.owned or not self._gateways or self.session.trouble():
            return self._processes
        found = []
        for place in self._places().values():
            if place.node_id == ray.get_runtime_context().get_node_id():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(place.pid)
                    found += [identify(each) for each in (process, *process.children(recursive=True))]
        self._processes = tuple(sorted(found))
        return self._processes

    def logs(self) -> list[operator_pb2.Log]:
        """The logs of gateways and workers; NAME@PID is that of a process that has ended."""
        return [
            operator_pb2.Log(name=name, node=place.node, path=log_path(place)) for name, place in self._logged().items()
        ]

    def read_log(self, name: str, path: str, offset: int) -> operator_pb2.ReadLogResponse:
        """The part of a log at ``offset``, or its first part if the log is not at ``path`` (any more). LaunchError if
        there is none."""
        place = self._logged().get(name)
        if place is None:
            raise LaunchError(f"{name} has no log: it does not exist, or has no process yet")
        return read_log(place, path, offset)

    def _places(self) -> dict[str, ProcessPlace]:
        """The processes of gateways and workers, without those that have none yet; empty while Ray does not answer."""
        if not self._gateways or self.session.trouble():
            return {}
        located = {name: locate(actor) for name, actor in self._actors().items()}
        places = {name: place for name, place in located.items() if place is not None}
        self._seen.update({place: name for name, place in places.items()})
        return places

    def _logged(self) -> dict[str, ProcessPlace]:
        """`_places`, and as NAME@PID the last processes that have ended, on nodes that are still there."""
        places = self._places()
        if not places:
            return {}
        nodes = {node.node_id for node in self.session.nodes()}
        ended = [(place, name) for place, name in self._seen.copy().items() if place not in places.values()]
        return places | {f"{name}@{place.pid}": place for place, name in ended[-KEPT_LOGS:] if place.node_id in nodes}

    def _actors(self) -> dict[str, Any]:
        members = self._members.all if self._members else ()
        gateways = {f"gateway-{number}" if number else "gateway": each for number, each in enumerate(self._gateways)}
        return {**gateways, **{member.worker_id: member.actor for member in members}}

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise StartCancelled("the service was asked to stop while it was starting")

    def _scale(
        self, wanted: Mapping[Role, int], drain_s: float, report: Report, oversubscribe: bool
    ) -> operator_pb2.Scaled:
        members = self._members
        if members is None:
            raise LaunchError("the service is not running")
        for role, count in wanted.items():
            present = len(members.of(role))
            if bool(count) != bool(present):
                raise LaunchError(f"{role}: {present} workers cannot become {count}: a service keeps its initial roles")
        flipped = self._flip(members, wanted, report)
        leaving = [member for role, count in wanted.items() for member in _to_leave(members.of(role), count)]
        coming = [role for role, count in wanted.items() for _ in range(count - len(members.of(role)))]
        if leaving:
            report(f"{_names(leaving)}: finishing requests")
            names = [member.worker_id for member in leaving]
            # None may dismiss a worker while another one still uses it.
            self._have_gateways("directory.retire", drain_s + STOP_TIMEOUT_S, names, drain_s)
            self._have_gateways("dismiss", STOP_TIMEOUT_S, names)
            members.remove(leaving)
            for member in leaving:
                self._notes.pop(member.worker_id, None)
        waiting: list[Member] = []
        if coming:
            self._fetch_model(hosts_of(self.session.nodes(), members.bundles), report)
            added = members.add(coming, self.session.nodes(), share=oversubscribe)
            try:
                waiting = members.unplaced(added, PLACE_TIMEOUT_S)
                if waiting and self.session.owned:
                    hint = (
                        "a GPU's memory is divided when the service starts, so restart it with that many workers"
                        if members.device == "cuda" or oversubscribe
                        else "let workers share slots with --oversubscribe"
                    )
                    raise LaunchError(
                        f"no free slot for {_names(waiting)}, and the service's own Ray gets no more nodes; {hint}"
                    )
                placed = [member for member in added if member not in waiting]
                if placed:
                    report(f"{_names(placed)}: starting")
                self._send_members()  # before they report to the gateways
                notes = members.wait_ready(placed, self.config.cluster.start_limit_s(members.device), report)
                self._take_notes(notes, report)
            except BaseException:
                members.remove(added)
                raise
        self._send_members()
        return operator_pb2.Scaled(
            prefill=len(members.of(Role.PREFILL)),
            decode=len(members.of(Role.DECODE)),
            waiting=[member.worker_id for member in waiting],
            flipped={member.worker_id: member.role for member in flipped},
        )

    def _scale_servers(
        self, wanted: Mapping[Role, int], urls: Mapping[Role, Sequence[str]], drain_s: float, report: Report
    ) -> operator_pb2.Scaled:
        present = self._servers
        if not present:
            raise LaunchError("pdserve starts the workers of this service; give their numbers: --prefill N, --decode N")
        if wanted:
            raise LaunchError(
                "its workers are servers that pdserve does not start; name all that it should have, by "
                "--prefill-url URL, --decode-url URL, or both"
            )
        roles = {server.role for server in present.values()}
        for role in urls.keys() - roles:
            raise LaunchError(f"{role}: there is no such worker, and a service keeps its initial roles")
        PdserveConfig.load(None, {f"cluster.{role}_urls": list(at) for role, at in urls.items()})  # checks them
        before = {role: [server.url for server in present.values() if server.role is role] for role in roles}
        servers = named({**before, **urls}, present)
        coming = {worker_id: server for worker_id, server in servers.items() if worker_id not in present}
        leaving = sorted(present.keys() - servers.keys())
        if coming:
            report(", ".join(f"{worker_id} at {server.url}" for worker_id, server in coming.items()) + ": waiting")
            self._set_servers({**present, **coming})
            late = self._have_gateways(
                "directory.wait_roles", SERVER_TIMEOUT_S + STOP_TIMEOUT_S, list(coming), SERVER_TIMEOUT_S
            )
            if missing := sorted({name for names in late for name in names}):
                notes = [
                    note for note in self.status().notes if note.startswith(tuple(f"{name}: " for name in missing))
                ]
                self._set_servers(present)
                raise LaunchError("; ".join(notes) or f"{', '.join(missing)}: not ready in {SERVER_TIMEOUT_S:.0f} s")
        if leaving:
            report(f"{', '.join(leaving)}: finishing requests")
            self._have_gateways("directory.retire", drain_s + STOP_TIMEOUT_S, leaving, drain_s)
            self._set_servers(servers)
        counts = self.counts
        return operator_pb2.Scaled(prefill=counts[Role.PREFILL], decode=counts[Role.DECODE])

    def _set_servers(self, servers: Mapping[str, ServerAt]) -> None:
        self._servers, self._servers_version = dict(servers), self._servers_version + 1
        self._have_gateways("expect", STOP_TIMEOUT_S, *self._expected())

    def _flip(self, members: Members, wanted: Mapping[Role, int], report: Report) -> list[Member]:
        """Where one role is to shrink and the other to grow, give workers the other role. Returns when all gateways
        give them its work, or after `FLIP_TIMEOUT_S`: a worker that is not there now takes its role when it comes."""
        surplus = {role: len(members.of(role)) - count for role, count in wanted.items()}
        giving = next((role for role, count in surplus.items() if count > 0), None)
        taking = next((role for role, count in surplus.items() if count < 0), None)
        if giving is None or taking is None:
            return []
        if not members.may_flip:
            report(
                "workers keep their roles (cluster.prefill_resources and cluster.decode_resources differ, or their "
                "servers are SGLang's); some leave and others are added"
            )
            return []
        count = min(surplus[giving], -surplus[taking])
        flipped = members.flip(_to_flip(members.of(giving), taking, count, self._workers()), taking)
        for member in flipped:
            report(f"{member.worker_id} becomes a {taking} worker")
        self._send_members()
        names = [member.worker_id for member in flipped]
        answers = self._have_gateways("directory.wait_roles", FLIP_TIMEOUT_S + STOP_TIMEOUT_S, names, FLIP_TIMEOUT_S)
        for name in sorted({name for late in answers for name in late}):
            report(f"{name} takes its role as soon as it is there")
        return flipped

    def _workers(self) -> dict[str, pb.WorkerStatus]:
        """The status of the workers, by id; empty if no gateway gives it."""
        try:
            return {worker.worker_id: worker for worker in self.status().workers}
        except LaunchError as error:
            log.warning("%s", error)
            return {}

    def _ask(self, method: str, timeout_s: float, *arguments: Any) -> list[Any]:
        """Call the ``method`` (see `GatewayActor.call`) of all gateways at once. Returns an answer for each, or the
        RayError instead of one."""
        if not self._gateways or not self.session.is_alive():
            return []
        asked = [gateway.call.remote(method, timeout_s, *arguments) for gateway in self._gateways]
        ray.wait(asked, num_returns=len(asked), timeout=timeout_s)
        results: list[Any] = []
        for answer in asked:
            try:
                results.append(ray.get(answer, timeout=0))
            except ray.exceptions.RayError as error:
                log.warning("a gateway did not answer %s within %g s: %s", method, timeout_s, one_line(error))
                results.append(error)
        return results

    def _have_gateways(self, method: str, timeout_s: float, *arguments: Any) -> list[Any]:
        """`_ask` for answers alone. A gateway that has died or hangs is not needed: its requests have ended, or go to
        other workers once it goes on. A call that fails is an error."""
        results = self._ask(method, timeout_s, *arguments)
        for failed in (answer for answer in results if isinstance(answer, ray.exceptions.RayTaskError)):
            raise failed
        return [answer for answer in results if not isinstance(answer, Exception)]

    def _start_processes(self) -> None:
        """Start workers and gateways side by side, and wait until they serve."""
        cluster, gateway, host = self.config.cluster, self.config.gateway, "127.0.0.1"
        if not self.session.owned:
            host = ray.util.get_node_ip_address()
        if self._servers:
            self._start_before_servers(host)
            return
        nodes, device, bundles = self._await_nodes()
        self._fetch_model(hosts_of(nodes, bundles), self._report, self._check)
        shape = self._source.shape
        choice = service_dtype(self.config, shape.dtype, device, hosts_of(nodes, bundles), self.session.owned)
        notes = [choice.note] if choice.note else []
        if not self.session.owned and self.session.is_open():
            notes.append(f"Ray at {self.session.address} {OPEN_RAY}")
        self._take_notes({self._id: notes})
        model_config = self.config.model.model_copy(update={"dtype": choice.dtype})
        config = self.config.model_copy(update={"model": model_config})
        count = gateway.replicas
        base = free_ports(host, port_base(cluster), count, "cluster.port_base")
        registries = tuple(join_address(host, base + number) for number in range(count))
        members = self._members = Members(
            config,
            device,
            bundles,
            registry_addresses=registries,
            service=self._id,
            secret=self._secret,
            port_base=port_base(cluster),
            host=host if self.session.owned else "",
        )
        gateways, ports = ("the gateway", f"port {self.port}")
        if count > 1:
            gateways, ports = ("the gateways", f"ports {self.port} to {self.port + count - 1}")
        self._report(
            f"starting {cluster.prefill} prefill and {cluster.decode} decode workers ({device}, {choice.dtype}), and "
            f"{gateways} on {ports}"
        )
        began_s = time.monotonic()
        added = members.add(roles_of(cluster), nodes)  # first, because they take longest
        self._start_gateways(config, registries)
        timeout_s = cluster.start_limit_s(device)
        self._await_placed(members, added, timeout_s)
        self._await_gateways(timeout_s)
        self._report(f"{gateways} listen{'' if count > 1 else 's'} ({_since(began_s)})")
        self._take_notes(members.wait_ready(added, timeout_s, self._report, self._check))
        ready_s = time.monotonic()
        self._await_gateways(timeout_s, timeout_s)
        self._report(f"connected ({_since(ready_s)})")
        with contextlib.suppress(LaunchError):  # a gateway that is slow to answer serves all the same
            self._tell(self.status().notes)  # of what the workers have reported
        self._send_members()

    def _start_before_servers(self, host: str) -> None:
        """Start gateways before the servers that the configuration names, and wait until these answer."""
        cluster, count = self.config.cluster, self.config.gateway.replicas
        base = free_ports(host, port_base(cluster), count, "cluster.port_base")
        self._report(f"starting the gateway on port {self.port}, before {len(self._servers)} servers")
        self._start_gateways(self.config, [join_address(host, base + number) for number in range(count)])
        timeout_s = cluster.start_limit_s("cpu")
        self._await_gateways(timeout_s)
        self._await_gateways(timeout_s, timeout_s)
        self._tell(self.status().notes)

    def _fetch_model(self, nodes: Sequence[Node], report: Report, check: Check = lambda: None) -> None:
        """Have the model's files on these nodes before workers start there, whose start has a time limit."""
        for path in (self._source.path, self.config.engine.draft_model):
            if HubId.of(path) is not None and not self.session.owned:  # its own Ray has no other hosts
                fetch_model(path, nodes, report, check)

    def _start_gateways(self, config: PdserveConfig, registries: Sequence[str]) -> None:
        here = on_node(ray.get_runtime_context().get_node_id())
        actor: Any = GatewayActor
        for number, registry in enumerate(registries):
            replica = config.model_copy(update={"gateway": config.gateway.replica(number)})
            self._gateways.append(
                actor.options(num_cpus=0, max_restarts=-1, max_concurrency=8, scheduling_strategy=here).remote(
                    replica, registry, self._id, self._secret.hex(), self._cache_key
                )
            )

    def _await_placed(self, members: Members, added: Sequence[Member], timeout_s: float) -> None:
        """Wait until all workers have a node, and report what is missing."""
        began_s = time.monotonic()
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
                free = "; ".join(f"{node.ip} has {in_words(node.available)}" for node in self.session.nodes())
                self._report_waiting(f"waiting for room: {wants}; now free: {free}")

    def _report_waiting(self, what: str) -> None:
        if what != self._waiting:
            self._waiting = what
            self._report(what)

    def _await_gateways(self, timeout_s: float, *serving_s: float) -> None:
        """Wait for all gateways; see `GatewayActor.wait`."""
        deadline_s = time.monotonic() + timeout_s + STOP_TIMEOUT_S

        def waiting(numbers: list[int]) -> None:
            self._check()
            if time.monotonic() > deadline_s:
                raise LaunchError(f"the gateway did not answer within {timeout_s:.0f} s")

        asked = {gateway.wait.remote(*serving_s): number for number, gateway in enumerate(self._gateways)}
        for _, answer in answers(asked, waiting):
            if isinstance(answer, Exception):
                raise answer
            if "error" in answer:
                raise from_wire(*answer["error"])

    def _await_nodes(self) -> tuple[list[Node], str, dict[Role, Bundle]]:
        """The nodes, the device, and the workers' bundles. Waits for missing nodes of a Ray that was joined, because
        nodes join some time after `ray up` has returned."""
        cluster = self.config.cluster
        deadline_s = time.monotonic() + (cluster.start_limit_s(cluster.device) if cluster.nodes else NODES_TIMEOUT_S)
        while True:
            self._check()
            nodes = self.session.nodes()
            try:
                if len(nodes) < (cluster.nodes or 0) and not self.session.owned:
                    raise LaunchError(f"cluster.nodes: {cluster.nodes} are wanted, and Ray has {len(nodes)}")
                device = resolve_device(cluster, nodes)
                return nodes, device, worker_bundles(cluster, device, nodes, self.config.engine.slots)
            except LaunchError as error:
                if self.session.owned or time.monotonic() > deadline_s:
                    raise
                self._report_waiting(f"waiting for nodes: {error}")
                time.sleep(NODES_POLL_S)

    def _take_notes(self, notes: Mapping[str, list[str]], report: Report | None = None) -> None:
        """Report notes to the user, and keep them for the service's status."""
        self._notes.update(notes)
        self._tell([text for texts in notes.values() for text in texts], report)

    def _tell(self, notes: Iterable[str], report: Report | None = None) -> None:
        """Report those notes to the user that were not reported yet."""
        for text in notes:
            if text not in self._told:
                self._told.add(text)
                (report or self._note)(text)

    def _send_members(self) -> None:
        for gateway in self._gateways:
            gateway.call.remote("expect", 0.0, *self._expected())

    def _expected(self) -> tuple[Any, ...]:
        """The arguments of `Gateway.expect`."""
        notes = list(dict.fromkeys(text for texts in self._notes.values() for text in texts))
        if self._members is None:
            roles = {worker_id: server.role for worker_id, server in self._servers.items()}
            return roles, notes, self._servers_version, self._scaling, self._servers
        version = self._members.version  # read first: others may change the members now
        return {member.worker_id: member.role for member in self._members.all}, notes, version, self._scaling


def _to_leave(members: Sequence[Member], stay: int) -> list[Member]:
    """The workers to remove so that ``stay`` remain: those without a node first, then the latest."""
    first_to_stay = sorted(members, key=lambda member: not member.node_id)  # stable
    return first_to_stay[stay:]


def _to_flip(members: Sequence[Member], role: Role, count: int, workers: Mapping[str, pb.WorkerStatus]) -> list[Member]:
    """The workers to give another ``role``: first those that started with it, then those whose device slot no worker of
    that role shares, then those with the least to do, then the latest. ``workers`` are their statuses, as far as known.
    """
    taken = {_slot(worker) for worker in workers.values() if worker.role == role}

    def order(member: Member) -> tuple[bool, bool, int]:
        worker = workers.get(member.worker_id)
        shares = worker is not None and _slot(worker) in taken
        return member.born is not role, shares, 0 if worker is None else worker.outstanding_tokens

    return sorted(reversed(members), key=order)[:count]


def _slot(worker: pb.WorkerStatus) -> tuple[str, str]:
    return worker.node, worker.cores if worker.device == "cpu" else worker.cuda_visible_devices


def _since(began_s: float) -> str:
    return f"{time.monotonic() - began_s:.1f} s"


def _names(members: Sequence[Member]) -> str:
    return ", ".join(member.worker_id for member in members)
