"""Mode ``auto`` by costs: as a function of plain values, and in a router in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import TransferTimeout
from pdserve.core.request import Mode
from pdserve.core.worker import Role
from router.auto_mode import (
    ADVANTAGE,
    BUSY_EVERY,
    IDLE_EVERY,
    KNOWN_EVERY,
    Pair,
    break_even_tokens,
    describe_break_even,
    judge,
)
from router.cost_model import MIN_SAMPLES, Costs, Line
from router.view import Needs, WorkerView
from tests.router.conftest import Cluster, MakeCluster

PREFILL, DECODE, LINK = "prefill cpu", "decode cpu", "within a host"


def line(*coefficients: float, deviation: float = 0.0, samples: int = 100) -> Line:
    """A line whose first coefficient was measured with this standard deviation."""
    width = range(len(coefficients))
    covariance = tuple([tuple([deviation**2 if i == j == 0 else 0.0 for j in width]) for i in width])
    return Line(coefficients, covariance, samples)


def costs(**changes: Any) -> Costs:
    """Prefill 2 ms + 0.1 ms/token everywhere; hand-off 4 ms + 1 ms/MB; decode 5 ms + 0.5 ms for each request."""
    prefill = line(2e-3, 1e-4, 1e-4, 0.0)
    return Costs(
        **{
            "prefill": {PREFILL: prefill, DECODE: prefill},
            "handoff": {LINK: line(4e-3, 1e-9)},
            "decode": {PREFILL: line(5e-3, 5e-4), DECODE: line(5e-3, 5e-4)},
            "requests": 200,
            **changes,
        }
    )


def worker(worker_id: str, **changes: Any) -> WorkerView:
    """An idle worker of 1000 blocks of 10 tokens, 1000 bytes a token."""
    role = Role.PREFILL if worker_id.startswith("p") else Role.DECODE
    values = {"block_size": 10, "num_blocks": 1000, "max_tokens": 10_000, "free_blocks": 1000, "block_bytes": 10_000}
    return WorkerView(worker_id, role, **{**values, "kind": f"{role} cpu", "node": "here", **changes})


def needs(prompt: int, output: int = 20, **changes: Any) -> Needs:
    return Needs(Mode.AUTO, prompt, output, **changes)


P, D = worker("p0"), worker("d0")


def busy(count: int) -> WorkerView:
    return worker("d0", decoding=count, outstanding_requests=count)


def test_a_short_prompt_runs_where_it_decodes_and_a_long_one_does_not() -> None:
    """With 4 requests that a prompt delays, 10 tokens cost 2 + 1 + 4 ms there, and 3 + 4 ms on a pair."""
    decode = busy(4)
    short, long = (judge(needs(count), Pair(P, decode), [decode], costs()) for count in (5, 50))
    assert short.worker is decode
    assert short.why == "4.5 ms on d0 alone, 6.51 ms on a pair"
    assert long.worker is None
    assert long.why == "27 ms on d0 alone, 11.1 ms on a pair"


def test_an_idle_decode_worker_takes_a_long_prompt_while_prefill_queues() -> None:
    queued = worker("p0", prompt_tokens=2000)
    verdict = judge(needs(1000), Pair(queued, D), [D], costs())
    assert verdict.worker is D
    assert verdict.why == "102 ms on d0 alone, 307 ms on a pair"
    # Nothing waits: it would save the hand-off only, which is less than the advantage that one worker needs.
    cheap = costs(handoff={LINK: line(1e-3, 0.0)})
    assert judge(needs(1000), Pair(P, D), [D], cheap).worker is None


def test_an_idle_moment_of_a_busy_decode_worker_is_no_reason() -> None:
    """The requests that come meanwhile would wait for the prompt."""
    assert judge(needs(30), Pair(P, D), [D], costs()).worker is D
    assert judge(needs(30), Pair(P, D), [D], costs(decoding=5.0)).worker is None


def test_of_two_decode_workers_the_less_crowded_is_cheaper() -> None:
    """It slows down fewer others, and its own tokens come faster."""
    crowded, idle = busy(16), worker("d1")
    assert judge(needs(50, 100), Pair(P, crowded), [crowded, idle], costs()).worker is idle


def test_it_takes_an_advantage_beyond_three_percent_and_the_margins() -> None:
    """The request would take 6.5 ms on the decode worker and 6.51 on a pair."""
    decode = busy(4)
    barely = costs(prefill={PREFILL: line(2e-3, 1e-4, 1e-4, 0.0), DECODE: line(4.0e-3, 1e-4, 1e-4, 0.0)})
    assert judge(needs(5), Pair(P, decode), [decode], barely).worker is None
    clear = line(3e-3, 1e-4, 1e-4, 0.0)
    assert judge(needs(5), Pair(P, decode), [decode], costs(prefill={PREFILL: clear, DECODE: clear})).worker is decode
    unsure = line(3e-3, 1e-4, 1e-4, 0.0, deviation=1e-3)
    verdict = judge(needs(5), Pair(P, decode), [decode], costs(prefill={PREFILL: unsure, DECODE: unsure}))
    assert verdict.worker is None


@given(prompt=st.integers(1, 2000), scale=st.floats(0.985, 1.015), decoding=st.integers(0, 20))
def test_small_changes_of_the_costs_do_not_flip_a_clear_decision(prompt: int, scale: float, decoding: int) -> None:
    """A decision for one worker is never made within the advantage, and so never by noise of 1.5 %."""
    decode = busy(decoding)
    first = judge(needs(prompt), Pair(P, decode), [decode], costs())
    moved = costs(handoff={LINK: line(4e-3 * scale, 1e-9 * scale)})
    second = judge(needs(prompt), Pair(P, decode), [decode], moved)
    if first.worker is not second.worker:
        on_pair = 2e-3 + 1e-4 * prompt + 4e-3 + 1e-9 * 10_000 * (-(-prompt // 10))
        alone = 2e-3 + 1e-4 * prompt * (1 + decoding)
        assert alone == pytest.approx((1 - ADVANTAGE) * on_pair, rel=0.016)


def test_what_is_not_measured_is_not_compared() -> None:
    assert judge(needs(5), Pair(P, D), [D], costs(handoff={})).worker is None
    verdict = judge(needs(5), Pair(P, D), [D], costs(prefill={PREFILL: line(2e-3, 1e-4, 1e-4, 0.0)}))
    assert verdict.worker is None
    assert verdict.why == "6.51 ms on a pair, not known on one worker"


def test_explorations_are_few_and_short() -> None:
    unknown = costs(prefill={PREFILL: line(2e-3, 1e-4, 1e-4, 0.0)}, since_explored=IDLE_EVERY)
    verdict = judge(needs(5), Pair(P, D), [D], unknown)
    assert (verdict.worker, verdict.explores) == (D, True)
    assert judge(needs(500), Pair(P, D), [D], unknown).worker is None  # a long prompt would delay others
    delayed = busy(1)
    assert judge(needs(5), Pair(P, delayed), [delayed], unknown).worker is None
    later = costs(prefill=unknown.prefill, since_explored=BUSY_EVERY)
    assert judge(needs(5), Pair(P, delayed), [delayed], later).worker is delayed
    # Once all is known, the other choice is still measured now and then.
    known = costs(since_explored=KNOWN_EVERY)
    tickets = [judge(needs(5, ticket=n), Pair(P, D), [D], known) for n in range(2)]
    assert [(v.worker, v.explores) for v in tickets] == [(None, True), (None, True)]
    assert judge(needs(5), Pair(P, D), [D], costs(since_explored=KNOWN_EVERY - 1)).worker is D


def test_the_break_even_is_where_both_cost_the_same() -> None:
    pair = Pair(worker("p0", linked={"d0": 1.0}), D)
    # 4 ms + 0.001 ms/token of the hand-off, and 0.4 ms for each token that 4 requests wait for.
    assert break_even_tokens(pair, costs(), 4) == pytest.approx(4 / (0.4 - 0.001))
    assert break_even_tokens(pair, costs(), 0) == float("inf")
    assert break_even_tokens(pair, costs(handoff={}), 4) is None
    dear = {PREFILL: line(1e-3, 1e-4, 1e-4, 0.0), DECODE: line(9e-3, 1e-4, 1e-4, 0.0)}
    assert break_even_tokens(pair, costs(prefill=dear), 4) == 0.0
    words = [describe_break_even(pair, costs(decoding=decoding))[1] for decoding in (1.0, 5.0)]
    assert words == [
        "break-even: beside 0.0 others, prompts of any length are cheaper where they decode",
        "break-even: beside 4.0 others, prompts up to 10 uncached tokens are cheaper where they decode",
    ]
    assert describe_break_even([P, D], costs()) == (None, "")


@given(prompt=st.integers(1, 500), decoding=st.integers(1, 20))
def test_a_decision_is_on_its_side_of_the_break_even(prompt: int, decoding: int) -> None:
    decode = busy(decoding)
    tokens = break_even_tokens(Pair(P, decode), costs(), decoding)
    assert tokens is not None
    if judge(needs(prompt), Pair(P, decode), [decode], costs()).worker is not None:
        assert prompt <= tokens


# --- in a router -----------------------------------------------------------------------------------------------------


async def auto(cluster: Cluster, count: int) -> list[str]:
    """Where each of so many requests was placed, and why."""
    placements = []
    for index in range(count):
        record = cluster.record(mode=Mode.AUTO, name=f"r{index}", max_tokens=8)
        await cluster.served(record)
        placements += record.placements
        await asyncio.sleep(0.1)
        for worker_id in cluster.fleet:
            cluster.beat(worker_id)
    assert len(placements) == count
    return placements


async def test_it_is_a_pair_until_enough_is_measured_and_then_what_is_cheaper(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()  # in which the hand-off costs more than a prompt
    cluster.fleet["p0"].delay_s = {"prefill": 0.010, "run": 0.010, "run_more": 0.005}
    cluster.fleet["d0"].delay_s = {"decode": 0.050, "decode_more": 0.005, "run": 0.010, "run_more": 0.005}
    placements = await auto(cluster, 300)
    ways = ["pair" if "decode on" in one else "alone" for one in placements]
    assert ways[:MIN_SAMPLES] == ["pair"] * MIN_SAMPLES
    assert all("too few hand-offs are measured" in one for one in placements[:MIN_SAMPLES])
    assert ways[-64:].count("alone") >= 63  # one may explore
    explorations = sum("exploration" in one for one in placements)
    assert explorations <= MIN_SAMPLES + 300 / KNOWN_EVERY + 2
    assert any(one.startswith("mode auto: 10 ms on ") and "on a pair; both on " in one for one in placements[-64:])

    # A retry is not compared.
    for worker in cluster.fleet.values():
        worker.fail("run", TransferTimeout("planted"))
    record = cluster.record(mode=Mode.AUTO)
    await cluster.served(record)
    assert record.placements[-1].startswith("mode auto: a retry is for a pair")
