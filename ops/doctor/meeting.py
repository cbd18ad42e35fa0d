"""How a prefill worker's probe met a decode worker's: over what, how fast, or why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from kv_transfer.handshake import LinkFigures
from ops.doctor.dial import Dial


class Obstacle(StrEnum):
    """Why two did not meet; the first five are those of `Dial`, found where the KV would travel."""

    NONE = "open"
    REFUSED = "refused"
    TIMED_OUT = "timed out"
    UNREACHABLE = "unreachable"
    NO_SUCH_HOST = "no such host"
    NO_TRANSPORT = "no transport"  # none that both ends have reaches the other
    LAYOUT = "layout"  # another model, dtype or block size
    BROKEN = "broken"  # connected, and then something went wrong
    NOT_TRIED = "not tried"  # one of the two has no KV end, which is a finding of its own

    @classmethod
    def of(cls, dialled: Dial | None) -> Obstacle | None:
        """What a dial says; None if it says nothing, or that the way is open."""
        return None if dialled in (None, Dial.OPEN) else cls(dialled)


@dataclass(frozen=True, slots=True)
class Meeting:
    """``address`` is where the decode worker's probe listens with ``transport``. ``figures`` are there if they met."""

    transport: str = ""
    address: str = ""
    reason: str = ""
    figures: LinkFigures | None = None
    obstacle: Obstacle = Obstacle.NONE
    what: str = ""

    def to_wire(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Meeting:
        """The meeting that `to_wire` described."""
        figures = data["figures"]
        return cls(
            **{
                **data,
                "figures": None if figures is None else LinkFigures(**figures),
                "obstacle": Obstacle(data["obstacle"]),
            }
        )
