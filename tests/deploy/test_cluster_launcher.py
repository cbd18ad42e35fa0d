"""aws.yaml and gcp.yaml are files that Ray's cluster launcher takes, once their placeholders are filled in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import ray.autoscaler

from tests.deploy.files import LAUNCHER, document, ray_start_commands

SCHEMA = json.loads((Path(str(ray.autoscaler.__file__)).parent / "ray-schema.json").read_text())


@pytest.fixture(params=LAUNCHER)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def prepared(name: str) -> dict[str, Any]:
    """With all of Ray's defaults for this cloud, as `ray up` prepares it before it asks the cloud anything."""
    from ray.autoscaler._private.util import prepare_config

    config: dict[str, Any] = prepare_config(document(name))
    return config


def test_it_satisfies_rays_schema(name: str) -> None:
    jsonschema.validate(document(name), SCHEMA)


def test_rays_own_preparation_takes_it(prepared: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import validate_config

    validate_config(prepared)
    types = prepared["available_node_types"]
    assert set(types) == {"head", "prefill", "decode"}  # none of Ray's default types is left
    assert prepared["head_node_type"] == "head"
    assert types["head"]["max_workers"] == 0


def test_the_clouds_defaults_add_no_command(name: str, prepared: dict[str, Any]) -> None:
    """They would install a Ray of their own."""
    own = document(name)
    assert prepared["setup_commands"] == own["setup_commands"]
    assert prepared["head_setup_commands"] == [*own["setup_commands"], *own["head_setup_commands"]]
    assert prepared["worker_setup_commands"] == own["setup_commands"]


def test_the_head_is_no_place_for_workers(prepared: dict[str, Any]) -> None:
    assert prepared["available_node_types"]["head"]["resources"] == {"CPU": 0}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_each_role_has_nodes_that_can_be_added(prepared: dict[str, Any], role: str) -> None:
    node_type = prepared["available_node_types"][role]
    assert node_type["resources"][role] == node_type["resources"]["GPU"] >= 1  # a worker takes one of both
    assert 1 <= node_type["min_workers"] < node_type["max_workers"]


def test_all_that_the_types_allow_may_exist_at_once(prepared: dict[str, Any]) -> None:
    allowed = sum(node_type["max_workers"] for node_type in prepared["available_node_types"].values())
    assert prepared["max_workers"] == allowed


def test_machines_with_gpus_may_be_stopped_for_maintenance() -> None:
    """Google Cloud refuses to make them otherwise."""
    types = document("gcp.yaml")["available_node_types"]
    for role in ("prefill", "decode"):
        assert types[role]["node_config"]["scheduling"]["onHostMaintenance"] == "TERMINATE"


def test_project_and_token_travel(name: str) -> None:
    config = document(name)
    assert set(config["file_mounts"]) == {"~/pdserve", "~/.ray/auth_token"}
    assert ".venv/" in config["rsync_exclude"]


def test_every_node_starts_ray_from_the_projects_environment_with_the_token(name: str) -> None:
    config = document(name)
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        assert all("~/pdserve/.venv/bin/ray" in command for command in commands)
        (start,) = [command for command in commands if "ray start" in command]
        assert start.startswith("ulimit -n 65536;")
        assert "RAY_AUTH_MODE=token ~/pdserve/.venv/bin/ray start" in start


def test_ray_start_knows_every_option(name: str) -> None:
    from ray.scripts.scripts import start

    assert isinstance(start, click.Command)
    commands = ray_start_commands(name)
    assert len(commands) == 2
    for arguments in commands:
        context = click.Context(start)
        start.parse_args(context, [value.replace("~", "/home/ubuntu") for value in arguments])
        assert context.params["object_store_memory"] < 2**30  # KV never goes through it
