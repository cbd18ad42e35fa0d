"""`python -m tests.e2e.crowd TARGET COUNT SEED`: a client process of a crowd, which prints the fate of its streams."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter

from pdserve import AsyncClient
from pdserve.core.errors import RequestAborted

PROMPT = [11, 7, 200, 41, 5, 99, 3] * 6
TOKENS = 64
CANCELLED_SHARE = 0.1
TIMEOUT_S = 600.0


async def crowd(target: str, count: int, seed: int) -> Counter[str]:
    """So many streams at once, of which a tenth is cancelled at random moments; what became of them. Prints a line when
    the first token of each has come."""
    draw, outcomes, begun = random.Random(seed), Counter[str](), 0

    async def ask(number: int, client: AsyncClient) -> None:
        nonlocal begun
        is_cancelled, after = draw.random() < CANCELLED_SHARE, draw.randrange(TOKENS)
        stream = client.generate(
            PROMPT, max_tokens=TOKENS, ignore_eos=True, salt=f"{seed} {number}", timeout_s=TIMEOUT_S
        )
        try:
            async for token in stream:
                begun += token.index == 0
                if begun == count and token.index == 0:
                    print("all have begun", flush=True)  # noqa: T201 - for the test
                if is_cancelled and token.index == after:
                    stream.cancel()
            result = await stream.result()
        except RequestAborted:
            outcomes["cancelled" if is_cancelled else "aborted"] += 1
        else:
            outcomes[str(list(result.token_ids))] += 1

    async with AsyncClient(target) as client:
        await asyncio.gather(*(ask(number, client) for number in range(count)))
    return outcomes


if __name__ == "__main__":
    print(json.dumps(asyncio.run(crowd(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))))  # noqa: T201
