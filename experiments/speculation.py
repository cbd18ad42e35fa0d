"""``pdserve experiment speculation``: what guesses of next tokens gain, over how often they are right and how many
requests decode together.

Every cell drives the engine's scheduler and model runner in a process of its own on one core or one GPU
(`experiments.engine_alone`). Planted guesses are those of a drafter that knows the answer, which was generated before,
and is right with a given probability for each token. All arms of a repeat have the same prompts."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from pydantic import Field

from experiments.engine_alone.program import Rates, Sample, Task, measure_alone
from experiments.engine_alone.steps import ALWAYS, AUTO, OFF, RANDOM, REPEATING, GuessCase
from experiments.experiment import Bench, Cell, Experiment, Options, option
from experiments.report.drawing import Mark, Panel, Picture, TableBlock, table
from experiments.report.page import Report, setup_of
from experiments.run_folder import Figures, RunData
from experiments.statistics import plain_mean
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import InvalidRequest
from pdserve.core.interval import MIN_VALUES, interval_text
from pdserve.core.request import counted

ARMS = OFF, AUTO, ALWAYS
_METHOD = (
    "the engine's scheduler and model runner alone; {0.repeats} repeats after one that is not counted, order reversed "
    "with each repeat; outputs of {0.output_len} tokens after prompts of {0.prompt_len}, tokens per second from the "
    "first token of the last request on; intervals are 95 % bootstrap, of the ratio in each repeat"
)


class SpeculationOptions(Options):
    """Options of `Speculation`."""

    batches: tuple[int, ...] = option((1, 4, 16), description="requests that decode together", quick=[1, 16])
    acceptances: tuple[float, ...] = option(
        (0.0, 0.3, 0.5, 0.7, 0.9, 1.0), description="how often planted guesses are right", quick=[0.0, 0.5, 1.0]
    )
    prompt_len: int = Field(256, ge=16, description="tokens of a prompt")
    output_len: int = option(128, ge=8, description="tokens of an output", quick=48)
    draft_model: str = Field("", description="also measure the guesses of this draft model (as engine.speculation)")
    device: Literal["cpu", "cuda"] = Field("cpu", description="one core, or the first GPU")
    repeats: int = option(5, ge=1, description="how often each case is measured", quick=2)


class Speculation(Experiment):
    """See the module."""

    name = "speculation"
    question = "How many more tokens per second do guesses of the next tokens give, and from when on do they pay?"
    options_type = SpeculationOptions
    needs_own = "speculation measures an engine of its own on this machine and uses no service"
    options: SpeculationOptions

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """A cell per batch size."""
        options = self.options
        if not options.batches or min(options.batches) < 1:
            raise InvalidRequest("--batches: give at least one, of at least one request each")
        if not options.acceptances or not all(0.0 <= each <= 1.0 for each in options.acceptances):
            raise InvalidRequest("--acceptances: give at least one, from 0 to 1 each")
        return [
            Cell(f"batch/{batch}", {"batch": batch}, None, self._task(batch).measurements) for batch in options.batches
        ]

    def _cases(self, batch: int) -> tuple[GuessCase, ...]:
        return (
            *(GuessCase(batch, right) for right in self.options.acceptances),
            *(GuessCase(batch, text=text) for text in (REPEATING, RANDOM)),
            *(GuessCase(batch, None, text, True) for text in (REPEATING, RANDOM) if self.options.draft_model),
        )

    def _task(self, batch: int) -> Task:
        options = self.options
        return Task(
            model=options.model,
            device=options.device,
            core=min(os.sched_getaffinity(0)) if options.device == "cpu" else None,
            repeats=options.repeats,
            seed=options.seed,
            arms=ARMS,
            guesses=self._cases(batch),
            prompt_len=options.prompt_len,
            output_len=options.output_len,
            draft_model=options.draft_model,
        )

    async def measure(self, bench: Bench) -> None:
        """Run the cell's task in an engine process, and keep what it writes as ``samples``."""
        task, samples = self._task(int(bench.cell.parameters["batch"])), list[dict[str, Any]]()

        def take(message: Rates | Sample) -> None:
            if isinstance(message, Sample):
                bench.advance(1)
                if message.repeat >= 0:
                    case = task.guesses[message.values.pop("guess")]
                    samples.append({"repeat": message.repeat, **msgspec.structs.asdict(case), **message.values})

        built = await measure_alone(task, take)
        bench.facts |= {"samples": samples, "device": built.device, "dtype": built.dtype, "core": built.core}

    def summarise(self, run: RunData) -> Figures:
        """``guesses``, one per batch size and kind of guesses: ``batch``, ``guesses``, ``right`` (planted; null for
        n-grams and a draft model), ``text``, ``by_model``, ``off_tokens_per_s``; by arm (``auto``, ``always``)
        ``ratio`` of the tokens per second to those without speculation, ``drafts_per_token``, and ``accepted`` (share
        of the drafts; null without any).
        ``pays_from``: by batch size the share of right guesses from which on verifying all of them pays, interpolated
        between those measured; 0 if it always does, null if it never does."""
        rows = []
        for cell in run.cells:
            batch, samples = int(cell.parameters["batch"]), cell.facts.get("samples", ())
            for case in self._cases(batch):
                fields = msgspec.structs.asdict(case)
                mine = [s for s in samples if fields.items() <= {"by_model": False, **s}.items()]
                if mine:
                    rows.append({**fields, "guesses": case.guesses, **self._figures(mine, batch)})
        pays_from = {
            str(batch): _pays_from([row for row in rows if row["batch"] == batch and row["right"] is not None])
            for batch in dict.fromkeys(row["batch"] for row in rows)
        }
        return {"experiment": self.name, "guesses": rows, "pays_from": pays_from, "failed": []}

    def _figures(self, samples: Sequence[Mapping[str, Any]], batch: int) -> Figures:
        tokens = batch * (self.options.output_len - 1) * len(samples)
        figures: Figures = {"off_tokens_per_s": self._mean(sample[OFF]["rate"] for sample in samples)}
        for arm in (AUTO, ALWAYS):
            drafts, accepted = (sum(sample[arm][key] for sample in samples) for key in ("drafts", "accepted"))
            figures[arm] = {
                "ratio": self._mean(sample[arm]["rate"] / sample[OFF]["rate"] for sample in samples),
                "drafts_per_token": round(drafts / tokens, 4),
                "accepted": round(accepted / drafts, 4) if drafts else None,
            }
        return figures

    def _mean(self, values: Any) -> Any:
        return plain_mean(list(values), self.options.seed)

    def report(self, run: RunData, summary: Figures) -> Report:
        """A picture of the ratios, and a table."""
        rows, options = summary["guesses"], self.options
        blocks: list[Picture | TableBlock] = []
        if planted := [{**row, "series": counted(row["batch"], "request")} for row in rows if row["right"] is not None]:
            blocks.append(_picture(planted))
        if rows:
            columns = (
                "requests | batch",
                "guesses",
                "tokens/s without | off_tokens_per_s:.1f",
                *(f"{arm}: times as many | {arm}.ratio:.2f" for arm in (AUTO, ALWAYS)),
                *(f"{arm}: verified per token | {arm}.drafts_per_token:.2f" for arm in (AUTO, ALWAYS)),
                "accepted, % | always.accepted*100:.0f",
            )
            caption = (
                "Auto verifies as many guesses as pay by the measured cost of rows; always, all. Repeating text: a "
                "prompt that repeats, and greedy tokens. Random text: a random prompt, and tokens at temperature 1."
            )
            blocks.append(table("Tokens per second", rows, columns, caption))
        machine = ", ".join(f"{run.fact(key)}" for key in ("device", "dtype") if run.fact(key))
        method = f"{_METHOD.format(options)}; {machine}"
        caveats = [
            options.repeats < MIN_VALUES and f"With fewer than {MIN_VALUES} repeats there are no intervals.",
            "The weights of dummy models are random. Their guesses are as often right as planted, but n-grams of their "
            "text say nothing about the text of a trained model.",
        ]
        return Report("Speculation", self.question, _answer(summary), setup_of(run, method), blocks, caveats, [])


def _differs(ratio: Figures) -> bool:
    """Whether the interval of a ratio is on one side of 1, or there is none because values are few."""
    return ratio["lo"] is None or ratio["lo"] > 1.0 or ratio["hi"] < 1.0


def _pays_from(rows: Sequence[Figures]) -> float | None:
    """The share of right guesses at which the ratio of `ALWAYS` passes 1. None also if no ratio differs from it."""
    if not any(_differs(row[ALWAYS]["ratio"]) for row in rows):
        return None
    points = sorted((float(row["right"]), float(row[ALWAYS]["ratio"]["mean"])) for row in rows)
    if not points or points[-1][1] < 1.0:
        return None
    if points[0][1] >= 1.0:
        return 0.0
    for (left, low), (right, high) in itertools.pairwise(points):
        if low < 1.0 <= high:
            return round(left + (right - left) * (1.0 - low) / (high - low), 3)
    return None


def _answer(summary: Figures) -> str:
    parts = []
    for batch, pays_from in summary["pays_from"].items():
        rows = [row for row in summary["guesses"] if str(row["batch"]) == batch]
        best = max((row for row in rows if row["right"] is not None), key=lambda row: float(row["right"]))
        ratio = best[ALWAYS]["ratio"]
        start = f"With {counted(int(batch), 'request')}, guesses of which {best['right']:.0%} are right give"
        if not _differs(ratio):
            parts.append(f"{start} no difference in tokens per second that could be measured.")
            continue
        when = "never pays" if pays_from is None else f"pays from {pays_from:.0%} on" if pays_from else "always pays"
        worst = min((row[AUTO]["ratio"] for row in rows), key=lambda each: float(each["mean"]))
        parts.append(
            f"{start} {interval_text(ratio, '.2f')} times the tokens per second; verifying all guesses {when}. With "
            f"those verified that pay, the worst case has {interval_text(worst, '.2f')} times the tokens per second."
        )
    return " ".join(parts) or "Nothing was measured."


def _picture(rows: Sequence[Figures]) -> Picture:
    return Picture(
        "speculation",
        "Tokens per second with guesses, over how often they are right",
        "Above 1, speculation pays. Left: only as many guesses are verified as pay. Right: all.",
        [
            Panel(
                [Mark([{**row, "ratio": row[arm]["ratio"]} for row in rows], "right", "ratio", "series")],
                "share of guesses that are right",
                "times the tokens per second",
                arm,
                xlim=(0, 1),
            )
            for arm in (AUTO, ALWAYS)
        ],
        columns=2,
        share={"sharey": True},
        legend=True,
    )
