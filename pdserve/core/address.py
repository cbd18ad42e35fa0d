"""Network addresses as text: ``host:port``, or ``[host]:port`` if the host is an IPv6 address."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from pdserve.core.errors import InvalidRequest

DEFAULT_PORT = 50_051
"""The service's gRPC port."""
_SCHEMES = ("http", "grpc")
_GRPC_NAME = re.compile(r"(unix|unix-abstract|dns|ipv4|ipv6):")


def join_address(host: str, port: int) -> str:
    """The address of ``port`` on ``host``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host (without brackets) and port; ValueError if there is no host or the port is not a number."""
    host, _, port = address.rpartition(":")
    if not host:
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)


def target_of(text: str) -> str:
    """The address that a user means: a host, ``host:port``, a URL (``http://host:port/``), or a name of gRPC's own
    (``unix:/path``), which stays as it is. Without a port it is `DEFAULT_PORT`. `InvalidRequest` if it is none of
    them."""
    text = text.strip()
    if _GRPC_NAME.match(text):
        return text
    if "://" not in text:
        text = f"grpc://[{text}]" if _is_ipv6(text) else f"grpc://{text}"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidRequest(f"target: {text.removeprefix('grpc://')!r} is not host:port ({error})") from None
    if parts.scheme not in _SCHEMES:
        raise InvalidRequest(f"target: {parts.scheme!r} is none of {', '.join(_SCHEMES)}; give host:port")
    if not host or " " in host or parts.path not in ("", "/") or parts.query or parts.username:
        raise InvalidRequest(f"target: {text.removeprefix('grpc://')!r} is not host:port")
    return join_address(host, DEFAULT_PORT if port is None else port)


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False
