"""The service secret: what gateway and workers of one service know, and nobody else.

The two ends of a connection prove to each other that they know it, and never send it:

    dialling end                                 listening end
    greeting: a nonce                    ──▶
                                         ◀──     challenge: a nonce, and the listening end's proof
    the dialling end's proof             ──▶

A proof is an HMAC-SHA256 over the purpose of the connection, the side, both nonces, and the address that was dialled.
So it is worth nothing on another connection, on another port, or for the other side. This module does no input or
output: `kv_transfer.transports.socket_transport` and `runtime.stream_proof` carry the three messages.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from enum import StrEnum
from typing import NoReturn

from pdserve.core.errors import ConfigError

SECRET_VARIABLE = "PDSERVE_SERVICE_SECRET"
"""The environment variable that has the secret of processes without Ray, in hexadecimal."""
SECRET_BYTES = 32
NONCE_BYTES = 32
PROOF_BYTES = 32


class Side(StrEnum):
    """The end of a connection that a proof comes from."""

    DIALLING = "dialling"
    LISTENING = "listening"


class AuthenticationFailed(Exception):
    """The other end of a connection did not prove that it knows the service's secret, or has no certificate of the
    service where one is needed. Whoever owns the connection ends it, and raises an error of its own."""

    def __init__(self, why: str = "the peer does not know the service's secret") -> None:
        super().__init__(why)


class ServiceSecret:
    """A service's secret of 32 random bytes. ConfigError for any other number of bytes.

    It neither shows itself in `repr` nor lets itself be pickled or copied; where it has to leave the process, `hex`
    says so."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if len(key) != SECRET_BYTES:
            raise ConfigError(f"{SECRET_VARIABLE}: a service's secret has {SECRET_BYTES} bytes, not {len(key)}")
        self._key = key

    @classmethod
    def new(cls) -> ServiceSecret:
        """A random secret."""
        return cls(secrets.token_bytes(SECRET_BYTES))

    @classmethod
    def from_hex(cls, text: str) -> ServiceSecret:
        """The secret that `hex` gave. ConfigError, which does not quote the text, if it is malformed."""
        try:
            key = bytes.fromhex(text)
        except ValueError:
            raise ConfigError(f"{SECRET_VARIABLE}: not {2 * SECRET_BYTES} hexadecimal digits") from None
        return cls(key)

    @classmethod
    def from_environment(cls) -> ServiceSecret:
        """The secret in the variable `SECRET_VARIABLE`, which is removed from this process's environment, so that no
        child inherits it. ConfigError if it is missing or malformed."""
        text = os.environ.pop(SECRET_VARIABLE, None)
        if text is None:
            raise ConfigError(
                f"{SECRET_VARIABLE} is not set: without Ray, gateway and workers get the secret of their service by it "
                f"({2 * SECRET_BYTES} random hexadecimal digits, the same for all of them)"
            )
        return cls.from_hex(text)

    def hex(self) -> str:
        """The secret as text, for another process of the same service. It must not appear on command lines or in
        logs."""
        return self._key.hex()

    def environment(self) -> dict[str, str]:
        """The variables for a child process that calls `from_environment`."""
        return {SECRET_VARIABLE: self.hex()}

    def proof(self, purpose: str, side: Side, nonces: tuple[bytes, bytes], address: str) -> bytes:
        """The proof of ``side`` on a connection that was dialled at ``address`` for ``purpose``. ``nonces`` are those
        of the dialling and of the listening end."""
        digest = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in (purpose.encode(), side.encode(), *nonces, address.encode()):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
        return digest.digest()

    @property
    def cache_key(self) -> bytes:
        """A key of 32 bytes that separates the cached KV of callers. It tells nothing about the secret."""
        return hmac.digest(self._key, b"cached KV", "sha256")

    def verify(self, proof: bytes, purpose: str, side: Side, nonces: tuple[bytes, bytes], address: str) -> None:
        """Return if ``proof`` is the one that ``side`` has to give, else raise AuthenticationFailed. Takes the same
        time for all proofs of one length."""
        if not hmac.compare_digest(proof, self.proof(purpose, side, nonces, address)):
            raise AuthenticationFailed

    def __repr__(self) -> str:
        return "ServiceSecret(…)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a service's secret is not pickled or copied; pass its hex() to where it is needed")


def new_nonce() -> bytes:
    """Random bytes that one end contributes to a connection."""
    return secrets.token_bytes(NONCE_BYTES)
