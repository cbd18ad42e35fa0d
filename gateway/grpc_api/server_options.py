"""Options of the public gRPC server: its bounds, and pings that keep connections open while nothing else is sent.

A long prompt, a wait in the queue or a paused stream can be silent for minutes. NATs and load balancers forget
connections that are silent, some of them after a minute, and a client that has vanished without a word would keep its
request. Pings prevent the one and detect the other. Clients may ping as well: gRPC's own default would close a
connection whose client pings more often than every five minutes."""

from __future__ import annotations

from gateway.grpc_api.connection_guard import MAX_STREAMS
from pdserve.core.grpc_pings import ping_options

MAX_PENDING_CALLS = 4 * MAX_STREAMS
"""Limit: calls of all clients that wait for a handler. Then: RESOURCE_EXHAUSTED by gRPC.

They take up to 30 KB of gRPC's memory each, also when their client has left."""
MAX_PENDING_S = 3600
MAX_SEND_BYTES = 64 * 2**20
PING_EVERY_S = 30.0
"""Limit: silence of a connection. Then: the service pings."""
PING_TIMEOUT_S = 20.0
"""Limit: time to answer the ping. Then: closed, its requests cancelled."""
CLIENT_PINGS_EVERY_S = 10.0
"""Limit: shortest time between two pings of a client. Then: GOAWAY (`too_many_pings`)."""
LATE_S = 5.0
"""Pings may follow each other quicker by this much: one that was delayed on its way is close to the next."""


def server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """For messages of at most ``max_message_bytes``."""
    return [
        *ping_options(_ms(PING_EVERY_S), _ms(PING_TIMEOUT_S), other_timeout_ms=_ms(PING_TIMEOUT_S)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(CLIENT_PINGS_EVERY_S - LATE_S)),
        ("grpc.so_reuseport", 0),  # a second gateway must not silently share the port
        ("grpc.max_send_message_length", MAX_SEND_BYTES),
        ("grpc.max_receive_message_length", max_message_bytes),
        # By default gRPC drops calls at random once 1000 wait for a handler, and those that wait for 30 s. Here the
        # router's queue refuses the requests of an honest burst.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ("grpc.server_max_unrequested_time_in_server", MAX_PENDING_S),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        # Else gRPC would take up to 4 MiB of a stream that nothing reads, and more of clients that ignore flow control.
        ("grpc.http2.bdp_probe", 0),
    ]


def _ms(seconds: float) -> int:
    return round(seconds * 1e3)
