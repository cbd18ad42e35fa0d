"""Draws of policies: pseudo-random numbers that are functions of the request."""

from __future__ import annotations

import xxhash

from pdserve.core.worker import Role
from router.needs import Needs


def draw(needs: Needs, role: Role) -> int:
    """A number of 64 bits for a request and a role, evenly distributed and independent of other requests and roles."""
    return xxhash.xxh3_64_intdigest(f"{role}/{needs.ticket}".encode())
