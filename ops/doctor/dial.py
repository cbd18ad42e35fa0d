"""Whether a TCP connection can be opened, and if not, in which of the ways that need different remedies."""

from __future__ import annotations

import errno
import socket
from enum import StrEnum

_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM, errno.EADDRNOTAVAIL, errno.ENETDOWN}


class Dial(StrEnum):
    """What came of it."""

    OPEN = "open"
    REFUSED = "refused"  # the host answers, and nobody listens there (or a firewall says so)
    TIMED_OUT = "timed out"  # nothing comes back: a firewall that drops, a partition, a host that is off
    UNREACHABLE = "unreachable"  # the network says that there is no way, or that it is prohibited
    NO_SUCH_HOST = "no such host"

    @classmethod
    def of(cls, error: OSError) -> Dial:
        """What an error of a connection means."""
        if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
            return cls.TIMED_OUT
        if isinstance(error, socket.gaierror):
            return cls.NO_SUCH_HOST
        return cls.UNREACHABLE if error.errno in _UNREACHABLE else cls.REFUSED


REMEDIES = {
    Dial.OPEN: "",
    Dial.REFUSED: "nobody listens there, or a firewall rejects it: open it there (see cluster.port_base)",
    Dial.TIMED_OUT: "packets vanish: open the port in the firewall between the two (see cluster.port_base), or name a "
    "network that joins them with transfer.interface",
    Dial.UNREACHABLE: "no route, or a rule prohibits it: see `ip route get` and the firewall where it is dialled from, "
    "or name a network that joins the two with transfer.interface",
    Dial.NO_SUCH_HOST: "the name cannot be resolved there: use an address",
}
"""What to do about each."""


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[host]:port``; ValueError if it is neither."""
    host, _, port = address.rpartition(":")
    if not host:
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)


def dial(address: str, timeout_s: float) -> Dial:
    """Open a connection to ``host:port``, and close it. ValueError if it is no such address."""
    try:
        socket.create_connection(split_address(address), timeout_s).close()
    except OSError as error:
        return Dial.of(error)
    return Dial.OPEN
