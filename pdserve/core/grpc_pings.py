"""Pings by which the ends of a gRPC connection notice that the other one no longer answers."""

from __future__ import annotations


def ping_options(every_ms: int, timeout_ms: int, other_timeout_ms: int) -> list[tuple[str, int]]:
    """Channel or server options, times in milliseconds: a ping when nothing has come for ``every_ms``, of which there
    may be any number, and an answer within ``timeout_ms``, or the connection is closed.

    gRPC sends pings of its own as well, and while one of them is unanswered it sends none of these. They have to be
    answered within ``other_timeout_ms``; gRPC's default is a minute."""
    return [
        ("grpc.keepalive_time_ms", every_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", other_timeout_ms),
        ("grpc.http2.max_pings_without_data", 0),
    ]
