"""cluster.yaml is a file that Ray's cluster launcher takes, once its three placeholders are filled in."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import ray.autoscaler
import yaml

from tests.cluster.cluster_file import ROOT, filled_in


def cluster_file() -> dict[str, Any]:
    return filled_in("10.0.0.1", ["10.0.0.2", "10.0.0.3"], "ray")


def test_the_commands_for_two_hosts_fill_it_in(tmp_path: Path) -> None:
    (command,) = re.findall(r"^desk\$ (sed -i .*)$", (ROOT / "docs" / "cluster.md").read_text(), re.MULTILINE)
    copy = tmp_path / "cluster.yaml"
    copy.write_text((ROOT / "cluster.yaml").read_text())
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True, timeout=30)
    assert yaml.safe_load(copy.read_text()) == filled_in("10.0.0.1", ["10.0.0.2"], "ubuntu")


def test_it_satisfies_rays_schema() -> None:
    schema = json.loads((Path(str(ray.autoscaler.__file__)).parent / "ray-schema.json").read_text())
    jsonschema.validate(cluster_file(), schema)


def test_rays_own_preparation_takes_it() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(cluster_file())
    validate_config(config)
    assert config["provider"]["worker_ips"] == ["10.0.0.2", "10.0.0.3"]
    node_type = config["available_node_types"]["local.cluster.node"]
    assert node_type["min_workers"] == node_type["max_workers"] == config["max_workers"] == 2


def test_every_command_uses_the_projects_own_environment() -> None:
    config = cluster_file()
    for command in (*config["head_start_ray_commands"], *config["worker_start_ray_commands"]):
        assert "~/pdserve/.venv/bin/ray " in command or "~/pdserve/scripts/stop_without_head.sh " in command
    assert set(config["file_mounts"]) == {"~/pdserve", "~/.ray/auth_token"}
