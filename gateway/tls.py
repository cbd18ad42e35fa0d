"""TLS of the public servers, from the files that the configuration names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from pdserve.core.config import GatewayConfig
from pdserve.core.errors import ConfigError
from pdserve.core.tls_files import read_certificates, read_key_pair

CERT, KEY, CLIENT_CA = "gateway.tls_cert", "gateway.tls_key", "gateway.tls_client_ca"


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Files that have been read and fit together. With a ``client_ca``, clients must have a certificate of it."""

    cert: Path
    key: Path
    client_ca: Path | None

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """The credentials of a gRPC server."""
        cert, key = read_key_pair(self.cert, self.key, CERT, KEY)
        clients = None if self.client_ca is None else read_certificates(self.client_ca, CLIENT_CA)
        return grpc.ssl_server_credentials([(key, cert)], clients, require_client_auth=clients is not None)


def server_tls(config: GatewayConfig) -> ServerTls | None:
    """The TLS of the public servers; None without one. `ConfigError` if a file is missing, unreadable or of another
    key."""
    cert, key = config.tls_cert, config.tls_key
    if cert is None and key is None:
        if config.tls_client_ca is not None:
            raise ConfigError(f"{CERT}: it is missing; {CLIENT_CA} needs {CERT} and {KEY}")
        return None
    if cert is None or key is None:
        absent, present = (CERT, KEY) if cert is None else (KEY, CERT)
        raise ConfigError(f"{absent}: it is missing; {present} needs both")
    read_key_pair(cert, key, CERT, KEY)
    if config.tls_client_ca is not None:
        read_certificates(config.tls_client_ca, CLIENT_CA)
    return ServerTls(cert, key, config.tls_client_ca)
