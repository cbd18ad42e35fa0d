"""Mutual TLS of the worker plane: control, registry and KV between hosts.

All processes of a service have certificates of one CA. Workers are dialled at addresses that a cluster hands out, so
certificates do not name them: every certificate has the fixed name `SERVER_NAME`, which dialling ends verify together
with the chain. The proof of the service's secret, which covers the dialled address, follows over the same connection.
This module knows no gRPC: `runtime.grpc_tls` and `kv_transfer.transports.tcp` use it.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.core.config import ClusterConfig
from pdserve.core.errors import ConfigError
from pdserve.core.tls_files import read_certificates, read_key_pair

SERVER_NAME = "pdserve-worker"
"""The DNS name in the subjectAltName of every certificate of the worker plane."""
CERT, KEY, CA = "cluster.tls_cert", "cluster.tls_key", "cluster.tls_ca"
_FLIGHTS = 4  # more than a handshake has in each direction


@dataclass(frozen=True, slots=True)
class PlaneTls:
    """Files that have been read and fit together, for gRPC in PEM and for sockets as contexts. Both ends of a
    connection verify the other's certificate."""

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes
    dialling: ssl.SSLContext
    listening: ssl.SSLContext


def plane_tls(config: ClusterConfig) -> PlaneTls | None:
    """The TLS of the worker plane; None if none is configured. ConfigError if a file is missing or unreadable, or if
    a process with these files could not connect to another one with them."""
    cert, key, ca = config.tls_cert, config.tls_key, config.tls_ca
    if cert is None or key is None or ca is None:
        absent = [name for name, path in ((CERT, cert), (KEY, key), (CA, ca)) if path is None]
        if len(absent) == 3:
            return None
        raise ConfigError(f"{absent[0]}: it is missing; {CERT}, {KEY} and {CA} need each other")
    cert_data, key_data = read_key_pair(cert, key, CERT, KEY)
    ca_data = read_certificates(ca, CA)
    dialling, listening = (
        _context(protocol, cert, key, ca_data) for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
    )
    tls = PlaneTls(cert_data, key_data, ca_data, dialling, listening)
    if problem := _problem(tls):
        raise ConfigError(
            f"{CERT}: {cert} cannot be used with {CA} {ca}: {problem} (it needs to be signed by "
            f"that CA, for {SERVER_NAME} as subjectAltName, and for servers and clients if it has an extendedKeyUsage)"
        )
    return tls


def _context(protocol: ssl._SSLMethod, cert: Path, key: Path, ca: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3  # both ends are of one service
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC does: the CA need not be a root
    context.load_verify_locations(cadata=ca.decode("ascii"))
    context.load_cert_chain(cert, key, password="")
    if protocol is ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # connections are not resumed
    return context


def _problem(tls: PlaneTls) -> str | None:
    """The reason why a process with these files would refuse another one with them, or None: a handshake in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        tls.dialling.wrap_bio(to_client, to_server, server_hostname=SERVER_NAME),
        tls.listening.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(_FLIGHTS):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
            except ssl.SSLError as error:
                return error.reason or str(error)
    return None
