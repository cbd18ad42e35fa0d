"""The warm-up before a measurement: requests without rows, until every worker has served some in each mode.

On an idle service requests go round the workers, so a single round reaches all of them. Requests of others may keep a
worker from getting any; after a few rounds the measurement begins all the same, and the report names that worker."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from experiments.experiment import Bench
from experiments.workloads.conversation import Workload
from pdserve.client.async_client import AsyncClient
from pdserve.client.generation import Generation
from pdserve.client.request import Prompt
from pdserve.client.status import ServiceStatus
from pdserve.core.request import Mode

NOT_REACHED = "not_reached"
"""The fact of a cell that lists the workers which the warm-up did not reach: ``mode`` and ``worker``."""

_MOST_ROUNDS = 5
_CONVERSATIONS = 64  # of a workload, which are repeated if more are needed


async def warm_up(
    bench: Bench,
    client: AsyncClient,
    requests: Iterator[tuple[Prompt, int]],
    modes: Iterable[str],
    *,
    rounds: int = 1,
) -> None:
    """Send ``requests``, which are prompts and output lengths, in each of ``modes``. A round is one request per worker,
    all at once. There are at least ``rounds`` rounds, and more of them while a worker has not served any. Notes the
    workers that were not reached, and raises what a request fails with."""
    status = await client.status()
    for mode in modes:
        missing = _to_reach(status, mode)
        at_once = max(1, *(len(workers) for workers in missing.values()))
        for number in range(max(rounds, _MOST_ROUNDS)):
            if number >= rounds and not any(missing.values()):
                break
            for done in await _served(client, list(itertools.islice(requests, at_once)), mode):
                for part, workers in missing.items():
                    workers.discard(getattr(done, part))
        for worker in sorted(set().union(*missing.values())):
            bench.facts.setdefault(NOT_REACHED, []).append({"mode": str(mode), "worker": worker})
            bench.tell(f"the warm-up did not reach {worker} with a request of mode {mode}")


def requests_of(workload: Workload, seed: int, vocab_size: int) -> Iterator[tuple[Prompt, int]]:
    """The first turns of a workload's conversations, again and again."""
    for conversation in itertools.cycle(workload.conversations(_CONVERSATIONS, seed, vocab_size)):
        turn = conversation.turns[0]
        yield turn.text or turn.token_ids, turn.output_len


def not_reached_texts(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fact `NOT_REACHED` in words: one sentence per mode."""
    modes: dict[str, list[str]] = {}
    for entry in entries:
        modes.setdefault(entry["mode"], []).append(entry["worker"])
    return [
        f"No request of mode {mode} of the warm-up reached {', '.join(workers)}, so the first ones that were measured "
        "there may have been slower."
        for mode, workers in modes.items()
    ]


def _to_reach(status: ServiceStatus, mode: str) -> dict[str, set[str]]:
    """The workers that requests of a mode run on, by the field of `Generation` that names the one that was used."""
    ready = [worker for worker in status.workers if worker.state == "ready"]
    if mode == Mode.COLOCATED:
        return {"prefill_worker": {worker.worker_id for worker in ready}}
    return {
        f"{role}_worker": {worker.worker_id for worker in ready if worker.role == role}
        for role in ("prefill", "decode")
    }


async def _served(client: AsyncClient, requests: Sequence[tuple[Prompt, int]], mode: str) -> list[Generation]:
    """Send requests at once, and return what they generated. A hand-off needs a second token."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    client.generate(
                        prompt,
                        mode=mode,
                        max_tokens=max(2, output_len),
                        ignore_eos=True,
                        salt=f"warm-up/{secrets.token_hex(8)}",
                    ).result()
                )
                for prompt, output_len in requests
            ]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
