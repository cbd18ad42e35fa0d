"""The proofs of `runtime.secret` at both ends of a stream socket, before anything else travels on it:

    dialling end                                  listening end
    magic, greeting (48 bytes)            ──▶
                                          ◀──     nonce, proof (64 bytes)
    proof (32 bytes)                      ──▶

All sizes are fixed, so an unproven peer makes this process hold a few hundred bytes, and nothing of it is parsed. Both
functions need a timeout around them.
"""

from __future__ import annotations

import asyncio
import socket

from runtime.secret import NONCE_BYTES, PROOF_BYTES, ServiceSecret, Side, new_nonce

MAGIC = b"pdserve-kv/3\n\0\0\0"


async def prove_dialling(connection: socket.socket, secret: ServiceSecret, purpose: str, address: str) -> None:
    """Prove this end, which has dialled ``address``, once the listening end is proven. `Unproven` if that does not know
    the secret, EOFError if it closes the connection, OSError if the connection breaks."""
    loop, greeting = asyncio.get_running_loop(), new_nonce()
    await loop.sock_sendall(connection, MAGIC + greeting)
    challenge = await read_exactly(connection, NONCE_BYTES + PROOF_BYTES)
    nonces = greeting, challenge[:NONCE_BYTES]
    secret.verify(challenge[NONCE_BYTES:], purpose, Side.LISTENING, nonces, address)
    await loop.sock_sendall(connection, secret.proof(purpose, Side.DIALLING, nonces, address))


async def prove_listening(connection: socket.socket, secret: ServiceSecret, purpose: str, address: str) -> None:
    """Prove this end, which listens at ``address``, and return once the dialling end is proven. Raises as
    `prove_dialling` does; EOFError also if the peer speaks another protocol."""
    loop = asyncio.get_running_loop()
    if await read_exactly(connection, len(MAGIC)) != MAGIC:
        raise EOFError("the peer speaks another protocol")
    nonces = await read_exactly(connection, NONCE_BYTES), new_nonce()
    challenge = nonces[1] + secret.proof(purpose, Side.LISTENING, nonces, address)
    await loop.sock_sendall(connection, challenge)
    secret.verify(await read_exactly(connection, PROOF_BYTES), purpose, Side.DIALLING, nonces, address)


async def read_exactly(connection: socket.socket, size: int) -> bytes:
    """The next ``size`` bytes. EOFError if the peer closes the connection before. Needs a timeout around it."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < size:
        more = await loop.sock_recv(connection, size - len(data))
        if not more:
            raise EOFError("the peer closed the connection")
        data += more
    return data
