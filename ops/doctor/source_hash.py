"""Which source an installation really runs: a version says nothing of a checkout that somebody has changed."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import xxhash

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "pdserve", "engine", "kv_transfer", "worker", "router", "prefill_worker", "decode_worker", "gateway", "ops",
)  # fmt: skip


@cache
def source_hash(root: Path = ROOT) -> str:
    """16 hex digits over names and contents of all modules below ``root`` that belong to pdserve."""
    digest = xxhash.xxh3_64()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
