"""A request of the core: its states, its attempts, and its way over the wire."""

from __future__ import annotations

import msgspec
import pytest

from pdserve.core.request import (
    REQUEST_TRANSITIONS,
    Mode,
    Request,
    RequestStatus,
    check_transition,
)
from pdserve.core.sampling import SamplingParams


def request() -> Request:
    return Request("r", (1, 2), SamplingParams(max_tokens=5), Mode.PD, timeout_s=9.0, salt="s")


def test_what_is_listed_happens_and_everything_else_raises() -> None:
    running = check_transition(REQUEST_TRANSITIONS, RequestStatus.QUEUED, RequestStatus.RUNNING)
    assert running is RequestStatus.RUNNING
    with pytest.raises(AssertionError, match="queued → finished is not in the table; allowed: "):
        check_transition(REQUEST_TRANSITIONS, RequestStatus.QUEUED, RequestStatus.FINISHED)


def test_an_attempt_goes_on_from_prompt_and_outputs() -> None:
    assert request().token_ids == (1, 2)
    assert request().max_tokens == 5
    attempt = request().attempt("r#1", [7, 8], timeout_s=1.5)
    assert attempt.token_ids == (1, 2, 7, 8)
    assert (attempt.num_tokens, attempt.max_tokens) == (4, 3)
    assert (attempt.request_id, attempt.attempt_id, attempt.timeout_s, attempt.salt) == ("r", "r#1", 1.5, "s")
    assert request().output_token_ids == ()


def test_a_request_survives_the_wire_and_nothing_else_is_one() -> None:
    attempt = request().attempt("r#1", [7, 8], timeout_s=1.5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(attempt), type=Request) == attempt
    for wrong in ({"request_id": "r"}, {"request_id": 1, "prompt_token_ids": [], "sampling": {}}, [1]):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(wrong), type=Request)
