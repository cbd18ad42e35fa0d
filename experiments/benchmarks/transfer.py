"""How fast KV travels: our transports, whole hand-offs and peers, in one run: `python -m experiments.benchmarks.transfer`.

Every pair is two processes (memcpy is one). In each round every pair moves every size once, so that whatever else the
machine does meets all of them; figures are medians. A transfer is timed from the source's first act until the last byte
is in the target's memory (NIXL and Mooncake read, and are timed where they do), a hand-off until the last block is
verified. Then a service with the 135m shape shows what is left of it beside a prefill. 1 MB is 2**20 bytes, 1 GB/s
10**9 bytes."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from experiments.benchmarks.frame import Quick, in_turns, note, run, service
from experiments.benchmarks.handoff_pair import HandoffPair
from experiments.benchmarks.library_pairs import LibraryPair, MooncakeTcp, Nixl, PeerEnvironment
from experiments.pairs.memcpy import Memcpy
from experiments.pairs.pair import Pair, PairFailed, PairUnavailable
from experiments.pairs.raw_tcp import RawTcp
from experiments.pairs.transport_pair import TransportPair
from pdserve import AsyncClient, Generation
from pdserve.core.timeline import Figure

MB = 2**20
TRANSPORTS = {"shm": "host", "tcp": "network", "grpc_stream": "network", "torch_dist": "network"}
if importlib.util.find_spec("nixl") is not None:
    TRANSPORTS["nixl"] = "host"  # UCX reads the other process's memory
HANDOFF_TRANSPORTS = {"shm": "end_to_end", "tcp": "end_to_end_tcp"}
"""By transport, what its figures are called."""


class Sizes(NamedTuple):
    """``rounds`` of transfers of so many ``megabytes``, and of hand-offs of so many ``tokens`` of these ``shapes``. The
    first hand-off and the last ones of ``handoffs`` are compared, for ``first_tokens``, with ``first_pairs`` pairs."""

    rounds: int = 7
    megabytes: tuple[int, ...] = (1, 16, 128)
    shapes: tuple[str, ...] = ("135m", "8b")
    tokens: tuple[int, ...] = (512, 2048, 8192)
    handoffs: int = 100
    first_tokens: int = 2048
    first_pairs: int = 9


QUICK = Sizes(1, (1,), ("135m",), (64,), handoffs=12, first_tokens=64, first_pairs=1)


def transfer(quick: Quick = False) -> dict[str, Any]:
    """Measure transports, hand-offs and peers."""
    sizes = QUICK if quick else Sizes()
    environment = PeerEnvironment(installs=not quick)
    transports: list[Pair] = [TransportPair(name) for name in TRANSPORTS]
    peers: list[Pair] = [
        Nixl(environment),
        Nixl(environment, private_memory=True),
        Nixl(environment, tcp_only=True),
        MooncakeTcp(environment),
    ]
    raw = RawTcp()
    raw.name = "raw tcp"
    bytes_of = {str(megabytes): megabytes * MB for megabytes in sizes.megabytes}
    rates = rates_gbs([Memcpy(), *transports, raw, *peers], bytes_of, sizes.rounds)
    largest = str(sizes.megabytes[-1])
    result: dict[str, Any] = {
        "ceiling": {"memcpy_gbs": rates["memcpy"][largest], "tcp_gbs": rates["raw tcp"][largest]},
        "ceilings": {"memcpy": rates["memcpy"], "tcp": rates["raw tcp"]},
        "transports": {name: {"kind": kind, **rates[name]} for name, kind in TRANSPORTS.items()},
        "peers": {peer.name: rates[peer.name] for peer in peers},
    }
    for transport, name in HANDOFF_TRANSPORTS.items():
        result[name] = {shape: _end_to_end(shape, transport, sizes) for shape in sizes.shapes}
    result["first_to_hundredth"] = {transport: _first_and_last(transport, sizes) for transport in HANDOFF_TRANSPORTS}
    result["overlap"] = asyncio.run(_overlap(quick))
    return result


def rates_gbs(pairs: Sequence[Pair], bytes_of: Mapping[str, int], rounds: int) -> dict[str, dict[str, Any]]:
    """Median rates by pair and name of a size; of a pair that cannot run, or a peer that gives up, why it is
    ``unavailable``."""
    unavailable: dict[str, str] = {}
    seconds: dict[str, dict[str, list[float]]] = {pair.name: {size: [] for size in bytes_of} for pair in pairs}
    with ExitStack() as stack:
        for pair in pairs:
            note(f"starting {pair.name}")
            stack.enter_context(pair)
            try:
                pair.start(max(bytes_of.values()))
            except PairUnavailable as error:
                unavailable[pair.name] = str(error)
        for number, pair in in_turns(pairs, rounds, warm_up=1):
            try:
                for size, num_bytes in bytes_of.items() if pair.name not in unavailable else ():
                    taken_s = pair.seconds(num_bytes)
                    if number >= 0:
                        seconds[pair.name][size].append(taken_s)
            except PairFailed as error:
                if not isinstance(pair, LibraryPair):  # a failure of ours is no property of the machine
                    raise
                unavailable[pair.name] = str(error)
    return {
        name: {"unavailable": unavailable[name]}
        if name in unavailable
        else {size: bytes_of[size] / statistics.median(each) / 1e9 for size, each in taken.items()}
        for name, taken in seconds.items()
    }


def _end_to_end(shape: str, transport: str, sizes: Sizes) -> dict[str, dict[str, float | None]]:
    """Hand-offs of a shape's real blocks beside the bare transport, at the same numbers of bytes."""
    blocks, bare = HandoffPair(shape, transport), TransportPair(transport)
    bytes_of = {str(count): blocks.layout.expected_bytes(count) for count in sizes.tokens}
    rates = rates_gbs([blocks, bare], bytes_of, sizes.rounds)
    ours, plain = rates[blocks.name], rates[bare.name]
    return {
        count: {
            "gbs": ours.get(count),
            "x_bare": ours[count] / plain[count] if count in ours and count in plain else None,
        }
        for count in bytes_of
    }


def _first_and_last(transport: str, sizes: Sizes) -> float:
    """The first hand-off of a new pair of workers over its last ones, in time; the median of several pairs."""
    ratios = []
    for _ in range(sizes.first_pairs):
        with HandoffPair("135m", transport, probe=False) as pair:
            size = pair.layout.expected_bytes(sizes.first_tokens)
            pair.start(size)
            seconds = [pair.unchecked(size) for _ in range(sizes.handoffs)]
        ratios.append(seconds[0] / statistics.median(seconds[-10:]))
    return statistics.median(ratios)


# --- overlap ---------------------------------------------------------------------------------------------------------


class OverlapSizes(NamedTuple):
    """``rounds`` of prompts, for each way to overlap, each of which is a service."""

    model: str = "dummy:135m"
    prompt_tokens: int = 2048
    rounds: int = 7
    overlaps: tuple[str, ...] = ("layer", "chunk", "none")


QUICK_OVERLAP = OverlapSizes("tiny", 128, 1, ("layer",))


async def _overlap(quick: bool) -> dict[str, Any]:
    """For each way to overlap: prefill with and without a hand-off, and what the hand-off took. Each round sends the
    same prompts, with a new salt each so that no prefix cache helps, once with the hand-off and once for one token
    only. The second request is the same work for the prefill worker without a transfer."""
    sizes = QUICK_OVERLAP if quick else OverlapSizes()
    result: dict[str, Any] = {}
    for name in sizes.overlaps:
        with service({"model.path": sizes.model, "transfer.overlap": name}) as served:
            result[name] = await _measure_overlap(served.target, sizes)
    return result


async def _measure_overlap(target: str, sizes: OverlapSizes) -> dict[str, float]:
    done: dict[int, list[Generation]] = {3: [], 1: []}
    async with AsyncClient(target) as client:
        vocab_size = (await client.status()).vocab_size
        for turn, max_tokens in in_turns(done, sizes.rounds, warm_up=1):
            draw = random.Random(turn)
            prompt = [draw.randrange(vocab_size) for _ in range(sizes.prompt_tokens)]
            salt = f"{turn}/{max_tokens}"
            request = client.generate(prompt, max_tokens=max_tokens, ignore_eos=True, mode="pd", salt=salt)
            generation = await request.result()
            if turn >= 0:
                done[max_tokens].append(generation)
    prefill_ms, alone_ms = ([g.breakdowns[Figure.TTFT].stages_ms["prefill"] for g in each] for each in done.values())
    transfers = [g.transfer for g in done[3]]
    exposed_ms = [each.exposed_ms for each in transfers]
    return {
        "prefill_ms": statistics.median(prefill_ms),
        "prefill_alone_ms": statistics.median(alone_ms),
        "x_prefill": statistics.median(a / b for a, b in zip(prefill_ms, alone_ms, strict=True)),
        "exposed_ms": statistics.median(exposed_ms),
        "exposed_share": statistics.median(e / p for e, p in zip(exposed_ms, prefill_ms, strict=True)),
        **{
            name: statistics.median(getattr(each, name) for each in transfers)
            for name in ("wire_ms", "export_ms", "import_ms", "messages")
        },
    }


if __name__ == "__main__":
    run(transfer)
