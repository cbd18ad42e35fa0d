"""The cost of a hand-off beside a prefill, in a service of one prefill and one decode worker on this host.

Each round sends the same prompts, with a new salt each so that no prefix cache helps, once with the hand-off and once
for one token only. The second request is the same work for the prefill worker without a transfer."""

from __future__ import annotations

import random
import statistics
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from ops.launch.detach import start_detached, stop_detached
from pdserve.client.async_client import AsyncClient
from pdserve.core.config import PdserveConfig
from pdserve.core.timeline import Figure


class Sizes(NamedTuple):
    """``rounds`` of prompts, for each way to overlap, each of which is a service."""

    model: str = "dummy:135m"
    prompt_tokens: int = 2048
    rounds: int = 7
    overlaps: tuple[str, ...] = ("layer", "chunk", "none")


QUICK = Sizes("tiny", 128, 1, ("layer",))


async def measure_overlap(console: Console, *, quick: bool) -> dict[str, Any]:
    """For each way to overlap: prefill with and without a hand-off, what is exposed of it, in ms and in percent."""
    sizes = QUICK if quick else Sizes()
    columns = ("prefill, ms", "without hand-off", "exposed, ms", "wire, ms")
    table = Table(f"{sizes.prompt_tokens} tokens of {sizes.model}, 1P1D", *columns)
    result: dict[str, Any] = {}
    for overlap in sizes.overlaps:
        console.print(f"a service with overlap: {overlap}")
        settings = PdserveConfig.load(None, {"model.path": sizes.model, "gateway.port": 0, "transfer.overlap": overlap})
        port = start_detached(settings, lambda stage: None)
        try:
            result[overlap] = figures = await _rounds(f"localhost:{port}", sizes)
        finally:
            stop_detached(port)
        table.add_row(
            overlap,
            f"{figures['prefill_ms']:.0f}",
            f"{figures['prefill_alone_ms']:.0f}",
            f"{figures['exposed_ms']:.2f} ({100 * figures['exposed_share']:.2f} %)",
            f"{figures['wire_ms']:.1f}",
        )
    console.print(table)
    return result


async def _rounds(target: str, sizes: Sizes) -> dict[str, float]:
    draw = random.Random(7)
    pushed: list[Any] = []
    alone: list[Any] = []
    async with AsyncClient(target) as client:
        vocabulary = (await client.status()).vocab_size
        for turn in range(sizes.rounds + 1):
            prompt = [draw.randrange(vocabulary) for _ in range(sizes.prompt_tokens)]
            for max_tokens, into in ((3, pushed), (1, alone))[:: 1 if turn % 2 else -1]:
                salt = f"{turn}/{max_tokens}"
                request = client.generate(prompt, max_tokens=max_tokens, ignore_eos=True, mode="pd", salt=salt)
                generation = await request.result()
                if turn:  # the first one is warm-up
                    into.append(generation)
    prefill_ms = [g.breakdowns[Figure.TTFT].stages_ms["prefill"] for g in pushed]
    alone_ms = [g.breakdowns[Figure.TTFT].stages_ms["prefill"] for g in alone]
    exposed_ms = [g.transfer.exposed_ms for g in pushed]
    return {
        "prefill_ms": round(statistics.median(prefill_ms), 1),
        "prefill_alone_ms": round(statistics.median(alone_ms), 1),
        "x_prefill": round(statistics.median(a / b for a, b in zip(prefill_ms, alone_ms, strict=True)), 3),
        "exposed_ms": round(statistics.median(exposed_ms), 2),
        "exposed_share": round(statistics.median(e / p for e, p in zip(exposed_ms, prefill_ms, strict=True)), 4),
        "wire_ms": round(statistics.median(g.transfer.wire_ms for g in pushed), 2),
        "export_ms": round(statistics.median(g.transfer.export_ms for g in pushed), 2),
        "import_ms": round(statistics.median(g.transfer.import_ms for g in pushed), 2),
        "messages": statistics.median(g.transfer.messages for g in pushed),
    }
