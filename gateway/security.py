"""What protects the public servers, from the configuration: TLS, and the tokens of callers."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from gateway.callers import Callers
from gateway.tls import ServerTls, server_tls
from pdserve.core.address import is_loopback
from pdserve.core.clock import Clock
from pdserve.core.config import GatewayConfig
from pdserve.core.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Security:
    """TLS of the servers (None: they have none), and who may call them."""

    tls: ServerTls | None
    callers: Callers


def security_of(config: GatewayConfig, clock: Clock) -> Security:
    """Read all files. `ConfigError` if one cannot be used, or if others could reach the service unprotected."""
    security = Security(server_tls(config), Callers(config.tokens, clock))
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
