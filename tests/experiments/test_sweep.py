"""A sweep: its file, its cells, its arithmetic, a run against a service; and `pdserve plot` of what it wrote."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any

import pytest

from experiments.run_folder import RunFolder
from experiments.runner import redraw, run_experiment
from experiments.sweep import Sweep, SweepOptions
from pdserve.core.errors import InvalidRequest
from tests.experiments.quiet import Quiet
from tests.local_cluster import LocalCluster


def read(tmp_path: Path, text: str) -> SweepOptions:
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    return SweepOptions.read(path)


def test_the_matrix_keeps_a_service_for_its_cells(tmp_path: Path) -> None:
    options = read(
        tmp_path,
        "transports: [shm, tcp]\noverlaps: [layer]\nprompt_lens: [64, 128]\nworkers: [1P1D, 2P1D]\nrates: [2, 0]\n"
        "repeats: 3\nservice: {engine.num_blocks: 64}\n",
    )
    cells = Sweep(options).cells(None)
    assert len(cells) == 16
    assert [cell.name for cell in cells[:4]] == [
        "1P1D/shm/layer/64/idle", "1P1D/shm/layer/64/rate-2", "1P1D/shm/layer/128/idle", "1P1D/shm/layer/128/rate-2"
    ]  # fmt: skip
    changes = sum(a.service != b.service for a, b in itertools.pairwise(cells))
    assert changes == 3  # four services
    assert cells[-1].service == {"engine.num_blocks": 64, "cluster.prefill": 2, "cluster.decode": 1,
                                 "transfer.transport": "tcp", "transfer.overlap": "layer"}  # fmt: skip
    assert cells[0].work == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("transport: [shm]", "transport: unknown key; known are duration_s, "),
        ("transports: [smoke]", "transports.0: Input should be one of auto, shm"),
        ("prompt_lens: [64, x]", "prompt_lens.1: Input should be a valid integer"),
        ("prompt_lens: []", "prompt_lens: "),
        ("prompt_lens: 64", "prompt_lens: "),
        ("rates: [-1]", "rates.0: "),
        ("rates: [2, 2.0]", "rates: a value is given twice"),
        ("rates: [2]", "slo: auto goes by idle requests; add 0 to rates"),
        ("workers: [3D]", "workers: '3D' is not a number"),
        ("repeats: 0", "repeats: "),
        ("slo: speed=3", "slo: 'speed' is none of"),
        ("service: {engine.blocks: 3}", "service: engine.blocks: unknown key"),
        ("service: {cluster.prefill: 3}", "service: cluster.prefill is set by workers"),
        ("- 3", "must be a mapping"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_wrong_file_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        read(tmp_path, text)
    assert str(raised.value).startswith(f"{tmp_path}/sweep.yaml: {message}")


def test_the_command_reports_a_missing_file(tmp_path: Path, pdserve: Any) -> None:
    ran = pdserve("experiment", "sweep", str(tmp_path / "none.yaml"))
    assert ran.code == 2
    assert "none.yaml: cannot be read" in ran.err
    assert "FILE: give the file" in pdserve("experiment", "sweep").err


def test_a_sweep_of_a_running_service_and_its_plots(tmp_path: Path, pdserve: Any, tcp_service: LocalCluster) -> None:
    options = read(
        tmp_path, "prompt_lens: [32, 70]\nrates: [0, 5]\nrepeats: 2\npairs_s: 0\noutput_len: 4\nduration_s: 1\n"
    )
    folder = RunFolder.create(tmp_path, "sweep", options.model_dump(mode="json"))
    outcome = run_experiment(Sweep(options), folder, Quiet(), target=tcp_service.target)
    several = Sweep(SweepOptions(overlaps=("layer", "none")))
    with pytest.raises(InvalidRequest, match="overlaps: a running service has one"):
        run_experiment(several, RunFolder.create(tmp_path, "other", {}), Quiet(), target=tcp_service.target)
    assert outcome.failures == []
    assert outcome.summary is not None
    names = [cell["cell"] for cell in outcome.summary["cells"]]
    assert names == [f"1P1D/tcp/as-configured/{length}/{load}" for length in (32, 70) for load in ("idle", "rate-5")]
    loaded = outcome.summary["cells"][1]
    assert loaded["slo_ms"]["ttft"] > 0
    assert loaded["n"] > 2
    assert redraw(Sweep(options), folder) == outcome.summary

    plots = tmp_path / "plots"
    again = pdserve("plot", str(folder.path), str(folder.path), "--format", "png,svg,pdf,csv", "--output", str(plots))
    assert again.code == 0, again.err
    stems = ("exposed_over_length", "goodput_over_rate", "stage_cdfs")
    assert {path.name for path in plots.iterdir()} == {f"{s}.{f}" for s in stems for f in ("png", "svg", "pdf", "csv")}
    assert (plots / "exposed_over_length.svg").read_text().lstrip().startswith("<?xml")
    assert (plots / "exposed_over_length.pdf").read_bytes().startswith(b"%PDF")
    with (plots / "exposed_over_length.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [int(each["prompt_len"]) for each in table[:2]] == [32, 70]
    cells = [cell for cell in outcome.summary["cells"] if cell["load"] == "idle"]
    assert float(table[0]["exposed_ms"]) == pytest.approx(cells[0]["exposed_ms"]["mean"], abs=1e-5)
    assert table[0]["series"].startswith("sweep/")
    wrong = pdserve("plot", str(folder.path), "--format", "bmp")
    assert "format: 'bmp' is none of png" in wrong.err


def test_nothing_to_plot_is_an_error(tmp_path: Path, pdserve: Any) -> None:
    folder = RunFolder.create(tmp_path, "bench", {})
    ran = pdserve("plot", str(folder.path), "--output", str(tmp_path / "plots"))
    assert ran.code == 2
    assert "nothing to draw" in ran.err
