"""Both state tables, pair by pair: what is listed happens, everything else raises."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from pdserve.core.request import (
    ENGINE_TRANSITIONS,
    REQUEST_TRANSITIONS,
    EngineStatus,
    Mode,
    Request,
    RequestStatus,
    check_transition,
)
from pdserve.core.sampling import SamplingParams

REQUEST_ALLOWED = {
    ("queued", "running"),
    ("queued", "aborted"),
    ("queued", "failed"),
    ("running", "queued"),
    ("running", "finished"),
    ("running", "aborted"),
    ("running", "failed"),
}
ENGINE_ALLOWED = {
    ("waiting", "waiting_for_kv"),
    ("waiting", "running"),
    ("waiting_for_kv", "running"),
    ("running", "preempted"),
    ("preempted", "running"),
    *((status, "finished") for status in ("waiting", "waiting_for_kv", "running", "preempted")),
}


def request() -> Request:
    return Request("r", (1, 2), SamplingParams(max_tokens=5), Mode.PD, timeout_s=9.0, salt="s")


@pytest.mark.parametrize(
    ("table", "states", "allowed"),
    [(REQUEST_TRANSITIONS, RequestStatus, REQUEST_ALLOWED), (ENGINE_TRANSITIONS, EngineStatus, ENGINE_ALLOWED)],
    ids=["request", "engine"],
)
def test_what_is_listed_happens_and_everything_else_raises(
    table: Any, states: type[RequestStatus] | type[EngineStatus], allowed: set[tuple[str, str]]
) -> None:
    for current, to in itertools.product(states, states):
        if (current.value, to.value) in allowed:
            assert check_transition(table, current, to) is to
        else:
            with pytest.raises(AssertionError, match=f"{current.value} → {to.value} is not in the table; allowed: "):
                check_transition(table, current, to)


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
