"""The files of deploy/ agree with each other and with the instructions."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from pdserve.core.config import PdserveConfig
from tests.deploy.files import (
    DEPLOY,
    KUBERAY,
    LAUNCHER,
    PLACEHOLDERS,
    document,
    placeholders,
    pod_templates,
    ray_start_commands,
    text,
)

LAST_PORT = 20_399
"""Of those that firewalls let through for pdserve's workers."""


# --- the service's configuration -------------------------------------------------------------------------------------


def test_the_job_reads_the_configuration_that_its_pod_has() -> None:
    (path,) = re.findall(r"entrypoint: pdserve up -c (\S+)", text("kuberay-job.yaml"))
    (container,) = pod_templates()["gateway"]["spec"]["containers"]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "config"]
    assert path == f"{mount['mountPath']}/pdserve.yaml"
    assert "--from-file=pdserve.yaml=deploy/pdserve.yaml" in text("README.md")


def test_the_configuration_is_one() -> None:
    config = PdserveConfig.parse(document("pdserve.yaml"))
    assert config.cluster.address == "auto"
    assert config.cluster.device == "cuda"


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("name", [*LAUNCHER, "kuberay-cluster.yaml"])
def test_a_role_fits_the_nodes_that_are_meant_for_it_and_no_others(name: str, role: str) -> None:
    needs = {"GPU": 1, **document("pdserve.yaml")["cluster"][f"{role}_resources"]}
    fitting = [
        node_type
        for node_type, offered in _node_types(name).items()
        if all(offered.get(resource, 0) >= amount for resource, amount in needs.items())
    ]
    assert fitting == [role]


def _node_types(name: str) -> dict[str, dict[str, int]]:
    if name in LAUNCHER:
        types = document(name)["available_node_types"]
    else:
        from ray.autoscaler._private.kuberay import autoscaling_config

        spec = document(name, "RayCluster")["spec"]
        types = autoscaling_config._generate_available_node_types_from_ray_cr_spec(spec)
    return {node_type: dict(value["resources"]) for node_type, value in types.items()}


# --- ports -----------------------------------------------------------------------------------------------------------


def test_the_api_has_one_port_everywhere() -> None:
    port = document("pdserve.yaml")["gateway"]["port"]
    (rule,) = document("aws.yaml")["provider"]["security_group"]["IpPermissions"]
    assert rule["FromPort"] == rule["ToPort"] == port
    (service,) = document("kuberay-cluster.yaml", "Service")["spec"]["ports"]
    assert service["port"] == port
    policy = document("kuberay-cluster.yaml", "NetworkPolicy")["spec"]["ingress"]
    assert port in [each["port"] for rule in policy for each in rule.get("ports", [])]
    (container,) = pod_templates()["gateway"]["spec"]["containers"]
    assert str(port) == container["readinessProbe"]["exec"]["command"][-1]
    assert any(port in ports for ports in _firewall_rule("pdserve-clients"))


def test_the_registry_has_one_port_everywhere() -> None:
    (container,) = pod_templates()["gateway"]["spec"]["containers"]
    assert {"name": "registry", "containerPort": _port_base()} in container["ports"]


def test_rays_start_commands_fix_the_same_ports_on_all_nodes() -> None:
    commands = [arguments for name in LAUNCHER for arguments in ray_start_commands(name)]
    assert len(commands) == 4
    workers = [{option for option in _ports(each).items() if option[0] != "--port"} for each in commands]
    assert workers[0]
    assert all(each == workers[0] for each in workers)


def test_rays_ports_and_pdserves_are_apart() -> None:
    ports = _ports(ray_start_commands("aws.yaml")[0])
    ranged = range(ports.pop("--min-worker-port"), ports.pop("--max-worker-port") + 1)
    mine = range(_port_base(), LAST_PORT + 1)
    assert len(set(ports.values())) == len(ports) == 7
    assert not set(ports.values()) & {*ranged, *mine}
    assert not set(ranged) & set(mine)


def test_the_firewall_lets_all_of_them_through() -> None:
    ports = _ports(ray_start_commands("gcp.yaml")[0])
    nodes = _firewall_rule("pdserve-nodes")
    needed = itertools.chain(ports.values(), range(_port_base(), LAST_PORT + 1))
    assert all(any(port in allowed for allowed in nodes) for port in needed)
    assert range(ports["--min-worker-port"], ports["--max-worker-port"] + 1) in nodes


def test_there_are_ports_for_as_many_workers_as_the_comment_says() -> None:
    (workers,) = re.findall(r"enough for (\d+) workers", text("pdserve.yaml"))
    assert _port_base() + 1 + 4 * (int(workers) - 1) + 3 <= LAST_PORT < _port_base() + 1 + 4 * int(workers) + 3
    assert f"{_port_base()}-{LAST_PORT}" in text("pdserve.yaml")


def test_the_firewall_rules_go_by_tags_that_the_nodes_have() -> None:
    tags = {name: set(node["node_config"]["tags"]["items"]) for name, node in _gcp_types().items()}
    assert tags == {"head": {"pdserve", "pdserve-head"}, "prefill": {"pdserve"}, "decode": {"pdserve"}}
    assert {"pdserve", "pdserve-head"} == set(re.findall(r"--target-tags=(\S+)", text("README.md")))


def _gcp_types() -> dict[str, Any]:
    types: dict[str, Any] = document("gcp.yaml")["available_node_types"]
    return types


def _port_base() -> int:
    base: int = document("pdserve.yaml")["cluster"]["port_base"]
    return base


def _ports(arguments: list[str]) -> dict[str, int]:
    pairs = (argument.split("=", 1) for argument in arguments if "port=" in argument)
    return {option: int(value) for option, value in pairs}


def _firewall_rule(name: str) -> list[range]:
    (allowed,) = re.findall(rf"create {name} .*?--allow=(\S+)", text("README.md"), re.DOTALL)
    bounds = [each.removeprefix("tcp:").split("-") for each in allowed.split(",")]
    return [range(int(bound[0]), int(bound[-1]) + 1) for bound in bounds]


# --- placeholders and the instructions -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pdserve.yaml", *LAUNCHER, *KUBERAY])
def test_every_placeholder_is_explained(name: str) -> None:
    rows = [line for line in text("README.md").splitlines() if line.startswith("| `<")]
    for placeholder in placeholders(name):
        (row,) = [row for row in rows if f"`{placeholder}`" in row.split("|")[1]]
        assert name in row.split("|")[2]
        assert placeholder in PLACEHOLDERS, "tests/deploy/files.py fills it in"


def test_nothing_is_explained_that_is_not_there() -> None:
    explained = placeholders("README.md")
    assert explained == set().union(*(placeholders(name) for name in ("pdserve.yaml", *LAUNCHER, *KUBERAY)))
    assert explained == set(PLACEHOLDERS)


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text("README.md"))
    assert len(links) > 5
    for link in links:
        assert (DEPLOY / link).exists(), link


def test_the_secret_has_the_name_that_the_cluster_asks_for() -> None:
    name = document("kuberay-cluster.yaml", "RayCluster")["spec"]["authOptions"]["secretName"]
    assert f"kubectl create secret generic {name} --from-file=auth_token=" in text("README.md")
