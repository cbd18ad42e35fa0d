"""The folder of a run: what is written, what survives an interruption, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
import yaml

from experiments.link_sweep import LinkSweep, LinkSweepOptions
from experiments.run_folder import FinishedCell, RequestRow, RunData, RunFolder
from experiments.runner import redraw, run_experiment
from ops.cli.options import print_json
from pdserve.core.errors import InvalidRequest
from tests.experiments.quiet import Quiet


def row(cell: str, index: int = 0) -> RequestRow:
    stages_ms = {"ttft": {"prefill": 9.0}}
    return RequestRow(cell=cell, arm="pd", repeat=0, index=index, ttft_ms=12.5, itl_ms=(1.0, 2.0), stages_ms=stages_ms)


def finished(cell: str) -> FinishedCell:
    return FinishedCell(cell, {"prompt_len": 128}, 1.5, {"links": []})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run whose cell ``a`` has finished."""
    made = RunFolder.create(tmp_path, "x", {"pairs": 3})
    made.append(row("a"))
    made.finish_cell(finished("a"))
    return made


def cells_of(folder: RunFolder) -> list[str]:
    """The cells of its rows."""
    return [each.cell for each in folder.load().rows]


def test_what_is_written_is_read_again(folder: RunFolder) -> None:
    folder.write_environment({"seed": 1})
    folder.append(row("a", 1))
    folder.write_summary({"cells": []})
    run = RunFolder.open(folder.path).load()
    assert run == RunData("x", {"pairs": 3}, {"seed": 1}, (finished("a"),), (row("a"), row("a", 1)))
    assert run.rows_of("a", "pd") == [*run.rows]
    assert run.rows_of("a", "colocated") == []
    assert folder.summary == {"cells": []}


def test_pandas_reads_the_requests_in_one_line(folder: RunFolder) -> None:
    folder.append(RequestRow(cell="a", arm="colocated", repeat=0, index=0, error="NotReady: no worker"))
    frame = pandas.read_json(folder.path / "requests.jsonl", lines=True)
    assert set(frame.columns) == set(RequestRow.__struct_fields__)
    assert frame.groupby("arm").ttft_ms.mean()["pd"] == 12.5
    assert frame.error.notna().sum() == 1


def test_two_runs_of_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    assert len({RunFolder.create(tmp_path, "x", {}).path for _ in range(3)}) == 3


def test_an_interrupted_cell_is_measured_again(folder: RunFolder) -> None:
    folder.append(row("b"))
    assert folder.drop_unfinished() == 1
    assert cells_of(folder) == ["a"]
    assert folder.finished() == {"a"}


def test_spoiled_cells_are_dropped_and_the_others_arranged(folder: RunFolder) -> None:
    for name in ("b", "c"):
        folder.append(row(name))
        folder.finish_cell(finished(name))
    assert folder.drop_unfinished({"b"}) == 1
    assert cells_of(folder) == ["a", "c"]
    folder.finish_cell(finished("b"))
    folder.arrange(["b", "c"])  # a is of an earlier plan
    assert [each.cell for each in folder.load().cells] == ["a", "b", "c"]


def test_a_line_that_was_cut_off_is_dropped_and_a_damaged_one_named(folder: RunFolder) -> None:
    requests = folder.path / "requests.jsonl"
    for path in (requests, folder.path / "cells.jsonl"):
        with path.open("ab") as file:
            file.write(b'{"cell": "b", "ar')
    folder.drop_unfinished()
    folder.append(row("b"))
    assert cells_of(folder) == ["a", "b"]
    requests.write_bytes(b'{"cell": 3}\n' + requests.read_bytes())
    with pytest.raises(InvalidRequest, match=r"requests\.jsonl:1"):
        folder.load()


def test_the_output_of_a_command_with_one_run_is_that_run(tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path, "bench", {})
    assert RunFolder.open(tmp_path).path == first.path
    RunFolder.create(tmp_path, "bench", {})
    with pytest.raises(InvalidRequest, match=r"^A: .* has 2 runs; name one, such as"):
        RunFolder.open(tmp_path, "A")


def test_what_is_no_folder_or_not_finished_is_refused(tmp_path: Path, folder: RunFolder) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"not the folder of a run"):
        RunFolder.open(folder.path / "none")
    with pytest.raises(InvalidRequest, match="--resume"):
        _ = folder.summary
    with pytest.raises(InvalidRequest, match="output"):
        RunFolder.create(tmp_path / "file", "x", {})


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_not_written(tmp_path: Path, wrong: float) -> None:
    folder = RunFolder.create(tmp_path, "x", {})
    late = RequestRow(cell="a", arm="pd", repeat=0, index=0, itl_ms=(wrong,))
    writes: list[Callable[[], None]] = [
        lambda: folder.write_summary({"cells": [wrong]}),
        lambda: folder.write_environment({"ceiling_gbs": wrong}),
        lambda: folder.append(late),
        lambda: folder.finish_cell(FinishedCell("a", {}, 1.0, {"rate": wrong})),
        lambda: print_json({"figure": wrong}),
    ]
    for write in writes:
        with pytest.raises(ValueError, match="not JSON compliant"):
            write()
    assert {path.name for path in folder.path.iterdir()} == {"config.yaml"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"schema_version": 2}, "schema_version: is 2, and pdserve"),
        ({"schema_version": None}, "schema_version: is missing, and pdserve"),
        ({"options": {"speed": 3}}, "options.speed: bench of pdserve"),
        ({"options": {"slo": 3}}, "--slo: Input should be a valid string"),
    ],
)
def test_a_run_that_this_version_cannot_read_is_refused_by_every_command(
    tmp_path: Path, pdserve: Any, wrong: dict[str, Any], message: str
) -> None:
    folder = RunFolder.create(tmp_path, "bench", {})
    folder.append(row("load"))
    folder.write_summary({"x": 1.0})
    good = RunFolder.create(tmp_path, "bench", {})
    good.append(row("load"))
    good.write_summary({"x": 1.0})
    config = folder.path / "config.yaml"
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), **wrong}))
    for command in (
        ("report", str(folder.path)),
        ("compare", str(folder.path), str(good.path)),
        ("compare", str(good.path), str(folder.path)),
        ("plot", str(folder.path), "--output", str(tmp_path / "plots")),
    ):
        ran = pdserve(*command)
        assert ran.code == 2, command
        assert f"{config}: {message}" in ran.err
    config.write_text(config.read_text().replace("experiment: bench", "experiment: prefix"))
    ran = pdserve("experiment", "prefix", "--resume", str(folder.path))
    assert ran.code == 2
    assert f"error: {config}: " in ran.err


def test_a_run_with_an_option_that_is_fixed_now_is_reported_and_not_resumed(tmp_path: Path) -> None:
    saved = {**LinkSweepOptions().model_dump(mode="json"), "transport": "grpc_stream"}
    folder = RunFolder.create(tmp_path, "link-sweep", saved)
    sweep = LinkSweep.of(folder)
    redraw(sweep, folder)
    with pytest.raises(InvalidRequest, match=r"transport: is 'grpc_stream', and 'tcp' in every run .* not resumed"):
        run_experiment(sweep, folder, Quiet())


def test_files_are_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "x", {})
    folder.write_summary({"a": 1})
    folder.write_summary({"b": 2})
    assert json.loads((folder.path / "summary.json").read_text()) == {"b": 2}
    assert not list(folder.path.glob(".*"))
