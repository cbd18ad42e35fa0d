"""How far a hand-off is, at either end."""

from __future__ import annotations

from enum import StrEnum


class TransferStatus(StrEnum):
    """``SUCCESS`` and ``FAILED`` are final."""

    BOOTSTRAPPING = "bootstrapping"  # sender: no link to the receiver yet; receiver: its sender has not been heard of
    WAITING = "waiting"  # both ends know of it, no block has travelled
    TRANSFERRING = "transferring"
    SUCCESS = "success"  # every block is verified and in the receiver's pool
    FAILED = "failed"
