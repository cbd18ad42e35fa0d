"""How fast KV travels: our transports, whole hand-offs and peers, in one run: `python -m benchmarks.transfer`.

Every pair is two processes (memcpy is one). In each round every pair moves every size once, so that whatever else the
machine does meets all of them; figures are medians. A transfer is timed from the source's first act until the last byte
is in the target's memory (NIXL and Mooncake read, and are timed where they do), a hand-off until the last block is
verified. Then a service with the 135m shape shows what is left of it beside a prefill. Tables, then one JSON line. 1 MB
is 2**20 bytes, 1 GB/s 10**9 bytes.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from benchmarks.overlap import measure_overlap
from benchmarks.peers.environment import PeerEnvironment
from benchmarks.peers.library_pair import LibraryPair
from benchmarks.peers.mooncake import MooncakeTcp
from benchmarks.peers.nixl import Nixl
from benchmarks.quick import Quick
from benchmarks.transfer_pair import HandoffPair
from experiments.pairs.memcpy import Memcpy
from experiments.pairs.pair import Pair, PairFailed, PairUnavailable
from experiments.pairs.raw_tcp import RawTcp
from experiments.pairs.transport_pair import TransportPair

MB = 2**20
TRANSPORTS = {"shm": "host", "tcp": "network", "grpc_stream": "network", "torch_dist": "network"}
if importlib.util.find_spec("nixl") is not None:
    TRANSPORTS["nixl"] = "host"  # UCX reads the other process's memory
HANDOFF_TRANSPORTS = ("shm", "tcp")


class Sizes(NamedTuple):
    """``rounds`` of transfers of so many ``megabytes``, and of hand-offs of so many ``tokens`` of these ``shapes``. The
    first hand-off and the last ones of ``handoffs`` are compared, for ``first_tokens``, with ``first_pairs`` pairs."""

    rounds: int
    megabytes: tuple[int, ...] = (1, 16, 128)
    shapes: tuple[str, ...] = ("135m", "8b")
    tokens: tuple[int, ...] = (512, 2048, 8192)
    handoffs: int = 100
    first_tokens: int = 2048
    first_pairs: int = 9


QUICK = Sizes(1, (1,), ("135m",), (64,), handoffs=12, first_tokens=64, first_pairs=1)

Samples = dict[int, list[float]]
"""Seconds, by bytes."""


def main(
    rounds: Annotated[int, typer.Option(min=1, help="how often each transfer is measured")] = 7,
    quick: Quick = False,
    service: Annotated[bool, typer.Option(help="whether to measure the overlap in a service (two minutes)")] = True,
) -> None:
    """Measure transports, hand-offs and peers."""
    console = Console()
    chosen = QUICK if quick else Sizes(rounds)
    environment = PeerEnvironment(installs=not quick)
    if not quick:
        console.print("peers are installed into an environment of their own, if it is not there yet")
    sizes = [mb * MB for mb in chosen.megabytes]
    pairs: list[Pair] = [Memcpy(), *(TransportPair(name) for name in TRANSPORTS)]
    peers: list[Pair] = [
        Nixl(environment),
        Nixl(environment, private_memory=True),
        Nixl(environment, tcp_only=True),
        MooncakeTcp(environment),
    ]
    raw = RawTcp()
    raw.name = "raw tcp"
    bare = TransferRun(
        [*pairs, raw, *peers], dict.fromkeys([pair.name for pair in [*pairs, raw, *peers]], sizes), console
    )
    bare.measure(chosen.rounds)
    console.print(bare.table("buffer to buffer, GB/s", [f"{mb} MB" for mb in chosen.megabytes]))

    result: dict[str, Any] = {
        "ceiling": {"memcpy_gbs": bare.gbs("memcpy", sizes[-1]), "tcp_gbs": bare.gbs("raw tcp", sizes[-1])},
        "ceilings": {"memcpy": bare.by_megabytes("memcpy"), "tcp": bare.by_megabytes("raw tcp")},
        "transports": {name: {"kind": kind, **bare.by_megabytes(name)} for name, kind in TRANSPORTS.items()},
        "peers": {peer.name: bare.by_megabytes(peer.name) for peer in peers},
    }
    for transport in HANDOFF_TRANSPORTS:
        key = "end_to_end" if transport == "shm" else f"end_to_end_{transport}"
        result[key] = {shape: _end_to_end(shape, transport, chosen, console) for shape in chosen.shapes}
    result["first_to_hundredth"] = {transport: _first_and_last(transport, chosen) for transport in HANDOFF_TRANSPORTS}
    console.print(
        f"a pair's first hand-off over its {chosen.handoffs}th ({chosen.first_tokens} tokens, 135m): "
        f"{result['first_to_hundredth']}"
    )
    if service:
        result["overlap"] = asyncio.run(measure_overlap(console, quick=quick))
    sys.stdout.write(json.dumps(result) + "\n")


class TransferRun:
    """Pairs that are measured in turns; ``sizes`` in bytes, by the pair's name."""

    def __init__(self, pairs: Sequence[Pair], sizes: Mapping[str, Sequence[int]], console: Console) -> None:
        self._pairs, self._sizes, self._console = pairs, sizes, console
        self._samples: dict[str, Samples] = {pair.name: {size: [] for size in sizes[pair.name]} for pair in pairs}
        self.unavailable: dict[str, str] = {}

    def measure(self, rounds: int) -> None:
        """Start all of them, move everything ``rounds`` times after once for warmth, end them."""
        with ExitStack() as stack, Progress(console=self._console, transient=True) as progress:
            task = progress.add_task("starting", total=len(self._pairs) * (rounds + 2))
            for pair in self._pairs:
                progress.update(task, description=f"starting {pair.name}")
                stack.enter_context(pair)
                try:
                    pair.start(max(self._sizes[pair.name]))
                except PairUnavailable as error:
                    self.unavailable[pair.name] = str(error)
                progress.advance(task)
            for turn in range(rounds + 1):
                for pair in self._pairs:
                    progress.update(task, description=f"{pair.name}, {f'round {turn}' if turn else 'warm-up'}")
                    self._turn(pair, record=turn > 0)
                    progress.advance(task)

    def _turn(self, pair: Pair, *, record: bool) -> None:
        if pair.name in self.unavailable:
            return
        try:
            for size in self._sizes[pair.name]:
                seconds = pair.seconds(size)
                if record:
                    self._samples[pair.name][size].append(seconds)
        except PairFailed as error:
            if not isinstance(pair, LibraryPair):  # a failure of ours is no property of the machine
                raise
            self.unavailable[pair.name] = str(error)

    def gbs(self, name: str, size: int) -> float | None:
        """The median rate of a pair; None if it could not be had."""
        if name in self.unavailable:
            return None
        return round(size / statistics.median(self._samples[name][size]) / 1e9, 3)

    def by_megabytes(self, name: str) -> dict[str, object]:
        """What a pair reached, or why it did not."""
        if name in self.unavailable:
            return {"unavailable": self.unavailable[name]}
        return {str(size // MB): self.gbs(name, size) for size in self._sizes[name]}

    def table(self, title: str, columns: Sequence[str]) -> Table:
        """All pairs."""
        table = Table(title, *columns, "unavailable because")
        for column in table.columns[1:-1]:
            column.justify = "right"
        for pair in self._pairs:
            figures = [str(self.gbs(pair.name, size) or "") for size in self._sizes[pair.name]]
            table.add_row(pair.name, *figures, Text(self.unavailable.get(pair.name, "")))
        return table


def _end_to_end(shape: str, transport: str, chosen: Sizes, console: Console) -> dict[str, dict[str, float | None]]:
    """Hand-offs of a shape's real blocks beside the bare transport, at the same numbers of bytes."""
    blocks, bare = HandoffPair(shape, transport), TransportPair(transport)
    sizes = [blocks.layout.expected_bytes(count) for count in chosen.tokens]
    run = TransferRun([blocks, bare], {blocks.name: sizes, bare.name: sizes}, console)
    run.measure(chosen.rounds)
    console.print(run.table(f"{shape} over {transport}, GB/s", [f"{count} tokens" for count in chosen.tokens]))
    return {
        str(count): {
            "gbs": (gbs := run.gbs(blocks.name, size)),
            "x_bare": round(gbs / plain, 2) if gbs and (plain := run.gbs(bare.name, size)) else None,
        }
        for count, size in zip(chosen.tokens, sizes, strict=True)
    }


def _first_and_last(transport: str, chosen: Sizes) -> float:
    """The first hand-off of a new pair of workers over its last ones, in time; the median of several pairs."""
    ratios = []
    for _ in range(chosen.first_pairs):
        with HandoffPair("135m", transport, probe=False) as pair:
            size = pair.layout.expected_bytes(chosen.first_tokens)
            pair.start(size)
            seconds = [pair.unchecked(size) for _ in range(chosen.handoffs)]
        ratios.append(seconds[0] / statistics.median(seconds[-10:]))
    return round(statistics.median(ratios), 2)


if __name__ == "__main__":
    typer.run(main)
