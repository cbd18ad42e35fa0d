"""A profile that no machine has."""

from __future__ import annotations

import json
from pathlib import Path

from simulator.planning.step_time import KNOTS


def write_profile(folder: Path, **changes: object) -> None:
    """Write what a run of ``pdserve experiment profile`` of the model tiny leaves in its folder, as far as it is read:
    steps of 10 ms. ``changes``: other values of its summary."""
    steps = {"at_rows": [0.01] * len(KNOTS), "sampled_s": 0, "pair_s": 0, "read_s": 0, "knots": KNOTS, "error": 0.03}
    summary = {
        "experiment": "profile",
        "model": "tiny",
        "dtype": "float32",
        "device": "cpu",
        "chunk": 256,
        "block_size": 16,
        "pool_tokens": 16_000,
        "steps": steps,
        "overheads": {},
        "link": {"bytes_per_s": 1e9},
        "spread": [1.0],
    }
    (folder / "summary.json").write_text(json.dumps({**summary, **changes}))
