"""Ports and channels of gRPC inside a service: with mutual TLS if the service has it, else without."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from runtime.plane_tls import SERVER_NAME, PlaneTls

Options = Sequence[tuple[str, int]]


def server_credentials(tls: PlaneTls) -> grpc.ServerCredentials:
    """Credentials of a server that accepts only clients with a certificate of the CA."""
    return grpc.ssl_server_credentials([(tls.key, tls.cert)], tls.ca, require_client_auth=True)


def add_port(server: grpc.Server | grpc.aio.Server, address: str, tls: PlaneTls | None) -> int:
    """Have ``server`` listen at ``address``, and return the port. RuntimeError if the address cannot be used."""
    if tls is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, server_credentials(tls))


def open_channel(address: str, tls: PlaneTls | None, options: Options) -> grpc.Channel:
    """A channel to ``address``."""
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, _credentials(tls), options=[*options, *_NAME])


def open_aio_channel(address: str, tls: PlaneTls | None, options: Options) -> grpc.aio.Channel:
    """The same for asyncio."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, _credentials(tls), options=[*options, *_NAME])


_NAME = (("grpc.ssl_target_name_override", SERVER_NAME),)


def _credentials(tls: PlaneTls) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
