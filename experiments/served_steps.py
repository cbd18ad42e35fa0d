"""Steps of the engines of a running service, of whatever kind, measured by requests of mode ``pd`` alone: prompts by
the time that prefill has them, and decode steps by the gaps between tokens of requests that decode together."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from experiments.engine_alone.steps import StepCase, drawn_size
from experiments.workloads.conversation import random_tokens
from pdserve.client.async_client import AsyncClient
from pdserve.client.generation import Generation
from pdserve.core.errors import InvalidRequest
from pdserve.core.request import Mode
from pdserve.core.timeline import Figure

_LARGEST_PROMPT, _LARGEST_BATCH = 512, 32
_MOST_CONTEXT, _LEAST_CONTEXT = 8192, 16
"""Tokens of all contexts of a batch together, and of one."""
_OUTPUTS, _MOST_OUTPUTS = 32, 512
"""The outputs of a batch are doubled until its requests decode together for `_LEAST_GAPS` gaps."""
_LEAST_GAPS = 4


class ServedStep(NamedTuple):
    """A measured step: its size, and the seconds that it took each time."""

    case: StepCase
    times_s: Sequence[float]


def unshared_salt() -> str:
    """A salt for a prompt of which nothing may be cached, also not if a service is profiled again."""
    return secrets.token_hex(8)


def served_cases(count: int, seed: int, room: int) -> Iterator[StepCase]:
    """``count`` steps of random sizes, prompts and decodes in turn, for a service with ``room`` tokens of KV."""
    draw = random.Random(f"served/{seed}")

    for number in range(count):
        if number % 2 == 0:
            yield StepCase(1, drawn_size(draw, min(_LARGEST_PROMPT, room // 2), 8))
            continue
        batch = drawn_size(draw, max(1, min(_LARGEST_BATCH, room // (2 * (_LEAST_CONTEXT + _OUTPUTS)))))
        most = min(_MOST_CONTEXT, room // 2) // batch - _OUTPUTS
        yield StepCase(batch, 1, drawn_size(draw, max(most, _LEAST_CONTEXT), _LEAST_CONTEXT))


async def measure_served(client: AsyncClient, case: StepCase, repeats: int, name: str, vocab_size: int) -> ServedStep:
    """Measure a step ``repeats`` times, after a warm-up; ``name`` seeds its prompts. For decode steps, the
    context of the returned case is the mean one. InvalidRequest if the service never decodes so many requests
    together."""
    times_s, context = [], case.context
    for repeat in range(-1, repeats):
        seed = f"{name}/{repeat}"
        if case.tokens > 1:
            (done,) = await _together(client, [random_tokens(seed, case.tokens, vocab_size)], 2)
            stages_ms = done.generation.breakdowns[Figure.TTFT].stages_ms
            seconds = (stages_ms.get("prefill") or stages_ms["prefill_leg"]) / 1e3
        else:
            prompts = [random_tokens(f"{seed}/{each}", case.context, vocab_size) for each in range(case.batch)]
            seconds, middle = await _decode_s(client, prompts)
            context = case.context + middle
        if repeat >= 0:
            times_s.append(seconds)
    return ServedStep(msgspec.structs.replace(case, context=context), times_s)


class _Answered(NamedTuple):
    generation: Generation
    times_s: Sequence[float]
    """When its tokens came, by one clock."""


async def _together(client: AsyncClient, prompts: Sequence[Sequence[int]], outputs: int) -> list[_Answered]:
    async def one(prompt: Sequence[int]) -> _Answered:
        sent_s = time.monotonic()
        salt = unshared_salt()
        done = await client.generate(prompt, max_tokens=outputs, mode=Mode.PD, ignore_eos=True, salt=salt).result()
        arrived_ms = itertools.accumulate(done.itl_ms, initial=done.ttft_ms)
        return _Answered(done, [sent_s + each / 1e3 for each in arrived_ms])

    return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


async def _decode_s(client: AsyncClient, prompts: Sequence[Sequence[int]]) -> tuple[float, int]:
    """Seconds between two tokens while all requests decode, and how many tokens they have had on average. Servers may
    send several tokens at a time, so it is the mean of each request's gaps, and the median over the requests."""
    outputs = _OUTPUTS
    while True:
        answers = await _together(client, prompts, outputs)
        begin_s = max(each.times_s[1] for each in answers)
        end_s = min(each.times_s[-1] for each in answers)
        inside = [[place for place, at_s in enumerate(each.times_s) if begin_s <= at_s <= end_s] for each in answers]
        if min(map(len, inside)) > _LEAST_GAPS:
            means = [
                (each.times_s[places[-1]] - each.times_s[places[0]]) / (len(places) - 1)
                for each, places in zip(answers, inside, strict=True)
            ]
            return statistics.median(means), round(statistics.fmean(itertools.chain(*inside)))
        outputs *= 2
        if outputs > _MOST_OUTPUTS:
            raise InvalidRequest(
                f"target: the service does not decode {len(prompts)} requests together; profile one that takes more "
                "at a time, or is idle"
            )
