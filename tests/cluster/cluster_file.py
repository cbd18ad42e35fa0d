"""The project's own cluster.yaml with its placeholders filled in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
RAY_OPTIONS = "~/ray_options"
"""A host's file with options of its own for `ray start`."""


def filled_in(head: str, workers: Sequence[str], user: str) -> dict[str, Any]:
    """As a user would: addresses of the hosts, and the user there."""
    text = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
    for placeholder, value in {
        "<head host or address>": head,
        "<second host>, <third host>": ", ".join(workers),
        "<user on the hosts>": user,
    }.items():
        assert text.count(placeholder) == 1, placeholder
        text = text.replace(placeholder, value)
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def with_options_by_host(config: dict[str, Any]) -> dict[str, Any]:
    """The same, but each `ray start` takes what `RAY_OPTIONS` says on its host: what tests pretend of a host."""
    changed = dict(config)
    for kind in ("head", "worker"):
        key = f"{kind}_start_ray_commands"
        changed[key] = [
            f"{command} $(cat {RAY_OPTIONS})" if "ray start" in command else command for command in config[key]
        ]
    return changed
