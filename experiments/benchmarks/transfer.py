"""How fast KV travels: our transports, whole hand-offs and peers, in one run:
`python -m experiments.benchmarks.transfer`.

Every pair is two processes, and the pairs move all sizes in turns; figures are medians. A transfer is timed from the
source's first act until the last byte is in the target's memory (memcpy, NIXL and Mooncake are timed where they read),
a hand-off until the last block is verified. Then a service with the 135m shape shows what is left of it beside a
prefill. 1 MB is 2**20 bytes, 1 GB/s 10**9 bytes."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pandas

from experiments.benchmarks.frame import Quick, frame, in_turns, note, row, run, service
from experiments.benchmarks.handoff_pair import handoff_pair, layout_of
from experiments.benchmarks.peers import mooncake_tcp, nixl, peer_python
from experiments.pairs.pair import Pair, Turns, memcpy, socket
from experiments.pairs.transport_pair import transport_pair
from experiments.workloads.conversation import random_tokens
from pdserve import AsyncClient

MB = 2**20
TRANSPORTS = {"shm": "host", "tcp": "network", "grpc_stream": "network", "torch_dist": "network"}
if importlib.util.find_spec("nixl") is not None:
    TRANSPORTS["nixl"] = "host"  # UCX reads the other process's memory
HANDOFF_TRANSPORTS = {"shm": "end_to_end", "tcp": "end_to_end_tcp"}
"""By transport, what its figures are called."""


class Sizes(NamedTuple):
    """``rounds`` of transfers of so many ``megabytes``, and of hand-offs of so many ``tokens`` of these ``shapes``. The
    first hand-off and the last ones of ``handoffs`` are compared, for ``first_tokens``, with ``first_pairs`` pairs.
    Each way to overlap is a service with ``model``, to which ``rounds`` of prompts are sent."""

    rounds: int = 7
    megabytes: tuple[int, ...] = (1, 16, 128)
    shapes: tuple[str, ...] = ("135m", "8b")
    tokens: tuple[int, ...] = (512, 2048, 8192)
    handoffs: int = 100
    first_tokens: int = 2048
    first_pairs: int = 9
    model: str = "dummy:135m"
    prompt_tokens: int = 2048
    overlaps: tuple[str, ...] = ("layer", "chunk", "none")


QUICK = Sizes(1, (1,), ("135m",), (64,), 12, first_tokens=64, first_pairs=1, model="tiny", prompt_tokens=128,
              overlaps=("layer",))  # fmt: skip


def transfer(quick: Quick = False) -> dict[str, Any]:
    """Measure transports, hand-offs and peers."""
    sizes = QUICK if quick else Sizes()
    python_with = partial(peer_python, installs=not quick)
    others = [
        nixl(python_with), nixl(python_with, private_memory=True), nixl(python_with, tcp_only=True),
        mooncake_tcp(python_with),
    ]  # fmt: skip
    bytes_of = {str(megabytes): megabytes * MB for megabytes in sizes.megabytes}
    ours = [memcpy(), socket(), *map(transport_pair, TRANSPORTS)]
    rates = rates_gbs([*ours, *others], bytes_of, sizes.rounds, others)
    largest = str(sizes.megabytes[-1])
    result: dict[str, Any] = {
        "ceiling": {"memcpy_gbs": rates["memcpy"][largest], "tcp_gbs": rates["socket"][largest]},
        "ceilings": {"memcpy": rates["memcpy"], "tcp": rates["socket"]},
        "transports": {name: {"kind": kind, **rates[name]} for name, kind in TRANSPORTS.items()},
        "peers": {pair.name: rates[pair.name] for pair in others},
        **{
            name: {shape: _end_to_end(shape, transport, sizes) for shape in sizes.shapes}
            for transport, name in HANDOFF_TRANSPORTS.items()
        },
        "first_to_hundredth": {transport: _first_and_last(transport, sizes) for transport in HANDOFF_TRANSPORTS},
        "overlap": {},
    }
    for name in sizes.overlaps:
        with service({"model.path": sizes.model, "transfer.overlap": name}) as served:
            result["overlap"][name] = served.client(partial(_overlap, sizes))
    return result


def rates_gbs(
    pairs: Sequence[Pair], bytes_of: Mapping[str, int], rounds: int, peers: Sequence[Pair] = ()
) -> dict[str, dict[str, Any]]:
    """Median rates by pair and name of a size; of a pair that cannot run, or one of ``peers`` that fails, why it is
    ``unavailable``. A failure of ours is no property of the machine, and raised."""
    note(", ".join(pair.name for pair in pairs))
    turns = Turns(pairs, list(bytes_of.values()))
    list(turns.run(rounds, may_fail=lambda pair: pair in peers))
    return {
        **{
            name: {size: count / statistics.median(taken[count]) / 1e9 for size, count in bytes_of.items()}
            for name, taken in turns.seconds.items()
        },
        **{name: {"unavailable": why} for name, why in turns.unavailable.items()},
    }


def _end_to_end(shape: str, transport: str, sizes: Sizes) -> pandas.DataFrame:
    """Hand-offs of a shape's real blocks beside the bare transport, at the same numbers of bytes."""
    blocks, bare = handoff_pair(shape, transport), transport_pair(transport)
    bytes_of = {str(count): layout_of(shape).expected_bytes(count) for count in sizes.tokens}
    rates = pandas.DataFrame(rates_gbs([blocks, bare], bytes_of, sizes.rounds))
    return pandas.DataFrame({"gbs": rates[blocks.name], "x_bare": rates[blocks.name] / rates[bare.name]})


def _first_and_last(transport: str, sizes: Sizes) -> float:
    """The first hand-off of a new pair of workers over its last ones, in time; the median of several pairs."""
    ratios, size = [], layout_of("135m").expected_bytes(sizes.first_tokens)
    for _ in range(sizes.first_pairs):
        with handoff_pair("135m", transport, checked=False) as pair:
            pair.start(size)
            seconds = [pair.seconds(size) for _ in range(sizes.handoffs)]
        ratios.append(seconds[0] / statistics.median(seconds[-10:]))
    return statistics.median(ratios)


async def _overlap(sizes: Sizes, client: AsyncClient) -> dict[str, Any]:
    """Prefill with and without a hand-off, and what the hand-off took. Each round sends the same prompt, with a new
    salt each so that no prefix cache helps, once with the hand-off and once for one token only. The second request is
    the same work for the prefill worker without a transfer."""
    rows, vocab_size = [], (await client.status()).vocab_size
    for turn, max_tokens in in_turns((3, 1), sizes.rounds, warm_up=1):
        prompt = random_tokens(f"{turn}", sizes.prompt_tokens, vocab_size)
        options: dict[str, Any] = {"ignore_eos": True, "mode": "pd", "salt": f"{turn}/{max_tokens}"}
        done = await client.generate(prompt, max_tokens=max_tokens, **options).result()
        rows.append(row(done, max_tokens, turn))
    (_, alone), (_, handed) = frame(rows).set_index("repeat").groupby("arm")
    prefill_ms, alone_ms = handed["stages_ms.ttft.prefill"], alone["stages_ms.ttft.prefill"]
    moved = handed.filter(like="transfer.").rename(columns=lambda name: name.removeprefix("transfer."))
    return {
        "prefill_ms": prefill_ms.median(),
        "prefill_alone_ms": alone_ms.median(),
        "x_prefill": (prefill_ms / alone_ms).median(),
        "exposed_share": (moved.exposed_ms / prefill_ms).median(),
        **moved[["exposed_ms", "wire_ms", "export_ms", "import_ms", "messages"]].astype(float).median(),
    }


if __name__ == "__main__":
    run(transfer)
