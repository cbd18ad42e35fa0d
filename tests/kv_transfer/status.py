"""How far a transfer is at one end, for tests that have to act at a certain point of it."""

from __future__ import annotations

from enum import StrEnum

from kv_transfer.receive_transfer import ReceiveTransfer
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from pdserve.core.errors import PdserveError


class Status(StrEnum):
    """``SUCCESS`` and ``FAILED`` are final."""

    BOOTSTRAPPING = "bootstrapping"  # sender: no link yet; receiver: nothing came from its sender
    WAITING = "waiting"  # no block has travelled
    TRANSFERRING = "transferring"
    SUCCESS = "success"
    FAILED = "failed"


def status_of(end: KVSender | KVReceiver, attempt_id: str) -> Status:
    """The status of a transfer; TransferEnded once ``wait`` or ``abort`` has returned."""
    transfer = end._find(attempt_id)
    if transfer.outcome is not None:
        return Status.FAILED if isinstance(transfer.outcome, PdserveError) else Status.SUCCESS
    if transfer._first_s is not None:
        return Status.TRANSFERRING
    known = transfer.source if isinstance(transfer, ReceiveTransfer) else transfer.settle
    return Status.BOOTSTRAPPING if known is None else Status.WAITING
