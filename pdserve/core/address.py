"""Network addresses as text: ``host:port``, or ``[host]:port`` if the host is an IPv6 address."""

from __future__ import annotations


def join_address(host: str, port: int) -> str:
    """The address of ``port`` on ``host``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host (without brackets) and port; ValueError if there is no host or the port is not a number."""
    host, _, port = address.rpartition(":")
    if not host:
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)
