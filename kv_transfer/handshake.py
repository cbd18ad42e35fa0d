"""The handshake on a new link: before any request, the two workers compare layouts and incarnations, and measure the
link. The measured rate is the ceiling with which hand-offs are compared.

`introduce`, `measure`, `survey`, `greet` and `dismiss` have no time limit: put a timeout around them.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass

from kv_transfer.base import MAX_PAYLOAD_BYTES, KVLink, Message
from kv_transfer.pool import Pool
from kv_transfer.protocol import (
    MAX_EOS_TOKEN_IDS,
    Announce,
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
from pdserve.core.errors import ConfigError, LayoutMismatch, ModelError, PeerLost, TransferRefused, to_wire
from pdserve.core.kv_layout import MAX_PROBE_BYTES, KVLayout, Region

_FIRST_PROBE_BYTES = 64 * 2**10
_SMALLEST_TELLING_BYTES = 2**20  # a smaller payload may arrive together with its header
_PROBE_S = 0.025
_ROUND_TRIPS = 50
_SHOWN_IDS = 16  # end-of-sequence ids in an error message
_PAYLOADS_LEFT = 4  # the least number of payloads of the largest size in a survey
_SLOW_FACTOR = 4  # a survey takes at most this multiple of its time


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """The result of a `survey`. ``gbs`` is the median rate of payloads of the largest size, ``best_gbs`` the best rate
    of any payload (10^9 bytes per second; 0: nothing was sent). The round trips are those of messages without a
    payload, from the sender to the receiver's event loop and back."""

    gbs: float
    best_gbs: float
    round_trip_s: float
    median_round_trip_s: float
    moved_bytes: int


async def introduce(link: KVLink, me: Hello, worker_id: str) -> KVLayout:
    """Introduce the sender ``me``, and return the layout of the receiver ``worker_id``. LayoutMismatch or
    TransferRefused if the receiver refuses, or another worker answers."""
    await link.send(encode(me))
    answer = decode((await link.recv()).header)
    if isinstance(answer, Refused):
        raise peer_error(answer.kind, f"refused by {worker_id}: {answer.message}")
    if not isinstance(answer, HelloOk) or (answer.worker_id, answer.epoch) != (worker_id, me.epoch):
        raise TransferRefused(f"another worker than {worker_id} answers at its KV endpoint")
    # The receiver has checked this already; its answer is checked before it is used.
    answer.layout.check_source(me.layout)
    return answer.layout


async def measure(link: KVLink, pool: Pool, announced: list[Announce]) -> float:
    """Measure the best rate of the link, in 10^9 bytes per second, with growing payloads of the pool's probe area.
    Takes 25 ms, and on a slow link or one with a long round trip until one payload was telling (three at most).
    Announcements that arrive meanwhile are added to ``announced``."""
    best, size, area, started_s = 0.0, _FIRST_PROBE_BYTES, ProbeArea(pool), time.perf_counter()
    while not best or time.perf_counter() - started_s < _PROBE_S:
        took_s = await _probe(link, area.next(size), announced)
        if is_telling(size, took_s):
            best = max(best, size / took_s / 1e9)
        size = min(size * 4, MAX_PROBE_BYTES)
    return best


async def survey(link: KVLink, pool: Pool, for_s: float) -> LinkFigures:
    """Measure round trips, and then rates for about ``for_s`` seconds, with payloads that grow to `MAX_PROBE_BYTES` as
    long as several more of them fit into the time.

    The time of a payload lasts until the sender has the answer, less a round trip. The receiver's own time alone would
    be too short, because bytes queue before the receiver looks."""
    started_s = time.perf_counter()
    trips_s: list[float] = []
    while len(trips_s) < _ROUND_TRIPS and (not trips_s or time.perf_counter() - started_s < for_s):
        sent_s = time.perf_counter()
        await _probe(link, [], [])
        trips_s.append(time.perf_counter() - sent_s)
    rates: list[float] = []  # of payloads of ``size``
    size, moved_bytes, best, area, started_s = _FIRST_PROBE_BYTES, 0, 0.0, ProbeArea(pool), time.perf_counter()
    while for_s and (past_s := time.perf_counter() - started_s) < _SLOW_FACTOR * for_s:
        if past_s > for_s and len(rates) >= _PAYLOADS_LEFT:
            break
        regions = area.next(size)
        sent_s = time.perf_counter()
        told_s = await _probe(link, regions, [])
        took_s = max(told_s, time.perf_counter() - sent_s - min(trips_s))
        moved_bytes += size
        rates.append(size / took_s / 1e9)
        if is_telling(size, took_s):
            best = max(best, rates[-1])
        # Queues and token buckets absorb small payloads; only large ones show the sustained rate.
        larger = min(size * 2, MAX_PROBE_BYTES)
        if larger > size and larger / (size / took_s) * _PAYLOADS_LEFT < for_s - past_s:
            size, rates = larger, []
    return LinkFigures(
        gbs=statistics.median(rates) if rates else 0.0,
        best_gbs=best,
        round_trip_s=min(trips_s),
        median_round_trip_s=statistics.median(trips_s),
        moved_bytes=moved_bytes,
    )


class ProbeArea:
    """Hands out parts of a pool's probe area in turn, because a part that was just used is in the processor's cache."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self._start = pool, 0

    def next(self, size: int) -> list[Region]:
        """The next ``size`` bytes."""
        start = self._start if self._start + size <= self._pool.probe_bytes else 0
        self._start = start + size
        return self._pool.probe(start, size)


async def _probe(link: KVLink, regions: list[Region], announced: list[Announce]) -> float:
    """Send a probe, and return the seconds that the receiver needed to fetch it."""
    await link.send(encode(Probe()), await link.payload(regions))
    while isinstance(answer := decode((await link.recv()).header), Announce):
        announced.append(answer)
    if not isinstance(answer, Probed):
        raise TransferRefused(f"a {type(answer).__name__} was not expected")
    return max(answer.micros, 1) / 1e6


def is_telling(num_bytes: int, took_s: float) -> bool:
    """Whether a payload is large or slow enough to measure the link by."""
    return num_bytes >= _SMALLEST_TELLING_BYTES or took_s > _PROBE_S


async def greet(link: KVLink, expected: Hello) -> Hello:
    """Answer the sender's hello, and return it. `Refusal` unless it matches ``expected``, whose ``worker_id`` is the
    receiver's; the caller must then `dismiss` the sender."""
    hello = _check(parse(await link.recv()), expected)
    link.introduced()
    await link.send(encode(HelloOk(expected.worker_id, expected.epoch, expected.layout)))
    return hello


async def dismiss(link: KVLink, refusal: Refusal) -> None:
    """Send the reason to the peer, and wait until it closes the link."""
    await link.send(encode(Refused("", 0, *to_wire(refusal.error))))
    with contextlib.suppress(PeerLost):
        await link.recv()


def parse(message: Message) -> Header:
    """The message's header. `Refusal` if it is malformed."""
    try:
        return decode(message.header)
    except TransferRefused as error:
        raise Refusal(Reason.MALFORMED, str(error)) from None


def check_block_size(layout: KVLayout) -> None:
    """Raise ConfigError if a block is larger than `MAX_PAYLOAD_BYTES`."""
    if layout.block_bytes > MAX_PAYLOAD_BYTES:
        raise ConfigError(
            f"engine.block_size: {layout.block_size} tokens make blocks of {layout.block_bytes} bytes; "
            f"at most {MAX_PAYLOAD_BYTES} travel"
        )


def sorted_eos(token_ids: Iterable[int]) -> list[int]:
    """End-of-sequence ids, ascending, as in `Hello`. ModelError if there are more than `MAX_EOS_TOKEN_IDS`."""
    ids = sorted(set(token_ids))
    if len(ids) > MAX_EOS_TOKEN_IDS:
        raise ModelError(f"the model has {len(ids)} eos_token_ids; at most {MAX_EOS_TOKEN_IDS} are supported")
    return ids


def _check(hello: Header, ours: Hello) -> Hello:
    if not isinstance(hello, Hello):
        raise Refusal(Reason.MALFORMED, "the first message must be a hello")
    if hello.epoch != ours.epoch:
        why = f"{ours.worker_id} has started anew and holds nothing for {hello.worker_id}"
        raise Refusal(Reason.STALE_EPOCH, why)
    try:
        ours.layout.check_source(hello.layout)
    except LayoutMismatch as error:
        raise Refusal(Reason.LAYOUT, str(error)) from None
    if hello.checksums != ours.checksums:
        here, there = ("on" if each else "off" for each in (ours.checksums, hello.checksums))
        raise Refusal(Reason.LAYOUT, f"transfer.checksum differs: {here} here, {there} at the peer")
    if hello.eos_token_ids != ours.eos_token_ids:
        raise Refusal(
            Reason.LAYOUT,
            f"eos_token_ids differ: {_some(ours.eos_token_ids)} here, {_some(hello.eos_token_ids)} at the peer; all "
            "workers of a service must run a model with the same config.json and generation_config.json",
        )
    return hello


def _some(token_ids: list[int]) -> str:
    shown = ", ".join(map(str, token_ids[:_SHOWN_IDS]))
    return f"[{shown}{', ...' if len(token_ids) > _SHOWN_IDS else ''}]"
