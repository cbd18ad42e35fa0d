"""Goodput after a load step, with and without the controller of roles: `python -m experiments.benchmarks.role_flips`.

A service of 1 prefill and 2 decode workers of the model tiny. First it is measured what each role bears as 1P2D and as
2P1D. Then an open loop steps from long outputs to long prompts, more than one prefill worker can compute, and back to
long outputs: with fixed roles, with `scaling.controller: roles`, and with that and a `scaling.profile` of this machine
(``--profile``, else it is measured first; not with ``--quick``). Goodput is the number of requests per second whose
TTFT and mean time between tokens meet the objectives, by the time at which they were sent."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pandas
import typer

from experiments.benchmarks.frame import Quick, Service, load, note, run, service
from experiments.benchmarks.plan import measured_profile
from experiments.workloads.arrivals import ClosedLoop, random_arrivals, timed_arrivals
from experiments.workloads.conversation import Conversation
from experiments.workloads.synthetic import Fixed, Synthetic
from ops.launch.operator import request_scale
from pdserve import AsyncClient
from pdserve.core.errors import PdserveError
from pdserve.core.request import Mode
from pdserve.pb import operator_pb2

TTFT_MS = 1500.0
TIMEOUT_S = 120.0
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

    def requests(self) -> Iterator[Conversation]:
        """Without end."""
        return Synthetic(Fixed(self.prompt_tokens), Fixed(self.outputs)).conversations(10**9, self.clients, 4000)


class Sizes(NamedTuple):
    """Kinds of requests, and seconds: of a measurement of what a service bears, and of a phase of the load."""

    kinds: Mapping[str, Kind]
    warm_up_s: float = 3.0
    measure_s: float = 8.0
    phase_s: float = 30.0


FULL = Sizes({"prompts": Kind(1200, 4, 8), "outputs": Kind(16, 120, 16)})
QUICK = Sizes({"prompts": Kind(32, 2, 2), "outputs": Kind(16, 4, 2)}, warm_up_s=0.5, measure_s=0.5, phase_s=0.6)


def role_flips(
    quick: Quick = False,
    profile: Annotated[Path | None, typer.Option(help="folder of a profile of this machine")] = None,
) -> dict[str, Any]:
    """Measure."""
    with contextlib.ExitStack() as made:
        scalings: dict[str, dict[str, Any]] = {"off": {"controller": "off"}, "roles": {"controller": "roles"}}
        if not quick or profile is not None:
            path = profile or measured_profile(
                Path(made.enter_context(tempfile.TemporaryDirectory())), quick, {"model.path": "tiny"}
            )
            scalings["forecasts"] = {"controller": "roles", "profile": str(path)}
        return _measured(scalings, QUICK if quick else FULL)


def _measured(scalings: Mapping[str, Mapping[str, Any]], sizes: Sizes) -> dict[str, Any]:
    """What a service bears, and the load step with each of the controllers."""
    with service(SETTINGS) as served:
        bears = served.client(partial(_bears, served, sizes))
    itl_ms = 3 * bears.itl_ms.max()
    rates = {
        "outputs": LOAD_OF_OUTPUTS * bears.outputs_per_s.min(),
        # More than one prefill worker can compute, and less than two can.
        "prompts": bears.prompts_per_s.prod() ** 0.5,
    }
    result: dict[str, Any] = {"bears": bears, "ttft_ms": TTFT_MS, "itl_ms": itl_ms, "rates": rates}
    objectives = {"ttft_ms": TTFT_MS, "itl_ms": itl_ms, "interval_s": 0.5, "hold_s": 4.0}
    for name, scaling in scalings.items():
        with service({**SETTINGS, "scaling": {**scaling, **objectives}}) as served:
            result[name] = served.client(partial(_load_step, rates, sizes, itl_ms))
    return result


async def _bears(served: Service, sizes: Sizes, client: AsyncClient) -> pandas.DataFrame:
    """Closed loops of both kinds, as 1P2D and as 2P1D."""
    rows, seconds = {}, sizes.measure_s
    for kind in sizes.kinds.values():
        await closed_loop(client, kind, seconds / 2)  # warm-up
    for prefill, decode in ((1, 2), (2, 1)):
        if prefill == 2:
            request = operator_pb2.ScaleRequest(prefill=prefill, decode=decode, drain_s=30.0)
            await asyncio.to_thread(request_scale, served.state.socket, request, 120.0, note)
        prompts, outputs = [await closed_loop(client, kind, seconds) for kind in sizes.kinds.values()]
        rows[f"{prefill}P{decode}D"] = {
            "prompts_per_s": len(prompts) / seconds,
            "ttft_ms": prompts.ttft_ms.median(),
            "outputs_per_s": len(outputs) / seconds,
            "itl_ms": outputs.tpot_ms.fillna(0.0).median(),
        }
    return pandas.DataFrame(rows).T


async def closed_loop(client: AsyncClient, kind: Kind, seconds: float) -> pandas.DataFrame:
    """The requests that were answered in this time, or the first one, however long it takes. RuntimeError if one fails:
    then the rate says nothing."""
    options: dict[str, Any] = {"mode": Mode.PD, "timeout_s": TIMEOUT_S, "duration_s": seconds}
    found = await load([client], [ClosedLoop(kind.clients)], [kind.requests()], **options)
    for error in found.error.dropna():
        raise RuntimeError(error)
    in_time = found[found.ended_s <= seconds]
    return in_time if len(in_time) else found.head(1)


async def _load_step(rates: Mapping[str, float], sizes: Sizes, itl_ms: float, client: AsyncClient) -> dict[str, Any]:
    """Long outputs for a phase, long prompts for two, long outputs again for one: goodput by windows, requests that
    were lost, and the controller's actions with the seconds at which they were seen."""
    due: list[tuple[float, str]] = []
    for number, name in enumerate(PHASES):
        arrivals = itertools.takewhile(lambda at_s: at_s < sizes.phase_s, random_arrivals(rates[name], number))
        due += [(number * sizes.phase_s + at_s, name) for at_s in arrivals]
    requests = {name: kind.requests() for name, kind in sizes.kinds.items()}
    for kind in sizes.kinds.values():
        await closed_loop(client, kind, sizes.warm_up_s)
    actions: list[tuple[float, str, str]] = []
    watching = asyncio.create_task(_watch(client, actions))
    schedule, trace = timed_arrivals([at_s for at_s, _ in due]), (next(requests[name]) for _, name in due)
    sent = await load([client], [schedule], [trace], mode=Mode.PD, timeout_s=TIMEOUT_S)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    width_s, count = sizes.phase_s / WINDOWS, WINDOWS * len(PHASES)
    good = sent.error.isna() & (sent.ttft_ms <= TTFT_MS) & (sent.tpot_ms.fillna(0.0) <= itl_ms)
    by_window = good.groupby((sent.scheduled_s // width_s).astype(int)).agg(["count", "sum"])
    windows = (by_window.reindex(range(count), fill_value=0) / width_s).set_axis(
        ["sent_per_s", "goodput_per_s"], axis=1
    )
    windows.insert(0, "load", [PHASES[number // WINDOWS] for number in range(count)])
    return {
        "requests": len(sent),
        "errors": sent.error.count(),
        "retried": (sent.attempts > 1).sum(),
        "windows": windows.set_axis([f"at {number * width_s:g} s" for number in range(count)]),
        "actions": actions,
    }


async def _watch(client: AsyncClient, actions: list[tuple[float, str, str]]) -> None:
    """Note the controller's actions, and their reasons as they are last shown."""
    began_s = time.monotonic()
    while True:
        with contextlib.suppress(PdserveError):
            scaling = (await client.status()).scaling
            if scaling is not None and sum(scaling.actions.values()) > len(actions):
                actions.append((time.monotonic() - began_s - scaling.last_action_age_s, scaling.last_action, ""))
            if scaling is not None and actions:
                actions[-1] = (*actions[-1][:2], scaling.reason)
        await asyncio.sleep(0.2)


if __name__ == "__main__":
    run(role_flips)
