"""Runs the HTTP API on the gateway's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from gateway.http_api.connection import IDLE_S, Connection
from gateway.tls import ServerTls
from pdserve.core.errors import LaunchError

BACKLOG = 2048


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the gateway's process's own."""
        yield


class HttpServer:
    """An HTTP server for ``app``. `LaunchError` if the port is in use."""

    def __init__(self, app: FastAPI, host: str, port: int, tls: ServerTls | None = None) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio sends small writes at once only on sockets whose protocol is named; else each token waits for an ACK.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise LaunchError(
                f"gateway.http_port: {port} on {host} cannot be used ({error.strerror}); choose another, or 0 for no "
                "HTTP server"
            ) from None
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=int(IDLE_S),
            **({} if tls is None else _tls_options(tls)),
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when it serves."""
        self._serving = asyncio.create_task(self._server.serve([self._socket]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise LaunchError("gateway.http_port: the HTTP server ended while it started")
            await asyncio.sleep(0.001)

    async def stop(self, grace_s: float) -> None:
        """Refuse new connections, let running calls go on for ``grace_s``, then cancel them."""
        if self._serving is None:
            self._socket.close()
            return
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        await self._serving
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()  # its client does not read


def _tls_options(tls: ServerTls) -> dict[str, Any]:
    options: dict[str, Any] = {"ssl_certfile": tls.cert, "ssl_keyfile": tls.key}
    if tls.client_ca is not None:
        options |= {"ssl_ca_certs": tls.client_ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options
