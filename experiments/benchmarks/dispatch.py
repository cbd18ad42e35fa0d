"""What disaggregation adds to TTFT where nothing else does: on an idle service, and on one whose decode is busy.

`python -m experiments.benchmarks.dispatch` measures a service of one prefill and one decode worker: single requests in
both modes, the CPU time of several streams, and new requests while decode runs others."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, NamedTuple

import pandas

from experiments.benchmarks.frame import Quick, Service, added, cpu_s, frame, in_turns, row, run, service
from experiments.workloads.conversation import random_tokens
from pdserve import AsyncClient, AsyncStream


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
        idle, streaming = served.client(partial(_idle, served, sizes))
    with service({"model.path": sizes.busy_model}) as served:
        busy = served.client(partial(_busy, sizes))
    return {"benchmark": "dispatch", "idle": idle, "streaming": streaming, "decode_busy": busy}


def _stream(client: AsyncClient, seed: str, max_tokens: int, mode: str = "pd", tokens: int = 64) -> AsyncStream:
    """A request. Equal seeds give equal prompts, with which no prefix cache helps across modes."""
    prompt = random_tokens(seed, tokens, 256)
    return client.generate(prompt, max_tokens=max_tokens, ignore_eos=True, mode=mode, salt=mode, timeout_s=600)


async def _pairs(client: AsyncClient, name: str, count: int, max_tokens: int) -> pandas.DataFrame:
    """Pairs of requests, disaggregated and colocated, one at a time."""
    return frame([
        row(await _stream(client, f"{name}/{number}", max_tokens, mode).result(), mode, number)
        for number, mode in in_turns(("pd", "colocated"), count)
    ])  # fmt: skip


async def _idle(served: Service, sizes: Sizes, client: AsyncClient) -> tuple[dict[str, Any], dict[str, Any]]:
    """Differences of pairs of requests in ms, and the CPU time that worker processes and gateway spent per token; and
    the same time while several requests stream."""
    processes = served.processes
    await _pairs(client, "warm-up", 10, 4)
    before_s = cpu_s(processes)
    done = await _pairs(client, "idle", sizes.pairs, 4)
    idle = {
        "pairs": sizes.pairs,
        "colocated_ttft_ms": done.ttft_ms[done.arm == "colocated"].median(),
        **{f"added_{figure}": added(done, figure).median() for figure in ("ttft_ms", "ttft_decode_ms")},
        "cpu_ms_per_token": (cpu_s(processes) - before_s) / done.output_tokens.sum() * 1e3,
    }
    for turn in range(2):  # the first one is warm-up
        before_s = cpu_s(processes)
        streams = [_stream(client, f"{turn}/{number}", sizes.tokens) for number in range(sizes.streams)]
        made = sum(len(each.token_ids) for each in await asyncio.gather(*(stream.result() for stream in streams)))
        spent_s = cpu_s(processes) - before_s
    return idle, {"streams": sizes.streams, "cpu_ms_per_token": spent_s / made * 1e3}


async def _busy(sizes: Sizes, client: AsyncClient) -> dict[str, float]:
    """TTFT of new requests while decode has nothing else to do, and while it runs others, alternately. Colocated
    requests, which then run on the prefill worker alone, are the control: what they lose to a busy decode engine is the
    machine's (shared caches, memory bandwidth, hardware threads)."""
    await _pairs(client, "warm-up", sizes.busy_pairs, 2)
    idle, busy = [], []
    for turn in range(sizes.busy_rounds):
        idle.append(await _pairs(client, f"idle/{turn}", sizes.busy_pairs, 2))
        running = [
            _stream(client, f"{turn}/{number}", sizes.busy_tokens, tokens=sizes.busy_context)
            for number in range(sizes.busy_streams)
        ]
        for stream in running:
            await anext(stream)
            await anext(stream)
        busy.append(await _pairs(client, f"busy/{turn}", sizes.busy_pairs, 2))
        for stream in running:
            await stream.aclose()
        await asyncio.sleep(1.0)
    idle_ms, busy_ms = (pandas.concat(each).groupby("arm").ttft_ms.median() for each in (idle, busy))
    return {
        "idle_ttft_ms": idle_ms["pd"],
        "busy_ttft_ms": busy_ms["pd"],
        "ratio": busy_ms["pd"] / idle_ms["pd"],
        "colocated_ratio": busy_ms["colocated"] / idle_ms["colocated"],
    }


if __name__ == "__main__":
    run(dispatch)
