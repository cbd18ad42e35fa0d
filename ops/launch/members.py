"""The workers of a running service: one placement group and one actor each.

With one group per worker, workers can be added and removed one by one: the slot of a removed worker is free at once, a
group that does not fit is a demand that Ray's autoscaler sees, and when a node dies Ray moves the group and its actor
to another node.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from decode_worker.actor import DecodeWorkerActor
from ops.launch.node_tasks import Check, Report, answers, one_line
from ops.launch.plan import Bundle, Node, plan, shared_bundles
from ops.launch.ports import first_port
from ops.launch.worker import make_worker
from pdserve.core.config import PdserveConfig, PlacementPolicy
from pdserve.core.errors import LaunchError, from_wire
from pdserve.core.worker import Role
from pdserve.version import VERSION
from prefill_worker.actor import PrefillWorkerActor
from runtime.secret import ServiceSecret
from worker.spec import WorkerSpec


def reserve_slot(
    bundle: Bundle, target: Node | None, policy: PlacementPolicy, taken: Collection[str]
) -> PlacementGroup:
    """Request ``bundle`` from Ray, preferably on ``target``. Under ``strict_spread`` the nodes ``taken`` (ids) are
    excluded. Returns at once; the group may have to wait for a node."""
    others = sorted(set(taken) - ({target.node_id} if target else set()))
    # Selectors are hard constraints, targets are soft: after a node's death any other node may be used.
    selector = [{"ray.io/node-id": f"!in({','.join(others)})"}] if policy == "strict_spread" and others else None
    return placement_group(
        [dict(bundle)],
        strategy="STRICT_PACK",
        _soft_target_node_id=target.node_id if target else None,
        bundle_label_selector=selector,
    )


def node_of(group: PlacementGroup) -> str:
    """The id of the node that holds the group's bundle now; empty if none does."""
    table = placement_group_table(group)
    return str(table["bundles_to_node_id"].get(0, "")) if table["state"] == "CREATED" else ""


def wait_placed(groups: Sequence[PlacementGroup], timeout_s: float) -> list[PlacementGroup]:
    """Wait up to ``timeout_s`` until every group has a node; returns those that have none."""
    asked = {group.ready(): group for group in groups}
    _, waiting = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
    return [asked[reference] for reference in waiting]


STOP_TIMEOUT_S = 10.0
ACTORS: dict[Role, Any] = {Role.PREFILL: PrefillWorkerActor, Role.DECODE: DecodeWorkerActor}


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One worker. It keeps its name if its role changes."""

    worker_id: str
    role: Role
    born: Role  # the role that it started with
    ordinal: int  # its number among all workers of the service, from which its ports follow
    group: PlacementGroup
    actor: Any
    bundle: Bundle
    asked_s: float  # when Ray was asked for it, by `time.monotonic`

    @property
    def node_id(self) -> str:
        """The worker's node; empty while it waits for one."""
        return node_of(self.group)


def _niceness_note(niceness: int) -> list[str]:
    """A note for the user if workers run at a higher niceness than this process."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    if niceness <= own:
        return []
    return [
        f"Ray runs workers at niceness {niceness}, and `pdserve up` has {own}: other programs of their hosts come "
        "first; start Ray with RAY_worker_niceness=0 in its environment"
    ]


class Members:
    """Adds and removes workers of the service with this ``secret``. ``host`` is the address they listen on (empty: that
    of each worker's node)."""

    def __init__(
        self,
        config: PdserveConfig,
        device: str,
        bundles: Mapping[Role, Bundle],
        *,
        registry_addresses: tuple[str, ...],
        service: str,
        secret: ServiceSecret,
        port_base: int,
        host: str,
    ) -> None:
        self.device = device
        self._config = config
        self.bundles = bundles
        self._registry_addresses, self._service, self._secret = registry_addresses, service, secret
        self._port_base = port_base
        self._host = host
        self._members: dict[str, Member] = {}
        self.version = 0
        """Grows with every change of the members and their roles."""

    @property
    def all(self) -> tuple[Member, ...]:
        """All workers, in the order they were added."""
        return tuple(self._members.values())

    def of(self, role: Role) -> list[Member]:
        """The workers of one role, in the order they were added."""
        return [member for member in self._members.values() if member.role is role]

    def add(self, roles: Sequence[Role], nodes: Sequence[Node], *, share: bool = False) -> list[Member]:
        """Request a worker for each of ``roles``. Workers start by themselves as soon as they have a node. With
        ``share``, workers without a free device slot share one (see `plan.shared_bundles`). Under ``strict_spread``,
        LaunchError if there is not one node for each; no worker is added then."""
        policy = self._config.cluster.placement
        present = [(member.node_id, member.role) for member in self._members.values()]
        targets = plan(roles, self.bundles, nodes, policy, present)
        shared = shared_bundles(self._config.cluster, self.device) if share and None in targets else {}
        bundles = [
            shared[role] if shared and target is None else self.bundles[role]
            for role, target in zip(roles, targets, strict=True)
        ]
        on_node = Counter([node_id for node_id, _ in present] + [node.node_id for node in targets if node])
        taken = set(on_node) - {""}
        if policy == "strict_spread" and None in targets:
            raise LaunchError(
                f"cluster.placement: strict_spread wants a node for each worker, and there is none for "
                f"{targets.count(None)} of {len(targets)}; add nodes first, or use spread"
            )
        added: list[Member] = []
        try:
            for role, target, bundle in zip(roles, targets, bundles, strict=True):
                name, ordinal = self._free_name(role), self._free_ordinal()
                spec = self._spec(name, role, ordinal, on_node[target.node_id] if target else 1, bundle)
                group = reserve_slot(bundle, target, policy, taken)
                actor = self._start(spec, group, bundle)
                member = self._members[name] = Member(name, role, role, ordinal, group, actor, bundle, time.monotonic())
                self.version += 1
                added.append(member)
        except BaseException:
            self.remove(added)
            raise
        return added

    @property
    def may_flip(self) -> bool:
        """Whether a worker of one role may take the other. Not if the roles ask for different Ray resources: what one
        has need not do for the other. Not with SGLang, whose servers are started for their role."""
        return self.bundles[Role.PREFILL] == self.bundles[Role.DECODE] and self._config.worker.engine != "sglang"

    def flip(self, members: Sequence[Member], role: Role) -> list[Member]:
        """Give workers another role. They learn of it from the gateways. Returns them as they are now."""
        flipped = [replace(member, role=role) for member in members]
        self._members.update({member.worker_id: member for member in flipped})
        self.version += 1
        return flipped

    def unplaced(self, members: Sequence[Member], timeout_s: float) -> list[Member]:
        """Wait up to ``timeout_s`` for nodes; returns the workers that have none."""
        waiting = wait_placed([member.group for member in members], timeout_s)
        return [member for member in members if member.group in waiting]

    def wait_ready(
        self, members: Collection[Member], timeout_s: float, report: Report, check: Check = lambda: None
    ) -> dict[str, list[str]]:
        """Return once all of them are ready to serve; LaunchError (or what kept one from starting) otherwise. The
        result is what users have to know of each, by worker id. ``report`` gets each worker that is ready, with the
        seconds since Ray was asked for it. ``check`` is called every moment and may raise, which ends the wait."""
        notes: dict[str, list[str]] = {}
        deadline_s = time.monotonic() + timeout_s

        def waiting(late: list[Member]) -> None:
            check()
            if time.monotonic() > deadline_s:
                names = ", ".join(sorted(member.worker_id for member in late))
                raise LaunchError(f"{names}: not ready within {timeout_s:.0f} s")

        for member, answer in answers({member.actor.wait_ready.remote(): member for member in members}, waiting):
            name = member.worker_id
            if isinstance(answer, Exception):
                raise LaunchError(f"{name} did not start: {one_line(answer)}")
            if "error" in answer:
                raise from_wire(*answer["error"])
            notes[name] = answer["notes"]
            if self._config.cluster.address != "local":  # else who started the service has chosen it
                notes[name] = [*notes[name], *_niceness_note(answer["niceness"])]
            report(f"{name} is up ({time.monotonic() - member.asked_s:.1f} s)")
        return notes

    def remove(self, members: Sequence[Member], stop_timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End workers and free their slots. They are asked to stop, and killed after ``stop_timeout_s`` (0: at once).
        Errors of Ray are ignored, because it may be failing."""
        if stop_timeout_s > 0:
            with contextlib.suppress(ray.exceptions.RayError):  # workers without a node would not answer
                stopping = [member.actor.stop.remote() for member in members if member.node_id]
                ray.wait(stopping, num_returns=len(stopping), timeout=stop_timeout_s) if stopping else None
        for member in members:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(member.actor, no_restart=True)
            with contextlib.suppress(ray.exceptions.RayError):
                remove_placement_group(member.group)
            self._members.pop(member.worker_id, None)
            self.version += 1

    def _spec(self, name: str, role: Role, ordinal: int, num_slots: int, bundle: Bundle) -> WorkerSpec:
        return WorkerSpec(
            worker_id=name,
            role=role,
            host=self._host,
            node="",
            device=self.device,
            registry_addresses=self._registry_addresses,
            version=VERSION,
            service=self._service,
            port=first_port(self._port_base, ordinal, self._config.gateway.replicas),
            num_slots=num_slots,
            device_share=min(1.0, bundle.get("GPU", 1.0)),
            config=self._config,
        )

    def _start(self, spec: WorkerSpec, group: PlacementGroup, bundle: Bundle) -> Any:
        others = dict(bundle)
        return (
            ACTORS[spec.role]
            .options(
                # Unique, because a name stays taken for a while after its actor was killed.
                name=f"pdserve-{self._config.gateway.port}-{spec.worker_id}-{secrets.token_hex(4)}",
                num_cpus=others.pop("CPU", 0.0),
                num_gpus=others.pop("GPU", 0.0),
                memory=others.pop("memory", None),
                resources=others or None,
                max_restarts=-1,
                max_concurrency=8,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
            )
            # The secret is an argument, because Ray shows options and environment.
            .remote(spec.to_wire(), self._secret.hex(), make_worker)
        )

    def _free_name(self, role: Role) -> str:
        return next(name for index in itertools.count() if (name := f"{role}-{index}") not in self._members)

    def _free_ordinal(self) -> int:
        taken = {member.ordinal for member in self._members.values()}
        return next(ordinal for ordinal in itertools.count() if ordinal not in taken)
