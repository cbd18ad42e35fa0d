"""Goodput after a load step, with and without the controller of roles: `python -m benchmarks.role_flips`.

A service of 1 prefill and 2 decode workers of the model tiny. First it is measured what each role bears as 1P2D and as
2P1D. Then an open loop steps from long outputs to long prompts, more than one prefill worker can compute, and back to
long outputs; once with fixed roles, once with `scaling.controller: roles`. Goodput is the number of requests per second
whose TTFT and mean time between tokens meet the objectives, by the time at which they were sent. Tables, then one JSON
line.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.quick import Quick
from ops.launch.detach import start_detached, stop_detached
from ops.launch.operator import OperatorClient
from ops.launch.state import ServiceState
from pdserve import AsyncClient
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import PdserveError
from pdserve.core.worker import Role

TTFT_MS = 1500.0
TIMEOUT_S = 120.0
HOLD_S = 4.0


class Kind(NamedTuple):
    """Requests of one kind. So many ``clients`` send them in the closed loops that measure what a service bears."""

    prompt_tokens: int
    outputs: int
    clients: int


Kinds = Mapping[str, Kind]


LOAD_OF_OUTPUTS = 0.6
"""Rate of long outputs, as a share of what the service bears."""
KINDS: Kinds = {"prompts": Kind(1200, 4, 8), "outputs": Kind(16, 120, 16)}
QUICK_KINDS: Kinds = {"prompts": Kind(32, 2, 2), "outputs": Kind(16, 4, 2)}


class Sent(NamedTuple):
    """A request: when it was sent, its latencies (0: it failed), and how many attempts it took."""

    sent_s: float
    ttft_ms: float
    itl_ms: float
    attempts: int
    error: str = ""


@dataclass
class Trace:
    """What became of a load step. ``actions`` are those of the controller, with the time at which they were seen."""

    requests: list[Sent] = field(default_factory=list)
    actions: list[tuple[float, str]] = field(default_factory=list)

    def between(self, begin_s: float, end_s: float) -> list[Sent]:
        """The requests that were sent between two times."""
        return [each for each in self.requests if begin_s <= each.sent_s < end_s]


def main(
    measure_s: Annotated[float, typer.Option(min=2.0, help="length of a measurement of what a service bears")] = 8.0,
    phase_s: Annotated[float, typer.Option(min=5.0, help="length of each of the phases of the load")] = 30.0,
    quick: Quick = False,
) -> None:
    """Measure."""
    console = Console(highlight=False)
    kinds, warm_up_s = KINDS, 3.0
    if quick:
        kinds, warm_up_s, measure_s, phase_s = QUICK_KINDS, 0.5, 0.5, 0.6
    with service() as (target, state):
        bears = asyncio.run(_bears(target, state, kinds, measure_s))
    _show_bears(console, bears)
    one, two = bears["1P2D"], bears["2P1D"]
    itl_ms = round(3 * max(one["itl_ms"], two["itl_ms"]), 1)
    rates = {
        "outputs": round(LOAD_OF_OUTPUTS * min(one["outputs_per_s"], two["outputs_per_s"]), 2),
        # More than one prefill worker can compute, and less than two can.
        "prompts": round((one["prompts_per_s"] * two["prompts_per_s"]) ** 0.5, 2),
    }
    result: dict[str, Any] = {"bears": bears, "ttft_ms": TTFT_MS, "itl_ms": itl_ms, "rates": rates}
    for name in ("off", "roles"):
        scaling = {"controller": name, "ttft_ms": TTFT_MS, "itl_ms": itl_ms, "interval_s": 0.5, "hold_s": HOLD_S}
        with service({"scaling": scaling}) as (target, _):
            trace = asyncio.run(run_trace(target, rates, phase_s, kinds, warm_up_s))
        result[name] = summary(trace, phase_s, itl_ms)
        _show(console, name, result[name], phase_s)
    print(json.dumps(result))  # noqa: T201 - the last line is for programs


@contextlib.contextmanager
def service(changes: dict[str, Any] | None = None) -> Iterator[tuple[str, ServiceState]]:
    """A service of 1P2D, ready."""
    config = {
        "model": {"path": "tiny", "dtype": "float32"},
        "cluster": {"prefill": 1, "decode": 2, "oversubscribe": True},
        "engine": {"prefix_caching": False},
        "gateway": {"port": 0},
    }
    port = start_detached(PdserveConfig.parse({**config, **(changes or {})}))
    try:
        yield f"localhost:{port}", ServiceState.read(port)
    finally:
        stop_detached(port)


# --- what a service bears --------------------------------------------------------------------------------------------


async def _bears(target: str, state: ServiceState, kinds: Kinds, measure_s: float) -> dict[str, dict[str, float]]:
    """Closed loops of both kinds, as 1P2D and as 2P1D."""
    found: dict[str, dict[str, float]] = {}
    async with AsyncClient(target) as client:
        for kind in kinds.values():
            await closed_loop(client, kind, measure_s / 2)  # warm-up
        for prefill, decode in ((1, 2), (2, 1)):
            if prefill == 2:
                scale = OperatorClient(state.socket).scale
                wanted = {Role.PREFILL: prefill, Role.DECODE: decode}
                await asyncio.to_thread(scale, wanted, 30.0, 120.0, lambda stage: None)
            prompts, outputs = [await closed_loop(client, kind, measure_s) for kind in kinds.values()]
            found[f"{prefill}P{decode}D"] = {
                "prompts_per_s": round(len(prompts) / measure_s, 2),
                "ttft_ms": round(statistics.median(each.ttft_ms for each in prompts), 1),
                "outputs_per_s": round(len(outputs) / measure_s, 2),
                "itl_ms": round(statistics.median(each.itl_ms for each in outputs), 2),
            }
    return found


async def closed_loop(client: AsyncClient, kind: Kind, seconds: float) -> list[Sent]:
    """The requests that were answered in this time, or the first one, however long it takes. RuntimeError if one fails:
    then the rate says nothing."""
    end_s = time.monotonic() + seconds
    done: list[Sent] = []

    async def ask() -> None:
        while time.monotonic() < end_s or not done:
            sent = await _request(client, kind, 0.0)
            if sent.error:
                raise RuntimeError(f"a request of the closed loop failed: {sent.error}")
            if time.monotonic() < end_s or not done:
                done.append(sent)

    await asyncio.gather(*(ask() for _ in range(kind.clients)))
    return done


# --- the load step ---------------------------------------------------------------------------------------------------


async def run_trace(
    target: str, rates: dict[str, float], phase_s: float, kinds: Kinds = KINDS, warm_up_s: float = 3.0
) -> Trace:
    """Long outputs for a phase, long prompts for two, long outputs again for one."""
    trace, draws = Trace(), random.Random(1)
    async with AsyncClient(target) as client:
        for kind in kinds.values():
            await closed_loop(client, kind, warm_up_s)
        began_s = time.monotonic()
        watching = asyncio.create_task(_watch(client, trace, began_s))
        tasks: list[asyncio.Task[None]] = []

        async def ask(kind: Kind, at_s: float) -> None:
            trace.requests.append(await _request(client, kind, at_s))

        at_s = 0.0
        for name, phases in (("outputs", 1), ("prompts", 2), ("outputs", 1)):
            end_s = at_s + phases * phase_s
            while (at_s := at_s + draws.expovariate(rates[name])) < end_s:
                await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
                tasks.append(asyncio.create_task(ask(kinds[name], at_s)))
            at_s = end_s
        await asyncio.gather(*tasks)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return trace


async def _watch(client: AsyncClient, trace: Trace, began_s: float) -> None:
    """Note the controller's actions."""
    while True:
        with contextlib.suppress(PdserveError):
            scaling = (await client.status()).scaling
            if scaling is not None and sum(scaling.actions.values()) > len(trace.actions):
                acted_s = time.monotonic() - began_s - scaling.last_action_age_s
                trace.actions.append((round(acted_s, 1), scaling.last_action))
        await asyncio.sleep(0.2)


_numbers = itertools.count(1)


async def _request(client: AsyncClient, kind: Kind, at_s: float) -> Sent:
    number = next(_numbers)
    prompt = [(number + 31 * i) % 4000 + 1 for i in range(kind.prompt_tokens)]
    try:
        stream = client.generate(prompt, max_tokens=kind.outputs, ignore_eos=True, mode="pd", timeout_s=TIMEOUT_S)
        done = await stream.result()
    except PdserveError as error:
        return Sent(at_s, 0.0, 0.0, 0, type(error).__name__)
    return Sent(at_s, done.ttft_ms, done.tpot_ms or 0.0, done.attempts)


def summary(trace: Trace, phase_s: float, itl_ms: float) -> dict[str, Any]:
    """Goodput by windows of a sixth of a phase, requests that were lost, and the controller's actions."""
    width_s = phase_s / 6
    windows = []
    for number in range(24):
        sent = trace.between(number * width_s, (number + 1) * width_s)
        met = sum(not each.error and each.ttft_ms <= TTFT_MS and each.itl_ms <= itl_ms for each in sent)
        windows.append({"sent_per_s": round(len(sent) / width_s, 2), "goodput_per_s": round(met / width_s, 2)})
    return {
        "requests": len(trace.requests),
        "errors": sum(bool(each.error) for each in trace.requests),
        "retried": sum(each.attempts > 1 for each in trace.requests),
        "windows": windows,
        "actions": trace.actions,
    }


# --- tables ----------------------------------------------------------------------------------------------------------


def _show_bears(console: Console, bears: dict[str, dict[str, float]]) -> None:
    table = Table("workers", "long prompts/s", "TTFT p50, ms", "long outputs/s", "time per token p50, ms", box=None)
    for name, figures in bears.items():
        table.add_row(name, *(f"{figures[key]:.4g}" for key in ("prompts_per_s", "ttft_ms", "outputs_per_s", "itl_ms")))
    console.print(table)


def _show(console: Console, name: str, figures: dict[str, Any], phase_s: float) -> None:
    console.print(
        f"\ncontroller {name}: {figures['requests']} requests, {figures['errors']} lost, {figures['retried']} retried"
    )
    for at_s, action in figures["actions"]:
        console.print(f"  at {at_s:.1f} s: {action}")
    table = Table("sent at, s", "load", "sent/s", "goodput/s", "met", box=None)
    for number, window in enumerate(figures["windows"]):
        begin_s = number * phase_s / 6
        load = "prompts" if 1 <= begin_s / phase_s < 3 else "outputs"
        share = window["goodput_per_s"] / max(1e-9, window["sent_per_s"])
        table.add_row(
            f"{begin_s:.0f}", load, f"{window['sent_per_s']:.1f}", f"{window['goodput_per_s']:.1f}", f"{share:.0%}"
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
