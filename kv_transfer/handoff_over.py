"""What either end raises when it is asked about a hand-off that it does not have."""

from __future__ import annotations


class HandoffOver(LookupError):
    """The hand-off has ended here (``wait`` or ``abort`` returned), or was never begun. It is no `ValueError`, so that
    wrong arguments are never taken for it."""
