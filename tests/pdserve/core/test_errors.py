"""The error tree crosses process borders as ``(kind, message)``."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

import pdserve.core.errors
from pdserve.core.errors import (
    HandOffMissing,
    LayoutMismatch,
    NotReady,
    PdserveError,
    TransferError,
    WorkerLost,
    from_wire,
    to_wire,
)


def tree(root: type[PdserveError]) -> Iterator[type[PdserveError]]:
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


KINDS = [kind for kind in tree(PdserveError) if kind.__module__ == pdserve.core.errors.__name__]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_wire_round_trip(kind: type[PdserveError]) -> None:
    error = from_wire(*to_wire(kind("engine.block_size: wrong")))
    assert type(error) is kind
    assert str(error) == "engine.block_size: wrong"
    assert error.retryable is kind.retryable


def test_the_docstring_draws_the_tree_as_it_is() -> None:
    drawn = re.findall(r"^    [│├└─ ]*([A-Z]\w+)", pdserve.core.errors.__doc__ or "", re.MULTILINE)
    assert drawn == [kind.__name__ for kind in KINDS]


def test_retryable_is_what_another_worker_may_cure() -> None:
    retryable = {kind for kind in KINDS if kind.retryable}
    assert retryable == {NotReady, WorkerLost, *tree(TransferError)} - {LayoutMismatch, HandOffMissing}


def test_foreign_errors_keep_their_type_in_the_message() -> None:
    assert to_wire(ZeroDivisionError("by zero")) == ("PdserveError", "ZeroDivisionError: by zero")


@pytest.mark.parametrize("kind", ["", "ZeroDivisionError", "Exception", "SystemExit"])
def test_unknown_kinds_become_the_base_and_never_anything_else(kind: str) -> None:
    error = from_wire(kind, "hm")
    assert type(error) is PdserveError
    assert str(error) == "hm"
    assert not error.retryable
