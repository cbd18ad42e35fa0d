"""What `pdserve plan` predicts beside a figure that others have published: prefill as a service across datacentres
(arXiv 2604.15039), a hybrid model of 10^12 parameters.

Long prompts, of more than 19,400 tokens, are computed at a remote site of 4 instances (8 H200 each) and their KV goes
over a link of 100 Gbit/s. Prompts are log-normal (9.90, 1.00) between 128 and 131,072 tokens. The instances' time per
prompt and its KV are those of the paper's table. Its closed form, the sustained rate of all prompts at which the remote
site is the limit, is 3.24 per second, 49.6 % of them long, with 13 Gbit/s on the link.

In the simulation all long prompts are there at once; its rate is divided by their share. ``closed_rate`` is the closed
form with the same inputs, which takes the time of a prompt of the mean length for the mean time."""

from __future__ import annotations

import bisect
import math
import random
import statistics
from dataclasses import dataclass

from pdserve.core.config import RouterConfig
from pdserve.core.kv_layout import KVLayout
from pdserve.core.request import Mode
from pdserve.core.worker import Role
from simulator.planning.service import (
    LinkClass,
    PlannedRequests,
    PlannedService,
    PlannedTurn,
    PlannedWorker,
    run_service,
)
from simulator.planning.step_time import StepShape

RATE, LONG_SHARE, EGRESS_GBIT = 3.24, 0.496, 13.0
"""Published."""
_THRESHOLD, _SHORTEST, _LONGEST = 19_400, 128, 131_072
_INSTANCES = 4
_PREFILL_S = ((1024, 0.44), (8192, 0.72), (32_768, 1.84), (131_072, 7.40))
"""Tokens of a prompt, and how long an instance takes for it."""
_KV_BYTES_PER_TOKEN = 21_440
"""Of the mean long prompt: 172 MiB of state and 16.7 KiB per token."""
_LINK = LinkClass(100e9 / 8, 0.01)


@dataclass(frozen=True, slots=True)
class _PublishedSteps:
    """A prompt per step, between the published points; other steps take a millisecond."""

    def seconds(self, step: StepShape) -> float:
        """See `StepTime`."""
        if not step.pairs:
            return 1e-3
        place = min(max(1, bisect.bisect(_PREFILL_S, (step.rows, 0.0))), len(_PREFILL_S) - 1)
        (low, before_s), (high, after_s) = _PREFILL_S[place - 1 : place + 1]
        return before_s + (after_s - before_s) * (step.rows - low) / (high - low)


def prefill_as_a_service(prompts: int) -> dict[str, float]:
    """Simulate the long ones of so many prompts."""
    lengths = _lengths(prompts)
    long = [length for length in lengths if length > _THRESHOLD]
    share = len(long) / len(lengths)
    layout = KVLayout.uniform("published", "bfloat16", 512, 10, 1, _KV_BYTES_PER_TOKEN // 40)
    steps, blocks = _PublishedSteps(), 4096
    workers = [
        *(PlannedWorker(f"p{n}", Role.PREFILL, "there", steps, blocks, _LONGEST, 1) for n in range(_INSTANCES)),
        *(PlannedWorker(f"d{n}", Role.DECODE, f"here{n}", steps, blocks, _LONGEST) for n in range(8)),
    ]
    router = RouterConfig(max_queue=len(long) + 1, max_queue_tokens=2 * sum(long), prefix_fetch="off")
    wide = LinkClass(1e12)
    service = PlannedService(workers, layout, wide, wide, _LINK, router=router, layer_groups=8)
    run = run_service(service, Mode.PD, [PlannedRequests(0.0, (PlannedTurn((0,) * each, 2),)) for each in long])
    rate = sum(not each.error for each in run.requests) / run.duration_s / share
    egress = run.links["shared"] * _LINK.bytes_per_s * 8 / 1e9
    closed = _INSTANCES / steps.seconds(StepShape.plain(1, round(statistics.fmean(long)), 0)) / share
    return {
        "prompts": len(lengths),
        "rate": rate,
        "published_rate": RATE,
        "rate_error": rate / RATE - 1,
        "closed_rate": closed,
        "closed_rate_error": rate / closed - 1,
        "long_share": share,
        "published_long_share": LONG_SHARE,
        "egress_gbit": egress,
        "published_egress_gbit": EGRESS_GBIT,
    }


def _lengths(count: int) -> list[int]:
    """Evenly spread over the distribution, in a random order."""
    spread = statistics.NormalDist(9.90, 1.00)
    least, most = (spread.cdf(math.log(length)) for length in (_SHORTEST, _LONGEST))
    lengths = [round(math.exp(spread.inv_cdf(least + (most - least) * (n + 0.5) / count))) for n in range(count)]
    random.Random(0).shuffle(lengths)
    return lengths
