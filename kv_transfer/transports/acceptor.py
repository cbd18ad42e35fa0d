"""Accepts the connections of one listening socket, as long as there is room for peers that nobody knows yet."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from kv_transfer.transports.strangers import Stranger, Strangers
from pdserve.core.errors import TransferError

_BACKLOG = 128
_RETRY_S = 0.1
_log = logging.getLogger(__name__)

Welcome = Callable[[socket.socket, str, Stranger], Coroutine[Any, Any, None]]
"""Makes a link of a connection with a peer, or raises (OSError, EOFError, RuntimeError or TransferError) and leaves the
connection closed."""


class Acceptor:
    """Has ``welcome`` deal with each connection on ``server``, which is bound, until `aclose`. While `Strangers` has no
    room, connections wait in the kernel."""

    def __init__(self, server: socket.socket, strangers: Strangers, welcome: Welcome) -> None:
        server.listen(_BACKLOG)
        server.setblocking(False)
        self._server, self._strangers, self._welcome = server, strangers, welcome
        self._welcoming: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    @property
    def address(self) -> Any:
        """Where it listens."""
        return self._server.getsockname()

    async def aclose(self) -> None:
        """Accept nothing any more, and give up what is not a link yet."""
        tasks = [self._accepting, *self._welcoming]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._server.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._strangers.room()
            try:
                connection, address = await loop.sock_accept(self._server)
            except OSError as error:  # the peer has left the queue again, or no descriptor is free
                _log.warning("a connection could not be accepted: %s (%s)", error, self._strangers.name)
                await asyncio.sleep(_RETRY_S)
                continue
            self._begin(connection, str(address), self._strangers.enter())

    def _begin(self, connection: socket.socket, peer: str, stranger: Stranger) -> None:
        task = asyncio.create_task(self._deal_with(connection, peer, stranger))
        self._welcoming.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._welcoming.discard(task)
            if not stranger.met:  # cancelled before its first step
                connection.close()
            error = None if task.cancelled() else task.exception()
            if error is not None:
                _log.error("a peer's connection failed (%s)", self._strangers.name, exc_info=error)
            if task.cancelled() or error is not None:
                stranger.leave()

        task.add_done_callback(ended)

    async def _deal_with(self, connection: socket.socket, peer: str, stranger: Stranger) -> None:
        task = asyncio.current_task()
        assert task is not None
        stranger.met, stranger.cut = True, task.cancel
        try:
            connection.setblocking(False)
            await self._welcome(connection, peer, stranger)
        except (OSError, EOFError, RuntimeError, TransferError) as error:
            _log.warning("a peer's connection was given up: %s (%s)", error or "it timed out", self._strangers.name)
            stranger.leave()
