"""The first bytes on a new connection, by which the two ends make sure of each other."""

from __future__ import annotations

import asyncio
import socket


async def read_exactly(connection: socket.socket, size: int) -> bytes:
    """The next ``size`` bytes; EOFError if the peer closes before. Unbounded: put a timeout around it."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < size:
        more = await loop.sock_recv(connection, size - len(data))
        if not more:
            raise EOFError("the peer closed the connection")
        data += more
    return data


async def expect_greeting(connection: socket.socket, greeting: bytes) -> None:
    """Read the peer's greeting; EOFError if it is another one. Unbounded as well."""
    if await read_exactly(connection, len(greeting)) != greeting:
        raise EOFError("the peer speaks something else")
