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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.experiment import Bench
from experiments.run_folder import Figures, RequestRow, RunData, token_hash
from experiments.statistics import percentile, plain_mean, tail
from experiments.workloads.conversation import Room
from pdserve.client.async_client import AsyncClient, AsyncStream
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


async def measure_window(bench: Bench, client: AsyncClient, traffic: Traffic, arm: Arm, repeat: int) -> None:
    """Measure one window of an arm: writes the rows of its requests, and adds to the fact `WINDOWS`."""
    status = await client.status()
    salt = f"{bench.cell.name}/{arm.name}/{repeat}/{random.random()}"
    settled = [asyncio.Event() for _ in range(traffic.decoding)]
    tokens = min(_MOST_DECODED, Room.of(status).tokens - _DECODING_PROMPT_LEN)

    async def decode(index: int) -> None:
        """Decode until cancelled; a request that reaches its longest output is followed by another one."""
        prompt = traffic.prompt(status.vocab_size, DECODING, repeat, index)
        turn, succeeded = 0, True
        while succeeded:
            of_turn = f"{salt}/decoding/{index}/{turn}"
            stream = client.generate(prompt, mode=arm.mode, max_tokens=tokens, ignore_eos=True, salt=of_turn)
            place = {"arm": arm.name, "repeat": repeat, "index": index, "turn": turn, "kind": DECODING}
            succeeded = await _decode(bench, stream, len(prompt), arm.mode, settled[index], place)
            turn += 1

    await bench.settle(client, arm.name)
    decoding = [asyncio.create_task(decode(index)) for index in range(traffic.decoding)]
    try:
        for task, has_settled in zip(decoding, settled, strict=True):
            waiting = asyncio.create_task(has_settled.wait())
            await asyncio.wait((waiting, task), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        begin_s = bench.elapsed_s
        times_s = [] if arm.long_tokens == 0 else traffic.times_s(repeat)
        output_len = traffic.output_len if arm.long_tokens is None else arm.long_tokens
        prompts = [traffic.prompt(status.vocab_size, LONG, repeat, index) for index in range(len(times_s))]
        async with asyncio.TaskGroup() as group:
            for index, (at_s, prompt) in enumerate(zip(times_s, prompts, strict=True)):
                await asyncio.sleep(max(0.0, begin_s + at_s - bench.elapsed_s))
                sending = bench.send(
                    client, prompt, arm=arm.name, repeat=repeat, index=index, kind=LONG, due_s=begin_s + at_s,
                    mode=arm.mode, max_tokens=output_len, salt=f"{salt}/{index}",
                )  # fmt: skip
                group.create_task(sending)
            await asyncio.sleep(max(0.0, begin_s + traffic.arrive_s - bench.elapsed_s))
        end_s = bench.elapsed_s
    finally:
        for task in decoding:
            task.cancel()
        await asyncio.gather(*decoding, return_exceptions=True)
    window = {"arm": arm.name, "repeat": repeat, "begin_s": begin_s, "end_s": end_s}
    bench.facts.setdefault(WINDOWS, []).append(window)


async def _decode(
    bench: Bench, stream: AsyncStream, prompt_tokens: int, mode: str, settled: asyncio.Event, place: dict[str, Any]
) -> bool:
    """Decode one request to its end; False if it failed. Writes its row in any case, also when it is cancelled."""
    sent_s, started_s = bench.elapsed_s, time.monotonic()
    place = {**place, "scheduled_s": sent_s, "sent_s": sent_s}
    arrived_s: list[float] = []
    token_ids: list[int] = []
    error: PdserveError | None = None
    finish_reason = CANCELLED
    try:
        async for token in stream:
            arrived_s.append(token.arrived_s)
            token_ids.append(token.token_id)
            if len(arrived_s) == _SETTLED_TOKENS:
                settled.set()
        finish_reason = "length"
    except PdserveError as failure:
        error = failure
    finally:
        if error is not None:
            bench.record(None, error, **place)
        else:
            row = RequestRow(
                cell=bench.cell.name,
                **place,
                mode=mode,
                prompt_tokens=prompt_tokens,
                output_tokens=len(token_ids),
                token_hash=token_hash(tuple(token_ids)),
                finish_reason=finish_reason,
                ttft_ms=(arrived_s[0] - started_s) * 1e3 if arrived_s else None,
                itl_ms=tuple((b - a) * 1e3 for a, b in itertools.pairwise(arrived_s)),
            )
            bench.write(row)
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


def windows_by_arm(run: RunData) -> dict[str, list[WindowData]]:
    """The windows of each arm, in the order of their repeats."""
    found: dict[str, list[WindowData]] = {}
    for cell in run.cells:
        for window in cell.facts.get(WINDOWS, ()):
            place = window["arm"], window["repeat"]
            rows = [row for row in run.rows_of(cell.cell) if (row.arm, row.repeat) == place]
            found.setdefault(window["arm"], []).append(WindowData.of(window, rows))
    return {name: sorted(windows, key=lambda window: window.repeat) for name, windows in found.items()}


def arm_summary(windows: Sequence[WindowData], seed: int) -> dict[str, Any]:
    """The figures of an arm over all its windows. Distributions are those of all values together; intervals are those
    of the mean over windows."""

    def pooled(values: Callable[[WindowData], Sequence[float]]) -> dict[str, float | int] | None:
        return tail([each for window in windows for each in values(window)])

    def per_second(tokens: Callable[[WindowData], int]) -> Any:
        return plain_mean([tokens(window) / window.duration_s for window in windows], seed)

    p99s = [p99 for window in windows if (p99 := percentile(window.itl_ms, 99)) is not None]
    return {
        "windows": len(windows),
        "itl_ms": pooled(lambda window: window.itl_ms),
        "itl_p99_ms": plain_mean(p99s, seed),
        "stall_ms": pooled(lambda window: window.stalls_ms),
        "long_ttft_ms": pooled(lambda window: window.ttft_ms),
        "output_tokens_per_s": per_second(lambda window: window.output_tokens),
        "tokens_per_s": per_second(lambda window: window.output_tokens + window.prompt_tokens),
        "late_ms": round(max((window.late_ms for window in windows), default=0.0), 3),
        "errors": sum(len(window.errors) for window in windows),
        "error": next((error for window in windows for error in window.errors), None),
    }


def best_chunk(arms: Mapping[str, Figures], throughput_share: float) -> int | None:
    """The chunk size, a key of ``arms``, with the lowest p99 ITL among those whose tokens per second, prompt and
    output together, are at least ``throughput_share`` of the highest. None if no chunk size was measured."""
    measured = {int(name): arm for name, arm in arms.items() if name.isdecimal() and arm["itl_ms"]}
    if not measured:
        return None
    most = max(arm["tokens_per_s"]["mean"] for arm in measured.values())
    fit = [chunk for chunk, arm in measured.items() if arm["tokens_per_s"]["mean"] >= throughput_share * most]
    return min(fit, key=lambda chunk: (measured[chunk]["itl_ms"]["p99"], -chunk))


def passes(repeats: int) -> list[range]:
    """The repeats in two passes. The second one measures in reverse order, so that settings that need a service of
    their own are interleaved A B B A as well, with few starts."""
    first = -(-repeats // 2)
    return [each for each in (range(first), range(first, repeats)) if each]
