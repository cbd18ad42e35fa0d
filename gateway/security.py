"""What protects the public servers, from the configuration: TLS, the tokens of callers, and the names of hosts."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass

from gateway.callers import Callers
from gateway.tls import ServerTls, server_tls
from pdserve.core.address import is_loopback
from pdserve.core.clock import Clock
from pdserve.core.config import ANY_HOST, GatewayConfig
from pdserve.core.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Security:
    """TLS of the servers (None: they have none), who may call them, and by which names of its host the HTTP server may
    be called besides ``localhost`` and addresses (None: by any)."""

    tls: ServerTls | None
    callers: Callers
    host_names: frozenset[str] | None


def security_of(config: GatewayConfig, clock: Clock) -> Security:
    """Read all files. `ConfigError` if one cannot be used, or if others could reach the service unprotected."""
    tls = server_tls(config)
    security = Security(tls, Callers(config.tokens, clock), _host_names(config, tls))
    missing = []
    if security.tls is None:
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


def _host_names(config: GatewayConfig, tls: ServerTls | None) -> frozenset[str] | None:
    """With a token or TLS any name is right: a web page of another site has no token, and a browser that was led to the
    service by a name of such a site refuses the certificate."""
    if config.tokens is not None or tls is not None or ANY_HOST in config.allowed_hosts:
        return None
    return frozenset(name.lower() for name in (config.host, socket.gethostname(), *config.allowed_hosts))
