"""Limits of one token, on a clock that the test moves."""

from __future__ import annotations

import pytest

from gateway.admitted_call import AdmittedCall
from gateway.callers import Caller, Quota
from gateway.token_file import TokenLimits
from pdserve.core.clock import FakeClock
from pdserve.core.errors import CapacityExceeded
from router.deadline import Deadline


def refusal(quota: Quota, requests: int = 1) -> CapacityExceeded:
    with pytest.raises(CapacityExceeded) as caught:
        quota.take(requests)
    return caught.value


def test_without_limits_nothing_is_refused() -> None:
    quota = Quota(TokenLimits(), FakeClock())
    for _ in range(10_000):
        quota.take(1)
        quota.spend(10**6)
    assert quota.running == 10_000


def test_requests_per_minute_may_come_at_once_and_come_back_evenly() -> None:
    clock = FakeClock()
    quota = Quota(TokenLimits(requests_per_minute=30), clock)
    for _ in range(30):
        quota.take(1)
    error = refusal(quota)
    assert str(error) == "requests_per_minute: the token allows 30 requests per minute; come back later"
    assert error.retry_after_s == pytest.approx(2.0)
    clock.advance(1.5)
    assert refusal(quota).retry_after_s == pytest.approx(0.5)
    clock.advance(0.5)
    quota.take(1)
    refusal(quota)
    clock.advance(3600.0)
    for _ in range(30):
        quota.take(1)
    refusal(quota)  # what was not used within a minute is not kept


def test_running_requests_are_counted_until_they_end() -> None:
    quota = Quota(TokenLimits(concurrent=2), FakeClock())
    quota.take(1)
    quota.take(1)
    error = refusal(quota)
    assert str(error).startswith("concurrent: the token allows 2 requests at the same time")
    assert error.retry_after_s is not None
    assert quota.running == 2
    quota.give_back(1)
    quota.take(1)
    quota.give_back(2)
    assert quota.running == 0


def test_outputs_of_one_call_that_never_fit_are_told_so() -> None:
    quota = Quota(TokenLimits(concurrent=4, requests_per_minute=100), FakeClock())
    quota.take(1)
    quota.take(3, held=1)
    quota.give_back(4)
    quota.take(1)
    with pytest.raises(CapacityExceeded) as caught:
        quota.take(4, held=1)
    assert caught.value.retry_after_s is None
    assert "ask for less" in str(caught.value)
    assert quota.running == 1


def test_tokens_are_charged_when_they_are_known() -> None:
    clock = FakeClock()
    quota = Quota(TokenLimits(tokens_per_minute=600), clock)
    quota.take(1)
    quota.check_tokens()
    quota.spend(900)  # more than is left: it is not known before
    error = refusal(quota)
    assert str(error).startswith("tokens_per_minute: the token allows 600 tokens per minute")
    assert error.retry_after_s == pytest.approx(30.1)
    with pytest.raises(CapacityExceeded):
        quota.check_tokens()  # of a request that had begun before
    clock.advance(31.0)
    quota.take(1)
    for _ in range(10):
        quota.spend(1)
    refusal(quota)


async def test_all_outputs_of_a_call_may_exceed_what_is_left() -> None:
    clock = FakeClock()
    caller = Caller("a", Quota(TokenLimits(tokens_per_minute=1000), clock))
    call = AdmittedCall(caller, 0.0, Deadline(60.0, clock))
    for _ in range(3):
        call.spend_prompt(600)
    with pytest.raises(CapacityExceeded):
        AdmittedCall(caller, 0.0, Deadline(60.0, clock)).spend_prompt(1)


def test_a_call_with_several_outputs_fits_when_it_comes_back_as_it_was_told() -> None:
    clock = FakeClock()
    quota = Quota(TokenLimits(requests_per_minute=10), clock)
    quota.take(7)
    quota.take(1)
    with pytest.raises(CapacityExceeded) as caught:
        quota.take(4, held=1)
    assert caught.value.retry_after_s is not None
    clock.advance(caught.value.retry_after_s)
    quota.take(1)
    quota.take(4, held=1)


def test_a_refused_request_costs_nothing() -> None:
    clock = FakeClock()
    quota = Quota(TokenLimits(requests_per_minute=2, concurrent=1), clock)
    quota.take(1)
    for _ in range(5):
        refusal(quota)
    quota.give_back(1)
    quota.take(1)
    assert quota.running == 1


def test_changed_limits_apply_to_what_was_used() -> None:
    clock = FakeClock()
    quota = Quota(TokenLimits(requests_per_minute=10), clock)
    for _ in range(10):
        quota.take(1)
    quota.limits = TokenLimits(requests_per_minute=20)
    for _ in range(10):
        quota.take(1)
    quota.limits = TokenLimits(requests_per_minute=5)
    assert refusal(quota).retry_after_s == pytest.approx((20 + 1 - 5) * 12)
