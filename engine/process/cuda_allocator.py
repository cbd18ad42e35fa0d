"""Settings of torch's CUDA allocator that the KV pool can live with."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads the newer name first
_EXPANDABLE = re.compile(r"(expandable_segments\s*:\s*)(true|1|on|yes)", re.IGNORECASE)


def shareable_allocator(environment: Mapping[str, str]) -> dict[str, str]:
    """The allocator's variables of ``environment`` that have to change, with expandable segments off. CUDA IPC hands
    such memory over as a file descriptor, by a system call that containers forbid."""
    changed = {name: _EXPANDABLE.sub(r"\1False", environment.get(name, "")) for name in _NAMES}
    return {name: value for name, value in changed.items() if value != environment.get(name, "")}
