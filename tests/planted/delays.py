"""Delays that tests plant in stages, to prove that a breakdown shows each where it is.

The product's code knows nothing of them. Processes that a test starts run a module of this folder in place of the
product's, and read the delays from the environment: `tests.planted.engine`, `tests.planted.worker`,
`tests.planted.gateway`. The stage ``network`` is planted between processes: `tests.planted.late_wire`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

ENGINE_MODULE = "tests.planted.engine"
STAGES = frozenset(
    {"gateway", "route", "dispatch", "prefill_queue", "prefill", "kv_exposed", "decode_queue", "first_decode"}
)
_VARIABLE = "TESTS_PLANTED_DELAYS_MS"


def environment(delays_ms: Mapping[str, float]) -> dict[str, str]:
    """What `planted_delays_s` reads in a process that is started with it; ``delays_ms`` is by stage."""
    assert delays_ms.keys() <= STAGES, delays_ms
    return {_VARIABLE: json.dumps(dict(delays_ms))}


def planted_delays_s() -> dict[str, float]:
    """The delays of this process, by stage."""
    return {stage: delay_ms / 1e3 for stage, delay_ms in json.loads(os.environ.get(_VARIABLE, "{}")).items()}
