"""`python -m gateway CONFIG_JSON REGISTRY_ADDRESS` runs a gateway without Ray. The service's secret comes from the
environment. It ends on SIGTERM and with its parent."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading

from gateway.gateway_thread import GatewayThread
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import PdserveError
from pdserve.core.process import end_with_parent
from pdserve.core.secret import ServiceSecret


def main() -> None:
    """Serve until SIGTERM; exits with 1 and one line on stderr if it cannot start."""
    end_with_parent(signal.SIGTERM)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: stop.set())
    try:
        secret = ServiceSecret.from_environment()
        gateway = GatewayThread(PdserveConfig.parse(json.loads(sys.argv[1])), sys.argv[2], "0+no-ray", secret)
        gateway.start()
    except PdserveError as error:
        sys.exit(f"error: {error}")
    stop.wait()
    gateway.stop()


if __name__ == "__main__":
    main()
