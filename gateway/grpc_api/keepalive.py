"""Pings that keep connections of the public gRPC server open while nothing else is sent.

A long prompt, a wait in the queue or a paused stream can be silent for minutes. NATs and load balancers forget
connections that are silent, some of them after a minute, and a client that has vanished without a word would keep its
request. Pings prevent the one and detect the other. Clients may ping as well: gRPC's own default would close a
connection whose client pings more often than every five minutes."""

from __future__ import annotations

from pdserve.core.grpc_pings import ping_options

PING_EVERY_S = 30.0
"""Limit: silence of a connection. Then: the service pings."""
PING_TIMEOUT_S = 20.0
"""Limit: time to answer the ping. Then: closed, its requests cancelled."""
CLIENT_PINGS_EVERY_S = 10.0
"""Limit: shortest time between two pings of a client. Then: GOAWAY (`too_many_pings`)."""
LATE_S = 5.0
"""Pings may follow each other quicker by this much: one that was delayed on its way is close to the next."""


def keepalive_options() -> list[tuple[str, int]]:
    """Options of the public server."""
    return [
        *ping_options(_ms(PING_EVERY_S), _ms(PING_TIMEOUT_S), other_timeout_ms=_ms(PING_TIMEOUT_S)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(CLIENT_PINGS_EVERY_S - LATE_S)),
    ]


def _ms(seconds: float) -> int:
    return round(seconds * 1e3)
