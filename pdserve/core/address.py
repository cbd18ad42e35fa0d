"""Network addresses as text: ``host:port``, or ``[host]:port`` if the host is an IPv6 address."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from pdserve.core.errors import InvalidRequest

DEFAULT_PORT = 50_051
"""Port: gRPC, for clients: `gateway.port`."""
_SCHEMES = {"http": False, "grpc": False, "https": True, "grpcs": True}
"""Schemes of targets, and whether they mean TLS."""
_OF_THIS_HOST = ("unix:", "unix-abstract:")
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


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this host and cannot be reached from others: a loopback address, or ``localhost``. Other
    names count as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def stays_on_this_host(address: str) -> bool:
    """Whether messages to an address, in gRPC's terms, do not leave this host."""
    if address.startswith(_OF_THIS_HOST):
        return True
    try:
        return is_loopback(split_address(address)[0])
    except ValueError:
        return False


def target_of(text: str) -> tuple[str, bool | None]:
    """The address that a user means, in gRPC's terms, and whether it uses TLS (None: the user does not say).

    A user gives a host, ``host:port``, a port of this host, a URL (``http://host:port/``; ``https://`` and ``grpcs://``
    mean TLS), or a name of gRPC's own (``unix:/path``), which stays as it is. Without a port it is `DEFAULT_PORT`.
    `InvalidRequest` if it is none of them."""
    text = text.strip()
    if _GRPC_NAME.match(text):
        return text, None
    if text.isascii() and text.isdecimal():
        text = f"localhost:{text}"
    with_scheme = "://" in text
    if not with_scheme:
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
    address = join_address(host, DEFAULT_PORT if port is None else port)
    return address, _SCHEMES[parts.scheme] if with_scheme else None


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False
