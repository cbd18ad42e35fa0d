"""What disaggregation adds to TTFT where nothing else does: on an idle service, and on one whose decode is busy.

`python -m experiments.benchmarks.dispatch` measures a service of one prefill and one decode worker: single requests in
both modes, the CPU time of several streams, and new requests while decode runs others."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from typing import Any, NamedTuple

from experiments.benchmarks.frame import Quick, Service, cpu_s, in_turns, run, service
from pdserve import AsyncClient, AsyncStream, Generation

VOCABULARY = 256
MODES = ("pd", "colocated")


class Sizes(NamedTuple):
    """``pairs`` of requests on the idle service, ``streams`` of so many ``tokens`` at once, and in each of
    ``busy_rounds`` some ``busy_pairs`` beside ``busy_streams`` that decode ``busy_tokens`` after ``busy_context``, with
    a ``busy_model`` whose steps take long."""

    pairs: int = 200
    streams: int = 8
    tokens: int = 400
    busy_model: str = "dummy:135m"
    busy_rounds: int = 4
    busy_pairs: int = 6
    busy_streams: int = 16
    busy_context: int = 1024
    busy_tokens: int = 1500


QUICK = Sizes(2, 2, 64, "tiny", busy_rounds=1, busy_pairs=1, busy_streams=2, busy_context=64)


def dispatch(quick: Quick = False) -> dict[str, Any]:
    """Measure."""
    sizes = QUICK if quick else Sizes()
    with service({}) as served:
        idle = asyncio.run(_idle(served, sizes))
        streaming = asyncio.run(_streaming(served, sizes))
    with service({"model.path": sizes.busy_model}) as served:
        busy = asyncio.run(_busy(served.target, sizes))
    return {"benchmark": "dispatch", "idle": idle, "streaming": streaming, "decode_busy": busy}


def _stream(client: AsyncClient, seed: object, max_tokens: int, mode: str = "pd", tokens: int = 64) -> AsyncStream:
    """A request. Equal seeds give equal prompts, with which no prefix cache helps across modes."""
    draw = random.Random(str(seed))
    prompt = [draw.randrange(VOCABULARY) for _ in range(tokens)]
    return client.generate(prompt, max_tokens=max_tokens, ignore_eos=True, mode=mode, salt=mode, timeout_s=600)


async def _idle(served: Service, sizes: Sizes) -> dict[str, float]:
    """Pairs of requests, disaggregated and colocated, one at a time. Differences of the pairs in ms, and the CPU time
    that worker processes and gateway spent per token."""
    done: dict[str, list[Generation]] = {mode: [] for mode in MODES}
    processes = served.processes
    async with AsyncClient(served.target) as client:
        for number, mode in in_turns(MODES, sizes.pairs, warm_up=10):
            if number == 0 and not any(done.values()):
                before_s = cpu_s(processes)
            generation = await _stream(client, number, 4, mode).result()
            if number >= 0:
                done[mode].append(generation)
        spent_s = cpu_s(processes) - before_s
    tokens = sum(len(each.token_ids) for each in (*done["pd"], *done["colocated"]))

    def added(figure: str) -> float:
        pd, colocated = ([float(getattr(each, figure)) for each in done[mode]] for mode in MODES)
        return statistics.median(a - b for a, b in zip(pd, colocated, strict=True))

    return {
        "pairs": sizes.pairs,
        "colocated_ttft_ms": statistics.median(each.ttft_ms for each in done["colocated"]),
        "added_ttft_ms": added("ttft_ms"),
        "added_ttft_decode_ms": added("ttft_decode_ms"),
        "cpu_ms_per_token": spent_s / tokens * 1e3,
    }


async def _streaming(served: Service, sizes: Sizes) -> dict[str, float]:
    """CPU time of gateway and worker processes per token while several requests stream."""
    processes = served.processes
    async with AsyncClient(served.target) as client:
        for turn in range(2):  # the first one is warm-up
            before_s = cpu_s(processes)
            streams = [_stream(client, f"{turn}/{number}", sizes.tokens) for number in range(sizes.streams)]
            done = await asyncio.gather(*(stream.result() for stream in streams))
    made = sum(len(each.token_ids) for each in done)
    return {"streams": sizes.streams, "cpu_ms_per_token": (cpu_s(processes) - before_s) / made * 1e3}


async def _busy(target: str, sizes: Sizes) -> dict[str, float]:
    """TTFT of new requests while decode has nothing else to do, and while it runs others, alternately. Colocated
    requests, which then run on the prefill worker alone, are the control: what they lose to a busy decode engine is the
    machine's (shared caches, memory bandwidth, hardware threads)."""
    seeds = itertools.count(10**6)
    async with AsyncClient(target) as client:

        async def probe(found: dict[str, list[float]]) -> None:
            for _, mode in in_turns(MODES, sizes.busy_pairs):
                found[mode].append((await _stream(client, next(seeds), 2, mode).result()).ttft_ms)

        idle, busy, warm_up = ({mode: list[float]() for mode in MODES} for _ in range(3))
        await probe(warm_up)
        for _ in range(sizes.busy_rounds):
            await probe(idle)
            running = [
                _stream(client, next(seeds), sizes.busy_tokens, tokens=sizes.busy_context)
                for _ in range(sizes.busy_streams)
            ]
            for stream in running:
                for _ in range(2):
                    await anext(stream)
            await probe(busy)
            for stream in running:
                await stream.aclose()
            await asyncio.sleep(1.0)
    ratios = {mode: statistics.median(busy[mode]) / statistics.median(idle[mode]) for mode in MODES}
    return {
        "idle_ttft_ms": statistics.median(idle["pd"]),
        "busy_ttft_ms": statistics.median(busy["pd"]),
        "ratio": ratios["pd"],
        "colocated_ratio": ratios["colocated"],
    }


if __name__ == "__main__":
    run(dispatch)
