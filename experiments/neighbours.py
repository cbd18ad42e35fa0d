"""Long prompts that arrive while other requests decode: the traffic of a window, and what it cost each side.

In a window a fixed number of requests decode all the time (kind `DECODING`). They begin before the window, and are
cancelled when it is over. Meanwhile prompts arrive (kind `LONG`), open-loop: their number follows from the rate, and
their times are uniform over the arrival time, as those of a Poisson process with that number are. The window lasts
until all arrivals are answered, so that an arm that falls behind is measured while it does. Each begins when the
service is idle."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experiments.experiment import Bench
from experiments.request_row import RequestRow, token_hash
from experiments.statistics import mean_interval, percentile
from experiments.warm_up import warm_up
from experiments.workloads.room import Room
from pdserve.client.async_client import AsyncClient
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import PdserveError

DECODING, LONG = "decoding", "long"
WINDOWS = "windows"
"""The fact of a cell that lists its windows: arm, repeat, and begin and end in seconds since the cell began."""
CANCELLED = "cancelled by the experiment"
"""The finish reason of decoding requests: they end with their window."""

_DECODING_PROMPT_LEN = 16
_MOST_DECODED = 2048
_SETTLED_TOKENS = 8  # of each decoding request, before a window begins
_CALIBRATIONS = 4  # of which the first is left out


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a window has: ``decoding`` requests that decode all the time, and ``arrivals`` prompts of ``prompt_len``
    tokens within ``arrive_s`` seconds, each with an output of ``output_len`` tokens."""

    decoding: int
    arrivals: int
    arrive_s: float
    prompt_len: int
    output_len: int
    seed: int

    def times_s(self, repeat: int) -> list[float]:
        """When the prompts of a repeat arrive, in seconds since the window began: the same in all arms."""
        draw = random.Random(f"{self.seed}/times/{repeat}")
        return sorted(draw.uniform(0, self.arrive_s) for _ in range(self.arrivals))

    def prompt(self, vocab_size: int, kind: str, repeat: int, index: int) -> list[int]:
        """A prompt: the same in all arms."""
        draw = random.Random(f"{self.seed}/{kind}/{repeat}/{index}")
        length = self.prompt_len if kind == LONG else _DECODING_PROMPT_LEN
        return [draw.randrange(vocab_size) for _ in range(length)]

    def check_fits(self, status: ServiceStatus) -> None:
        """InvalidRequest or CapacityExceeded if the service cannot hold a long prompt and its output."""
        Room.of(status).check(self.prompt_len, self.output_len, "--prompt-len")


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of the comparison: the mode of all its requests. ``long_tokens`` is the output of the long prompts
    instead of the traffic's; 0: none of them are sent."""

    name: str
    mode: str
    long_tokens: int | None = None


async def long_prompt_s(client: AsyncClient, traffic: Traffic, mode: str) -> float:
    """Seconds that one long prompt takes on the idle service, to its first token."""
    status = await client.status()
    traffic.check_fits(status)
    times_ms = []
    for index in range(_CALIBRATIONS):
        prompt = traffic.prompt(status.vocab_size, LONG, -1, index)
        done = await client.generate(
            prompt, mode=mode, max_tokens=1, ignore_eos=True, salt=f"calibration/{random.random()}"
        ).result()
        times_ms.append(done.ttft_ms)
    return sorted(times_ms[1:])[(_CALIBRATIONS - 1) // 2] / 1e3


async def measure_window(bench: Bench, client: AsyncClient, traffic: Traffic, arm: Arm, repeat: int) -> None:
    """Measure one window of an arm: writes the rows of its requests, and adds to the fact `WINDOWS`."""
    await _Window(bench, client, traffic, arm, repeat, await client.status()).measure()


class _Window:
    def __init__(
        self, bench: Bench, client: AsyncClient, traffic: Traffic, arm: Arm, repeat: int, status: ServiceStatus
    ) -> None:
        self._bench, self._client, self._traffic, self._arm, self._repeat = bench, client, traffic, arm, repeat
        self._status = status
        self._salt = f"{bench.cell.name}/{arm.name}/{repeat}/{random.random()}"
        self._settled = [asyncio.Event() for _ in range(traffic.decoding)]

    async def measure(self) -> None:
        await self._bench.settle(self._client, self._arm.name)
        decoding = [asyncio.create_task(self._decode(index)) for index in range(self._traffic.decoding)]
        try:
            for task, has_settled in zip(decoding, self._settled, strict=True):
                waiting = asyncio.create_task(has_settled.wait())
                await asyncio.wait((waiting, task), return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
            begin_s = self._bench.elapsed_s
            await self._send_long(begin_s)
            end_s = self._bench.elapsed_s
        finally:
            for task in decoding:
                task.cancel()
            await asyncio.gather(*decoding, return_exceptions=True)
        self._bench.facts.setdefault(WINDOWS, []).append(
            {"arm": self._arm.name, "repeat": self._repeat, "begin_s": begin_s, "end_s": end_s}
        )

    async def _send_long(self, begin_s: float) -> None:
        traffic = self._traffic
        times_s = [] if self._arm.long_tokens == 0 else traffic.times_s(self._repeat)
        prompts = [traffic.prompt(self._status.vocab_size, LONG, self._repeat, i) for i in range(len(times_s))]
        async with asyncio.TaskGroup() as group:
            for index, (at_s, prompt) in enumerate(zip(times_s, prompts, strict=True)):
                await asyncio.sleep(max(0.0, begin_s + at_s - self._bench.elapsed_s))
                group.create_task(self._long(index, begin_s + at_s, prompt))
            await asyncio.sleep(max(0.0, begin_s + traffic.arrive_s - self._bench.elapsed_s))

    async def _long(self, index: int, scheduled_s: float, prompt: Sequence[int]) -> None:
        place: dict[str, Any] = {
            "arm": self._arm.name,
            "repeat": self._repeat,
            "index": index,
            "kind": LONG,
            "scheduled_s": scheduled_s,
            "sent_s": self._bench.elapsed_s,
        }
        tokens = self._traffic.output_len if self._arm.long_tokens is None else self._arm.long_tokens
        try:
            done = await self._client.generate(
                prompt, mode=self._arm.mode, max_tokens=tokens, ignore_eos=True, salt=f"{self._salt}/{index}"
            ).result()
        except PdserveError as error:
            self._bench.record(None, error, **place)
        else:
            self._bench.record(done, **place)

    async def _decode(self, index: int) -> None:
        """Decode until cancelled; a request that reaches its longest output is followed by another one."""
        prompt = self._traffic.prompt(self._status.vocab_size, DECODING, self._repeat, index)
        tokens = min(_MOST_DECODED, Room.of(self._status).tokens - len(prompt))
        turn = 0
        while await self._decode_once(index, turn, prompt, tokens):
            turn += 1

    async def _decode_once(self, index: int, turn: int, prompt: Sequence[int], tokens: int) -> bool:
        """Decode one request to its end; False if it failed. Writes its row in any case."""
        sent_s, started_s = self._bench.elapsed_s, time.monotonic()
        arrived_s: list[float] = []
        token_ids: list[int] = []
        error: PdserveError | None = None
        finish_reason = CANCELLED
        stream = self._client.generate(
            prompt,
            mode=self._arm.mode,
            max_tokens=tokens,
            ignore_eos=True,
            salt=f"{self._salt}/decoding/{index}/{turn}",
        )
        try:
            async for token in stream:
                arrived_s.append(token.arrived_s)
                token_ids.append(token.token_id)
                if len(arrived_s) == _SETTLED_TOKENS:
                    self._settled[index].set()
            finish_reason = "length"
        except PdserveError as failure:
            error = failure
        finally:
            place: dict[str, Any] = {
                "arm": self._arm.name,
                "repeat": self._repeat,
                "index": index,
                "turn": turn,
                "kind": DECODING,
                "scheduled_s": sent_s,
                "sent_s": sent_s,
            }
            if error is not None:
                self._bench.record(None, error, **place)
            else:
                self._bench.write(
                    RequestRow(
                        cell=self._bench.cell.name,
                        **place,
                        mode=self._arm.mode,
                        prompt_tokens=len(prompt),
                        output_tokens=len(token_ids),
                        token_hash=token_hash(tuple(token_ids)),
                        finish_reason=finish_reason,
                        ttft_ms=(arrived_s[0] - started_s) * 1e3 if arrived_s else None,
                        itl_ms=tuple((b - a) * 1e3 for a, b in itertools.pairwise(arrived_s)),
                    )
                )
        return error is None


@dataclass(frozen=True, slots=True)
class WindowData:
    """What one window of an arm measured. ``gaps`` are the gaps between tokens of the decoding requests: the second at
    which each ended, counted from the begin of the window, and its length in milliseconds. ``stalls_ms`` has for each
    long prompt the longest gap of any decoding request between its arrival and its first token."""

    arm: str
    repeat: int
    duration_s: float
    gaps: tuple[tuple[float, float], ...]
    ttft_ms: tuple[float, ...]
    stalls_ms: tuple[float, ...]
    arrivals_s: tuple[float, ...]
    output_tokens: int
    prompt_tokens: int
    late_ms: float
    errors: tuple[str, ...]

    @property
    def itl_ms(self) -> list[float]:
        """The lengths of the gaps."""
        return [gap_ms for _, gap_ms in self.gaps]

    @classmethod
    def of(cls, window: Mapping[str, Any], rows: Sequence[RequestRow]) -> WindowData:
        """The window that a fact describes, and its rows."""
        begin_s, end_s = float(window["begin_s"]), float(window["end_s"])
        gaps: list[tuple[float, float]] = []
        output_tokens = 0
        for row in rows:
            if row.ttft_ms is None:
                continue
            at_s = row.sent_s + row.ttft_ms / 1e3
            output_tokens += begin_s < at_s <= end_s
            for gap_ms in row.itl_ms:
                at_s += gap_ms / 1e3
                if begin_s < at_s <= end_s:
                    output_tokens += 1
                    if row.kind == DECODING:
                        gaps.append((at_s - begin_s, gap_ms))
        long = [row for row in rows if row.kind == LONG]
        answered = [row for row in long if row.error is None]
        return cls(
            arm=str(window["arm"]),
            repeat=int(window["repeat"]),
            duration_s=end_s - begin_s,
            gaps=tuple(sorted(gaps)),
            stalls_ms=tuple(
                stall_ms
                for row in answered
                if row.ttft_ms
                and (stall_ms := _longest(gaps, row.scheduled_s - begin_s, row.sent_s - begin_s + row.ttft_ms / 1e3))
            ),
            ttft_ms=tuple(ttft_ms for row in answered if (ttft_ms := row.since_due().ttft_ms) is not None),
            arrivals_s=tuple(sorted(row.scheduled_s - begin_s for row in long)),
            output_tokens=output_tokens,
            prompt_tokens=sum(row.prompt_tokens for row in answered),
            late_ms=max(((row.sent_s - row.scheduled_s) * 1e3 for row in long), default=0.0),
            errors=tuple(row.error for row in rows if row.error is not None),
        )


def _longest(gaps: Sequence[tuple[float, float]], from_s: float, to_s: float) -> float:
    """The longest of the gaps that overlap the time; 0 if none does."""
    return max((gap_ms for end_s, gap_ms in gaps if end_s > from_s and end_s - gap_ms / 1e3 < to_s), default=0.0)


def windows_of(facts: Mapping[str, Any], rows: Sequence[RequestRow]) -> list[WindowData]:
    """The windows of one cell, in the order in which they were measured."""
    return [
        WindowData.of(window, [row for row in rows if (row.arm, row.repeat) == (window["arm"], window["repeat"])])
        for window in facts.get(WINDOWS, ())
    ]


@dataclass(frozen=True, slots=True)
class Tail:
    """Percentiles of a figure in milliseconds; ``n`` values."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Tail | None:
        """Those of ``values``; None if there are none."""
        if not values:
            return None
        p50, p90, p99 = (percentile(values, percent) or 0.0 for percent in (50, 90, 99))
        return cls(sum(values) / len(values), p50, p90, p99, max(values), len(values))

    def to_dict(self) -> dict[str, float | int]:
        """Plain values, rounded to a microsecond."""
        return {key: value if key == "n" else round(value, 3) for key, value in asdict(self).items()}


def arm_summary(windows: Sequence[WindowData], seed: int) -> dict[str, Any]:
    """The figures of an arm over all its windows. Distributions are those of all values together; intervals are those
    of the mean over windows."""
    itl = Tail.of([gap_ms for window in windows for gap_ms in window.itl_ms])
    ttft = Tail.of([ttft_ms for window in windows for ttft_ms in window.ttft_ms])
    stalls = Tail.of([stall_ms for window in windows for stall_ms in window.stalls_ms])
    p99s = [p99 for window in windows if (p99 := percentile(window.itl_ms, 99)) is not None]
    output = mean_interval([window.output_tokens / window.duration_s for window in windows], seed)
    total = mean_interval(
        [(window.output_tokens + window.prompt_tokens) / window.duration_s for window in windows], seed
    )
    itl_p99 = mean_interval(p99s, seed)
    return {
        "windows": len(windows),
        "itl_ms": None if itl is None else itl.to_dict(),
        "itl_p99_ms": None if itl_p99 is None else itl_p99.to_dict(),
        "stall_ms": None if stalls is None else stalls.to_dict(),
        "long_ttft_ms": None if ttft is None else ttft.to_dict(),
        "output_tokens_per_s": None if output is None else output.to_dict(),
        "tokens_per_s": None if total is None else total.to_dict(),
        "late_ms": round(max((window.late_ms for window in windows), default=0.0), 3),
        "errors": sum(len(window.errors) for window in windows),
        "error": next((error for window in windows for error in window.errors), None),
    }


def best_chunk(arms: Mapping[int, Mapping[str, Any]], throughput_share: float) -> int | None:
    """The chunk size, a key of ``arms``, with the lowest p99 ITL among those whose tokens per second, prompt and output
    together, are at least ``throughput_share`` of the highest. None if no arm was measured."""
    measured = {chunk: arm for chunk, arm in arms.items() if arm["itl_ms"] and arm["tokens_per_s"]}
    if not measured:
        return None
    most = max(arm["tokens_per_s"]["mean"] for arm in measured.values())
    fit = [chunk for chunk, arm in measured.items() if arm["tokens_per_s"]["mean"] >= throughput_share * most]
    return min(fit, key=lambda chunk: (measured[chunk]["itl_ms"]["p99"], -chunk))


async def warm_up_traffic(bench: Bench, client: AsyncClient, traffic: Traffic, modes: Iterable[str]) -> None:
    """Send long prompts to every worker, and decode a few tokens of each. Writes no rows."""
    status = await client.status()
    traffic.check_fits(status)
    prompts = ((traffic.prompt(status.vocab_size, LONG, -2, index), 4) for index in itertools.count())
    await warm_up(bench, client, prompts, modes)


def passes(repeats: int) -> list[range]:
    """The repeats in two passes. The second one measures in reverse order, so that settings that need a service of
    their own are interleaved A B B A as well, with few starts."""
    first = -(-repeats // 2)
    return [each for each in (range(first), range(first, repeats)) if each]


def in_turn(arms: Sequence[Arm], repeat: int) -> list[Arm]:
    """The order of the arms in a repeat: forwards, backwards, forwards, ..."""
    return list(arms) if repeat % 2 == 0 else list(reversed(arms))
