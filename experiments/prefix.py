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
tokens that are left (`checkpoints.arithmetic`), and the rest stays."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence
from typing import Any

from checkpoints.arithmetic import ModelArithmetic
from checkpoints.source import resolve_model
from experiments.experiment import Bench, Cell, Experiment, Options, option
from experiments.modes import chunk_tokens
from experiments.report.drawing import DASHED, FAINT, PALETTE, Looks, Mark, Panel, Picture, TableBlock, table
from experiments.report.page import Report, setup_of
from experiments.run_folder import Figures, FinishedCell, RequestRow, Rows, RunData, faults, stages_of, values_of
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

    name = "prefix"
    question = "What do the prefix caches of prefill and decode save when prompts begin alike?"
    options_type = PrefixOptions
    options: PrefixOptions

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """One cell per shared length."""
        length, lens, repeats = self.options.prompt_len, self.options.shared_lens, self.options.repeats
        if not lens or min(lens) < 0 or max(lens) > length:
            raise InvalidRequest(f"--shared-lens: give lengths from 0 to that of the prompt, {length}")
        if attached is not None:
            if not any(worker.links for worker in attached.workers):
                raise InvalidRequest("--target: the service has no linked pair of prefill and decode workers")
            Room.of(attached).check(length, _OUTPUT_TOKENS, "--prompt-len")
        service = {"engine.prefix_caching": True}
        return [
            Cell(f"{shared}/{length}", {"shared_len": shared, "prompt_len": length}, service, repeats)
            for shared in lens
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

    def summarise(self, run: RunData) -> Figures:
        """``cells``, one per shared length and arm: ``cell``, ``shared_len``, ``prompt_len``, ``arm``, ``n``,
        ``errors``; ``ttft_ms``, ``ttft_decode_ms``; ``saved_ms``, the median of the paired differences, ``none`` minus
        this arm; ``predicted_ttft_ms`` (null if the model's shape is unknown on this host); means of ``prefill_ms``,
        ``kv_exposed_ms``, ``prefill_cached_tokens``, ``computed_tokens``, ``kv_blocks_skipped``, ``kv_blocks_sent``;
        sums of ``kv_bytes``, ``kv_bytes_expected``, ``kv_bytes_arithmetic``; ``reuse_as_arranged``, ``tokens_equal``.

        ``predicted``, one for each length at which another block is full: ``shared_len``, and by arm ``ttft_ms`` and
        ``kv_bytes``."""
        cold = [row for row in run.rows if row.arm == NONE and row.error is None]
        prediction = _Prediction(run.cells[0], cold) if cold else None
        cells, failed = [], []
        ordered = sorted(run.cells, key=lambda cell: int(cell.parameters["shared_len"]))
        for cell, arm in itertools.product(ordered, ARMS):
            rows, where = run.rows_of(cell.cell, arm), f"{cell.cell}, arm {arm}"
            if prediction and (found := _summarise_arm(cell, arm, run, prediction, self.options.seed)):
                cells.append(found)
                if not found["tokens_equal"]:
                    failed.append(f"{where}: tokens differ from those without a cache")
                if found["kv_bytes_expected"] != found["kv_bytes_arithmetic"]:
                    failed.append(f"{where}: bytes expected did not fall by the skipped blocks")
            failed += faults(where, rows)
        predicted = prediction.curve() if prediction else []
        return {"experiment": self.name, "cells": cells, "predicted": predicted, "failed": failed}

    def report(self, run: RunData, summary: Figures) -> Report:
        """TTFT and bytes over the shared length, and a table."""
        cells, predicted = summary["cells"], summary["predicted"]
        caveats = [
            "One request at a time on an idle service: the room that caches free for other requests, and blocks that "
            "other prompts displace, are not in these figures.",
            "Caches hold whole blocks: tokens after the last full block of the shared beginning are computed and "
            "moved.",
            not all(cell["reuse_as_arranged"] for cell in cells)
            and "Some requests did not find what the earlier request had left: another worker was chosen, blocks were "
            "displaced, or prefix caches are off. The table has what they found; the predictions assume all of it.",
            any(line["ttft_ms"][NONE] is None for line in predicted)
            and "No prediction of the TTFT: the model's layers are unknown on this host.",
            any(cell["n"] < MIN_VALUES for cell in cells)
            and f"Cells with fewer than {MIN_VALUES} prompts have no intervals.",
        ]
        title, blocks = "Prefix caches on prefill and decode", _blocks(cells, predicted) if cells else []
        return Report(title, self.question, _answer(cells), setup_of(run, _METHOD), blocks, caveats, summary["failed"])


class _Prediction:
    """What arithmetic expects of each shared length, given the rows ``cold`` of the arm ``none``."""

    def __init__(self, cell: FinishedCell, cold: Rows) -> None:
        self._length = int(cell.parameters["prompt_len"])
        self._block_size = int(cell.facts["block_size"])
        self._block_bytes = self._block_size * int(cell.facts["kv_bytes_per_token"])
        known, chunk = cell.facts.get("arithmetic"), chunk_tokens(cell.config, self._length)
        self._model = known and ModelArithmetic.from_dict(known)
        self._chunk, self._ttft_ms = chunk, statistics.fmean(values_of(cold, "ttft_ms"))
        self._prefill_ms = _stage(cold, Figure.TTFT, "prefill")

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
        if self._model is None:
            return None
        cached = self.reuse(arm, shared)[0]
        whole, left = (self._model.prefill(self._length, self._chunk, each).flops for each in (0, cached))
        return round(self._ttft_ms - self._prefill_ms * (1 - left / whole), 4)

    def curve(self) -> list[Figures]:
        """Every shared length at which another block is full."""
        return [
            {
                "shared_len": shared,
                "ttft_ms": {arm: self.ttft_ms(arm, shared) for arm in ARMS},
                "kv_bytes": {arm: self.kv_bytes(self.reuse(arm, shared)[1]) for arm in ARMS},
            }
            for shared in sorted({*range(0, self._length + 1, self._block_size), self._length})
        ]


def _service_facts(status: ServiceStatus) -> Figures:
    facts: Figures = {"block_size": status.block_size, "kv_bytes_per_token": status.kv_bytes_per_token}
    try:
        shape = resolve_model(status.model).shape
    except ModelError:
        return facts
    return {**facts, "arithmetic": ModelArithmetic.of(shape, status.dtype).to_dict()}


def _summarise_arm(cell: FinishedCell, arm: str, run: RunData, prediction: _Prediction, seed: int) -> Figures | None:
    """The figures of an arm; None if it has no answer."""
    sent = run.rows_of(cell.cell, arm)
    rows, shared = [row for row in sent if row.error is None], int(cell.parameters["shared_len"])
    if not rows:
        return None
    cold = {row.index: row for row in run.rows_of(cell.cell, NONE) if row.error is None}
    pairs = [(cold[row.index], row) for row in rows if row.index in cold]
    saved = {
        figure: median_interval([_figure(before, figure) - _figure(row, figure) for before, row in pairs])
        for figure in (Figure if arm != NONE else ())
    }
    arranged = prediction.reuse(arm, shared)
    means = {
        "computed_tokens": [row.prompt_tokens - row.prefill_cached_tokens for row in rows],
        **{key: values_of(rows, key) for key in ("prefill_cached_tokens", "kv_blocks_skipped", "kv_blocks_sent")},
    }
    return {
        "cell": cell.cell,
        **cell.parameters,
        "arm": arm,
        "n": len(rows),
        "errors": len(sent) - len(rows),
        **{f"{figure}_ms": plain_mean(values_of(rows, f"{figure}_ms"), seed) for figure in Figure},
        "saved_ms": {figure.value: each.to_dict() for figure, each in saved.items() if each is not None},
        "predicted_ttft_ms": prediction.ttft_ms(arm, shared),
        "prefill_ms": round(_stage(rows, Figure.TTFT, "prefill"), 4),
        "kv_exposed_ms": round(_stage(rows, Figure.TTFT_DECODE, "kv_exposed"), 4),
        **{key: round(statistics.fmean(each), 3) for key, each in means.items()},
        **{key: sum(values_of(rows, key)) for key in ("kv_bytes", "kv_bytes_expected")},
        "kv_bytes_arithmetic": sum(prediction.kv_bytes(row.kv_blocks_skipped) for row in rows),
        "reuse_as_arranged": all((row.prefill_cached_tokens, row.kv_blocks_skipped) == arranged for row in rows),
        "tokens_equal": all(before.token_hash == row.token_hash for before, row in pairs),
    }


def _figure(row: RequestRow, figure: Figure) -> float:
    value = row.figure_ms(figure)
    assert value is not None, "every request makes more than two tokens"
    return value


def _stage(rows: Rows, figure: Figure, stage: str) -> float:
    """The mean of a stage; 0 where it is unknown."""
    return float(sum(stages_of(rows, figure).get(stage, [0.0]))) / len(rows)


def _answer(cells: Sequence[Figures]) -> str:
    reused = [cell for cell in cells if cell["arm"] != NONE and cell["shared_len"]]
    if not reused:
        return "No request with a shared beginning was completed."
    # Of the lengths below the whole prompt the longest: a prompt that is shared as a whole is a special case.
    partial = [cell for cell in reused if cell["shared_len"] < cell["prompt_len"]] or reused
    shared = max(cell["shared_len"] for cell in partial)
    sentences = []
    for cell in partial:
        if cell["shared_len"] == shared and cell["saved_ms"]:
            moved = f"{cell['kv_bytes'] / cell['n'] / 1e6:.2f} MB"
            sentences.append(
                f"With {shared} of {cell['prompt_len']} tokens cached on prefill, {cell['computed_tokens']:g} tokens "
                f"are computed and {_earlier('token 1', cell, Figure.TTFT)}; {moved} of KV are moved as without a "
                "cache."
                if cell["arm"] == PREFILL
                else f"If decode has them as well, {cell['kv_blocks_skipped']:g} blocks are skipped, {moved} are "
                f"moved, and {_earlier('token 2', cell, Figure.TTFT_DECODE)} than without any cache."
            )
    return " ".join(sentences) or "No request was completed both with and without a cache."


def _earlier(token: str, cell: Figures, figure: Figure) -> str:
    saved = Interval.from_dict(cell["saved_ms"][figure.value])
    text = saved.text(form="")
    return f"{token} comes {text} earlier" if saved.sign else f"{token} comes not measurably earlier ({text})"


_LOOKS: Looks = {
    NONE: {"label": "no reuse", "color": PALETTE[6], "markersize": 11, "markerfacecolor": "white"},
    PREFILL: {"label": "cached on prefill", "color": PALETTE[0]},
    BOTH: {"label": "cached on prefill and decode", "color": PALETTE[1]},
}
"""Where two arms are the same, the smaller mark leaves the larger one visible."""


def _blocks(cells: Sequence[Figures], predicted: Sequence[Figures]) -> list[Picture | TableBlock]:
    """``ttft`` and ``ttft_decode``, and the bytes per request, over the shared length, beside what arithmetic gives."""
    length, lens = cells[0]["prompt_len"], sorted({cell["shared_len"] for cell in cells})
    axis: Any = {"ticks": lens, "xlim": (-0.04 * length, 1.04 * length), "ylim": (0, None)}
    records = [
        {
            **cell,
            "cached": {NONE: "neither"}.get(cell["arm"], cell["arm"]),
            "bytes": cell["kv_bytes"] // cell["n"],
            "megabytes": cell["kv_bytes"] / cell["n"] / 1e6,
            "equal": cell["kv_bytes"] == cell["kv_bytes_expected"] == cell["kv_bytes_arithmetic"],
        }
        for cell in cells
    ]

    def dashed(column: str, label: str | None, factor: float) -> Mark:
        look = {"color": FAINT, "linewidth": 1.2, "linestyle": DASHED, "label": label}
        return Mark(predicted, "shared_len", column, look=look, kind="steps", factor=factor)

    panels: list[Panel] = []
    for column, y, title, lines in (
        ("ttft_ms", "time, ms", "ttft: token 1", [dashed("ttft_ms.prefill", "arithmetic, with reuse", 1)]),
        ("ttft_decode_ms", "time, ms", "ttft_decode: token 2", []),
        ("megabytes", "KV moved per request, MB", "bytes",
         [dashed("kv_bytes.none", None, 1e-6), dashed("kv_bytes.both", "arithmetic", 1e-6)]),
    ):  # fmt: skip
        marks = [*lines, Mark(records, "shared_len", column, "arm", _LOOKS)]
        legend = "" if len(panels) == 1 else "lower left"
        panels.append(Panel(marks, "shared with an earlier request, tokens", y, title, legend=legend, **axis))
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
    return [
        Picture(
            "ttft_over_shared",
            f"TTFT and bytes moved over the shared length (prompts of {length} tokens)",
            "Mean with 95 % intervals. Dashed: the prefill of the arm without reuse, scaled by the FLOPs of the tokens "
            "that are left to compute, plus everything else as it is; and (blocks of the prompt − blocks that decode "
            "has) × bytes of a block. Both caches save the same computation; token 2 also waits for what has to be "
            "moved. What only prefill has cached is moved like what it computes.",
            panels,
            columns=3,
        ),
        table("All cells", records, columns, caption),
    ]
