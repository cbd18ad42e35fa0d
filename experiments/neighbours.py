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

from pydantic import Field, PositiveInt

from experiments.experiment import Bench, Options, option
from experiments.run_folder import Figures, RequestRow, Rows, RunData, token_hash, values_of
from experiments.statistics import percentile, plain_mean, tail
from experiments.workloads.conversation import Room
from pdserve.client.async_client import AsyncClient, AsyncStream
from pdserve.client.status import ServiceStatus
from pdserve.core.chance import SYSTEM
from pdserve.core.errors import PdserveError

DECODING, LONG = "decoding", "long"
WINDOWS = "windows"
"""The fact of a cell that lists its windows: arm, repeat, and begin and end in seconds since the cell began."""
CANCELLED = "cancelled by the experiment"
"""The finish reason of decoding requests: they end with their window."""

_DECODING_PROMPT_LEN = 16
_MOST_DECODED = 2048
_SETTLED_TOKENS = 8  # of each decoding request, before a window begins


OUTPUT_LEN = 8
"""Of the long prompts: enough to be handed off, and next to nothing beside the prompt."""


class NeighbourOptions(Options):
    """What a window has: ``decoding`` requests that decode all the time, and prompts of ``prompt_len`` tokens that
    arrive within ``arrive_s`` seconds."""

    prompt_len: int
    chunk_sizes: tuple[PositiveInt, ...]
    arrive_s: float
    decoding: int = Field(4, ge=1, description="requests that decode all the time")
    load: float = Field(0.5, gt=0, le=2, description="arrivals of long prompts, as a share of what a worker computes")
    rate: float | None = Field(None, gt=0, description="arrivals of long prompts per second, instead of --load")
    throughput_share: float = Field(
        0.95, gt=0, le=1, description="a chunk size qualifies as best with this share of the highest throughput"
    )
    repeats: int = option(6, ge=1, description="windows per arm", quick=2)

    def arrivals(self, prompt_s: float) -> int:
        """How many prompts arrive in a window, if one takes a worker ``prompt_s`` seconds."""
        return max(1, round((self.rate or self.load / prompt_s) * self.arrive_s))

    def times_s(self, repeat: int, arrivals: int) -> list[float]:
        """When the prompts of a repeat arrive, in seconds since the window began: the same in all arms."""
        draw = random.Random(f"{self.seed}/times/{repeat}")
        return sorted(draw.uniform(0, self.arrive_s) for _ in range(arrivals))

    def prompt(self, vocab_size: int, kind: str, repeat: int, index: int) -> list[int]:
        """A prompt: the same in all arms."""
        draw = random.Random(f"{self.seed}/{kind}/{repeat}/{index}")
        length = self.prompt_len if kind == LONG else _DECODING_PROMPT_LEN
        return [draw.randrange(vocab_size) for _ in range(length)]

    def check_fits(self, status: ServiceStatus) -> None:
        """InvalidRequest or CapacityExceeded if the service cannot hold a long prompt and its output."""
        Room.of(status).check(self.prompt_len, OUTPUT_LEN, "--prompt-len")


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of the comparison: the mode of all its requests. ``long_tokens`` is the output of the long prompts
    instead of `OUTPUT_LEN`; 0: none of them are sent."""

    name: str
    mode: str
    long_tokens: int = OUTPUT_LEN


async def measure_window(
    bench: Bench, client: AsyncClient, options: NeighbourOptions, arrivals: int, arm: Arm, repeat: int
) -> None:
    """Measure one window of an arm: writes the rows of its requests, and adds to the fact `WINDOWS`."""
    status = await client.status()
    salt = f"{bench.cell.name}/{arm.name}/{repeat}/{SYSTEM.random()}"
    settled = [asyncio.Event() for _ in range(options.decoding)]
    tokens = min(_MOST_DECODED, Room.of(status).tokens - _DECODING_PROMPT_LEN)
    place: dict[str, Any] = {"arm": arm.name, "repeat": repeat}

    async def decode(index: int) -> None:
        """Decode until cancelled; a request that reaches its longest output is followed by another one."""
        prompt = options.prompt(status.vocab_size, DECODING, repeat, index)
        for turn in itertools.count():
            of_turn = f"{salt}/decoding/{index}/{turn}"
            stream = client.generate(prompt, mode=arm.mode, max_tokens=tokens, ignore_eos=True, salt=of_turn)
            of_row = {**place, "index": index, "turn": turn, "kind": DECODING, "mode": arm.mode}
            if not await _decode(bench, stream, settled[index], {**of_row, "prompt_tokens": len(prompt)}):
                return

    await bench.settle(client, arm.name)
    decoding = [asyncio.create_task(decode(index)) for index in range(options.decoding)]
    try:
        for task, has_settled in zip(decoding, settled, strict=True):
            waiting = asyncio.create_task(has_settled.wait())
            await asyncio.wait((waiting, task), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        begin_s = bench.elapsed_s
        async with asyncio.TaskGroup() as group:
            for index, at_s in enumerate(options.times_s(repeat, arrivals) if arm.long_tokens else ()):
                prompt = options.prompt(status.vocab_size, LONG, repeat, index)
                await asyncio.sleep(max(0.0, begin_s + at_s - bench.elapsed_s))
                sending = bench.send(
                    client, prompt, **place, index=index, kind=LONG, due_s=begin_s + at_s, mode=arm.mode,
                    max_tokens=arm.long_tokens, salt=f"{salt}/{index}",
                )  # fmt: skip
                group.create_task(sending)
            await asyncio.sleep(max(0.0, begin_s + options.arrive_s - bench.elapsed_s))
        end_s = bench.elapsed_s
    finally:
        for task in decoding:
            task.cancel()
        await asyncio.gather(*decoding, return_exceptions=True)
    bench.facts.setdefault(WINDOWS, []).append({**place, "begin_s": begin_s, "end_s": end_s})


async def _decode(bench: Bench, stream: AsyncStream, settled: asyncio.Event, place: dict[str, Any]) -> bool:
    """Decode one request to its end; False if it failed. Writes its row in any case, also when it is cancelled."""
    sent_s, started_s = bench.elapsed_s, time.monotonic()
    place |= {"scheduled_s": sent_s, "sent_s": sent_s}
    arrived_s: list[float] = []
    token_ids: list[int] = []
    finish_reason = CANCELLED
    try:
        async for token in stream:
            arrived_s.append(token.arrived_s)
            token_ids.append(token.token_id)
            if len(arrived_s) == _SETTLED_TOKENS:
                settled.set()
        finish_reason = "length"
    except PdserveError as error:
        finish_reason = ""
        bench.record(None, error, **place)
    finally:
        if finish_reason:
            row = RequestRow(
                cell=bench.cell.name,
                **place,
                output_tokens=len(token_ids),
                token_hash=token_hash(tuple(token_ids)),
                finish_reason=finish_reason,
                ttft_ms=(arrived_s[0] - started_s) * 1e3 if arrived_s else None,
                itl_ms=tuple((b - a) * 1e3 for a, b in itertools.pairwise(arrived_s)),
            )
            bench.write(row)
    return finish_reason != ""


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
    def of(cls, window: Mapping[str, Any], rows: Rows) -> WindowData:
        """The window that a fact describes, and its rows."""
        begin_s, duration_s = window["begin_s"], window["end_s"] - window["begin_s"]
        gaps: list[tuple[float, float]] = []
        output_tokens = 0
        for row in rows:
            ends_s = row.token_times_s - begin_s
            within = (ends_s > 0) & (ends_s <= duration_s)
            output_tokens += int(within.sum())
            if row.kind == DECODING:
                gaps += itertools.compress(zip(ends_s[1:].tolist(), row.itl_ms, strict=False), within[1:])
        long = [row for row in rows if row.kind == LONG]
        answered = [row for row in long if row.error is None]
        waits = [(row.scheduled_s - begin_s, row.token_times_s[0] - begin_s) for row in answered if row.ttft_ms]
        stalls = [
            max((ms for end_s, ms in gaps if end_s > from_s and end_s - ms / 1e3 < to_s), default=0.0)
            for from_s, to_s in waits
        ]
        return cls(
            arm=window["arm"],
            repeat=window["repeat"],
            duration_s=duration_s,
            gaps=tuple(sorted(gaps)),
            stalls_ms=tuple(filter(None, stalls)),
            ttft_ms=tuple(values_of([row.since_due() for row in answered], "ttft_ms")),
            arrivals_s=tuple(sorted(row.scheduled_s - begin_s for row in long)),
            output_tokens=output_tokens,
            prompt_tokens=sum(row.prompt_tokens for row in answered),
            late_ms=max(((row.sent_s - row.scheduled_s) * 1e3 for row in long), default=0.0),
            errors=tuple(row.error for row in rows if row.error is not None),
        )


def windows_by_arm(run: RunData) -> dict[str, list[WindowData]]:
    """The windows of each arm, in the order of their repeats."""
    found: dict[str, list[WindowData]] = {}
    for cell in run.cells:
        for window in cell.facts.get(WINDOWS, ()):
            rows = [row for row in run.rows_of(cell.cell, window["arm"]) if row.repeat == window["repeat"]]
            found.setdefault(window["arm"], []).append(WindowData.of(window, rows))
    return {name: sorted(windows, key=lambda window: window.repeat) for name, windows in found.items()}


def arm_summary(windows: Sequence[WindowData], seed: int) -> Figures:
    """The figures of an arm over all its windows. Distributions are those of all values together; intervals are those
    of the mean over windows."""

    def pooled(field: str) -> Any:
        return tail([each for window in windows for each in getattr(window, field)])

    def per_second(tokens: Callable[[WindowData], int]) -> Any:
        return plain_mean([tokens(window) / window.duration_s for window in windows], seed)

    p99s = [p99 for window in windows if (p99 := percentile(window.itl_ms, 99)) is not None]
    errors = [error for window in windows for error in window.errors]
    return {
        "windows": len(windows),
        "itl_ms": pooled("itl_ms"),
        "itl_p99_ms": plain_mean(p99s, seed),
        "stall_ms": pooled("stalls_ms"),
        "long_ttft_ms": pooled("ttft_ms"),
        "output_tokens_per_s": per_second(lambda window: window.output_tokens),
        "tokens_per_s": per_second(lambda window: window.output_tokens + window.prompt_tokens),
        "late_ms": round(max((window.late_ms for window in windows), default=0.0), 3),
        "errors": len(errors),
        "error": next(iter(errors), None),
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
