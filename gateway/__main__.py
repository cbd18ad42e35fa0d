"""`python -m gateway CONFIG_JSON REGISTRY_HOST:PORT`: a gateway without Ray. Ends on SIGTERM, and with its parent."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys

from core.config import PdserveConfig
from core.errors import PdserveError
from core.process import end_with_parent
from engine.model_source import resolve_model
from gateway.gateway import Gateway
from worker.client import WorkerClient


async def _serve(config: PdserveConfig, registry_address: str) -> None:
    model = resolve_model(config.model.path)
    gateway = Gateway(
        config,
        model_name=model.name,
        model_folder=model.folder,
        connect=WorkerClient.connect,
        registry_address=registry_address,
    )
    await gateway.start()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    await gateway.stop()


def main() -> None:
    """Serve until SIGTERM; exits with 1 and one line on stderr if the gateway cannot start."""
    end_with_parent(signal.SIGTERM)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(_serve(PdserveConfig.parse(json.loads(sys.argv[1])), sys.argv[2]))
    except PdserveError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
