"""Placement of workers: pairs, spreading, and nodes in use."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import yaml
from hypothesis import given
from hypothesis import strategies as st

from ops.launch.plan import Node, plan, roles_of, worker_bundles
from pdserve.core.config import ClusterConfig, PdserveConfig, PlacementPolicy
from pdserve.core.worker import Role

P, D = Role.PREFILL, Role.DECODE
ONE_CPU = {P: {"CPU": 1.0}, D: {"CPU": 1.0}}


def host(name: str, **resources: float) -> Node:
    return Node(name, f"10.0.0.{name}", resources, resources)


def planned(
    roles: list[Role], nodes: list[Node], policy: PlacementPolicy, present: list[tuple[str, Role]] | None = None
) -> list[str | None]:
    return [node.node_id if node else None for node in plan(roles, ONE_CPU, nodes, policy, present or [])]


def test_pack_puts_pairs_on_one_node() -> None:
    assert planned([P, P, D, D], [host("1", CPU=2), host("2", CPU=2)], "pack") == ["1", "2", "1", "2"]
    # The first has room for one alone: the pair goes where both fit.
    assert planned([P, D], [host("1", CPU=1), host("2", CPU=2)], "pack") == ["2", "2"]
    # As few nodes as possible.
    assert planned([P, P, D, D], [host("1", CPU=8), host("2", CPU=8)], "pack") == ["1"] * 4


def test_two_hosts_of_eight_gpus_have_the_workers_that_the_document_tells() -> None:
    document = (Path(__file__).resolve().parents[3] / "docs" / "cluster.md").read_text()
    (split,) = re.findall(r"^cluster: \{.*prefill_resources.*\}$", document, re.MULTILINE)
    nodes = [host("1", GPU=8, CPU=64, prefill=8), host("2", GPU=8, CPU=64, decode=8)]

    def workers(config: ClusterConfig) -> Counter[tuple[str | None, Role]]:
        roles = roles_of(config)
        placed = plan(roles, worker_bundles(config, "cuda", nodes), nodes, config.placement)
        return Counter((node.node_id if node else None, role) for node, role in zip(placed, roles, strict=True))

    half = workers(ClusterConfig(prefill=8, decode=8))
    assert half == {("1", P): 4, ("1", D): 4, ("2", P): 4, ("2", D): 4}
    assert workers(PdserveConfig.parse(yaml.safe_load(split)).cluster) == {("1", P): 8, ("2", D): 8}


def test_spread_keeps_each_role_and_then_the_roles_apart() -> None:
    hosts = [host("1", CPU=4), host("2", CPU=4)]
    assert planned([P, D], hosts, "spread") == ["1", "2"]
    assert planned([P, P, D, D], hosts, "spread") == ["1", "2", "2", "1"]
    hosts += [host("3", CPU=4), host("4", CPU=4)]
    assert planned([P, P, D, D], hosts[:3], "spread") == ["1", "3", "2", "1"]
    assert planned([P, P, D, D], hosts, "spread") == ["1", "3", "2", "4"]
    assert planned([P, D], hosts[:1], "spread") == ["1", "1"]


def test_strict_spread_never_shares_a_node() -> None:
    hosts = [host("1", CPU=4), host("2", CPU=4)]
    assert planned([P, D], hosts, "strict_spread") == ["1", "2"]
    assert planned([P, D, D], hosts, "strict_spread") == ["1", "2", None]
    assert planned([D], hosts, "strict_spread", [("1", P)]) == ["2"]


def test_present_workers_count() -> None:
    hosts = [host("1", CPU=1), host("2", CPU=1)]
    assert planned([D], hosts, "pack", [("2", P)]) == ["2"]
    assert planned([D], hosts, "spread", [("1", P)]) == ["2"]
    assert planned([D, D], hosts, "pack", [("gone", P)]) == ["1", "2"]


def test_roles_go_where_their_resources_are() -> None:
    bundles = {P: {"CPU": 1.0, "prefill": 1.0}, D: {"CPU": 1.0, "decode": 1.0}}
    hosts = [host("1", CPU=4, decode=2), host("2", CPU=4, prefill=1)]
    chosen = plan([P, P, D, D], bundles, hosts, "pack")
    assert [node and node.node_id for node in chosen] == ["2", None, "1", "1"]


@given(
    roles=st.lists(st.sampled_from([P, D]), max_size=12),
    cpus=st.lists(st.integers(0, 4), max_size=5),
    policy=st.sampled_from(["pack", "spread", "strict_spread"]),
)
def test_no_worker_is_refused_while_there_is_room(roles: list[Role], cpus: list[int], policy: PlacementPolicy) -> None:
    hosts = [host(str(index), CPU=float(count)) for index, count in enumerate(cpus)]
    chosen = planned(roles, hosts, policy)
    room = sum(1 for count in cpus if count) if policy == "strict_spread" else sum(cpus)
    assert sum(node is not None for node in chosen) == min(len(roles), room)
    for index, count in enumerate(cpus):
        assert chosen.count(str(index)) <= (1 if policy == "strict_spread" else count)
