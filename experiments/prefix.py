"""``pdserve experiment prefix``: what prefix caches save when prompts begin alike.

All prompts have one length. Their first k tokens, the shared beginning, were sent before by an earlier request of the
same salt. Each repeat sends one prompt in three arms, in an order that changes from repeat to repeat:

============ =========================================================================================================
``none``     a salt of its own: nothing is cached
``prefill``  the earlier request asked for one token, which prefill makes alone: only the prefill worker has its KV
``both``     the earlier request asked for two tokens: its KV was moved, and both workers have it
============ =========================================================================================================

Caches hold whole blocks. Prefill computes the prompt except for the cached blocks, but its last token at least.
Decode's cached blocks are not moved; a block that prefill alone has is moved like a computed one.

The prediction of the TTFT is arithmetic: of the arm ``none``, the stage ``prefill`` is scaled by the FLOPs of the
tokens that are left (`experiments.engine_alone.arithmetic`), and the rest stays."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from checkpoints.source import resolve_model
from experiments.engine_alone.arithmetic import ModelArithmetic
from experiments.experiment import Bench, Cell, Experiment, Options, option
from experiments.modes import chunk_tokens
from experiments.report.drawing import DASHED, FAINT, PALETTE, Look, Mark, Panel, Picture, TableBlock, table
from experiments.report.page import Report, setup_of
from experiments.run_folder import FinishedCell, RequestRow, RunData, failures, unexpected_bytes
from experiments.statistics import plain_mean
from experiments.warm_up import warm_up
from experiments.workloads.conversation import Room
from pdserve.client.async_client import AsyncClient
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import InvalidRequest, ModelError, PdserveError
from pdserve.core.interval import MIN_VALUES, Interval, median_interval
from pdserve.core.request import Mode
from pdserve.core.timeline import Figure

NONE, PREFILL, BOTH = ARMS = ("none", "prefill", "both")
_EARLIER_TOKENS = {PREFILL: 1, BOTH: 2}
_OUTPUT_TOKENS = 8
_METHOD = "one request at a time; each prompt in all three arms, in all orders by turns; intervals are 95 % bootstrap"


class PrefixOptions(Options):
    """Options of `Prefix`."""

    prompt_len: int = option(1024, ge=2, description="prompt length in tokens", quick=512)
    shared_lens: tuple[int, ...] = option(
        (0, 128, 256, 512, 768, 1024),
        description="how many of its first tokens are shared with an earlier request",
        quick=[0, 128, 256, 512],
    )
    repeats: int = option(12, ge=1, description="prompts per shared length", quick=6)


class Prefix(Experiment):
    """See the module."""

    name: ClassVar[str] = "prefix"
    question: ClassVar[str] = "What do the prefix caches of prefill and decode save when prompts begin alike?"
    options_type: ClassVar[type[Options]] = PrefixOptions
    options: PrefixOptions

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """One cell per shared length."""
        options = self.options
        if not options.shared_lens or min(options.shared_lens) < 0 or max(options.shared_lens) > options.prompt_len:
            raise InvalidRequest(f"--shared-lens: give lengths from 0 to that of the prompt, {options.prompt_len}")
        if attached is not None:
            if not any(worker.links for worker in attached.workers):
                raise InvalidRequest("--target: the service has no linked pair of prefill and decode workers")
            Room.of(attached).check(options.prompt_len, _OUTPUT_TOKENS, "--prompt-len")
        return [
            Cell(
                f"{shared}/{options.prompt_len}",
                {"shared_len": shared, "prompt_len": options.prompt_len},
                {"engine.prefix_caching": True},
                options.repeats,
            )
            for shared in options.shared_lens
        ]

    async def measure(self, bench: Bench) -> None:
        """Send each prompt in the three arms, each after its earlier request."""
        parameters = bench.cell.parameters
        length, shared = int(parameters["prompt_len"]), int(parameters["shared_len"])
        draw = random.Random(f"{self.options.seed}/{bench.cell.name}")
        async with AsyncClient(bench.target) as client:
            status = await client.status()
            bench.facts |= _service_facts(status)
            # On an idle service requests go round the workers: so many earlier requests reach every one of them.
            rounds = max(sum(worker.role == role for worker in status.workers) for role in ("prefill", "decode"))

            async def earlier(arm: str, prompt: Sequence[int], salt: str) -> None:
                if arm in _EARLIER_TOKENS and shared:
                    for _ in range(rounds):
                        await client.generate(
                            prompt[:shared], mode="pd", max_tokens=_EARLIER_TOKENS[arm], ignore_eos=True, salt=salt
                        ).result()

            other = random.Random(f"{self.options.seed}/{bench.cell.name}/warm-up")
            prompts = ([other.randrange(status.vocab_size) for _ in range(length)] for _ in itertools.count())
            await warm_up(bench, client, ((prompt, _OUTPUT_TOKENS) for prompt in prompts), (Mode.PD,))
            await bench.settle(client, "all arms")
            orders = list(itertools.permutations(ARMS))
            for number in range(-1, self.options.repeats):  # the first one is the warm-up
                prompt = [draw.randrange(status.vocab_size) for _ in range(length)]
                for arm in orders[number % len(orders)]:
                    salt = f"{self.options.seed}/{bench.cell.name}/{number}/{arm}/{draw.random()}"
                    place: dict[str, Any] = {"arm": arm, "repeat": 0, "index": number}
                    try:
                        await earlier(arm, prompt, salt)
                    except PdserveError as error:
                        bench.record(None, error, **place)
                        continue
                    options: dict[str, Any] = {"mode": "pd", "max_tokens": _OUTPUT_TOKENS, "salt": salt}
                    if number < 0:
                        await client.generate(prompt, ignore_eos=True, **options).result()
                    else:
                        await bench.send(client, prompt, **place, **options)
                if number >= 0:
                    bench.advance(1)

    def summarise(self, run: RunData) -> dict[str, Any]:
        """``cells``, one per shared length and arm: ``cell``, ``shared_len``, ``prompt_len``, ``arm``, ``n``,
        ``errors``; ``ttft_ms``, ``ttft_decode_ms``; ``saved_ms``, the median of the paired differences, ``none`` minus
        this arm; ``predicted_ttft_ms`` (null if the model's shape is unknown on this host); means of ``prefill_ms``,
        ``kv_exposed_ms``, ``prefill_cached_tokens``, ``computed_tokens``, ``kv_blocks_skipped``, ``kv_blocks_sent``;
        sums of ``kv_bytes``, ``kv_bytes_expected``, ``kv_bytes_arithmetic``; ``reuse_as_arranged``, ``tokens_equal``.

        ``predicted``, one for each length at which another block is full: ``shared_len``, and by arm ``ttft_ms`` and
        ``kv_bytes``."""
        cold = [row for cell in run.cells for row in run.rows_of(cell.cell, NONE) if row.error is None]
        prediction = _Prediction(run.cells[0], cold) if cold else None
        cells, failed = [], []
        for cell in sorted(run.cells, key=lambda cell: int(cell.parameters["shared_len"])):
            for arm in ARMS:
                rows, where = run.rows_of(cell.cell, arm), f"{cell.cell}, arm {arm}"
                found = prediction and _summarise_arm(cell, arm, run, prediction, self.options.seed)
                if found:
                    cells.append(found)
                    if not found["tokens_equal"]:
                        failed.append(f"{where}: tokens differ from those without a cache")
                    if found["kv_bytes_expected"] != found["kv_bytes_arithmetic"]:
                        failed.append(f"{where}: bytes expected did not fall by the skipped blocks")
                if wrong := unexpected_bytes(rows):
                    failed.append(f"{where}: {wrong}")
                failed += failures(where, rows)
        return {
            "experiment": self.name,
            "cells": cells,
            "predicted": [] if prediction is None else prediction.curve(),
            "failed": failed,
        }

    def report(self, run: RunData, summary: Mapping[str, Any]) -> Report:
        """TTFT and bytes over the shared length, and a table."""
        cells: list[Mapping[str, Any]] = summary["cells"]
        report = Report(
            title="Prefix caches on prefill and decode",
            question=self.question,
            answer=_answer(cells),
            setup=setup_of(run, _METHOD),
            caveats=_caveats(cells, summary["predicted"]),
            failures=summary["failed"],
        )
        if cells:
            report.blocks += [*_pictures(cells, summary["predicted"]), _table(cells)]
        return report


class _Prediction:
    """What arithmetic expects of each shared length, given the rows ``cold`` of the arm ``none``."""

    def __init__(self, cell: FinishedCell, cold: Sequence[RequestRow]) -> None:
        facts = cell.facts
        self._length = int(cell.parameters["prompt_len"])
        self._chunk = chunk_tokens(cell.config, self._length)
        self._block_size = int(facts["block_size"])
        self._block_bytes = self._block_size * int(facts["kv_bytes_per_token"])
        known = facts.get("arithmetic")
        self._arithmetic = None if known is None else ModelArithmetic.from_dict(known)
        self._ttft_ms = statistics.fmean(row.ttft_ms for row in cold if row.ttft_ms is not None)
        self._prefill_ms = statistics.fmean(_stage(row, Figure.TTFT, "prefill") for row in cold)

    def reuse(self, arm: str, shared: int) -> tuple[int, int]:
        """Tokens that prefill need not compute, which are whole blocks, but never the last token; and blocks that
        decode has."""
        cached, skipped = (min(shared, most) // self._block_size for most in (self._length - 1, self._length))
        return cached * self._block_size * (arm != NONE), skipped * (arm == BOTH)

    def kv_bytes(self, skipped_blocks: int) -> int:
        """Bytes of the prompt's other blocks."""
        return (-(-self._length // self._block_size) - skipped_blocks) * self._block_bytes

    def ttft_ms(self, arm: str, shared: int) -> float | None:
        """The TTFT; None if the model's shape is unknown on this host."""
        if self._arithmetic is None:
            return None
        chunk = self._chunk
        whole = self._arithmetic.prefill(self._length, chunk).flops
        left = self._arithmetic.prefill(self._length, chunk, self.reuse(arm, shared)[0]).flops
        return round(self._ttft_ms - self._prefill_ms * (1 - left / whole), 4)

    def curve(self) -> list[dict[str, Any]]:
        """Every shared length at which another block is full."""
        return [
            {
                "shared_len": shared,
                "ttft_ms": {arm: self.ttft_ms(arm, shared) for arm in ARMS},
                "kv_bytes": {arm: self.kv_bytes(self.reuse(arm, shared)[1]) for arm in ARMS},
            }
            for shared in sorted({*range(0, self._length + 1, self._block_size), self._length})
        ]


def _service_facts(status: ServiceStatus) -> dict[str, Any]:
    facts: dict[str, Any] = {"block_size": status.block_size, "kv_bytes_per_token": status.kv_bytes_per_token}
    try:
        shape = resolve_model(status.model).shape
    except ModelError:
        return facts
    return {**facts, "arithmetic": ModelArithmetic.of(shape, status.dtype).to_dict()}


def _summarise_arm(
    cell: FinishedCell, arm: str, run: RunData, prediction: _Prediction, seed: int
) -> dict[str, Any] | None:
    """The figures of an arm; None if it has no answer."""
    rows, cold = ({row.index: row for row in run.rows_of(cell.cell, each) if row.error is None} for each in (arm, NONE))
    own, shared = list(rows.values()), int(cell.parameters["shared_len"])
    if not own:
        return None
    pairs = [(cold[index], row) for index, row in rows.items() if index in cold]
    saved = {
        figure.value: median_interval([_figure(before, figure) - _figure(row, figure) for before, row in pairs])
        for figure in (Figure if arm != NONE else ())
    }
    arranged = prediction.reuse(arm, shared)

    def mean(values: Iterable[float], digits: int = 3) -> float:
        return round(statistics.fmean(values), digits)

    return {
        "cell": cell.cell,
        **cell.parameters,
        "arm": arm,
        "n": len(own),
        "errors": sum(row.error is not None for row in run.rows_of(cell.cell, arm)),
        **{f"{figure.value}_ms": plain_mean([_figure(row, figure) for row in own], seed) for figure in Figure},
        "saved_ms": {figure: each.to_dict() for figure, each in saved.items() if each is not None},
        "predicted_ttft_ms": prediction.ttft_ms(arm, shared),
        "prefill_ms": mean((_stage(row, Figure.TTFT, "prefill") for row in own), 4),
        "kv_exposed_ms": mean((_stage(row, Figure.TTFT_DECODE, "kv_exposed") for row in own), 4),
        "computed_tokens": mean(row.prompt_tokens - row.prefill_cached_tokens for row in own),
        **{
            key: mean(getattr(row, key) for row in own)
            for key in ("prefill_cached_tokens", "kv_blocks_skipped", "kv_blocks_sent")
        },
        **{key: sum(getattr(row, key) for row in own) for key in ("kv_bytes", "kv_bytes_expected")},
        "kv_bytes_arithmetic": sum(prediction.kv_bytes(row.kv_blocks_skipped) for row in own),
        "reuse_as_arranged": all((row.prefill_cached_tokens, row.kv_blocks_skipped) == arranged for row in own),
        "tokens_equal": all(before.token_hash == row.token_hash for before, row in pairs),
    }


def _figure(row: RequestRow, figure: Figure) -> float:
    value = row.figure_ms(figure)
    assert value is not None, "every request makes more than two tokens"
    return value


def _stage(row: RequestRow, figure: Figure, stage: str) -> float:
    return float(row.stages_ms.get(figure.value, {}).get(stage, 0.0))


def _answer(cells: Sequence[Mapping[str, Any]]) -> str:
    reused = [cell for cell in cells if cell["arm"] != NONE and cell["shared_len"]]
    if not reused:
        return "No request with a shared beginning was completed."
    # Of the lengths below the whole prompt the longest: a prompt that is shared as a whole is a special case.
    partial = [cell for cell in reused if cell["shared_len"] < cell["prompt_len"]] or reused
    shared = max(cell["shared_len"] for cell in partial)
    arms = {cell["arm"]: cell for cell in partial if cell["shared_len"] == shared}
    sentences = []
    if PREFILL in arms and arms[PREFILL]["saved_ms"]:
        cell = arms[PREFILL]
        saved = Interval.from_dict(cell["saved_ms"][Figure.TTFT.value])
        sentences.append(
            f"With {shared} of {cell['prompt_len']} tokens cached on prefill, {cell['computed_tokens']:g} tokens are "
            f"computed and {_earlier('token 1', saved)}; "
            f"{cell['kv_bytes'] / cell['n'] / 1e6:.2f} MB of KV are moved as without a cache."
        )
    if BOTH in arms and arms[BOTH]["saved_ms"]:
        cell = arms[BOTH]
        saved = Interval.from_dict(cell["saved_ms"][Figure.TTFT_DECODE.value])
        sentences.append(
            f"If decode has them as well, {cell['kv_blocks_skipped']:g} blocks are skipped, "
            f"{cell['kv_bytes'] / cell['n'] / 1e6:.2f} MB are moved, and {_earlier('token 2', saved)} than without any "
            "cache."
        )
    return " ".join(sentences) or "No request was completed both with and without a cache."


def _earlier(token: str, saved: Interval) -> str:
    text = saved.text(form="")
    if saved.sign == 0:
        return f"{token} comes not measurably earlier ({text})"
    return f"{token} comes {text} earlier"


def _caveats(cells: Sequence[Mapping[str, Any]], predicted: Sequence[Mapping[str, Any]]) -> list[str]:
    caveats = [
        "One request at a time on an idle service: the room that caches free for other requests, and blocks that "
        "other prompts displace, are not in these figures.",
        "Caches hold whole blocks: tokens after the last full block of the shared beginning are computed and moved.",
    ]
    if any(not cell["reuse_as_arranged"] for cell in cells):
        caveats.append(
            "Some requests did not find what the earlier request had left: another worker was chosen, blocks were "
            "displaced, or prefix caches are off. The table has what they found; the predictions assume all of it."
        )
    if any(line["ttft_ms"][NONE] is None for line in predicted):
        caveats.append("No prediction of the TTFT: the model's layers are unknown on this host.")
    if any(cell["n"] < MIN_VALUES for cell in cells):
        caveats.append(f"Cells with fewer than {MIN_VALUES} prompts have no intervals.")
    return caveats


_LOOKS: dict[str, Look] = {
    NONE: {"label": "no reuse", "color": PALETTE[6], "markersize": 11, "markerfacecolor": "white"},
    PREFILL: {"label": "cached on prefill", "color": PALETTE[0]},
    BOTH: {"label": "cached on prefill and decode", "color": PALETTE[1]},
}
_ARITHMETIC = {"color": FAINT, "linewidth": 1.2, "linestyle": DASHED}


def _pictures(cells: Sequence[Mapping[str, Any]], predicted: Sequence[Mapping[str, Any]]) -> list[Picture]:
    """``ttft`` and ``ttft_decode``, and the bytes per request, over the shared length, beside what arithmetic gives."""
    length, lens = cells[0]["prompt_len"], sorted({cell["shared_len"] for cell in cells})
    axis: dict[str, Any] = {
        "x": "shared with an earlier request, tokens",
        "ticks": lens,
        "xlim": (-0.04 * length, 1.04 * length),
        "ylim": (0, None),
    }
    records = [{**cell, "megabytes": cell["kv_bytes"] / cell["n"] / 1e6} for cell in cells]
    lines = [{**line, "megabytes": {arm: each / 1e6 for arm, each in line["kv_bytes"].items()}} for line in predicted]
    arithmetic = Mark(lines, "shared_len", "ttft_ms.prefill", kind="steps",
                      look={**_ARITHMETIC, "label": "arithmetic, with reuse"})  # fmt: skip
    plain = {arm: {**look, "markersize": 5} for arm, look in _LOOKS.items()}
    times = [
        Panel(
            [Mark(records, "shared_len", f"{figure.value}_ms", by="arm", looks=plain), *extra],
            y="time, ms",
            title=title,
            legend=legend,
            **axis,
        )
        for figure, title, extra, legend in (
            (Figure.TTFT, "ttft: token 1", [arithmetic] if lines else [], "lower left"),
            (Figure.TTFT_DECODE, "ttft_decode: token 2", [], ""),
        )
    ]
    moved = [
        *(Mark(lines, "shared_len", f"megabytes.{arm}", kind="steps", look={**_ARITHMETIC, **label})
          for arm, label in ((NONE, {}), (BOTH, {"label": "arithmetic"})) if lines),
        # Where two arms move the same, the smaller mark leaves the larger one visible.
        Mark(records, "shared_len", "megabytes", by="arm", looks=_LOOKS, kind="points"),
    ]  # fmt: skip
    return [
        Picture(
            "ttft_over_shared",
            f"TTFT over the shared length (prompts of {length} tokens)",
            "Mean with 95 % intervals. Dashed: the prefill of the arm without reuse, scaled by the FLOPs of the tokens "
            "that are left to compute, plus everything else as it is. Both caches save the same computation; token 2 "
            "also waits for what has to be moved.",
            times,
            columns=2,
            share={"sharey": True},
        ),
        Picture(
            "bytes_over_shared",
            "Bytes moved over the shared length",
            "Points: bytes that decode received and verified. Dashed: (blocks of the prompt − blocks that decode has) "
            "× bytes of a block. What only prefill has cached is moved like what it computes.",
            [Panel(moved, y="KV moved per request, MB", legend="lower left", **axis)],
        ),
    ]


def _table(cells: Sequence[Mapping[str, Any]]) -> TableBlock:
    names = {NONE: "neither", PREFILL: "prefill", BOTH: "both"}
    records = [
        {
            **cell,
            "cached": names[cell["arm"]],
            "bytes": cell["kv_bytes"] // cell["n"],
            "equal": cell["kv_bytes"] == cell["kv_bytes_expected"] == cell["kv_bytes_arithmetic"],
        }
        for cell in cells
    ]
    columns = (
        "shared | shared_len",
        "cached on | cached",
        "n",
        "ttft, ms | ttft_ms:.1f",
        "predicted, ms | predicted_ttft_ms:.1f",
        "ttft_decode, ms | ttft_decode_ms:.1f",
        "prefill, ms | prefill_ms:.1f",
        "computed tokens | computed_tokens:g",
        "blocks skipped | kv_blocks_skipped:g",
        "KV, bytes | bytes:,",
        "= expected | equal",
        "tokens equal | tokens_equal",
    )
    caption = (
        "KV bytes per request; expected are the prompt's blocks less the skipped ones, times the bytes of a block."
    )
    return table("All cells", records, columns, caption)
