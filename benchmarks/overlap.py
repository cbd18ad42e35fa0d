"""The cost of a hand-off beside a prefill, in a service of one prefill and one decode worker on this host.

Each round sends the same prompts, with a new salt each so that no prefix cache helps, once with the hand-off and once
for one token only. The second request is the same work for the prefill worker without a transfer."""

from __future__ import annotations

import random
import statistics
from typing import Any, NamedTuple

from benchmarks.frame import in_turns, service
from pdserve import AsyncClient, Generation
from pdserve.core.timeline import Figure


class Sizes(NamedTuple):
    """``rounds`` of prompts, for each way to overlap, each of which is a service."""

    model: str = "dummy:135m"
    prompt_tokens: int = 2048
    rounds: int = 7
    overlaps: tuple[str, ...] = ("layer", "chunk", "none")


QUICK = Sizes("tiny", 128, 1, ("layer",))


async def overlap(quick: bool) -> dict[str, Any]:
    """For each way to overlap: prefill with and without a hand-off, and what the hand-off took."""
    sizes = QUICK if quick else Sizes()
    result: dict[str, Any] = {}
    for name in sizes.overlaps:
        with service({"model.path": sizes.model, "transfer.overlap": name}) as served:
            result[name] = await _measure(served.target, sizes)
    return result


async def _measure(target: str, sizes: Sizes) -> dict[str, float]:
    done: dict[int, list[Generation]] = {3: [], 1: []}
    async with AsyncClient(target) as client:
        vocab_size = (await client.status()).vocab_size
        for turn, max_tokens in in_turns(done, sizes.rounds, warm_up=1):
            draw = random.Random(turn)
            prompt = [draw.randrange(vocab_size) for _ in range(sizes.prompt_tokens)]
            salt = f"{turn}/{max_tokens}"
            request = client.generate(prompt, max_tokens=max_tokens, ignore_eos=True, mode="pd", salt=salt)
            generation = await request.result()
            if turn >= 0:
                done[max_tokens].append(generation)
    prefill_ms, alone_ms = ([g.breakdowns[Figure.TTFT].stages_ms["prefill"] for g in each] for each in done.values())
    transfers = [g.transfer for g in done[3]]
    exposed_ms = [each.exposed_ms for each in transfers]
    return {
        "prefill_ms": statistics.median(prefill_ms),
        "prefill_alone_ms": statistics.median(alone_ms),
        "x_prefill": statistics.median(a / b for a, b in zip(prefill_ms, alone_ms, strict=True)),
        "exposed_ms": statistics.median(exposed_ms),
        "exposed_share": statistics.median(e / p for e, p in zip(exposed_ms, prefill_ms, strict=True)),
        **{
            name: statistics.median(getattr(each, name) for each in transfers)
            for name in ("wire_ms", "export_ms", "import_ms", "messages")
        },
    }
