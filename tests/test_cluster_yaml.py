"""cluster.yaml is a file that Ray's cluster launcher takes, once its three placeholders are filled in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import ray.autoscaler
import yaml

ROOT = Path(__file__).resolve().parents[1]


def filled_in() -> dict[str, Any]:
    text = (ROOT / "cluster.yaml").read_text()
    for placeholder, value in {
        "<head host or address>": "10.0.0.1",
        "<second host>": "10.0.0.2",
        "<third host>": "10.0.0.3",
        "<user on the hosts>": "ray",
    }.items():
        assert text.count(placeholder) == 1, placeholder
        text = text.replace(placeholder, value)
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def test_it_satisfies_rays_schema() -> None:
    schema = json.loads((Path(str(ray.autoscaler.__file__)).parent / "ray-schema.json").read_text())
    jsonschema.validate(filled_in(), schema)


def test_rays_own_preparation_takes_it() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(filled_in())
    validate_config(config)
    assert config["provider"]["worker_ips"] == ["10.0.0.2", "10.0.0.3"]
    assert config["max_workers"] == 2


def test_every_command_uses_the_projects_own_environment() -> None:
    config = filled_in()
    for command in (*config["head_start_ray_commands"], *config["worker_start_ray_commands"]):
        assert "~/pdserve/.venv/bin/ray" in command
    assert set(config["file_mounts"]) == {"~/pdserve", "~/.ray/auth_token"}
