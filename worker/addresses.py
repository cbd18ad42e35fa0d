"""The address of a host that KV travels over: resolves `transfer.interface` on the host it runs on."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

import psutil

from pdserve.core.errors import ConfigError

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


@dataclass(frozen=True, slots=True)
class Interface:
    """An address of this host and its network device (empty if unknown). ``mbits`` is the speed that the device reports
    (0: none), ``is_up`` whether it has a carrier."""

    address: str
    device: str
    mbits: int = 0
    is_up: bool = True


def interfaces() -> list[Interface]:
    """This host's addresses, sorted by device, without link-local IPv6 addresses."""
    states = psutil.net_if_stats()
    return [
        Interface(each.address, device, states[device].speed, states[device].isup)
        for device, addresses in sorted(psutil.net_if_addrs().items())
        for each in addresses
        if device in states and each.family in _FAMILIES and "%" not in each.address
    ]


def resolve_interface(wanted: str | None, host: str) -> Interface:
    """The address of this host that ``wanted`` names: a device, a network such as 10.1.0.0/16, an address, or a host
    name. None means ``host``. ConfigError, which lists this host's addresses, if none of them matches."""
    present = interfaces()
    if wanted is None:
        return next((each for each in present if each.address == host), Interface(host, ""))
    by_device = [each for each in present if each.device == wanted]
    if by_device:  # IPv4 first, as Ray and NCCL do by default
        return min(by_device, key=lambda each: ":" in each.address)
    if "/" in wanted:
        try:
            network = ipaddress.ip_network(wanted, strict=False)
        except ValueError as error:
            raise ConfigError(f"transfer.interface: {wanted!r} is no network: {error}") from None
        inside = next((each for each in present if ipaddress.ip_address(each.address) in network), None)
        if inside is None:
            raise ConfigError(f"transfer.interface: no address of {host} lies in {wanted}; it has {_listed(present)}")
        return inside
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(wanted, None, type=socket.SOCK_STREAM)}
    except OSError:
        addresses = set()
    named = next((each for each in present if each.address in addresses), None)
    if named is None:
        raise ConfigError(
            f"transfer.interface: {wanted!r} is neither a device nor an address of {host}; it has {_listed(present)}"
        )
    return named


def _listed(present: list[Interface]) -> str:
    return ", ".join(f"{each.device} {each.address}" for each in present)
