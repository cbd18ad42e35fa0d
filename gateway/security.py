"""What protects the public servers, from the configuration: TLS, the tokens of callers, and the names of hosts."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass

import grpc

from gateway.callers import Callers
from pdserve.core.address import is_loopback
from pdserve.core.clock import Clock
from pdserve.core.config import ANY_HOST, GatewayConfig
from pdserve.core.errors import ConfigError
from pdserve.core.tls_files import read_certificates, read_key_pair

log = logging.getLogger(__name__)

CERT, KEY, CLIENT_CA = "gateway.tls_cert", "gateway.tls_key", "gateway.tls_client_ca"


@dataclass(frozen=True, slots=True)
class Security:
    """What protects the servers."""

    tls: grpc.ServerCredentials | None
    """Of the gRPC server. The HTTP server has the same files of the configuration."""
    callers: Callers
    """Who may call them."""
    host_names: frozenset[str] | None
    """By which names of its host the HTTP server may be called besides ``localhost`` and addresses; None: by any."""


def security_of(config: GatewayConfig, clock: Clock) -> Security:
    """Read all files. `ConfigError` if one cannot be used, or if others could reach the service unprotected."""
    tls = _server_credentials(config)
    # With a token or TLS any name is right: a web page of another site has no token, and a browser that was led to the
    # service by a name of such a site refuses the certificate.
    any_name = config.tokens is not None or tls is not None or ANY_HOST in config.allowed_hosts
    names = (config.host, socket.gethostname(), *config.allowed_hosts)
    host_names = None if any_name else frozenset(name.lower() for name in names)
    security = Security(tls, Callers(config.tokens, clock), host_names)
    missing = []
    if tls is None:
        missing.append("TLS (gateway.tls_cert, gateway.tls_key)")
    if config.tokens is None and config.tls_client_ca is None:
        missing.append("authentication (gateway.tokens, or gateway.tls_client_ca)")
    if missing and not is_loopback(config.host):
        what = f"others can reach {config.host or 'all addresses of this host'}, and the service has no"
        if not config.insecure:
            raise ConfigError(
                f"gateway.host: {what} {' and no '.join(missing)}; configure what is missing (docs/security.md), "
                "listen on 127.0.0.1, or, if the network is trusted, set gateway.insecure (--insecure)"
            )
        log.warning("gateway.insecure: %s %s", what, " and no ".join(missing))
    return security


def _server_credentials(config: GatewayConfig) -> grpc.ServerCredentials | None:
    cert, key, client_ca = config.tls_cert, config.tls_key, config.tls_client_ca
    if cert is None or key is None:
        given = [name for name, path in ((CERT, cert), (KEY, key), (CLIENT_CA, client_ca)) if path is not None]
        if not given:
            return None
        raise ConfigError(f"{KEY if cert else CERT}: it is missing; {given[0]} needs {CERT} and {KEY}")
    certificate, private_key = read_key_pair(cert, key, CERT, KEY)
    clients = None if client_ca is None else read_certificates(client_ca, CLIENT_CA)
    return grpc.ssl_server_credentials([(private_key, certificate)], clients, require_client_auth=clients is not None)
