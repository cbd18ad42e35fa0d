"""How two workers meet: over each new link, before any request, they compare layouts and incarnations and measure what
the link can carry. So the first hand-off finds everything in place, and its figures can be compared with something."""

from __future__ import annotations

import contextlib
import time

from core.errors import ConfigError, LayoutMismatch, PeerLost, TransferRefused, to_wire
from core.kv_layout import KVLayout
from kv_transfer.base import MAX_PAYLOAD_BYTES, BlockStore, Buffer, KVLink, Message
from kv_transfer.integrity import (
    Header,
    Hello,
    HelloOk,
    Probe,
    Probed,
    Reason,
    Refusal,
    Refused,
    decode,
    encode,
    peer_error,
)

_FIRST_PROBE_BYTES = 64 * 2**10
_SMALLEST_TELLING_BYTES = 2**20  # less may come with its header, in no time at all
_LARGEST_PROBE_BYTES = 8 * 2**20
_PROBE_S = 0.025


async def introduce(link: KVLink, me: Hello, worker_id: str) -> None:
    """The sender's part: raises what the receiver refuses it with (LayoutMismatch, TransferRefused), or TransferRefused
    if another worker than ``worker_id`` answers. Unbounded: put a timeout around it."""
    await link.send(encode(me))
    answer = decode((await link.recv()).header)
    if isinstance(answer, Refused):
        raise peer_error(answer.kind, f"refused by {worker_id}: {answer.message}")
    if not isinstance(answer, HelloOk) or (answer.worker_id, answer.epoch) != (worker_id, me.epoch):
        raise TransferRefused(f"another worker than {worker_id} answers at its KV endpoint")


async def measure(link: KVLink, store: BlockStore) -> float:
    """What the link moves at best, in 10^9 bytes per second: larger and larger payloads from the pool, for some 25 ms
    (or one payload of 64 KiB, if the link is slow). 0 with an empty pool. Unbounded as well."""
    layout = store.layout
    count = min(store.num_blocks, max(1, _LARGEST_PROBE_BYTES // layout.block_bytes))
    best, size, start, started_s = 0.0, _FIRST_PROBE_BYTES, 0, time.perf_counter()
    while count and time.perf_counter() - started_s < _PROBE_S:
        # Other blocks each time: what has just travelled is in the processor's cache.
        blocks = range(start, start + count)
        start = start + count if start + 2 * count <= store.num_blocks else 0
        payload = _at_most(size, store.read_blocks(blocks, layout.all_layers, on_device=link.on_device))
        await link.send(encode(Probe()), payload)
        answer = decode((await link.recv()).header)
        if not isinstance(answer, Probed):
            raise TransferRefused(f"a {type(answer).__name__} has no place here")
        moved = sum(len(part) for part in payload)
        micros = max(answer.micros, 1)
        if is_telling(moved, micros / 1e6):
            best = max(best, moved / micros / 1e3)
        size = min(size * 4, _LARGEST_PROBE_BYTES)
    return best


def is_telling(num_bytes: int, took_s: float) -> bool:
    """Whether a payload of this size, taken in this time, says anything about the link."""
    return num_bytes >= _SMALLEST_TELLING_BYTES or took_s > _PROBE_S


async def greet(link: KVLink, worker_id: str, epoch: str, layout: KVLayout, *, checksums: bool) -> None:
    """The receiver's part: `Refusal` if the peer does not fit; then `dismiss` it. Unbounded as well."""
    _check(parse(await link.recv()), worker_id, epoch, layout, checksums)
    await link.send(encode(HelloOk(worker_id, epoch)))


async def dismiss(link: KVLink, refusal: Refusal) -> None:
    """Tell the peer why, and wait until it has read it and hangs up. Unbounded as well."""
    await link.send(encode(Refused("", 0, *to_wire(refusal.error))))
    with contextlib.suppress(PeerLost):
        await link.recv()


def parse(message: Message) -> Header:
    """The message's header; `Refusal` (malformed) if it has none."""
    try:
        return decode(message.header)
    except TransferRefused as error:
        raise Refusal(Reason.MALFORMED, str(error)) from None


def check_block_size(layout: KVLayout) -> None:
    """ConfigError if a block is larger than any transport carries in one message."""
    if layout.block_bytes > MAX_PAYLOAD_BYTES:
        raise ConfigError(
            f"engine.block_size: {layout.block_size} tokens make blocks of {layout.block_bytes} bytes; "
            f"at most {MAX_PAYLOAD_BYTES} travel"
        )


def _at_most(size: int, parts: list[Buffer]) -> list[Buffer]:
    cut: list[Buffer] = []
    for part in parts:
        if size > 0:
            cut.append(part[:size])
            size -= len(cut[-1])
    return cut


def _check(hello: Header, worker_id: str, epoch: str, layout: KVLayout, checksums: bool) -> None:
    if not isinstance(hello, Hello):
        raise Refusal(Reason.MALFORMED, "the first message must be a hello")
    if hello.epoch != epoch:
        raise Refusal(Reason.STALE_EPOCH, f"{worker_id} has started anew and holds nothing for {hello.worker_id}")
    try:
        layout.check_compatible(KVLayout.from_wire(hello.layout))
    except LayoutMismatch as error:
        raise Refusal(Reason.LAYOUT, str(error)) from None
    if hello.checksums != checksums:
        ours, theirs = ("on" if each else "off" for each in (checksums, hello.checksums))
        raise Refusal(Reason.LAYOUT, f"transfer.checksum differs: {ours} here, {theirs} at the peer")
