"""Whether a worker fetches a prefix from another one's cache: as a function of plain values, and in a router in virtual
time."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from pdserve.core.config import RouterConfig
from pdserve.core.handoff import PrefixFetch, TransferProof
from pdserve.core.prefix_digests import SNAPSHOT, BlockUpdate, PrefixDigests, pack
from pdserve.core.request import Mode
from pdserve.core.worker import TokenOutput
from router.cost_model import MIN_SAMPLES, Costs
from router.placement import Placed, place
from router.prefix_fetch import LEAST_TIMEOUT_S, MOST_TIMEOUT_S, PAUSE_S, SOURCE_TIMEOUT_S, Fetch, plan_fetch
from router.view import ClusterView, Needs
from tests.fake_worker import FAKE_LAYOUT
from tests.router.conftest import Cluster, MakeCluster
from tests.router.test_auto_mode import LINK, PREFILL, costs, line, worker

P0, P1, D0 = worker("p0"), worker("p1", linked={"d0": 1.0}), worker("d0")


def needs(prompt: int = 1000, **cached: int) -> Needs:
    return Needs(Mode.PD, prompt, 20, cached=cached)


def plan(wanted: Needs, *others: Any, costs_: Costs | None = None, when: Any = "auto") -> tuple[Fetch | None, str]:
    return plan_fetch(wanted, P1, others or (P0, P1, D0), costs() if costs_ is None else costs_, when)


def test_a_long_prefix_is_fetched_and_a_short_one_computed() -> None:
    """A token takes 0.1 ms to compute, and a microsecond beyond the first 4 ms to fetch."""
    fetch, why = plan(needs(p0=800))
    assert fetch == Fetch("p0", 800, pytest.approx(LEAST_TIMEOUT_S), is_usual=True)  # type: ignore[arg-type]
    assert why == "800 tokens from p0 are fetched: 4.8 ms, computed 80 ms"
    fetch, why = plan(needs(p0=50))
    assert fetch is None
    assert why == "50 tokens from p0 are not fetched: 4.05 ms, computed 5 ms"
    assert plan(needs(p0=60))[0] is not None, "quicker by more than a fifth"


def test_what_is_cached_already_is_not_counted() -> None:
    assert plan(needs(p0=800, p1=760))[1] == "40 tokens from p0 are not fetched: 4.04 ms, computed 4 ms"
    assert plan(needs(p0=800, p1=800)) == (None, "")
    assert plan(needs(p1=800)) == (None, "")
    assert plan(needs()) == (None, "")


def test_one_token_is_computed() -> None:
    fetch, _ = plan(needs(prompt=800, p0=800))
    assert fetch is not None
    assert fetch.num_tokens == 790
    assert plan(needs(prompt=800, p0=800, p1=790)) == (None, "")


def test_the_longest_prefix_wins_then_the_same_host_then_the_one_that_computes_least() -> None:
    far, busy = worker("p2", node="there"), worker("p3", prompt_tokens=5)
    assert plan(needs(p0=500, d0=600))[0].source == "d0"  # type: ignore[union-attr]
    assert plan(needs(p0=600, p2=600), far, P0)[0].source == "p0"  # type: ignore[union-attr]
    assert plan(needs(p0=600, p3=600), busy, P0)[0].source == "p0"  # type: ignore[union-attr]


@pytest.mark.parametrize("change", [{"ready": False}, {"late": True}, {"block_size": 20}])
def test_a_source_has_to_be_there_and_alike(change: Any) -> None:
    assert plan(needs(p0=800), worker("p0", **change)) == (None, "")


def test_a_source_that_failed_the_request_or_lately_this_worker_is_left_out() -> None:
    assert plan(msgspec.structs.replace(needs(p0=800), avoid=frozenset({"p0"}))) == (None, "")
    avoiding = worker("p1", avoided_sources=frozenset({"p0"}))
    assert plan_fetch(needs(p0=800), avoiding, (P0, avoiding), costs(), "auto") == (None, "")


def test_without_measured_costs_nothing_is_fetched_unless_it_is_asked_for() -> None:
    unknown = Costs()
    assert plan(needs(p0=800), costs_=unknown) == (None, "")
    fetch, why = plan(needs(p0=800), costs_=unknown, when="always")
    assert fetch == Fetch("p0", 800, MOST_TIMEOUT_S, is_usual=True)
    assert why == "800 tokens from p0 are fetched (router.prefix_fetch)"
    assert plan(needs(p0=800), when="off") == (None, "")


def test_measured_fetches_replace_hand_offs_and_margins_count() -> None:
    slow = costs(fetch={LINK: line(0.07, 0.0)})
    assert plan(needs(p0=800), costs_=slow)[0] is None
    vague = costs(fetch={LINK: line(0.01, 0.0, deviation=0.05)})
    assert plan(needs(p0=800), costs_=vague)[0] is None
    fetch, _ = plan(needs(p0=800), costs_=costs(fetch={LINK: line(0.01, 0.0, deviation=0.01)}))
    assert fetch is not None
    assert LEAST_TIMEOUT_S <= fetch.timeout_s < MOST_TIMEOUT_S


def test_a_source_that_computes_prompts_answers_after_its_step() -> None:
    """A step of 512 tokens takes 51 ms there."""
    busy = worker("p0", prompt_tokens=3000, step_tokens=512)
    fetch, why = plan(needs(p0=800), busy)
    assert why == "800 tokens from p0 are fetched: 56 ms, computed 80 ms"
    assert fetch is not None
    assert not fetch.is_usual
    assert plan(needs(p0=600), busy)[0] is None


def test_the_placement_says_so() -> None:
    view = ClusterView((P1, P0, D0), RouterConfig(policy="round_robin"), costs=costs())
    placed = place(needs(p0=800), view)
    assert isinstance(placed, Placed)
    assert (placed.prefill, placed.fetch and placed.fetch.source) == ("p1", "p0")
    assert placed.reason.endswith("; 800 tokens from p0 are fetched: 4.8 ms, computed 80 ms")
    off = place(needs(p0=800), ClusterView((P1, P0, D0), RouterConfig(policy="round_robin", prefix_fetch="off")))
    assert isinstance(off, Placed)
    assert off.fetch is None


def test_the_cost_model_learns_fetches_apart_from_hand_offs() -> None:
    learned = costs(fetch={LINK: line(2e-3, 1e-9)})
    assert learned.fetch_s(LINK, 10**6).seconds == pytest.approx(3e-3)  # type: ignore[union-attr]
    assert costs().fetch_s(LINK, 10**6) == costs().handoff[LINK].at(1, 10**6)
    assert costs().fetch_s("between hosts", 1) is None
    assert any(said.startswith("prefix fetch within a host: 2 ms + 1 ms/MB") for said in learned.describe())


# --- in a router -----------------------------------------------------------------------------------------------------

PROMPT = tuple(range(100, 141))  # ten blocks of 4 tokens, and a token


def knows(cluster: Cluster, worker_id: str, blocks: int) -> None:
    """The worker announces the first blocks of the prompt as cached."""
    worker_ = cluster.worker(worker_id)
    hashes = list(PrefixDigests("", FAKE_LAYOUT.block_size).hashes(PROMPT))[:blocks]
    update = BlockUpdate(SNAPSHOT, 1, pack(hashes))
    assert cluster.registry.heartbeat(
        worker_id, worker_.load, worker_.info, {**worker_.linked, **worker_.failed}, update
    )


def p1_is_next(cluster: Cluster) -> None:
    """By its turn; all workers live."""
    for worker_id in cluster.fleet:
        cluster.beat(worker_id)
    cluster.worker("p0").last_used = 10**6


def fetched(outcome: PrefixFetch) -> Any:
    def change(output: TokenOutput) -> TokenOutput:
        return msgspec.structs.replace(output, prefix_fetch=outcome) if output.cached_tokens else output

    return change


def proof_of(num_bytes: int) -> TransferProof:
    return TransferProof("loopback", num_bytes, 0, 10, 0, 1, "off", 0.1, 0.1, 0.1, 0.2, 0.3, 0.0, num_bytes)


@pytest.fixture
async def cluster(make_cluster: MakeCluster) -> Cluster:
    """p0 has the prompt; p1 is the next in turn."""
    cluster = make_cluster(prefill=2, policy="round_robin", prefix_fetch="always")
    cluster.worker("p0").last_used = 1
    knows(cluster, "p0", 10)
    return cluster


@pytest.mark.parametrize("max_tokens", [1, 4])
@pytest.mark.parametrize("mode", [Mode.PD, Mode.COLOCATED])
async def test_both_workers_are_told(cluster: Cluster, mode: Mode, max_tokens: int) -> None:
    cluster.worker("d0").last_used = 1
    p0, p1 = cluster.fleet["p0"], cluster.fleet["p1"]
    p1.delay_s = {"prefill": 0.01, "run": 0.01}
    record = cluster.record(PROMPT, mode=mode, max_tokens=max_tokens)
    await cluster.served(record)
    (source,) = p1.prefix_sources
    assert source is not None
    assert (source.peer, source.num_tokens, source.timeout_s) == (p0.info.peer, 40, MOST_TIMEOUT_S)
    ((call, request),) = p0.requests
    attempt_id = p1.requests[-1][1].attempt_id
    assert (call, request.attempt_id, request.token_ids) == ("send_prefix", f"{attempt_id}/prefix", PROMPT[:40])
    assert request.timeout_s == SOURCE_TIMEOUT_S
    assert p0.aborted == []
    assert "40 tokens from p0 are fetched" in record.placements[0]


async def test_what_is_fetched_is_not_outstanding(cluster: Cluster) -> None:
    cluster.fleet["p1"].hangs = {"prefill"}
    task = asyncio.create_task(cluster.served(cluster.record(PROMPT)))
    await cluster.until(lambda: bool(cluster.fleet["p1"].requests))
    assert cluster.worker("p1").prompt_tokens == 1
    await cluster.finish(task)
    assert len(cluster.fleet["p1"].aborted) == 1


async def test_a_failed_fetch_is_not_repeated_for_a_while(cluster: Cluster) -> None:
    p0, p1 = cluster.fleet["p0"], cluster.fleet["p1"]
    p1.cached_tokens = 1
    p1.change_output = fetched(PrefixFetch("p0", 0, 40, 100.0, failure="it took too long"))
    result = await cluster.served(cluster.record(PROMPT))
    assert result.prefix_fetch is not None
    assert result.prefix_bytes_expected == 0
    for pause_s, asked in ((PAUSE_S / 2, 1), (PAUSE_S, 2)):
        await asyncio.sleep(pause_s)
        p1_is_next(cluster)
        await cluster.served(cluster.record(PROMPT))
        assert [call for call, _ in p0.requests].count("send_prefix") == asked
        assert len(p1.requests) == asked + 1


async def test_the_result_and_the_cost_model_know_what_was_fetched(cluster: Cluster) -> None:
    num_bytes = 10 * FAKE_LAYOUT.block_bytes
    p1 = cluster.fleet["p1"]
    p1.delay_s, p1.cached_tokens = {"prefill": 0.1}, 40
    p1.change_output = fetched(PrefixFetch("p0", 40, 40, 30.0, proof_of(num_bytes)))
    for _ in range(MIN_SAMPLES):
        p1_is_next(cluster)
        result = await cluster.served(cluster.record(PROMPT))
        assert result.prefix_fetch is not None
        assert result.prefix_fetch.proof is not None
        assert result.prefix_fetch.proof.kv_bytes == result.prefix_bytes_expected == num_bytes
        assert result.prefill_cached_tokens == 40
    learned = cluster.registry.cost_model.refit()
    fetch, prefill = learned.fetch_s(LINK, num_bytes), learned.prefill[PREFILL].at(1, 1, 0, 0)
    assert fetch is not None
    assert fetch.seconds == pytest.approx(0.03, rel=0.01)
    assert prefill.seconds == pytest.approx(0.07, rel=0.01), "the fetch is no part of the prefill"
    assert learned.prefill.keys() == {PREFILL}
