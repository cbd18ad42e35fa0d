from __future__ import annotations

import grpc
import pytest

from gateway.failures import STATUSES, statuses_of
from pdserve.core.errors import LayoutMismatch, PdserveError, TransferTimeout

TREE = {
    "PdserveError": "INTERNAL",
    "ConfigError": "FAILED_PRECONDITION",
    "ModelError": "FAILED_PRECONDITION",
    "LaunchError": "FAILED_PRECONDITION",
    "InvalidRequest": "INVALID_ARGUMENT",
    "Unauthenticated": "UNAUTHENTICATED",
    "CapacityExceeded": "RESOURCE_EXHAUSTED",
    "NotReady": "UNAVAILABLE",
    "DeadlineExceeded": "DEADLINE_EXCEEDED",
    "RequestAborted": "CANCELLED",
    "WorkerLost": "UNAVAILABLE",
    "TransferError": "UNAVAILABLE",
    "TransferTimeout": "UNAVAILABLE",
    "PeerLost": "UNAVAILABLE",
    "LayoutMismatch": "FAILED_PRECONDITION",
    "TransferRefused": "UNAVAILABLE",
    "ChecksumMismatch": "UNAVAILABLE",
}


def family(root: type[PdserveError]) -> list[type[PdserveError]]:
    # Only the tree's own: tests elsewhere may have made classes of theirs.
    children = [child for child in root.__subclasses__() if child.__module__ == "pdserve.core.errors"]
    return [root, *(member for child in children for member in family(child))]


def test_every_error_of_the_tree_has_the_status_it_should() -> None:
    assert {kind.__name__: statuses_of(kind("x"))[0].name for kind in family(PdserveError)} == TREE


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("x")])
def test_unexpected_errors_are_internal(error: Exception) -> None:
    assert statuses_of(error)[0] is grpc.StatusCode.INTERNAL


def test_a_class_of_its_own_goes_before_its_base() -> None:
    assert LayoutMismatch in STATUSES
    assert TransferTimeout not in STATUSES
