"""The breakdown: each stage from its own events, offsets corrected, and a residue that hides nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.timeline import (
    EMITTED,
    GATEWAY,
    NETWORK,
    STAGE_NAMES,
    STAGES,
    UNATTRIBUTED,
    Breakdown,
    ClockOffset,
    Event,
    EventKind,
    Figure,
    Timeline,
)

K = EventKind
TTFT, TTFT_DECODE = Figure.TTFT, Figure.TTFT_DECODE

# When everything truly happens, in milliseconds of the gateway's clock. Gaps no stage covers: 1 ms from
# PAIR_CHOSEN to PREFILL_SENT.
TRUE_MS = {
    K.RECEIVED: 0.0,
    K.TOKENIZED: 2.0,
    K.PAIR_CHOSEN: 5.0,
    K.PREFILL_SENT: 6.0,
    K.PREFILL_RECEIVED: 11.0,
    K.PREFIX_AWAITED: 12.0,
    K.PREFIX_READY: 15.0,
    K.PREFILL_SCHEDULED: 17.0,
    K.TOKEN_1_SAMPLED: 57.0,
    K.TOKEN_1_ARRIVED: 59.0,
    K.TOKEN_1_EMITTED: 60.0,
    K.ROOM_MADE: 62.0,
    K.KV_VERIFIED: 77.0,
    K.DECODE_SCHEDULED: 84.0,
    K.DRAFTED: 90.0,
    K.TOKEN_2_SAMPLED: 99.0,
    K.TOKEN_2_ARRIVED: 104.0,
    K.TOKEN_2_EMITTED: 107.0,
    K.FINISHED: 200.0,
}
# The same of a request to engines that tell nothing of what happens in them.
EXTERNAL_MS = {K.PREFILL_ANSWERED: 58.0, K.DECODE_SENT: 61.0, K.DECODE_ANSWERED: 88.0}
ON_PREFILL = {K.PREFILL_RECEIVED, K.PREFIX_AWAITED, K.PREFIX_READY, K.PREFILL_SCHEDULED, K.TOKEN_1_SAMPLED}
ON_DECODE = {K.ROOM_MADE, K.KV_VERIFIED, K.DECODE_SCHEDULED, K.DRAFTED, K.TOKEN_2_SAMPLED}

TTFT_MS = {
    "gateway": 2.0 + 1.0,
    "route": 3.0,
    "dispatch": 5.0 + 2.0,
    "prefix_fetch": 3.0,
    "prefill_queue": 1.0 + 2.0,
    "prefill": 40.0,
    UNATTRIBUTED: 1.0,
}
TTFT_DECODE_MS = {
    "gateway": 2.0 + 3.0,
    "route": 3.0,
    "dispatch": 5.0 + 5.0,
    "prefix_fetch": 3.0,
    "prefill_queue": 1.0 + 2.0,
    "prefill": 40.0,
    "kv_exposed": 20.0,
    "decode_queue": 7.0,
    "drafting": 6.0,
    "first_decode": 9.0,
    UNATTRIBUTED: 1.0,
}


def timeline(
    offset_p_s: float = 0.0, offset_d_s: float = 0.0, *, colocated: bool = False, leave_out: tuple[EventKind, ...] = ()
) -> Timeline:
    """The events of `TRUE_MS`, as clocks that are off by these offsets tell them; no offset is known yet."""
    result = Timeline()
    for kind, time_ms in TRUE_MS.items():
        if kind in leave_out or (colocated and kind in (K.KV_VERIFIED, K.ROOM_MADE)):
            continue
        worker, offset_s = GATEWAY, 0.0
        if kind in ON_PREFILL or (colocated and kind in ON_DECODE):
            worker, offset_s = "p0", offset_p_s
        elif kind in ON_DECODE:
            worker, offset_s = "d0", offset_d_s
        result.record(kind, worker, time_ms / 1e3 + offset_s)
    return result


def shown(subject: Timeline, figure: Figure, client_total_ms: float | None = None) -> Breakdown:
    breakdown = subject.breakdown(figure, client_total_ms)
    assert breakdown is not None
    assert sum(breakdown.stages_ms.values()) == pytest.approx(breakdown.total_ms)
    assert list(breakdown.stages_ms)[-1] == UNATTRIBUTED
    assert breakdown.stages_ms[UNATTRIBUTED] == breakdown.unattributed_ms
    return breakdown


def stages(subject: Timeline, figure: Figure, client_total_ms: float | None = None) -> dict[str, float]:
    return dict(shown(subject, figure, client_total_ms).stages_ms)


def test_the_events_of_this_test_are_all_there_are() -> None:
    assert {*TRUE_MS, *EXTERNAL_MS, K.DECODE_READY} == set(EventKind)


def test_ttft() -> None:
    assert stages(timeline(), TTFT) == pytest.approx(TTFT_MS)


def test_a_prompt_of_which_nothing_is_fetched_waits_for_the_engine_alone() -> None:
    got = stages(timeline(leave_out=(K.PREFIX_AWAITED, K.PREFIX_READY)), TTFT)
    expected = TTFT_MS | {"prefill_queue": 6.0}
    del expected["prefix_fetch"]
    assert got == pytest.approx(expected)


def test_ttft_decode_of_a_handed_off_request() -> None:
    assert stages(timeline(), TTFT_DECODE) == pytest.approx(TTFT_DECODE_MS)
    alone = TTFT_DECODE_MS | {"first_decode": 15.0}
    del alone["drafting"]
    assert stages(timeline(leave_out=(K.DRAFTED,)), TTFT_DECODE) == pytest.approx(alone)


def test_ttft_decode_of_a_colocated_request_queues_from_token_1() -> None:
    got = stages(timeline(5.0, colocated=True), TTFT_DECODE)
    expected = TTFT_DECODE_MS | {"decode_queue": 27.0}
    del expected["kv_exposed"]
    # The worker's offset is unknown here, and yet nothing is wrong: all that crosses hosts goes there and back.
    assert got == pytest.approx(expected)


def test_network_is_the_clients_total_minus_the_gateways() -> None:
    got = stages(timeline(), TTFT, client_total_ms=72.5)
    assert got == pytest.approx({NETWORK: 12.5} | TTFT_MS)
    assert list(got) == [NETWORK, *(stage.name for stage in STAGES[TTFT] if stage.name in got), UNATTRIBUTED]
    own = [name for name in STAGE_NAMES if name in (NETWORK, *TTFT_DECODE_MS)]
    assert list(stages(timeline(), TTFT_DECODE, 120.0)) == [*own, UNATTRIBUTED]


def test_ttft_of_a_token_that_was_held_back_has_the_hand_off() -> None:
    held = timeline()
    for kind, time_ms in ((K.DECODE_READY, 77.0), (K.TOKEN_1_ARRIVED, 79.5), (K.TOKEN_1_EMITTED, 80.0)):
        held.record(kind, "d0" if kind is K.DECODE_READY else GATEWAY, time_ms / 1e3)
    expected = {**TTFT_MS, "gateway": 2.0 + 0.5, "dispatch": 5.0 + 2.5, "kv_exposed": 20.0}
    assert stages(held, TTFT) == pytest.approx(expected)
    assert stages(held, TTFT_DECODE) == pytest.approx(TTFT_DECODE_MS)


def external(*leave_out: EventKind) -> Timeline:
    result = timeline(leave_out=(*ON_PREFILL, *ON_DECODE))
    for kind, time_ms in EXTERNAL_MS.items():
        if kind not in leave_out:
            result.record(kind, "d0", time_ms / 1e3)
    return result


def test_an_engine_that_tells_nothing_has_the_stages_that_are_seen_from_outside() -> None:
    before = {"gateway": 2.0 + 1.0, "route": 3.0, "prefill_leg": 52.0}
    assert stages(external(), TTFT) == pytest.approx(before | {UNATTRIBUTED: 2.0})
    after = {"gateway": 2.0 + 3.0, "leg_gap": 3.0, "decode_leg": 27.0, "first_decode": 16.0}
    assert stages(external(), TTFT_DECODE) == pytest.approx(before | after | {UNATTRIBUTED: 1.0})
    colocated = external(K.DECODE_SENT, K.DECODE_ANSWERED)
    alone = before | {"gateway": 2.0 + 3.0, "first_decode": 46.0, UNATTRIBUTED: 1.0}
    assert stages(colocated, TTFT_DECODE) == pytest.approx(alone)


# --- clocks ----------------------------------------------------------------------------------------------------------


@given(st.floats(-1e4, 1e4))
def test_an_unknown_offset_cancels_in_the_dispatch_of_ttft(offset_s: float) -> None:
    subject = timeline(offset_s)
    assert stages(subject, TTFT) == pytest.approx(TTFT_MS, abs=1e-6)
    assert shown(subject, TTFT).clock_error_ms == 0.0


@given(st.floats(-1e4, 1e4), st.floats(-1e4, 1e4))
def test_measured_offsets_are_taken_out_of_what_crosses_hosts(offset_p_s: float, offset_d_s: float) -> None:
    subject = timeline(offset_p_s, offset_d_s)
    subject.clocks = {"p0": ClockOffset(offset_p_s, 0.001), "d0": ClockOffset(offset_d_s, 0.002)}
    assert stages(subject, TTFT_DECODE) == pytest.approx(TTFT_DECODE_MS, abs=1e-6)


def test_the_clock_error_bounds_the_stage_that_two_clocks_put_wrong() -> None:
    """Offsets measured wrong by all of their errors, in opposite directions: the worst there is."""
    subject = timeline()
    subject.clocks = {"p0": ClockOffset(0.001, 0.001), "d0": ClockOffset(-0.002, 0.002)}
    breakdown = shown(subject, TTFT_DECODE)
    assert breakdown.clock_error_ms == pytest.approx(3.0)
    wrong_ms = {name: abs(breakdown.stages_ms[name] - true_ms) for name, true_ms in TTFT_DECODE_MS.items()}
    assert wrong_ms["kv_exposed"] == pytest.approx(3.0)
    assert max(wrong_ms.values()) <= breakdown.clock_error_ms + 1e-9
    assert breakdown.unattributed_ms == pytest.approx(1.0)


def test_no_clock_error_where_the_offset_cancels() -> None:
    subject = timeline(7.0)
    subject.clocks["p0"] = ClockOffset(6.9, 0.2)
    assert shown(subject, TTFT).clock_error_ms == 0.0
    assert stages(subject, TTFT) == pytest.approx(TTFT_MS)
    assert shown(timeline(7.0, colocated=True), TTFT_DECODE).clock_error_ms == 0.0


# --- what did not happen ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("figure", Figure)
def test_no_breakdown_before_its_token_is_written_or_without_a_receipt(figure: Figure) -> None:
    for missing in (EMITTED[figure], K.RECEIVED):
        subject = timeline(leave_out=(missing,))
        found = (subject.breakdown(figure), subject.breakdown(figure, 50.0), subject.gateway_total_ms(figure))
        assert found == (None, None, None)
    assert timeline().gateway_total_ms(figure) == pytest.approx(TRUE_MS[EMITTED[figure]])


@pytest.mark.parametrize(("made_ms", "wait_ms"), [(62.0, 5.0), (57.0, 0.0), (30.0, 0.0)])
def test_waiting_for_room_is_the_part_after_token_1(made_ms: float, wait_ms: float) -> None:
    subject = timeline()
    subject.record(K.ROOM_MADE, "d0", made_ms / 1e3)
    assert subject.room_wait_ms == pytest.approx(wait_ms)
    assert stages(subject, TTFT_DECODE)["kv_exposed"] == pytest.approx(20.0), "it is a part of this stage"
    assert timeline(leave_out=(K.ROOM_MADE,)).room_wait_ms == 0.0


def test_a_one_token_request_has_no_ttft_decode_but_a_ttft() -> None:
    subject = timeline(leave_out=(*ON_DECODE, K.TOKEN_2_ARRIVED, K.TOKEN_2_EMITTED))
    assert subject.breakdown(TTFT_DECODE) is None
    assert stages(subject, TTFT) == pytest.approx(TTFT_MS)


@pytest.mark.parametrize("missing", sorted(set(EventKind) - {K.RECEIVED, K.TOKEN_2_EMITTED, *EXTERNAL_MS}))
def test_what_a_missing_event_leaves_open_is_unattributed_and_nothing_else_changes(missing: EventKind) -> None:
    got = stages(timeline(leave_out=(missing,)), TTFT_DECODE)
    lost_ms = 0.0
    own = {stage: [span for span in stage.spans if not {*span} & {*EXTERNAL_MS}] for stage in STAGES[TTFT_DECODE]}
    for spans in own.values():
        for span in spans:
            if span[0] is missing and len(span) == 3:  # decode_queue then starts at token 1
                lost_ms -= TRUE_MS[missing] - TRUE_MS[span[1]]
            elif missing in (span[0], span[-1]):
                lost_ms += TRUE_MS[span[-1]] - TRUE_MS[span[0]]
    assert got[UNATTRIBUTED] == pytest.approx(1.0 + lost_ms)
    untouched = [stage.name for stage, spans in own.items() if spans and all(missing not in span for span in spans)]
    assert {name: got[name] for name in untouched} == pytest.approx({name: TTFT_DECODE_MS[name] for name in untouched})


def test_the_residue_shows_a_planted_gap_exactly() -> None:
    subject = timeline()
    for kind in list(subject.events):
        if TRUE_MS[kind] >= TRUE_MS[K.PREFILL_SENT]:
            event = subject.events[kind]
            subject.record(kind, event.worker, event.time_s + 0.25)
    assert stages(subject, TTFT) == pytest.approx(TTFT_MS | {UNATTRIBUTED: 251.0})


# --- retries ---------------------------------------------------------------------------------------------------------


def test_the_last_attempts_events_win() -> None:
    subject = timeline(leave_out=(K.PREFIX_AWAITED, K.PREFIX_READY))
    subject.record(K.PREFILL_SCHEDULED, "p0", 0.012)
    subject.extend([Event(K.PREFILL_RECEIVED, "p0", 0.0115), Event(K.PREFILL_SENT, GATEWAY, 0.011)])
    got = stages(subject, TTFT)
    assert got["prefill"] == pytest.approx(45.0)
    assert got["prefill_queue"] == pytest.approx(0.5)
    assert got["dispatch"] == pytest.approx(0.5 + 2.0)
    assert got[UNATTRIBUTED] == pytest.approx(6.0)


def test_a_retry_on_another_worker_is_read_on_that_workers_clock() -> None:
    subject = timeline()
    subject.clocks["p1"] = ClockOffset(100.0, 0.0)
    for kind in ON_PREFILL:
        subject.record(kind, "p1", TRUE_MS[kind] / 1e3 + 100.0)
    assert stages(subject, TTFT_DECODE) == pytest.approx(TTFT_DECODE_MS)


def test_forgotten_events_did_not_happen() -> None:
    subject = timeline()
    subject.forget([K.KV_VERIFIED, K.FINISHED])
    assert not subject.has(K.KV_VERIFIED)
    assert "kv_exposed" not in stages(subject, TTFT_DECODE)
    subject.forget([K.KV_VERIFIED])  # twice is as good as once
    with pytest.raises(KeyError):
        subject.gateway_time(K.KV_VERIFIED)
