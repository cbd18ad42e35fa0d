"""The KubeRay manifests: the custom resources' fields, what Ray's autoscaler reads out of them, and pods, Service and
NetworkPolicy by Kubernetes' own schemas."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests.deploy.files import KUBERAY, ROOT, document, documents, pod_templates, worker_groups

KUBERNETES = "1.33"
CUSTOM_RESOURCES = json.loads((Path(__file__).parent / "kuberay_schema.json").read_text())
ROLES = ("prefill", "decode")


def cluster() -> dict[str, Any]:
    return document("kuberay-cluster.yaml", "RayCluster")


def job() -> dict[str, Any]:
    return document("kuberay-job.yaml")


def check(manifest: dict[str, Any]) -> None:
    """Against Kubernetes' schema; keys that it does not know are errors."""
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def check_pod(template: dict[str, Any]) -> None:
    check({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template})


def autoscaling_config() -> dict[str, Any]:
    """What KubeRay's autoscaler makes of the cluster; it validates its outcome by Ray's schema."""
    from ray.autoscaler._private.kuberay import autoscaling_config

    manifest = cluster()
    manifest["metadata"]["namespace"] = "default"  # the API server has filled that in by then
    config: dict[str, Any] = autoscaling_config._derive_autoscaling_config_from_ray_cr(manifest)
    return config


# --- custom resources ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("manifest", [cluster(), job()], ids=["cluster", "job"])
def test_the_custom_resources_have_fields_that_kuberay_knows(manifest: dict[str, Any]) -> None:
    jsonschema.validate(manifest, CUSTOM_RESOURCES)


def test_the_job_runs_on_this_cluster_and_where_the_gateway_belongs() -> None:
    spec = job()["spec"]
    assert spec["clusterSelector"] == {"ray.io/cluster": cluster()["metadata"]["name"]}
    needs = json.loads(spec["entrypointResources"])
    offering = [
        name
        for name, node_type in autoscaling_config()["available_node_types"].items()
        if all(node_type["resources"].get(key, 0) >= amount for key, amount in needs.items())
    ]
    assert offering == ["gateway"]


def test_rays_version_is_the_one_that_is_tested() -> None:
    assert cluster()["spec"]["rayVersion"] == version("ray")
    assert f"ray=={version('ray')}\n" in (ROOT / "constraints.txt").read_text()


# --- what the autoscaler reads ---------------------------------------------------------------------------------------


def test_rays_autoscaler_takes_the_cluster() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(autoscaling_config())
    validate_config(config)
    assert set(config["available_node_types"]) == {"headgroup", "gateway", "prefill", "decode"}
    assert config["idle_timeout_minutes"] == 15
    assert config["available_node_types"]["headgroup"]["resources"]["CPU"] == 0


@pytest.mark.parametrize("role", ROLES)
def test_each_role_has_nodes_that_can_be_added(role: str) -> None:
    node_type = autoscaling_config()["available_node_types"][role]
    assert node_type["resources"][role] == node_type["resources"]["GPU"] >= 1  # a worker takes one of both
    assert 1 <= node_type["min_workers"] < node_type["max_workers"]


def test_there_is_always_exactly_one_gateway() -> None:
    node_type = autoscaling_config()["available_node_types"]["gateway"]
    assert node_type["min_workers"] == node_type["max_workers"] == 1
    assert "GPU" not in node_type["resources"]


# --- pods, Service, NetworkPolicy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", pod_templates())
def test_pods_satisfy_kubernetes_schema(group: str) -> None:
    check_pod(pod_templates()[group])


def test_everything_else_satisfies_kubernetes_schema() -> None:
    others = [each for name in KUBERAY for each in documents(name) if each["kind"] not in ("RayCluster", "RayJob")]
    assert {each["kind"] for each in others} == {"Service", "NetworkPolicy"}
    for manifest in others:
        check(manifest)


@pytest.mark.parametrize("group", pod_templates())
def test_pods_fit_autoscaler_and_kuberay(group: str) -> None:
    spec = pod_templates()[group]["spec"]
    assert spec["restartPolicy"] == "Never"  # version 2 of the autoscaler refuses anything else
    (container,) = spec["containers"]
    assert container["resources"]["limits"] == container["resources"]["requests"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert mounted.keys() == volumes.keys()
    assert mounted["shm"] == "/dev/shm"
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert _bytes(volumes["shm"]["emptyDir"]["sizeLimit"]) < _bytes(container["resources"]["limits"]["memory"])


@pytest.mark.parametrize("group", ["head", *worker_groups()])
def test_the_object_store_is_small(group: str) -> None:
    spec = cluster()["spec"]["headGroupSpec"] if group == "head" else worker_groups()[group]
    size = int(spec["rayStartParams"]["object-store-memory"])
    (shm,) = [each for each in pod_templates()[group]["spec"]["volumes"] if each["name"] == "shm"]
    assert size < 2**30
    assert size < _bytes(shm["emptyDir"]["sizeLimit"])


def test_the_heads_readiness_is_not_the_services() -> None:
    """Else a service that is not ready takes away the way by which workers join that could make it so."""
    (container,) = pod_templates()["head"]["spec"]["containers"]
    assert "readinessProbe" not in container
    assert 50051 not in [port["containerPort"] for port in container["ports"]]


def test_the_service_leads_to_the_gateway() -> None:
    service = document("kuberay-cluster.yaml", "Service")
    assert service["spec"]["selector"] == {
        "ray.io/cluster": cluster()["metadata"]["name"],  # labels that KubeRay gives its pods
        "ray.io/group": "gateway",
    }
    (port,) = service["spec"]["ports"]
    (container,) = pod_templates()["gateway"]["spec"]["containers"]
    assert {"name": port["targetPort"], "containerPort": port["port"]} in container["ports"]


def test_every_pod_of_the_cluster_is_shielded() -> None:
    spec = document("kuberay-cluster.yaml", "NetworkPolicy")["spec"]
    mine = {"matchLabels": {"ray.io/cluster": cluster()["metadata"]["name"]}}
    assert spec["podSelector"] == mine
    unlimited = [rule["from"] for rule in spec["ingress"] if "ports" not in rule]
    assert unlimited == [[{"podSelector": mine}]]


def test_the_token_comes_from_a_secret() -> None:
    assert cluster()["spec"]["authOptions"] == {"mode": "token", "secretName": "pdserve-ray-token"}


def _bytes(quantity: str) -> int:
    from ray.autoscaler._private.kuberay.utils import parse_quantity

    return int(parse_quantity(quantity))
