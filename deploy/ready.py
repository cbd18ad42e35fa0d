"""Readiness of the gateway's pod: ``python ready.py PORT [CA NAME]`` ends with 0 if the service on PORT says that it is
serving. With the file CA it uses TLS and expects a certificate for NAME.

It does so too if nothing listens there: the pod has to be ready before the service can be started at all.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

TIMEOUT_S = 3.0


def ready(port: int, ca: str = "", name: str = "") -> bool:
    """Whether nothing listens on this host's ``port``, or the gRPC health service there answers SERVING."""
    try:
        socket.create_connection(("127.0.0.1", port), TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    target = f"127.0.0.1:{port}"
    options: list[tuple[str, int | str]] = [("grpc.enable_http_proxy", 0)]
    if ca:
        credentials = grpc.ssl_channel_credentials(Path(ca).read_bytes())
        channel = grpc.secure_channel(target, credentials, [*options, ("grpc.ssl_target_name_override", name)])
    else:
        channel = grpc.insecure_channel(target, options)
    with channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(0 if ready(int(sys.argv[1]), *sys.argv[2:]) else 1)
