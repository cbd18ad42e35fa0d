"""`python -m gateway CONFIG_JSON REGISTRY_ADDRESS [OPERATOR_SOCKET]` runs a gateway without Ray. The service's secret
comes from the environment. It ends on SIGTERM and with its parent. On the Unix socket, in a folder that only operators
can enter, it gives the status with all addresses and processes."""

from __future__ import annotations

import json
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc

from gateway.gateway import Gateway
from gateway.gateway_thread import GatewayThread
from gateway.grpc_api.operator_view import operator_view
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import PdserveError
from runtime.logs import set_up_logging
from runtime.process import end_with_parent
from runtime.secret import ServiceSecret


def main() -> None:
    """Serve until SIGTERM; exits with 1 and one line on stderr if it cannot start."""
    end_with_parent(signal.SIGTERM)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: stop.set())
    config_json, registry_address, *sockets = sys.argv[1:]
    try:
        secret = ServiceSecret.from_environment()
        config = PdserveConfig.parse(json.loads(config_json))
        set_up_logging(config.logging)
        gateway = GatewayThread(config, registry_address, "0+no-ray", secret)
        gateway.start()
    except PdserveError as error:
        sys.exit(f"error: {error}")
    operators = grpc.server(ThreadPoolExecutor(1, "operators"))
    operators.add_generic_rpc_handlers((operator_view(lambda: gateway.ask(Gateway.status)),))
    for socket in sockets:
        operators.add_insecure_port(f"unix:{socket}")
    operators.start()
    stop.wait()
    operators.stop(None)
    gateway.stop()


if __name__ == "__main__":
    main()
