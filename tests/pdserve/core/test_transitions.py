"""Both state tables, pair by pair: what is listed happens, everything else raises."""

from __future__ import annotations

import msgspec
import pytest

from pdserve.core.request import (
    ENGINE_TRANSITIONS,
    REQUEST_TRANSITIONS,
    EngineStatus,
    IllegalTransition,
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


@pytest.mark.parametrize("to", RequestStatus)
@pytest.mark.parametrize("current", RequestStatus)
def test_request_table(current: RequestStatus, to: RequestStatus) -> None:
    if (current.value, to.value) in REQUEST_ALLOWED:
        assert check_transition(REQUEST_TRANSITIONS, current, to) is to
    else:
        with pytest.raises(IllegalTransition, match=f"{current.value} → {to.value} is not in the table"):
            check_transition(REQUEST_TRANSITIONS, current, to)


@pytest.mark.parametrize("to", EngineStatus)
@pytest.mark.parametrize("current", EngineStatus)
def test_engine_table(current: EngineStatus, to: EngineStatus) -> None:
    if (current.value, to.value) in ENGINE_ALLOWED:
        assert check_transition(ENGINE_TRANSITIONS, current, to) is to
    else:
        with pytest.raises(IllegalTransition, match=f"{current.value} → {to.value} is not in the table"):
            check_transition(ENGINE_TRANSITIONS, current, to)


def test_the_tables_know_every_state() -> None:
    assert set(REQUEST_TRANSITIONS) == set(RequestStatus)
    assert set(ENGINE_TRANSITIONS) == set(EngineStatus)


def test_an_illegal_transition_names_what_is_allowed() -> None:
    with pytest.raises(IllegalTransition, match="allowed: none"):
        check_transition(REQUEST_TRANSITIONS, RequestStatus.FINISHED, RequestStatus.QUEUED)
    with pytest.raises(IllegalTransition, match=r"finished.*running"):
        check_transition(ENGINE_TRANSITIONS, EngineStatus.PREEMPTED, EngineStatus.WAITING)


def test_abort_is_possible_from_every_state_that_is_not_an_end() -> None:
    for status, allowed in REQUEST_TRANSITIONS.items():
        assert (RequestStatus.ABORTED in allowed) == bool(allowed), status
    for engine_status, engine_allowed in ENGINE_TRANSITIONS.items():
        assert (EngineStatus.FINISHED in engine_allowed) == bool(engine_allowed), engine_status


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
