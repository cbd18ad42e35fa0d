"""The handshake on a new link, whose transport has proven both ends: before any request, the two workers compare
layouts and incarnations, and measure the link. `kv_transfer.link_rate` defines what is measured.

`introduce`, `measure`, `survey`, `greet` and `dismiss` have no time limit: put a timeout around them.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from contract.kv import (
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
    peer_error,
)
from contract.message import encode
from kv_transfer.base import MAX_PAYLOAD_BYTES, KVLink, Message
from kv_transfer.codec import codec_of
from kv_transfer.pool import Pool
from pdserve.core.clock import Clock
from pdserve.core.errors import ConfigError, LayoutMismatch, ModelError, PeerLost, TransferRefused, to_wire
from pdserve.core.kv_layout import MAX_PROBE_BYTES, KVLayout

_WARM_UP_BYTES = 4096  # some transports connect when the first payload is sent
_FIRST_BYTES = 64 * 2**10
_ENOUGH_BYTES = 4 * 2**20  # a handshake sends a train of this size, unless a smaller one took too long
_TRAIN = 2  # probes of a train, except the first one of _FIRST_BYTES
_MOST_BYTES = _TRAIN * MAX_PROBE_BYTES
_PROBE_S = 0.025
_LEAST_ROUND_TRIPS, _FEW_ROUND_TRIPS, _MANY_ROUND_TRIPS = 2, 5, 50
_SHOWN_IDS = 16  # end-of-sequence ids in an error message
_TRAINS_LEFT = 4  # the least number of trains of the largest size in a survey
_SLOW_FACTOR = 4  # a survey takes at most this multiple of its time


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """The result of a `survey`. ``gbs`` is the median rate of trains of the largest size, ``ceiling_gbs`` the link's
    ceiling (10^9 bytes per second; 0: nothing was sent). The round trips are those of messages without a payload, from
    the sender to the receiver's event loop and back."""

    gbs: float
    ceiling_gbs: float
    round_trip_s: float
    median_round_trip_s: float
    moved_bytes: int


async def introduce(link: KVLink, me: Hello, worker_id: str) -> None:
    """Introduce the sender ``me`` to the receiver ``worker_id``. LayoutMismatch or TransferRefused if the receiver
    refuses, or another worker answers."""
    await link.send(encode(me))
    answer = decode((await link.recv()).header)
    if isinstance(answer, Refused):
        raise peer_error(answer.kind, f"refused by {worker_id}: {answer.message}")
    if not isinstance(answer, HelloOk) or (answer.worker_id, answer.epoch) != (worker_id, me.epoch):
        raise TransferRefused(f"another worker than {worker_id} answers at its KV endpoint")
    # The receiver has checked this already; its answer is checked before it is used.
    answer.layout.check_source(me.layout)


async def measure(
    link: KVLink, pool: Pool, announced: list[Announce], clock: Clock, *, by_value: bool = False
) -> float:
    """Measure the ceiling of the link (`kv_transfer.link_rate`), in 10^9 bytes per second, with growing trains of
    probes. Takes 25 ms; on a slow link about 0.1 s, or three round trips and 68 KiB. Sends no part of the
    probe area twice, because a part that was just used is in the processor's cache. Announcements that arrive meanwhile
    are added to ``announced``. ``by_value``: see `KVLink.payload`."""
    prober = _Prober(link, pool, announced, clock, by_value)
    await prober.train(_WARM_UP_BYTES)
    started_s, unused_bytes = clock.now(), pool.probe_bytes

    def left_s() -> float:
        return _PROBE_S - (clock.now() - started_s)

    for number in range(_FEW_ROUND_TRIPS):
        if number >= _LEAST_ROUND_TRIPS and left_s() < _PROBE_S / 2:
            break
        await prober.train(0)
    num_bytes = _FIRST_BYTES
    if link.on_device:  # its library may set up channels for the first payload of a size
        await prober.train(num_bytes)
        unused_bytes -= num_bytes
    while True:
        took_s = await prober.train(num_bytes)
        unused_bytes -= num_bytes
        most_bytes = min(unused_bytes, left_s() / took_s * num_bytes)
        larger = min(num_bytes * 4, _MOST_BYTES)
        if most_bytes >= larger or (larger <= _ENOUGH_BYTES and took_s < _PROBE_S):
            num_bytes = larger
        elif most_bytes < num_bytes:
            return prober.ceiling_gbs


async def survey(link: KVLink, pool: Pool, for_s: float, clock: Clock) -> LinkFigures:
    """Measure round trips, and then rates for about ``for_s`` seconds, with trains of probes that grow as long as
    several more of them fit into the time."""
    prober = _Prober(link, pool, [], clock)
    await prober.train(_WARM_UP_BYTES if for_s else 0)
    started_s = clock.now()
    trips_s: list[float] = []
    while len(trips_s) < _MANY_ROUND_TRIPS and (not trips_s or clock.now() - started_s < for_s):
        sent_s = clock.now()
        await prober.train(0)
        trips_s.append(clock.now() - sent_s)
    rates: list[float] = []  # of trains of ``num_bytes``
    num_bytes, moved_bytes, started_s = _FIRST_BYTES, 0, clock.now()
    while for_s and (past_s := clock.now() - started_s) < _SLOW_FACTOR * for_s:
        if past_s > for_s and len(rates) >= _TRAINS_LEFT:
            break
        took_s = await prober.train(num_bytes)
        moved_bytes += num_bytes
        rates.append(num_bytes / took_s / 1e9)
        # Queues and token buckets absorb small trains; only large ones show the sustained rate.
        larger = min(num_bytes * 2, _MOST_BYTES)
        if larger > num_bytes and larger / (num_bytes / took_s) * _TRAINS_LEFT < for_s - past_s:
            num_bytes, rates = larger, []
    return LinkFigures(
        gbs=statistics.median(rates) if rates else 0.0,
        ceiling_gbs=prober.ceiling_gbs,
        round_trip_s=min(trips_s),
        median_round_trip_s=statistics.median(trips_s),
        moved_bytes=moved_bytes,
    )


class _Prober:
    """Sends trains of probes over a link, from the pool's probe area."""

    def __init__(
        self, link: KVLink, pool: Pool, announced: list[Announce], clock: Clock, by_value: bool = False
    ) -> None:
        self._link, self._pool, self._announced, self._clock = link, pool, announced, clock
        self._by_value = by_value
        self.ceiling_gbs = 0.0
        """The link's ceiling, according to the receiver."""

    async def train(self, num_bytes: int) -> float:
        """Send a train of ``num_bytes`` (0: one message without a payload), and return the seconds that it took
        according to the receiver."""
        count = _TRAIN if num_bytes > _FIRST_BYTES else 1
        for left in reversed(range(count)):
            regions = self._pool.next_probe(num_bytes // count)
            payload = await self._link.payload(regions, by_value=self._by_value)
            await self._link.send(encode(Probe(round(self._clock.now() * 1e6), left)), payload)
        while isinstance(answer := decode((await self._link.recv()).header), Announce):
            self._announced.append(answer)
        if not isinstance(answer, Probed):
            raise TransferRefused(f"a {type(answer).__name__} was not expected")
        self.ceiling_gbs = answer.ceiling / 1e9
        return max(answer.micros, 1) / 1e6


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
    if hello.codec == "int8" and ours.codec != "int8":
        raise Refusal(Reason.LAYOUT, f"transfer.codec: int8 at the peer, {ours.codec} here; it must be the same")
    try:
        codec_of(hello.codec, ours.layout)
    except ConfigError as error:
        raise Refusal(Reason.LAYOUT, str(error)) from None
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
