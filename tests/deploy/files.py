"""The files of deploy/, read as somebody would who has filled them in."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
LAUNCHER = ("aws.yaml", "gcp.yaml")
KUBERAY = ("kuberay-cluster.yaml", "kuberay-job.yaml")

PLACEHOLDERS = {
    "<folder of the model on every node>": "tiny",
    "<network of the nodes in CIDR>": "10.0.0.0/16",
    "<region>": "region-1",
    "<one zone of the region>": "region-1a",
    "<network of the clients in CIDR>": "192.0.2.0/24",
    "<id of an Ubuntu 24.04 image with an NVIDIA driver>": "ami-0123456789abcdef0",
    "<project id>": "project-1",
    "<image built from deploy/Dockerfile>": "registry.example/pdserve:0.1.0",
    "<claim with the models>": "models",
    "<GPU for prefill>": "NVIDIA-L40S",
    "<GPU for decode>": "NVIDIA-H100-80GB-HBM3",
    "<namespace of the clients>": "clients",
    "<namespace of the KubeRay operator>": "kuberay",
}


def text(name: str) -> str:
    return (DEPLOY / name).read_text(encoding="utf-8")


def placeholders(name: str) -> set[str]:
    """What looks like a placeholder, outside of what says that there are some."""
    return set(re.findall(r"<[A-Za-z][^<>\n]*>", text(name)))


def documents(name: str) -> list[Any]:
    """The YAML documents of a file whose placeholders are filled in."""
    filled = text(name)
    for placeholder, value in PLACEHOLDERS.items():
        filled = filled.replace(placeholder, value)
    return list(yaml.safe_load_all(filled))


def document(name: str, kind: str | None = None) -> dict[str, Any]:
    """The only document, or the only one of ``kind``."""
    (found,) = [each for each in documents(name) if kind is None or each["kind"] == kind]
    assert isinstance(found, dict)
    return found


def worker_groups() -> dict[str, dict[str, Any]]:
    spec = document("kuberay-cluster.yaml", "RayCluster")["spec"]
    return {group["groupName"]: group for group in spec["workerGroupSpecs"]}


def pod_templates() -> dict[str, dict[str, Any]]:
    """By group; the head's is ``head``."""
    spec = document("kuberay-cluster.yaml", "RayCluster")["spec"]
    groups = {"head": spec["headGroupSpec"], **worker_groups()}
    return {name: group["template"] for name, group in groups.items()}


def ray_start_commands(name: str) -> list[list[str]]:
    """The arguments of the launcher's `ray start` of head and workers."""
    config = document(name)
    commands = (*config["head_start_ray_commands"], *config["worker_start_ray_commands"])
    return [shlex.split(command.partition("ray start")[2]) for command in commands if "ray start" in command]
