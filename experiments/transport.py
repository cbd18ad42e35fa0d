"""``pdserve experiment transport``: what each KV transport moves, and what a message costs.

On one machine every transport is a *pair* of two processes with a link between them (`experiments.pairs`), without
blocks, hashes or requests. A payload is timed from the source's first act until the target has its last byte. Two more
pairs are the ceilings: a thread that copies memory, and a blocking socket. All pairs take turns, so that whatever else
the machine does meets all of them. Each repeat starts new processes.

A payload of up to ``transfer.message_bytes`` is one message; larger ones travel as several, as in a hand-off. The line
``time = cost + bytes / rate`` through the sizes of one message gives the cost of a message, which includes waking the
receiver.

A running service (``--target``) has links of its own. Requests of several prompt lengths are sent over them one at a
time; bytes, times and the link's ceiling come from the responses. Such a hand-off has several messages and is hashed,
so the fit gives the cost of a hand-off there."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from experiments.experiment import Bench, Cell, Experiment, Options, option
from experiments.fit import fitted
from experiments.modes import PD
from experiments.pairs.pair import Turns, memcpy, socket
from experiments.pairs.transport_pair import transport_pair
from experiments.report.drawing import (
    DASHED,
    DOTTED,
    FAINT,
    PALETTE,
    Mark,
    Panel,
    Picture,
    Rule,
    TableBlock,
    frame_of,
    table,
)
from experiments.report.page import Report, setup_of
from experiments.run_folder import RunData, failures, unexpected_bytes
from experiments.statistics import plain_mean
from experiments.warm_up import warm_up
from pdserve.client.async_client import AsyncClient
from pdserve.client.status import ServiceStatus
from pdserve.core.config import TransferConfig
from pdserve.core.errors import InvalidRequest
from pdserve.core.interval import MIN_VALUES, Interval, interval_text

if TYPE_CHECKING:
    import pandas

MEMCPY, SOCKET = "memcpy", "socket"
CEILING_OF = {"shm": MEMCPY, "nixl": MEMCPY, "tcp": SOCKET, "grpc_stream": SOCKET, "torch_dist": SOCKET}
"""The transports that can be measured on one machine, and the ceiling of each."""
NAMES = {MEMCPY: "one thread's memcpy", SOCKET: "a blocking socket"}
"""The ceilings, in words."""
MESSAGE_BYTES = TransferConfig().message_bytes
LOCAL, SERVICE = "local", "service"
_KIB = 2**10
_WARM_UP_ROUNDS = 2


class TransportOptions(Options):
    """Options of `Transport`."""

    transports: tuple[str, ...] = Field(
        (), description="transports to measure (none: all that can be measured on this machine)"
    )
    kib: tuple[int, ...] = option(
        (64, 256, 1024, 4096, 16384, 131072),
        description="sizes in KiB",
        quick=[64, 512, 4096, 16384],
    )
    repeats: int = option(6, ge=1, description="how often processes are started anew", quick=6)
    rounds: int = option(
        7,
        ge=1,
        description="payloads of each size and repeat, of which the median counts",
        quick=5,
    )
    prompt_lens: tuple[int, ...] = option(
        (128, 256, 512, 1024, 2048, 4096),
        description="prompt lengths for the links of a running service",
        quick=[128, 512, 1024],
    )
    requests: int = option(12, ge=1, description="requests of each prompt length to a running service", quick=6)


class Transport(Experiment):
    """See the module."""

    name: ClassVar[str] = "transport"
    question: ClassVar[str] = "How fast does each transport move KV, and what does a message cost?"
    options_type: ClassVar[type[Options]] = TransportOptions
    options: TransportOptions

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """One cell per repeat; for a running service one per prompt length, with the links that it has."""
        options = self.options
        if attached is not None:
            return self._service_cells(attached)
        for name in set(options.transports) - CEILING_OF.keys():
            raise InvalidRequest(
                f"--transports: {name!r} is none of {', '.join(CEILING_OF)}; measure others with --target"
            )
        if not options.kib or min(options.kib) < 1:
            raise InvalidRequest("--kib: give at least one size of 1 KiB or more")
        work = (len(self._transports()) + 2) * (options.rounds + 2)
        return [
            Cell(f"repeat-{number}", {"where": LOCAL, "repeat": number}, None, work)
            for number in range(options.repeats)
        ]

    def _service_cells(self, attached: ServiceStatus) -> list[Cell]:
        transports = sorted({link.transport for worker in attached.workers for link in worker.links})
        if not transports:
            raise InvalidRequest("target: the service has no linked pair of prefill and decode workers")
        fit = self.options.fitting(self.options.prompt_lens, attached.context_length - 2, "--prompt-lens")
        shared = {"where": SERVICE, "transport": "+".join(transports)}
        return [
            Cell(f"{length} tokens", {**shared, "prompt_len": length}, work=self.options.requests) for length in fit
        ]

    def _transports(self) -> tuple[str, ...]:
        here = (name for name in CEILING_OF if name != "nixl" or importlib.util.find_spec("nixl") is not None)
        return self.options.transports or tuple(here)

    async def measure(self, bench: Bench) -> None:
        """Measure one repeat of all pairs, or one prompt length over the links of a service."""
        if bench.cell.parameters["where"] == SERVICE:
            await self._measure_service(bench)
            return
        pairs = [memcpy(), socket(), *map(transport_pair, self._transports())]
        turns = Turns(pairs, [kib * _KIB for kib in self.options.kib])
        for _ in turns.run(self.options.rounds):
            bench.advance(1)
            await asyncio.sleep(0)  # Ctrl-C is noticed here
        bench.facts["seconds"] = {
            name: {str(size): times_s for size, times_s in by_size.items()} for name, by_size in turns.seconds.items()
        }
        bench.facts["unavailable"] = {name: why.splitlines()[0] for name, why in turns.unavailable.items()}

    async def _measure_service(self, bench: Bench) -> None:
        length = int(bench.cell.parameters["prompt_len"])
        draw, other = (random.Random(f"{self.options.seed}/{bench.cell.name}{part}") for part in ("", "/warm-up"))
        async with AsyncClient(bench.target) as client:
            vocab_size = (await client.status()).vocab_size

            def prompt(draw: random.Random) -> list[int]:
                return [draw.randrange(vocab_size) for _ in range(length)]

            prompts = ((prompt(other), 2) for _ in itertools.count())
            await warm_up(bench, client, prompts, (PD,), rounds=_WARM_UP_ROUNDS)
            await bench.settle(client, PD)
            for number in range(self.options.requests):
                salt = f"{bench.cell.name}/{draw.random()}"
                await bench.send(client, prompt(draw), arm=PD, repeat=0, index=number, mode=PD, max_tokens=2, salt=salt)
                bench.advance(1)

    def summarise(self, run: RunData) -> dict[str, Any]:
        """``where`` is ``local`` or ``service``.

        ``cells``, one per transport and size: ``transport``, ``size_bytes`` (for a service the KV of a request of
        ``prompt_len``), ``messages``, ``gbs``, ``time_us`` (for a service the receiver's wire and import time),
        ``exposed_us``; ``per_message_us``, the cost of a message or hand-off by the fit (null without one);
        ``ceiling`` (``memcpy``, ``socket`` or ``link``), ``ceiling_gbs``, ``share``.

        ``ceilings``: the same for ``memcpy`` and ``socket``. ``fits`` by transport: ``per_message_us``, ``rate_gbs``,
        and ``misfit_pct``, the largest relative error. ``message_bytes``: the largest payload of a message.
        ``unavailable``: transports that could not be measured, and why."""
        local = not run.cells or run.cells[0].parameters["where"] == LOCAL
        times = _local_times(run) if local else _service_times(run)
        unavailable = {name: why for cell in run.cells for name, why in cell.facts.get("unavailable", {}).items()}
        failed = [f"{name}: {why}" for name, why in unavailable.items() if name in NAMES]
        for cell in run.cells:
            rows = run.rows_of(cell.cell)
            failed += [
                *failures(cell.cell, rows),
                *(f"{cell.cell}: {wrong}" for wrong in [unexpected_bytes(rows)] if wrong),
            ]
        fits = self._fits(times, MESSAGE_BYTES if local else float("inf"))
        cells = self._cells(times, {fit["transport"]: fit["per_message_us"] for fit in fits}, local)
        return {
            "experiment": self.name,
            "where": LOCAL if local else SERVICE,
            "message_bytes": MESSAGE_BYTES if local else None,
            "cells": [cell for cell in cells if cell["ceiling"]],
            "ceilings": [cell for cell in cells if not cell["ceiling"]],
            "fits": fits,
            "unavailable": unavailable,
            "failed": failed,
        }

    def _mean(self, values: Any) -> Any:
        return plain_mean(values.dropna().astype(float).tolist(), self.options.seed)

    def _cells(self, times: pandas.DataFrame, costs: Mapping[str, Any], local: bool) -> list[dict[str, Any]]:
        """The figures of each transport and size."""
        cells = []
        for name, of_name in times.groupby("transport", sort=False):
            for size, each in of_name.groupby("size"):
                figures = {
                    "gbs": self._mean(each.gbs),
                    "time_us": self._mean(each.s * 1e6),
                    "per_message_us": costs.get(name),
                    "share": self._mean(each.share),
                }
                own = {"messages": -(-size // MESSAGE_BYTES), "ceiling": CEILING_OF.get(name)}
                if not local:
                    own = {
                        "prompt_len": int(each.prompt_len.iloc[0]),
                        "exposed_us": self._mean(each.exposed_us),
                        "ceiling": "link",
                        "ceiling_gbs": round(float(each.ceiling_gbs.median()), 4),
                    }
                cells.append({"transport": name, "size_bytes": int(size), **figures, **own})
        return cells

    def _fits(self, times: pandas.DataFrame, most_bytes: float) -> list[dict[str, Any]]:
        """Of each transport with lines: they go through the sizes of each repeat up to ``most_bytes``, or through all
        if fewer than two are that small."""
        fits = []
        for name, of_name in times.groupby("transport", sort=False):
            lines = []
            for _, each in of_name.groupby("repeat"):
                small = each[each["size"] <= most_bytes]
                points = small if len(small) > 1 else each
                if (line := fit_line(points["size"], points.s)) is not None:
                    misfit = ((line[0] + points["size"] / line[1]) / points.s - 1).abs().max()
                    lines.append({"cost_us": line[0] * 1e6, "gbs": line[1] / 1e9, "misfit": misfit})
            if lines:
                found = frame_of(lines)
                fits.append({
                    "transport": name,
                    "per_message_us": self._mean(found.cost_us),
                    "rate_gbs": self._mean(found.gbs),
                    "misfit_pct": round(100 * float(found.misfit.mean()), 2),
                })  # fmt: skip
        return fits

    def report(self, run: RunData, summary: Mapping[str, Any]) -> Report:
        """Rates over size with the ceilings, times with the fit, and a table."""
        local = summary["where"] == LOCAL
        report = Report(
            title="What the transports move" if local else "What the links of this service move",
            question=self.question,
            answer=_answer(summary),
            setup=setup_of(
                run,
                "two processes per transport, payloads of all transports in turns, new processes in each repeat"
                if local
                else "requests one at a time over the links of the running service, overlap as configured there",
            ),
            caveats=_caveats(summary),
            failures=summary["failed"],
        )
        if summary["cells"]:
            report.blocks += [*_pictures(summary), *_tables(summary)]
        return report


def fit_line(sizes: Sequence[int], times_s: Sequence[float]) -> tuple[float, float] | None:
    """Cost in seconds and rate in bytes per second of the line ``time = cost + bytes / rate`` whose relative errors
    have the least squares; None where it is not determined or no rate."""
    if len(set(sizes)) < 2:
        return None
    cost_s, s_per_byte = fitted([(1.0, size) for size in sizes], times_s)
    return (cost_s, 1 / s_per_byte) if s_per_byte > 0 else None


def _times(records: list[dict[str, Any]]) -> pandas.DataFrame:
    columns = ("repeat", "transport", "size", "s", "gbs", "share")
    frame = frame_of(records)
    return frame.reindex(columns=frame.columns.union(columns, sort=False)).infer_objects()


def _local_times(run: RunData) -> pandas.DataFrame:
    """The median seconds of each repeat, pair and size; ``share`` is that of the ceiling's rate."""
    medians = {
        (number, name, int(size)): statistics.median(times_s)
        for number, cell in enumerate(run.cells)
        for name, by_size in cell.facts["seconds"].items()
        for size, times_s in by_size.items()
        if times_s
    }
    return _times([
        {
            "repeat": number,
            "transport": name,
            "size": size,
            "s": time_s,
            "gbs": size / time_s / 1e9,
            "share": medians.get((number, CEILING_OF.get(name, ""), size), float("nan")) / time_s,
        }
        for (number, name, size), time_s in medians.items()
    ])  # fmt: skip


def _service_times(run: RunData) -> pandas.DataFrame:
    """The receiver's seconds of each hand-off."""
    return _times([
        {
            "repeat": row.index,
            "transport": row.transport,
            "size": row.kv_bytes,
            "prompt_len": row.prompt_tokens,
            "s": (float(row.transfer["wire_ms"]) + float(row.transfer["import_ms"])) / 1e3,
            "exposed_us": float(row.transfer["exposed_ms"]) * 1e3,
            "gbs": float(row.transfer["gbs"]),
            "ceiling_gbs": (top := float(row.transfer["ceiling_gbs"])),
            "share": float(row.transfer["gbs"]) / top if top else None,
        }
        for row in sorted(run.rows, key=lambda row: (row.transport, row.prompt_tokens))
        if row.error is None and row.kv_bytes
    ])  # fmt: skip


def _answer(summary: Mapping[str, Any]) -> str:
    cells: Sequence[Mapping[str, Any]] = summary["cells"]
    if not cells:
        return "No transport was measured."
    largest = max(cell["size_bytes"] for cell in cells)
    best = {cell["transport"]: cell for cell in cells if cell["size_bytes"] == largest}
    costs = {fit["transport"]: Interval.from_dict(fit["per_message_us"]) for fit in summary["fits"]}
    what = "message" if summary["where"] == LOCAL else "hand-off"
    parts = []
    for name, cell in sorted(best.items(), key=lambda item: -item[1]["gbs"]["mean"]):
        of = NAMES.get(cell["ceiling"], "the link's ceiling")
        share = f", {interval_text(cell['share'], factor=100)} % of {of}" if cell["share"] else ""
        cost = f", and a {what} costs {costs[name].text('µs', '')}" if name in costs else ""
        parts.append(f"{name} moves {interval_text(cell['gbs'])} GB/s{share}{cost}")
    return f"With {size_text(largest)}, {'; '.join(parts)}."


_CAVEATS = {
    SERVICE: (
        "Times are the receiver's (wire and import), with hashing and the latency of the link, and without waits "
        "for blocks that were not computed yet. With overlap, most of this time is hidden behind the prefill.",
        "The ceiling is the best rate of the link so far, in its handshake or in a hand-off, so no share exceeds "
        "100 %.",
        "Short prompts of an overlapped hand-off travel in small messages.",
    ),
    LOCAL: (
        "Both ends of each pair are on this machine. Network transports meet no network here; measure a cluster "
        "with --target.",
        "The blocking socket has the kernel's default buffers. A transport with larger ones can exceed it.",
        "Each process has a core of its own where the machine has two. Libraries with threads of their own "
        "(grpc_stream, torch_dist) share it with them.",
        "The cost of a message includes waking the receiving process, which a busy receiver does not pay.",
    ),
}


def _caveats(summary: Mapping[str, Any]) -> list[str]:
    caveats = [*_CAVEATS[summary["where"]]]
    caveats += [f"{name} was not measured: {why}" for name, why in summary["unavailable"].items()]
    if any(cell["gbs"]["n"] < MIN_VALUES for cell in summary["cells"]):
        caveats.append(f"Figures of fewer than {MIN_VALUES} repeats have no intervals.")
    return caveats


def size_text(num_bytes: float) -> str:
    """``64 KiB``, ``1.5 MiB``."""
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:g} B"


def _pictures(summary: Mapping[str, Any]) -> list[Picture]:
    """Rates over the size with the ceilings, and times with the fitted lines."""
    local, cells = summary["where"] == LOCAL, summary["cells"]
    names = list(dict.fromkeys(cell["transport"] for cell in cells))
    looks = {name: {"color": PALETTE[number % len(PALETTE)]} for number, name in enumerate(names)}
    dashes = {name: {"label": NAMES[name], "color": FAINT, "linestyle": dash}
              for name, dash in ((MEMCPY, DASHED), (SOCKET, DOTTED))}  # fmt: skip
    links = {name: {**look, "label": f"ceiling of {name}", "linestyle": DASHED} for name, look in looks.items()}
    sizes = sorted({cell["size_bytes"] for cell in (*cells, *summary["ceilings"])})
    axes: dict[str, Any] = {
        "x": "payload" if local else "KV of a request",
        "log": "xy",
        "ticks": sizes,
        "tick_text": size_text,
        "xlim": (sizes[0] / 1.4, sizes[-1] * 1.4),
        "legend": "right",
    }
    bare: dict[str, Any] = {"by": "transport", "look": {"marker": ""}}
    rates = [
        Mark(summary["ceilings"], "size_bytes", "gbs", looks=dashes, **bare),
        Mark(cells, "size_bytes", "gbs", by="transport", looks=looks),
        *([] if local else [Mark(cells, "size_bytes", "ceiling_gbs", looks=links, **bare)]),
    ]
    lines = [
        {"transport": fit["transport"], "size": size, "us": us}
        for fit in summary["fits"]
        if (own := [cell["size_bytes"] for cell in cells if cell["transport"] == fit["transport"]])
        for size in np.geomspace(min(own), max(own), 60).tolist()
        if (us := fit["per_message_us"]["mean"] + size / fit["rate_gbs"]["mean"] / 1e3) > 0
    ]
    times: list[Mark | Rule] = [
        Mark(cells, "size_bytes", "time_us", by="transport", looks=looks, kind="points"),
        Mark(lines, "size", "us", by="transport", looks=looks, look={"marker": "", "linewidth": 1.2, "label": None}),
    ]
    if local and sizes[-1] > MESSAGE_BYTES:
        times.append(Rule("x", summary["message_bytes"], "several messages →"))
    return [
        Picture(
            "rate_over_size",
            "Rate over size",
            "Means with 95 % intervals; both axes are logarithmic. Grey lines are the ceilings, measured in the same "
            "turns: one thread that copies memory bounds what moves within a host, a blocking socket what moves over "
            "one."
            if local
            else "Bytes of a hand-off over the receiver's time for them, with 95 % intervals, and the ceiling of the "
            "link, which is the best rate it has reached so far. Both axes are logarithmic.",
            [Panel(rates, y="GB/s (10⁹ bytes per second)", **axes)],
            height_in=4.8,
        ),
        Picture(
            "time_over_size",
            "Time over size, and the cost of a message" if local else "Time over size",
            "Points are means with 95 % intervals. Lines are time = cost + bytes / rate, fitted to "
            + (
                "the sizes of one message; where a line is flat, the cost of a message dominates. Points beside their "
                "line show that the rate depends on the size, as it does once payloads exceed the processor's cache. "
                "To the right of the dotted line several messages are under way at once."
                if local
                else "all prompt lengths; the cost is that of a whole hand-off."
            ),
            [Panel(times, y="time, µs", **axes)],
            height_in=4.8,
        ),
    ]


def _tables(summary: Mapping[str, Any]) -> list[TableBlock]:
    what = "message" if summary["where"] == LOCAL else "hand-off"
    cells = [
        {
            **cell,
            "size": size_text(cell["size_bytes"]),
            "ceiling": f"{cell['ceiling_gbs']:.2f} GB/s" if "ceiling_gbs" in cell else NAMES.get(cell["ceiling"]),
        }
        for cell in (*summary["ceilings"], *summary["cells"])
    ]
    cells, fits = (
        [{**each, "transport": NAMES.get(each["transport"], each["transport"])} for each in records]
        for records in (cells, summary["fits"])
    )
    rates = (
        "transport",
        "size",
        "GB/s | gbs",
        "time, µs | time_us:,.0f",
        "ceiling",
        "share of ceiling | share",
        "n | gbs.n",
    )
    lines = (
        "transport",
        f"cost of a {what}, µs | per_message_us:.0f",
        "rate, GB/s | rate_gbs",
        "largest error, % | misfit_pct:.0f",
    )
    return [
        table("Rates", cells, rates, "Means with 95 % intervals over n repeats. 1 GB/s is 10⁹ bytes per second."),
        table(
            "time = cost + bytes / rate",
            fits,
            lines,
            "Least squares of relative errors, made in each repeat on its own. Where the largest error is large, the "
            "rate depends on the size, and the cost is only an orientation.",
        ),
    ]
