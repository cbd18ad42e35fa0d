"""What moves bytes how fast on this machine: `python -m benchmarks.peers [--mb 1 16 128] [--rounds 7]`.

All pairs are measured in one run, in turns: in each round every pair moves every size once. A table with medians, then
one JSON line. 1 MB is 2**20 bytes, 1 GB/s is 10**9 bytes per second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from benchmarks.peers.environment import PeerEnvironment
from benchmarks.peers.mooncake import MooncakeTcp
from benchmarks.peers.nixl import Nixl
from experiments.pairs.memcpy import Memcpy
from experiments.pairs.pair import Pair, PairFailed, PairUnavailable
from experiments.pairs.raw_tcp import RawTcp

MB = 2**20


def all_pairs() -> list[Pair]:
    """Every pair there is, not yet started."""
    environment = PeerEnvironment()
    return [
        Memcpy(),
        RawTcp(),
        Nixl(environment),
        Nixl(environment, private_memory=True),
        Nixl(environment, tcp_only=True),
        MooncakeTcp(environment),
    ]


def measure(
    pairs: Sequence[Pair], megabytes: Sequence[int], rounds: int, console: Console
) -> dict[str, dict[str, object]]:
    """Median GB/s by pair and size; a pair that cannot run, or gives up, has ``{"unavailable": reason}``."""
    unavailable: dict[str, str] = {}
    times: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack, Progress(console=console, transient=True) as progress:
        task = progress.add_task("starting", total=len(pairs) * (rounds + 2))
        for pair in pairs:
            progress.update(task, description=f"starting {pair.name}")
            stack.enter_context(pair)
            try:
                pair.start(max(megabytes) * MB)
            except PairUnavailable as error:
                unavailable[pair.name] = str(error)
            progress.advance(task)
        for turn in range(rounds + 1):
            for pair in pairs:
                progress.update(task, description=f"{pair.name}, {f'round {turn}' if turn else 'warm-up'}")
                try:
                    for mb in megabytes if pair.name not in unavailable else ():
                        seconds = pair.seconds(mb * MB)
                        if turn:  # the first transfer of a size is no measurement
                            times.setdefault((pair.name, mb), []).append(seconds)
                except PairFailed as error:
                    unavailable[pair.name] = str(error)
                progress.advance(task)
    return {
        pair.name: {"unavailable": unavailable[pair.name]}
        if pair.name in unavailable
        else {str(mb): _gbs(times[pair.name, mb], mb) for mb in megabytes}
        for pair in pairs
    }


def _gbs(seconds: Sequence[float], megabytes: int) -> float:
    return round(megabytes * MB / statistics.median(seconds) / 1e9, 2)


def _table(result: Mapping[str, Mapping[str, object]], megabytes: Sequence[int]) -> Table:
    table = Table("GB/s", *(f"{mb} MB" for mb in megabytes), "unavailable because")
    for column in table.columns[1:-1]:
        column.justify = "right"
    for name, row in result.items():
        table.add_row(name, *(str(row.get(str(mb), "")) for mb in megabytes), Text(str(row.get("unavailable", ""))))
    return table


def main() -> None:
    """Measure every pair."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mb", type=int, nargs="+", default=[1, 16, 128], help="sizes of a transfer, in MB")
    parser.add_argument("--rounds", type=int, default=7, help="how often each is measured")
    arguments = parser.parse_args()
    if min(arguments.mb) < 1 or arguments.rounds < 1:
        parser.error("sizes and rounds are positive")
    console = Console()
    result = measure(all_pairs(), arguments.mb, arguments.rounds, console)
    console.print(_table(result, arguments.mb))
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
