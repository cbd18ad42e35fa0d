"""The rate of a link: its arithmetic."""

from __future__ import annotations

import pytest

from kv_transfer.link_rate import Run, SenderClock


def run_of(*messages: tuple[int, float, float]) -> Run:
    run = Run()
    for message in messages:
        run.add(*message)
    return run


def test_back_to_back_messages_last_from_completion_to_completion() -> None:
    run = run_of((1000, 1.0, 1.5), (1000, 1.1, 2.0), (1000, 1.2, 2.5))
    assert (run.num_bytes, run.busy_s) == (3000, 1.5)
    assert run.gbs == pytest.approx(2e-6)


def test_a_wait_for_the_sender_does_not_count() -> None:
    assert run_of((1000, 1.0, 1.5), (1000, 7.0, 7.25)).busy_s == 0.75


def test_what_was_buffered_while_the_receiver_was_away_is_no_faster() -> None:
    """Two messages that lay in a socket for a second."""
    assert run_of((1000, 1.0, 2.0), (1000, 1.1, 2.001)).gbs == pytest.approx(2000 / 1.001 / 1e9)


def test_a_run_without_bytes_has_no_rate() -> None:
    assert Run().gbs == 0.0


@pytest.mark.parametrize(("size", "took_s", "tells"), [(2**20, 1e-4, True), (2**16, 1e-4, False), (2**16, 0.006, True)])
def test_a_small_fast_train_tells_nothing(size: int, took_s: float, tells: bool) -> None:
    assert run_of((size, 0.0, took_s)).tells == tells


def test_the_senders_clock_is_known_by_the_fastest_header() -> None:
    clock = SenderClock()
    clock.heard(1_000_000, 51.5)  # the clocks differ by 50 s; the header took half a second
    clock.heard(2_000_000, 52.01)
    clock.heard(3_000_000, 53.2)
    assert clock.arrival_s(3_000_000) == pytest.approx(53.01, abs=1e-3)
    assert clock.departure_s(3_000_000) == clock.arrival_s(3_000_000)
    for round_trip_s in (0.5, 0.02, 0.04):
        clock.answered(round_trip_s)
    assert clock.departure_s(3_000_000) == pytest.approx(53.0, abs=1e-3)


def test_clocks_may_drift_apart() -> None:
    clock = SenderClock()
    for minute in range(120):  # the sender's clock loses 50 us in a second
        sent_s = minute * 60.0
        received_s = sent_s * (1 + 5e-5) + 0.01
        clock.heard(round(sent_s * 1e6), received_s)
        assert received_s - 0.01 < clock.arrival_s(round(sent_s * 1e6)) <= received_s
