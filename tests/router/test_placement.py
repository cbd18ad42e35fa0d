"""`place` as a function: plain values in, a decision with its reason out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.config import RouterConfig
from pdserve.core.errors import CapacityExceeded, LayoutMismatch, NotReady, PeerLost
from pdserve.core.request import Mode
from pdserve.core.worker import Role
from router.placement import Decision, Never, Placed, Wait, place, unavailable
from router.policies import POLICIES
from router.view import ClusterView, Needs, WaitMode, WorkerView

PROMPT, OUTPUT = 20, 10
ALL = dict.fromkeys(["d0", "d1", "d2"], 0.0)


def worker(worker_id: str, **changes: Any) -> WorkerView:
    """A prefill worker (p...) linked to all, or a decode worker (d...): idle, of 32 blocks of 4 tokens."""
    is_prefill = worker_id.startswith("p")
    values = {"role": Role.PREFILL if is_prefill else Role.DECODE, "linked": ALL if is_prefill else {}}
    capacity = {"block_size": 4, "num_blocks": 32, "max_tokens": 128, "free_blocks": 32}
    return WorkerView(worker_id, **{**values, **capacity, **changes})


def busy(worker_id: str, tokens: int, **changes: Any) -> WorkerView:
    """One with requests on it."""
    return worker(worker_id, outstanding_tokens=tokens, outstanding_requests=1, **changes)


def view(*workers: WorkerView, policy: str = "least_tokens", backlog: int = 100, gateways: int = 1) -> ClusterView:
    values = {"policy": policy, "slo": {"ttft_ms": 100, "itl_ms": 10}, "prefill_backlog_tokens": backlog}
    return ClusterView(workers, RouterConfig.model_validate({**values, "prefix_fetch": "off"}), gateways)


def pairs_only(worker_id: str, **changes: Any) -> WorkerView:
    """One that serves no request alone."""
    return worker(worker_id, serves_alone=False, **changes)


def needs(mode: WaitMode = Mode.PD, **changes: Any) -> Needs:
    return Needs(mode, PROMPT, OUTPUT, **changes)


def placed(decision: Decision) -> tuple[str, str | None]:
    assert isinstance(decision, Placed), decision
    return decision.prefill, decision.decode


PLACED: dict[str, tuple[Needs, ClusterView, tuple[str, str | None], str]] = {
    "the least loaded of each role": (
        needs(),
        view(busy("p0", 9), busy("p1", 8), busy("d0", 3), busy("d1", 7, running=1), busy("d2", 4)),
        ("p1", "d0"),
        "prefill on p1: 8 outstanding tokens, the fewest of 2; decode on d0: 3 outstanding tokens, the fewest of 3",
    ),
    "among equals the one not used for longest": (
        needs(),
        view(worker("p0", last_used=2), worker("p1", last_used=1), worker("d1"), worker("d0")),
        ("p1", "d0"),
        "0 outstanding tokens, the fewest of 2",
    ),
    "not where it failed": (
        needs(avoid=frozenset({"p0", "d0"})),
        view(worker("p0"), busy("p1", 50), worker("d0"), busy("d1", 50)),
        ("p1", "d1"),
        "prefill on p1: the only one free, 1 avoided; decode on d1: the only one free, 1 avoided",
    ),
    "alone where a worker can": (
        needs(Mode.COLOCATED),
        view(pairs_only("p0"), pairs_only("d0"), busy("p1", 50)),
        ("p1", None),
        "both on p1: the only one free",
    ),
    "in mode auto on a pair, if no worker serves alone": (
        needs(Mode.AUTO),
        view(pairs_only("p0"), pairs_only("d0")),
        ("p0", "d0"),
        "prefill on p0",
    ),
    "where it failed, if there is no other": (
        needs(avoid=frozenset({"p0", "d0"})),
        view(worker("p0"), worker("d0")),
        ("p0", "d0"),
        "prefill on p0: the only one free, though it failed the request",
    ),
    "not on a late one": (
        needs(),
        view(worker("p0", late=True), busy("p1", 50), worker("d0", late=True)),
        ("p1", "d0"),
        "decode on d0: the only one free, though its heartbeat is late",
    ),
    "where its cache is": (
        needs(prefer="p1"),
        view(worker("p0"), busy("p1", 50), worker("d0")),
        ("p1", "d0"),
        "prefill on p1: the last attempt ran there, and its prefix cache holds the prompt",
    ),
    "colocated, the least loaded of all": (
        needs(Mode.COLOCATED),
        view(busy("p0", 9, last_used=1), busy("d0", 3, last_used=2)),
        ("d0", None),
        "mode colocated; both on d0: 3 outstanding tokens, the fewest of 2",
    ),
    "auto is a pair": (
        needs(Mode.AUTO),
        view(worker("p0"), worker("d0")),
        ("p0", "d0"),
        "mode auto: too few hand-offs are measured to compare; prefill on p0",
    ),
    "auto without links": (
        needs(Mode.AUTO),
        view(worker("p0", linked={}, link_errors=(PeerLost("d0 hung up"),)), worker("d0", outstanding_tokens=1)),
        ("p0", None),
        "mode auto: workers are ready, but no prefill worker is connected to a decode worker: d0 hung up; both on p0",
    ),
    "auto too large for a pair": (
        needs(Mode.AUTO),
        view(worker("p0"), worker("d0", max_tokens=29)),
        ("p0", None),
        "mode auto: prompt and max_tokens: 20 + 10 tokens exceed the KV pool of every worker",
    ),
}


@pytest.mark.parametrize(("wanted", "cluster", "where", "why"), PLACED.values(), ids=PLACED)
def test_placed(wanted: Needs, cluster: ClusterView, where: tuple[str, str | None], why: str) -> None:
    decision = place(wanted, cluster)
    assert placed(decision) == where
    assert isinstance(decision, Placed)
    assert why in decision.reason


def test_each_gateway_may_use_its_share_of_a_backlog_that_others_fill() -> None:
    """With a backlog of 100 tokens and two gateways."""
    for total, others, is_free in (
        (300, 300, True),
        (300, 251, True),
        (300, 250, False),
        (99, 0, True),
        (100, 0, False),
    ):
        each = worker("p0", prompt_tokens=total, others_prompt_tokens=others)
        assert view(each, gateways=2).is_free(each) == is_free, (total, others)


WAITS: dict[str, tuple[Needs, ClusterView, str, type[Exception] | None]] = {
    "no prefill worker is free": (
        needs(),
        view(busy("p0", 200, prompt_tokens=200), busy("p1", 150, prompt_tokens=150), worker("d0")),
        "no prefill worker is free: p1 has 150 prompt tokens to compute, the fewest of 2 "
        "(router.prefill_backlog_tokens: 100)",
        None,
    ),
    "no decode worker has room": (
        needs(),
        view(worker("p0"), busy("d0", 1, free_blocks=4), busy("d1", 1, free_blocks=9, blocks_placed=6)),
        "no decode worker has room: the prompt takes 5 blocks, d0 has 4 free, the most of 2",
        None,
    ),
    "the one with room is linked to another": (
        needs(),
        view(worker("p0", linked={"d0": 0.0}), busy("d0", 1, free_blocks=0), worker("d1")),
        "no free prefill worker is linked to a decode worker with room",
        None,
    ),
    "those that it fits are not ready": (
        needs(),
        view(worker("p0"), worker("d0", max_tokens=29), worker("d1", ready=False)),
        "no ready decode worker can hold 30 tokens",
        None,
    ),
    "nothing there": (
        needs(Mode.AUTO),
        view(),
        "mode auto: no prefill worker is ready (none has registered)",
        NotReady,
    ),
    "unlike workers, which would answer differently": (
        needs(Mode.AUTO),
        view(worker("p0", linked={}, link_errors=(LayoutMismatch("dtype differs"),)), worker("d0")),
        "workers are ready, but no prefill worker is connected to a decode worker: dtype differs",
        LayoutMismatch,
    ),
}


@pytest.mark.parametrize(("wanted", "cluster", "why", "error"), WAITS.values(), ids=WAITS)
def test_waits(wanted: Needs, cluster: ClusterView, why: str, error: type[Exception] | None) -> None:
    decision = place(wanted, cluster)
    assert isinstance(decision, Wait)
    assert decision.reason.startswith(why)
    assert type(decision.error) is (error or type(None))


@pytest.mark.parametrize("mode", [Mode.PD, Mode.COLOCATED, Mode.AUTO])
def test_what_no_worker_could_hold_is_never_placed(mode: WaitMode) -> None:
    small = view(worker("p0", max_tokens=29), worker("d0", max_tokens=29, ready=False))
    decision = place(needs(mode), small)
    assert isinstance(decision, Never)
    assert str(decision.error).startswith("prompt and max_tokens: 20 + 10 tokens exceed the KV pool of every worker")
    assert "(29 tokens at most)" in str(decision.error)
    assert isinstance(place(needs(mode), view(worker("p0", live=False, ready=False, max_tokens=1))), Wait)


# --- whatever the cluster --------------------------------------------------------------------------------------------


@st.composite
def clusters(draw: st.DrawFn) -> ClusterView:
    few = st.integers(0, 3)
    workers = []
    for name in [f"p{i}" for i in range(draw(few))] + [f"d{i}" for i in range(draw(few))]:
        live = draw(st.booleans()) or draw(st.booleans())
        rates = st.dictionaries(st.sampled_from(["d0", "d1", "d2"]), st.sampled_from([0.0, 1.0, 4.0]))
        linked = draw(rates) if name.startswith("p") else {}
        requests = draw(few)
        workers.append(
            worker(
                name,
                max_tokens=draw(st.sampled_from([16, 64, 128])),
                free_blocks=draw(st.integers(0, 32)),
                blocks_placed=draw(st.integers(-32, 32)),
                outstanding_requests=requests,
                outstanding_tokens=draw(st.integers(0, 50)) if requests else 0,
                prompt_tokens=draw(st.integers(0, 200)) if requests else 0,
                live=live,
                ready=live and (draw(st.booleans()) or draw(st.booleans())),
                late=draw(st.integers(0, 3)) == 0,
                node=draw(st.sampled_from(["a", "b"])),
                linked=linked,
                link_errors=(LayoutMismatch("dtype differs"),) * (draw(st.integers(0, 9)) == 0),
                last_used=draw(few),
            )
        )
    draw(st.randoms(use_true_random=False)).shuffle(workers)
    policy, backlog = draw(st.sampled_from(sorted(POLICIES))), draw(st.sampled_from([1, 100]))
    return view(*workers, policy=policy, backlog=backlog)


NAMES = ["p0", "p1", "p2", "d0", "d1", "d2"]
WANTED = st.builds(
    Needs,
    mode=st.sampled_from([Mode.PD, Mode.COLOCATED, Mode.AUTO]),
    prompt_tokens=st.integers(1, 130),
    output_tokens=st.integers(1, 40),
    avoid=st.frozensets(st.sampled_from(NAMES), max_size=3),
    prefer=st.sampled_from(["", *NAMES]),
    ticket=st.integers(0, 2**32),
    session=st.sampled_from(["", "a", "b"]),
    cached=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 130)),
)


def allowed(wanted: Needs, cluster: ClusterView) -> list[tuple[WorkerView, WorkerView | None]]:
    """All that a decision may be, spelled out: pairs, or single workers where one has to do both."""

    def is_free(each: WorkerView) -> bool:
        return each.ready and (each.prompt_tokens == 0 or each.prompt_tokens < cluster.config.prefill_backlog_tokens)

    tokens = wanted.prompt_tokens + wanted.output_tokens
    singles = [(each, None) for each in cluster.workers if is_free(each) and tokens <= each.max_tokens]
    if wanted.mode is Mode.COLOCATED:
        return [*singles]
    pairs = [
        (prefill, decode)
        for prefill in cluster.workers
        for decode in cluster.workers
        if (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE)
        and is_free(prefill)
        and decode.ready
        and decode.worker_id in prefill.linked
        and wanted.prompt_tokens < prefill.max_tokens
        and tokens <= decode.max_tokens
        and (
            not decode.outstanding_requests
            or -(-wanted.prompt_tokens // 4) <= min(decode.free_blocks - decode.blocks_placed, decode.num_blocks)
        )
    ]
    if pairs or wanted.mode is Mode.PD:
        return [*pairs]
    apart = unavailable(Mode.PD, cluster)
    if apart is None:
        apart_fits = isinstance(place(msgspec.structs.replace(wanted, mode=Mode.PD), cluster), Wait)
        return [] if apart_fits else [*singles]
    return [] if isinstance(apart, LayoutMismatch) else [*singles]


@given(wanted=WANTED, cluster=clusters())
def test_a_request_waits_only_if_nothing_can_take_it_and_goes_only_where_it_can(
    wanted: Needs, cluster: ClusterView
) -> None:
    decision, able = place(wanted, cluster), allowed(wanted, cluster)
    again = place(wanted, cluster)
    assert repr(again) == repr(decision), "the same values, the same decision"
    backwards = msgspec.structs.replace(cluster, workers=cluster.workers[::-1])
    if not isinstance(decision, Wait) or decision.error is None:  # which of several errors is told may differ
        assert repr(place(wanted, backwards)) == repr(decision), "in whatever order the workers are listed"
    if isinstance(decision, Never):
        assert isinstance(decision.error, CapacityExceeded)
        assert not able
        return
    if isinstance(decision, Wait):
        assert not able
        assert decision.reason
        # What it waits for either comes with time, or is what `unavailable` says.
        now = unavailable(wanted.mode, cluster)
        assert (type(decision.error), str(decision.error)) == (type(now), str(now))
        return
    assert placed(decision) in [(a.worker_id, b and b.worker_id) for a, b in able]
    assert decision.prefill in decision.reason
    assert decision.decode is None or decision.decode in decision.reason
    by_name = {each.worker_id: each for each in cluster.workers}

    def is_good(each: WorkerView | None) -> bool:
        return each is None or not (each.late or each.worker_id in wanted.avoid)

    def goodness(pair: tuple[WorkerView, WorkerView | None]) -> tuple[bool, bool]:
        return is_good(pair[1]), is_good(pair[0])

    chosen = by_name[decision.prefill], by_name.get(decision.decode or "")
    # A good decode worker matters more than a good prefill worker: it has the request for longer.
    assert goodness(chosen) == max(map(goodness, able)), "avoid is honoured where that is possible"
    if wanted.prefer in {a.worker_id for a, _ in able if goodness((a, chosen[1])) == goodness(chosen)} and chosen[1]:
        best = [a.worker_id for a, b in able if goodness((a, b)) == goodness(chosen)]
        assert decision.prefill == wanted.prefer or wanted.prefer not in best


def test_workers_that_serve_in_pairs_alone() -> None:
    pair = view(pairs_only("p0"), pairs_only("d0"))
    assert unavailable(Mode.PD, pair) is unavailable(Mode.AUTO, pair) is None
    refused = place(needs(Mode.COLOCATED), pair)
    assert isinstance(refused, Wait)
    assert "serve requests in pairs; use mode pd" in str(refused.error)
    # Without a pair, mode auto has nothing to fall back to.
    for mode in (Mode.PD, Mode.AUTO):
        error = unavailable(mode, view(pairs_only("p0")))
        assert "no decode worker is ready" in str(error)
        assert "modes auto and colocated" not in str(error)
