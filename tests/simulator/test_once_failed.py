"""Plans under which the service once failed."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from pdserve.core.request import Mode
from pdserve.core.worker import Role
from simulator.loop import WorldLoop
from simulator.model import answer
from simulator.plan import ClientRequest, Fault, Plan
from simulator.service import Asked, WorkerSettings
from simulator.simulation import simulate

SETTINGS = WorkerSettings(
    num_blocks=64,
    block_size=8,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    chunk_tokens=None,
    prefix_caching=True,
    run_ahead=False,
    one_sided=True,
    corrupt_share=0.0,
    bytes_per_s=2e6,
    step_s=(0.002, 0.01),
)


def asked(number: int) -> Asked:
    """A request for 16 tokens that is handed off."""
    return Asked(
        request_id=f"r{number}",
        tenant="a",
        prompt=tuple(1 + (number * 31 + place) % 60 for place in range(20)),
        max_tokens=16,
        ignore_eos=True,
        mode=Mode.PD,
        salt=str(number),
        timeout_s=30.0,
        priority=0,
    )


def test_decode_goes_on_while_prefill_cannot_reach_the_gateway() -> None:
    """Decode left too many tokens unread, so the attempt was given up; but token 1 was still awaited, until the
    deadline."""
    roles = {"prefill-0": Role.PREFILL, "prefill-1": Role.PREFILL, "decode-0": Role.DECODE}
    requests = tuple(ClientRequest(0.1 + 0.05 * number, asked(number)) for number in range(8))
    faults = (Fault(0.0, "partition", "host-prefill-0", 6.0, "host-gateway-0"),)
    config = {"router": {"policy": "round_robin", "max_unread_tokens": 4}}
    result = simulate(Plan(0, roles, 1, (0.0001, 0.002), SETTINGS, config, requests, faults))
    assert result.violations == []
    assert {outcome.end for outcome in result.outcomes} == {"length"}


@pytest.mark.parametrize("ends_at_once", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_workers_whose_pools_wait_for_each_other_go_on(seed: int, ends_at_once: bool) -> None:
    """Prefill kept finished prompts for a decode worker that kept its blocks for prompts for which prefill had none:
    with two gateways, requests reach the workers in different orders. They waited until their deadlines. When this was
    mended, a request failed whose token 1 was its last, and which awaited the proof of its hand-off."""
    roles = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
    small = replace(SETTINGS, num_blocks=8)  # one prompt with its tokens, and half of another one
    each = [asked(number) for number in range(16)]
    if ends_at_once:
        each = [replace(a, stop_token_ids=tuple(answer(a.model_salt, a.prompt, 1, ()))) for a in each]
    requests = tuple(ClientRequest(0.001 * number, a) for number, a in enumerate(each))
    result = simulate(Plan(seed, roles, 2, (0.0001, 0.2), small, {"gateway": {"replicas": 2}}, requests, ()))
    assert result.violations == []
    assert {outcome.end for outcome in result.outcomes} == {"stop" if ends_at_once else "length"}


@pytest.mark.parametrize(
    "seed",
    [
        961,
        1220,
        3194,  # the world took an engine that hung beside a paused watchdog for healed
        3514,  # a clock jumped by less than the errors of two measurements
        4144,  # as 3514
        6120,  # a deadline passed between the last token and the proof
        7546,  # the bound on a request's end left out the gateway's wait for a worker that does not answer
        8425,  # the controller flipped the last decode worker, while one that an operator had flipped was still seen
        8445,  # as 8425
        18041,  # a hand-off past its deadline cut a slow link, because others' blocks were being read
        28592,  # a message that came again with a wrong number was taken, and the right one awaited until the deadline
        28876,  # as 28592
        37031,  # as 28592
        28215,  # the world took a gateway that was paused for healed, which knew an engine that had ended
        37807,  # a lease was shorter than a link took for what was in flight, and heartbeats came too late
        38114,  # in Python 3.11 a worker that was stopped went on: `asyncio.wait_for` ignored the cancellation
        16589,  # a link that its sender had given up replaced the next one at the receiver, and ended
        66992,  # a prefill worker left when it had sent the KV, before decode had gone on, and the request failed
        58930,  # a worker that had left while the gateway was restarted got requests again
        73396,  # decode's tokens came sooner than token 1, and so many were unread that prefill was taken for lost
        97827,  # the world lost what a partition had held back when its sender closed the connection
        70022,  # the world took the last token of a resumed request, which prefill gives, for a decode worker's probe
    ],
)
def test_a_seed_that_failed_once(seed: int) -> None:
    assert simulate(Plan.draw(seed)).violations == []


def test_nothing_of_a_world_is_kept() -> None:
    """A client's stream that had ended kept its call, and so all that the call refers to, until the stream was freed;
    here the call refers to the stream, and a thousand seeds kept 200 MB."""
    gc.collect()  # those of other tests
    simulate(Plan.draw(41029))
    assert not [each for each in gc.get_objects() if type(each) is WorldLoop]
