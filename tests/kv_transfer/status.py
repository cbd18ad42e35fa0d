"""How far a transfer is at one end, for tests that have to act at a certain point of it."""

from __future__ import annotations

from enum import StrEnum

from kv_transfer.receive_transfer import ReceiveTransfer
from kv_transfer.send_transfer import SendTransfer


class Status(StrEnum):
    """``SUCCESS`` and ``FAILED`` are final."""

    BOOTSTRAPPING = "bootstrapping"  # sender: no link yet; receiver: nothing came from its sender
    WAITING = "waiting"  # no block has travelled
    TRANSFERRING = "transferring"
    SUCCESS = "success"
    FAILED = "failed"


def status_of(transfer: SendTransfer | ReceiveTransfer) -> Status:
    """The status of a transfer."""
    if transfer.is_over:
        return Status.SUCCESS if transfer.error is None else Status.FAILED
    if isinstance(transfer, ReceiveTransfer):
        begun, known = transfer._first_s is not None, transfer.source is not None
    else:
        begun, known = transfer.has_sent, transfer.link is not None
    return Status.TRANSFERRING if begun else Status.WAITING if known else Status.BOOTSTRAPPING
