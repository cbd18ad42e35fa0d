"""A client within its share beside one that floods the service, in virtual time: nothing but the order of requests
decides how long it waits."""

from __future__ import annotations

from statistics import median

from pdserve.core.request import Mode
from pdserve.core.worker import Role
from simulator.plan import ClientRequest, Plan
from simulator.service import Asked, WorkerSettings
from simulator.simulation import simulate

STEP_S = 0.010
REQUESTS = 10


def ttft_s(flood: int, mode: Mode) -> float:
    """The median TTFT of a client that sends one request after the other, beside another one's ``flood`` of requests,
    which all wait before it comes."""

    def asked(number: int, tenant: str) -> Asked:
        prompt = tuple(1 + (number * 31 + place) % 60 for place in range(64))
        return Asked(
            request_id=f"{tenant}{number}",
            tenant=tenant,
            prompt=prompt,
            max_tokens=16,
            ignore_eos=True,
            mode=mode,
            salt=str(number),
            timeout_s=100.0,
            priority=0,
        )

    settings = WorkerSettings(
        num_blocks=2048,
        block_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        chunk_tokens=None,
        prefix_caching=True,
        run_ahead=False,
        one_sided=True,
        corrupt_share=0.0,
        bytes_per_s=2e6,
        step_s=(STEP_S, STEP_S),
    )
    requests = [ClientRequest(0.001 * number, asked(number, "flood")) for number in range(flood)]
    requests += [ClientRequest(1.0 + 0.3 * number, asked(number, "one")) for number in range(REQUESTS)]
    config = {"router": {"max_queue": 1000, "max_queue_tokens": 10**6}}
    roles = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
    result = simulate(Plan(0, roles, 1, (0.0001, 0.0005), settings, config, tuple(requests), ()))
    assert result.violations == []
    times_s = [
        outcome.first_s - outcome.sent_s
        for outcome in result.outcomes
        if outcome.request.asked.tenant == "one" and outcome.first_s is not None
    ]
    assert len(times_s) == REQUESTS
    return median(times_s)


def test_it_waits_for_one_step_at_most_at_the_median() -> None:
    """Each of its requests waits for the running step, and is then computed before those of the other client."""
    for mode in (Mode.PD, Mode.COLOCATED):
        alone_s, beside_s = ttft_s(0, mode), ttft_s(500, mode)
        assert beside_s <= alone_s + STEP_S, mode
