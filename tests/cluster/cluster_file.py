"""The project's own cluster.yaml with its placeholders filled in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]


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
