"""The proofs of `runtime.secret` at both ends of a gRPC stream, as metadata of two calls:

    dialling end                                        listening end
    Meet: the greeting                          ──▶
                                                ◀──     the challenge as trailing metadata
    the stream: greeting, nonce and proof       ──▶     verified; only then are messages read

No message of a peer is read before its proof is verified, because gRPC buffers the whole of a message that is being
read, whatever its size limit (https://github.com/grpc/grpc/issues/43012). Between the two calls the listening end keeps
nothing: its nonce consists of the time and a MAC of the greeting and the connection, under a key of its own. The nonce
is accepted within `VALID_S`, on the same connection, and once.

This module knows metadata only. `worker.authentication` and `kv_transfer.transports.grpc_stream` make the calls.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import threading
import time
from collections.abc import Iterable
from typing import TypeAlias

from runtime.logs import LimitedLog
from runtime.secret import NONCE_BYTES, PROOF_BYTES, AuthenticationFailed, ServiceSecret, Side, new_nonce

MEET = "Meet"
"""The method of each service whose streams have to be proven."""
VALID_S = 10.0
"""How long a challenge can be answered."""
_GREETING, _NONCE, _PROOF = "pdserve-greeting-bin", "pdserve-nonce-bin", "pdserve-proof-bin"
_STAMP_BYTES = 8

Metadata: TypeAlias = tuple[tuple[str, bytes], ...]
_Received: TypeAlias = Iterable[tuple[str, str | bytes]] | None

_log = logging.getLogger(__name__)


class StreamDialler:
    """One connection's dialling end. ``address`` is the one that is dialled."""

    def __init__(self, secret: ServiceSecret, purpose: str, address: str) -> None:
        self._secret, self._purpose, self._address = secret, purpose, address
        self._greeting = new_nonce()

    @property
    def greeting(self) -> Metadata:
        """The metadata of `MEET`."""
        return ((_GREETING, self._greeting),)

    def answer(self, challenge: _Received) -> Metadata:
        """The metadata of the stream, once the trailing metadata of `MEET` have come. AuthenticationFailed if the
        listening end does not know the secret."""
        nonce, proof = _value(challenge, _NONCE, NONCE_BYTES), _value(challenge, _PROOF, PROOF_BYTES)
        nonces = self._greeting, nonce
        self._secret.verify(proof, self._purpose, Side.LISTENING, nonces, self._address)
        mine = self._secret.proof(self._purpose, Side.DIALLING, nonces, self._address)
        return (*self.greeting, (_NONCE, nonce), (_PROOF, mine))


class StreamListener:
    """A server's listening end, for all connections to ``address``, its own as peers dial it. Thread-safe.

    ``refused`` counts the calls of peers that did not know the secret. They are logged, but not each."""

    def __init__(self, secret: ServiceSecret, purpose: str, address: str) -> None:
        self.address = address
        self.refused = 0
        self._secret, self._purpose = secret, purpose
        self._own_key = secrets.token_bytes(NONCE_BYTES)
        self._used: dict[bytes, float] = {}  # nonces of proven peers, and when they are too old by themselves
        self._lock = threading.Lock()
        self._rejections = LimitedLog(_log)

    def challenge(self, metadata: _Received, connection: str) -> Metadata:
        """The trailing metadata that answer `MEET`. ``connection`` is gRPC's name of the peer. AuthenticationFailed if
        the greeting is missing or malformed."""
        try:
            greeting = _value(metadata, _GREETING, NONCE_BYTES)
        except AuthenticationFailed:
            self._refuse(connection)
            raise
        nonce = self._nonce(time.monotonic_ns().to_bytes(_STAMP_BYTES, "big"), greeting, connection)
        proof = self._secret.proof(self._purpose, Side.LISTENING, (greeting, nonce), self.address)
        return ((_NONCE, nonce), (_PROOF, proof))

    def verify(self, metadata: _Received, connection: str) -> None:
        """Return if the metadata of a stream prove that the peer knows the secret; AuthenticationFailed if not."""
        try:
            greeting, nonce = _value(metadata, _GREETING, NONCE_BYTES), _value(metadata, _NONCE, NONCE_BYTES)
            stamp = nonce[:_STAMP_BYTES]
            if not hmac.compare_digest(nonce, self._nonce(stamp, greeting, connection)):
                raise AuthenticationFailed
            age_s = time.monotonic() - int.from_bytes(stamp, "big") / 1e9
            proof = _value(metadata, _PROOF, PROOF_BYTES)
            self._secret.verify(proof, self._purpose, Side.DIALLING, (greeting, nonce), self.address)
            if age_s > VALID_S or not self._use(nonce):
                raise AuthenticationFailed
        except AuthenticationFailed:
            self._refuse(connection)
            raise

    def _nonce(self, stamp: bytes, greeting: bytes, connection: str) -> bytes:
        mac = hmac.new(self._own_key, stamp + greeting + connection.encode(), hashlib.sha256)
        return stamp + mac.digest()[: NONCE_BYTES - _STAMP_BYTES]

    def _use(self, nonce: bytes) -> bool:
        """Whether a proven peer uses the nonce for the first time."""
        with self._lock:
            now_s = time.monotonic()
            while self._used and next(iter(self._used.values())) < now_s:
                del self._used[next(iter(self._used))]
            if nonce in self._used:
                return False
            self._used[nonce] = now_s + VALID_S
            return True

    def _refuse(self, connection: str) -> None:
        with self._lock:
            self.refused += 1
        self._rejections.warning(
            f"{self._purpose} at {self.address}: {connection} was refused: it does not know the service's secret"
        )


def _value(metadata: _Received, key: str, size: int) -> bytes:
    """The only value of ``key``, which must have ``size`` bytes; else AuthenticationFailed."""
    values = [value for name, value in metadata or () if name == key]
    if len(values) != 1 or not isinstance(values[0], bytes) or len(values[0]) != size:
        raise AuthenticationFailed
    return values[0]
