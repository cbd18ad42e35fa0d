"""gRPC channel and server options of the control plane: no proxies, quick reconnects, and a dead peer noticed."""

from __future__ import annotations

MAX_CONTROL_BYTES = 64 * 2**20
"""Of one message: requests are bounded far below it, a step's outputs by the batch."""

CONTROL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", MAX_CONTROL_BYTES),
    ("grpc.max_send_message_length", MAX_CONTROL_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 2_000),
)
