"""Goodput after a load step, with and without the controller of roles: `python -m experiments.benchmarks.role_flips`.

A service of 1 prefill and 2 decode workers of the model tiny. First it is measured what each role bears as 1P2D and as
2P1D. Then an open loop steps from long outputs to long prompts, more than one prefill worker can compute, and back to
long outputs; once with fixed roles, once with `scaling.controller: roles`. Goodput is the number of requests per second
whose TTFT and mean time between tokens meet the objectives, by the time at which they were sent."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.benchmarks.frame import Quick, Service, loads, note, run, service
from experiments.load import Outcome
from experiments.workloads.arrivals import ClosedLoop, Schedule, random_arrivals, timed_arrivals
from experiments.workloads.conversation import Conversation
from experiments.workloads.synthetic import Fixed, Synthetic
from ops.launch.operator import request_scale
from pdserve import AsyncClient, Generation
from pdserve.core.errors import PdserveError
from pdserve.core.request import Mode
from pdserve.pb import operator_pb2

TTFT_MS = 1500.0
TIMEOUT_S = 120.0
HOLD_S = 4.0
VOCABULARY = 4000
LOAD_OF_OUTPUTS = 0.6
"""Rate of long outputs, as a share of what the service bears."""
PHASES = ("outputs", "prompts", "prompts", "outputs")
WINDOWS = 6
"""In each phase."""
SETTINGS = {
    "model.dtype": "float32",
    "cluster.prefill": 1,
    "cluster.decode": 2,
    "cluster.oversubscribe": True,
    "engine.prefix_caching": False,
}


class Kind(NamedTuple):
    """Requests of one kind. So many ``clients`` send them in the closed loops that measure what a service bears."""

    prompt_tokens: int
    outputs: int
    clients: int


class Sizes(NamedTuple):
    """Kinds of requests, and seconds: of a measurement of what a service bears, and of a phase of the load."""

    prompts: Kind = Kind(1200, 4, 8)
    outputs: Kind = Kind(16, 120, 16)
    warm_up_s: float = 3.0
    measure_s: float = 8.0
    phase_s: float = 30.0

    def kind(self, name: str) -> Kind:
        """``prompts`` or ``outputs``."""
        return self.prompts if name == "prompts" else self.outputs


QUICK = Sizes(Kind(32, 2, 2), Kind(16, 4, 2), warm_up_s=0.5, measure_s=0.5, phase_s=0.6)


def role_flips(quick: Quick = False) -> dict[str, Any]:
    """Measure."""
    sizes = QUICK if quick else Sizes()
    with service(SETTINGS) as served:
        bears = asyncio.run(_bears(served, sizes))
    one, two = bears["1P2D"], bears["2P1D"]
    itl_ms = 3 * max(one["itl_ms"], two["itl_ms"])
    rates = {
        "outputs": LOAD_OF_OUTPUTS * min(one["outputs_per_s"], two["outputs_per_s"]),
        # More than one prefill worker can compute, and less than two can.
        "prompts": (one["prompts_per_s"] * two["prompts_per_s"]) ** 0.5,
    }
    result: dict[str, Any] = {"bears": bears, "ttft_ms": TTFT_MS, "itl_ms": itl_ms, "rates": rates}
    for name in ("off", "roles"):
        scaling = {"controller": name, "ttft_ms": TTFT_MS, "itl_ms": itl_ms, "interval_s": 0.5, "hold_s": HOLD_S}
        with service({**SETTINGS, "scaling": scaling}) as served:
            result[name] = asyncio.run(_load_step(served.target, rates, sizes, itl_ms))
    return result


# --- what a service bears --------------------------------------------------------------------------------------------


async def _bears(served: Service, sizes: Sizes) -> dict[str, dict[str, float]]:
    """Closed loops of both kinds, as 1P2D and as 2P1D."""
    found: dict[str, dict[str, float]] = {}
    seconds = sizes.measure_s
    async with AsyncClient(served.target) as client:
        for kind in (sizes.prompts, sizes.outputs):
            await closed_loop(client, kind, seconds / 2)  # warm-up
        for prefill, decode in ((1, 2), (2, 1)):
            if prefill == 2:
                request = operator_pb2.ScaleRequest(prefill=prefill, decode=decode, drain_s=30.0)
                await asyncio.to_thread(request_scale, served.state.socket, request, 120.0, note)
            prompts = await closed_loop(client, sizes.prompts, seconds)
            outputs = await closed_loop(client, sizes.outputs, seconds)
            found[f"{prefill}P{decode}D"] = {
                "prompts_per_s": len(prompts) / seconds,
                "ttft_ms": statistics.median(each.ttft_ms for each in prompts),
                "outputs_per_s": len(outputs) / seconds,
                "itl_ms": statistics.median(each.tpot_ms or 0.0 for each in outputs),
            }
    return found


async def closed_loop(client: AsyncClient, kind: Kind, seconds: float) -> Sequence[Generation]:
    """The requests that were answered in this time, or the first one, however long it takes. The error of one that
    fails: then the rate says nothing."""
    outcomes = await _sent(client, ClosedLoop(kind.clients), _requests(kind), duration_s=seconds)
    for each in outcomes:
        if each.error is not None:
            raise each.error
    in_time = [each for each in outcomes if each.ended_s <= seconds] or outcomes[:1]
    return [each.generation for each in in_time if each.generation is not None]


async def _sent(
    client: AsyncClient, schedule: Schedule, requests: Iterator[Conversation], **options: Any
) -> Sequence[Outcome]:
    return await loads([client], [schedule], lambda number: requests, mode=Mode.PD, timeout_s=TIMEOUT_S, **options)


def _requests(kind: Kind) -> Iterator[Conversation]:
    return Synthetic(Fixed(kind.prompt_tokens), Fixed(kind.outputs)).conversations(10**9, kind.clients, VOCABULARY)


# --- the load step ---------------------------------------------------------------------------------------------------


async def _load_step(target: str, rates: Mapping[str, float], sizes: Sizes, itl_ms: float) -> dict[str, Any]:
    """Long outputs for a phase, long prompts for two, long outputs again for one: goodput by windows, requests that
    were lost, and the controller's actions with the seconds at which they were seen."""
    due: list[tuple[float, str]] = []
    for number, name in enumerate(PHASES):
        arrivals = itertools.takewhile(lambda at_s: at_s < sizes.phase_s, random_arrivals(rates[name], number))
        due += [(number * sizes.phase_s + at_s, name) for at_s in arrivals]
    requests = {name: _requests(sizes.kind(name)) for name in rates}
    actions: list[tuple[float, str]] = []
    async with AsyncClient(target) as client:
        for name in rates:
            await closed_loop(client, sizes.kind(name), sizes.warm_up_s)
        watching = asyncio.create_task(_watch(client, actions))
        trace = (next(requests[name]) for _, name in due)
        outcomes = await _sent(client, timed_arrivals([at_s for at_s, _ in due]), trace)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    done = [each.generation for each in outcomes if each.generation is not None]
    width_s = sizes.phase_s / WINDOWS
    windows: dict[str, dict[str, Any]] = {}
    for number in range(WINDOWS * len(PHASES)):
        begin_s = number * width_s
        sent = [each for each in outcomes if begin_s <= each.scheduled_s < begin_s + width_s]
        windows[f"at {begin_s:g} s"] = {
            "load": PHASES[number // WINDOWS],
            "sent_per_s": len(sent) / width_s,
            "goodput_per_s": sum(_is_good(each.generation, itl_ms) for each in sent) / width_s,
        }
    return {
        "requests": len(outcomes),
        "errors": len(outcomes) - len(done),
        "retried": sum(each.attempts > 1 for each in done),
        "windows": windows,
        "actions": actions,
    }


def _is_good(done: Generation | None, itl_ms: float) -> bool:
    return done is not None and done.ttft_ms <= TTFT_MS and (done.tpot_ms or 0.0) <= itl_ms


async def _watch(client: AsyncClient, actions: list[tuple[float, str]]) -> None:
    """Note the controller's actions."""
    began_s = time.monotonic()
    while True:
        with contextlib.suppress(PdserveError):
            scaling = (await client.status()).scaling
            if scaling is not None and sum(scaling.actions.values()) > len(actions):
                actions.append((time.monotonic() - began_s - scaling.last_action_age_s, scaling.last_action))
        await asyncio.sleep(0.2)


if __name__ == "__main__":
    run(role_flips)
