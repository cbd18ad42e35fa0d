"""Which ports a service listens on, so that firewalls can be told beforehand."""

from __future__ import annotations

from core.config import ClusterConfig

DEFAULT_BASE = 20_000
"""Of a service on a Ray that is there already. One on a Ray of its own lets the system pick."""

PORTS_PER_WORKER = 4
"""Control, and one for each KV transport that uses a port."""


def port_base(config: ClusterConfig) -> int:
    """The registry's port, from which all others are counted; 0: the system picks them all."""
    if config.port_base is not None:
        return config.port_base
    return 0 if config.address == "local" else DEFAULT_BASE


def first_port(base: int, ordinal: int) -> int:
    """The first of the ports of the service's worker number ``ordinal``, whatever node it is on."""
    return base + 1 + PORTS_PER_WORKER * ordinal if base else 0
