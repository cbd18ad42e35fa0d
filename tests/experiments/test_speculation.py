"""The experiment about speculation: summary and report on data made by hand, and a run with a small model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.scheduling.speculation import DraftContext
from experiments.engine_alone.guessing import PlantedDrafter
from experiments.run_folder import FinishedCell, RunData
from experiments.speculation import Speculation, SpeculationOptions
from pdserve.core.errors import InvalidRequest
from tests.experiments.quiet import holds, judged, measured

KINDS = [(0.5, "random"), (None, "repeating"), (None, "random")]


def cell(
    batch: int, rates: Sequence[Mapping[str, float]], kinds: Sequence[tuple[float | None, str]] = KINDS
) -> FinishedCell:
    """A finished cell whose arms have the same ``rates`` for all kinds of guesses, a repeat each."""
    samples = [
        {"repeat": repeat, "batch": batch, "right": right, "text": text,
         **{arm: {"rate": rate, "drafts": 0 if arm == "off" else 40, "accepted": 10} for arm, rate in each.items()}}
        for repeat, each in enumerate(rates)
        for right, text in kinds
    ]  # fmt: skip
    facts = {"samples": samples, "device": "cpu", "dtype": "float32", "core": 0}
    return FinishedCell(f"batch/{batch}", {"batch": batch}, 1.0, facts)


def test_figures_and_where_speculation_pays() -> None:
    cells = (
        cell(1, [{"off": 20.0, "auto": 30.0, "always": 40.0}] * 4, [(0.0, "random"), (1.0, "random")]),
        cell(4, [{"off": 20.0, "auto": 19.0, "always": 10.0}] * 4, [(0.0, "random")]),
        cell(16, [{"off": 20.0, "auto": 19.0, "always": 10.0}] * 4, [(0.0, "random")]),
    )
    cells[1].facts["samples"] += cell(4, [{"off": 20.0, "auto": 30.0, "always": 30.0}] * 4, [(1.0, "random")]).facts[
        "samples"
    ]
    summary, report = judged(
        Speculation, RunData("speculation", {}, {}, cells, ()), acceptances=(0.0, 1.0), output_len=11
    )
    assert summary["pays_from"] == {"1": 0.0, "4": 0.5, "16": None}
    holds(
        summary["guesses"][0],
        {"batch": 1, "right": 0.0, "auto.ratio.mean": 1.5, "always.ratio.mean": 2.0, "auto.accepted": 0.25,
         "auto.drafts_per_token": 4.0, "off_tokens_per_s.mean": 20.0},
    )  # fmt: skip
    for told in ("always pays", "pays from 50% on", "never pays", "2.00"):
        assert told in report.answer, told


def test_what_is_refused() -> None:
    for given, message in (
        ({"batches": ()}, "--batches"),
        ({"batches": (0,)}, "--batches"),
        ({"acceptances": ()}, "--acceptances"),
        ({"acceptances": (1.5,)}, "--acceptances"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            Speculation(SpeculationOptions.choose(given)).cells(None)


def test_planted_guesses_are_right_as_often_as_planned() -> None:
    answer = [number % 7 for number in range(2000)]
    for right in (0.0, 0.3, 1.0):
        [guesses] = PlantedDrafter({"r": [1, 2, *answer]}, right, 10).propose([DraftContext("r", [1, 2], [], 2000)])
        assert sum(a == b for a, b in zip(guesses, answer, strict=True)) == pytest.approx(2000 * right, abs=90)
    drafter = PlantedDrafter({"r": [1, 2, *answer]}, 1.0, 10)
    assert drafter.propose([DraftContext("r", [1, 2, *answer[:5]], [], 3)]) == [answer[5:8]]


def test_a_run(tmp_path: Path) -> None:
    options = SpeculationOptions.choose(
        {"model": "tiny", "batches": (1, 3), "acceptances": (0.0, 1.0), "output_len": 20, "repeats": 2}
    )
    summary, _, progress = measured(Speculation(options), tmp_path)
    assert [each.name for each in progress.cells] == ["batch/1", "batch/3"]
    rows: dict[tuple[Any, ...], Any] = {(row["batch"], row["right"], row["text"]): row for row in summary["guesses"]}
    assert len(rows) == 8
    for batch in (1, 3):
        right, wrong = rows[batch, 1.0, "random"], rows[batch, 0.0, "random"]
        assert right["always"]["accepted"] > 0.9
        assert wrong["always"]["accepted"] == 0.0
        assert wrong["always"]["drafts_per_token"] > 2
        assert rows[batch, None, "repeating"]["always"]["drafts_per_token"] > 0
