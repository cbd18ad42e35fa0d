"""What disaggregation adds to TTFT where nothing else does: on an idle service, and on one whose decode is busy.

`python -m benchmarks.dispatch` starts the services itself; with ``--target`` it measures the idle part of one that
runs. A table, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.quick import HELP
from ops.launch.detach import start_detached, stop_detached
from ops.launch.state import ServiceState
from pdserve import AsyncClient, Client, Generation
from pdserve.core.address import target_of
from pdserve.core.config import PdserveConfig

PROMPT_TOKENS = 64
VOCABULARY = 256


class Sizes(NamedTuple):
    """``pairs`` of requests on the idle service, ``streams`` of so many ``tokens`` at once, and in each of
    ``busy_rounds`` some ``busy_pairs`` beside ``busy_streams`` that decode ``busy_tokens`` after ``busy_context``."""

    pairs: int = 200
    streams: int = 8
    tokens: int = 400
    busy_rounds: int = 4
    busy_pairs: int = 6
    busy_streams: int = 16
    busy_context: int = 1024
    busy_tokens: int = 1500


QUICK = Sizes(2, 2, 64, busy_rounds=1, busy_pairs=1, busy_streams=2, busy_context=64)


@contextlib.contextmanager
def service(**settings: Any) -> Iterator[str]:
    """One prefill and one decode worker on this host; its target."""
    port = start_detached(PdserveConfig.load(None, {"gateway.port": 0, **settings}))
    try:
        yield f"localhost:{port}"
    finally:
        stop_detached(port)


def prompt(draw: random.Random, tokens: int) -> list[int]:
    """Random token ids, so that no prefix cache helps."""
    return [draw.randrange(VOCABULARY) for _ in range(tokens)]


# --- idle ------------------------------------------------------------------------------------------------------------


def idle(target: str, pairs: int) -> dict[str, float]:
    """Pairs of the same prompt, disaggregated and colocated, one request at a time. Differences of the pairs in ms,
    and the CPU time that worker processes and gateway spent per token."""
    draw = random.Random(1)
    added: dict[str, list[float]] = {"ttft": [], "ttft_decode": []}
    alone: list[Generation] = []
    with Client(target) as client:
        processes = _processes(target)
        before_s = tokens = 0.0
        for number in range(-10, pairs):  # the first ones are warm-up
            if number == 0:
                before_s, tokens = _cpu_s(processes), 0
            ids = prompt(draw, PROMPT_TOKENS)
            results = {}
            for mode in ("pd", "colocated")[:: 1 if number % 2 else -1]:
                salt = f"{number}/{mode}"
                stream = client.generate(ids, max_tokens=4, ignore_eos=True, mode=mode, salt=salt, timeout_s=60)
                results[mode] = stream.result()
                tokens += len(results[mode].token_ids)
            if number >= 0:
                pd, colocated = results["pd"], results["colocated"]
                assert pd.ttft_decode_ms is not None
                assert colocated.ttft_decode_ms is not None
                added["ttft"].append(pd.ttft_ms - colocated.ttft_ms)
                added["ttft_decode"].append(pd.ttft_decode_ms - colocated.ttft_decode_ms)
                alone.append(colocated)
        spent_s = _cpu_s(processes) - before_s
    return {
        "pairs": pairs,
        "colocated_ttft_ms": round(statistics.median(g.ttft_ms for g in alone), 3),
        "added_ttft_ms": round(statistics.median(added["ttft"]), 3),
        "added_ttft_decode_ms": round(statistics.median(added["ttft_decode"]), 3),
        "cpu_ms_per_token": round(spent_s / tokens * 1e3, 3),
    }


def _processes(target: str) -> list[psutil.Process]:
    """Gateway and worker processes of a service of this user on this host, without the engines."""
    state = ServiceState.at(target_of(target).address)
    assert state is not None, f"{target} is no service of yours on this host"
    with Client(state.operator) as operator:
        status = operator.status()
    return [psutil.Process(pid) for pid in (status.pid, *(worker.pid for worker in status.workers))]


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


# --- streaming -------------------------------------------------------------------------------------------------------


async def streaming(target: str, streams: int, tokens: int) -> dict[str, float]:
    """CPU time of gateway and worker processes per token while several requests stream."""
    processes = _processes(target)
    async with AsyncClient(target) as client_:
        draw = random.Random(2)

        async def one(number: int) -> int:
            ids = prompt(draw, PROMPT_TOKENS)
            stream = client_.generate(ids, max_tokens=tokens, ignore_eos=True, mode="pd", salt=str(number))
            return len((await stream.result()).token_ids)

        await asyncio.gather(*(one(-1 - number) for number in range(streams)))
        before_s = _cpu_s(processes)
        made = sum(await asyncio.gather(*(one(number) for number in range(streams))))
        return {"streams": streams, "cpu_ms_per_token": round((_cpu_s(processes) - before_s) / made * 1e3, 4)}


# --- decode busy -----------------------------------------------------------------------------------------------------


async def busy(target: str, sizes: Sizes) -> dict[str, float]:
    """TTFT of new requests while decode has nothing else to do, and while it runs others, alternately. Colocated
    requests, which then run on the prefill worker alone, are the control: what they lose to a busy decode engine is the
    machine's (shared caches, memory bandwidth, hardware threads)."""
    ttft_ms: dict[tuple[str, str], list[float]] = {
        (state, mode): [] for state in ("idle", "busy") for mode in ("pd", "colocated")
    }
    draw = random.Random(3)
    async with AsyncClient(target) as client:

        async def probe(state: str) -> None:
            for number in range(sizes.busy_pairs):
                for mode in ("pd", "colocated")[:: 1 if number % 2 else -1]:
                    ids = prompt(draw, PROMPT_TOKENS)
                    stream = client.generate(ids, max_tokens=2, ignore_eos=True, mode=mode, timeout_s=120)
                    ttft_ms[state, mode].append((await stream.result()).ttft_ms)

        await probe("idle")
        for values in ttft_ms.values():
            values.clear()
        for _ in range(sizes.busy_rounds):
            await probe("idle")
            running = [
                client.generate(
                    prompt(draw, sizes.busy_context),
                    max_tokens=sizes.busy_tokens,
                    ignore_eos=True,
                    mode="pd",
                    timeout_s=600,
                )
                for _ in range(sizes.busy_streams)
            ]
            for stream in running:
                for _ in range(2):
                    await anext(stream)
            await probe("busy")
            for stream in running:
                await stream.aclose()
            await asyncio.sleep(1.0)
    medians = {key: statistics.median(values) for key, values in ttft_ms.items()}
    return {
        "idle_ttft_ms": round(medians["idle", "pd"], 2),
        "busy_ttft_ms": round(medians["busy", "pd"], 2),
        "ratio": round(medians["busy", "pd"] / medians["idle", "pd"], 3),
        "colocated_ratio": round(medians["busy", "colocated"] / medians["idle", "colocated"], 3),
    }


def _idle_parts(target: str, sizes: Sizes, result: dict[str, Any]) -> None:
    result["idle"] = idle(target, sizes.pairs)
    result["streaming"] = asyncio.run(streaming(target, sizes.streams, sizes.tokens))


def main() -> None:
    """Measure, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", help="measure the idle part of this service alone")
    parser.add_argument("--pairs", type=int, default=Sizes().pairs)
    parser.add_argument("--no-busy", action="store_true", help="leave the part with a busy decode out")
    parser.add_argument("--quick", action="store_true", help=HELP)
    asked = parser.parse_args()
    sizes = QUICK if asked.quick else Sizes(pairs=asked.pairs)
    result: dict[str, Any] = {}
    if asked.target:
        _idle_parts(asked.target, sizes, result)
    else:
        with service() as target:
            _idle_parts(target, sizes, result)
            if asked.quick and not asked.no_busy:
                result["decode_busy"] = asyncio.run(busy(target, sizes))
        if not asked.quick and not asked.no_busy:
            with service(**{"model.path": "dummy:135m"}) as target:
                result["decode_busy"] = asyncio.run(busy(target, sizes))
    console = Console(stderr=False, highlight=False)
    table = Table("part", "figure", "value")
    for part, figures in result.items():
        for name, value in figures.items():
            table.add_row(part, name, str(value))
    console.print(table)
    print(json.dumps({"benchmark": "dispatch", **result}))  # noqa: T201


if __name__ == "__main__":
    main()
