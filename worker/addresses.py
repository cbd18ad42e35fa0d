"""Which of a host's addresses KV travels over: what `transfer.interface` means on the host that reads it."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

import psutil

from pdserve.core.errors import ConfigError

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


@dataclass(frozen=True, slots=True)
class Interface:
    """An address of this host and the device that has it (empty if none says so, as for a name of many hosts).
    ``mbits`` is the device's own claim (0: it makes none), ``is_up`` whether it has a carrier."""

    address: str
    device: str
    mbits: int = 0
    is_up: bool = True


def interfaces() -> list[Interface]:
    """This host's addresses, by device; link-local ones of IPv6 are left out."""
    states = psutil.net_if_stats()
    return [
        Interface(each.address, device, states[device].speed, states[device].isup)
        for device, addresses in sorted(psutil.net_if_addrs().items())
        for each in addresses
        if device in states and each.family in _FAMILIES and "%" not in each.address
    ]


def resolve_interface(wanted: str | None, host: str) -> Interface:
    """The address that ``wanted`` (a device, a network as 10.1.0.0/16, an address or a name; None: ``host``) means
    here. ConfigError that lists what there is if it means none of this host's."""
    present = interfaces()
    if wanted is None:
        return next((each for each in present if each.address == host), Interface(host, ""))
    by_device = [each for each in present if each.device == wanted]
    if by_device:  # IPv4 first: that is what Ray and NCCL take by default
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
