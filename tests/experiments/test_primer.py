"""The primer: its figures against arithmetic, and a run with the tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoints.arithmetic import ModelArithmetic
from experiments.engine_alone.program import Task, measure_alone
from experiments.engine_alone.steps import StepCase
from experiments.primer import Primer, PrimerOptions, doubling_batch, fitted_line
from experiments.report.drawing import Picture
from experiments.run_folder import FinishedCell, RunData
from pdserve.core.errors import ModelError
from tests.experiments.quiet import measured

MODEL = ModelArithmetic(1000, 300, 8, 4, 5000, (None, None), 2)
ENGINE = {
    "device": "cpu",
    "dtype": "bfloat16",
    "core": 0,
    "threads": 1,
    "chunk": 512,
    "arithmetic": MODEL.to_dict(),
    "last_cache_bytes": 1,
}
CEILINGS = [{"flops_per_s": 2e9, "bytes_per_s": 1e9}, {"flops_per_s": 4e9, "bytes_per_s": 2e9}]


def cell(name: str, samples: list[dict[str, Any]], **parameters: Any) -> FinishedCell:
    facts = {"engine": ENGINE, "ceilings": CEILINGS, "samples": samples}
    return FinishedCell(name, {"model": "m", "device": "cpu", **parameters}, 1.0, facts)


CELLS = (
    cell(
        "cache",
        [
            {"repeat": 0, "arm": "with", "times_s": [0.2, 0.1], "token_ids": [1, 2]},
            {"repeat": 0, "arm": "without", "times_s": [0.3, 0.3], "token_ids": [1, 2]},
            {"repeat": 1, "arm": "without", "times_s": [0.5, 0.7], "token_ids": [3, 4]},
            {"repeat": 1, "arm": "with", "times_s": [0.2, 0.2], "token_ids": [3, 5]},
        ],
        part="cache", prompt_len=4, output_len=2,
    ),
    cell(
        "profile",
        [{"repeat": 0, "prefill_s": 0.4, "decode_s": 0.6}, {"repeat": 1, "prefill_s": 0.6, "decode_s": 1.0}],
        part="profile", prompt_len=10, output_len=5,
    ),
    cell(
        "prefill",
        [{"repeat": 0, "tokens": 8, "time_s": 0.5}, {"repeat": 1, "tokens": 8, "time_s": 0.25}],
        part="prefill", lengths=[8],
    ),
    cell(
        "decode/16",
        [{"repeat": r, "batch": b, "time_s": 0.1 + 0.02 * b} for r in range(2) for b in (1, 4, 16)],
        part="decode", context=16, batches=[1, 4, 16],
    ),
)  # fmt: skip


def summary_of(*cells: FinishedCell) -> dict[str, Any]:
    return Primer(PrimerOptions()).summarise(RunData("primer", {}, {}, cells, ()))


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    found = summary_of(*CELLS)
    assert json.loads(json.dumps(found)) == found
    return found


def test_the_machine_is_measured_in_all_cells(summary: dict[str, Any]) -> None:
    machine = summary["machine"]
    assert (machine["peak_gflops"]["mean"], machine["peak_gflops"]["n"]) == (3.0, 8)
    assert machine["read_gbs"]["mean"] == 1.5
    assert machine["ridge_flops_per_byte"] == machine["ridge_batch"] == 2.0
    assert machine["weight_bytes"] == 2 * (2 * 1000 + 5000)


def test_with_and_without_a_cache(summary: dict[str, Any]) -> None:
    cache = summary["kv_cache"]
    assert cache["total_s"]["with"]["mean"] == pytest.approx(0.35)
    assert cache["total_s"]["without"]["mean"] == pytest.approx(0.9)
    assert cache["speedup"]["mean"] == pytest.approx((0.6 / 0.3 + 1.2 / 0.4) / 2)
    assert cache["token_ms"] == {"with": [200.0, 150.0], "without": [400.0, 500.0]}
    assert cache["tokens_equal_pct"] == 75.0
    prefill = MODEL.prefill(4, 512)
    assert cache["gflop"]["with"] == pytest.approx((prefill + MODEL.decode(1, 4)).flops / 1e9, abs=1e-4)
    assert cache["gflop"]["without"] == pytest.approx((prefill + MODEL.prefill(5, 512)).flops / 1e9, abs=1e-4)
    assert cache["published_s"] == {"with": 0.334, "without": 4.05}


def test_the_profile_of_a_request(summary: dict[str, Any]) -> None:
    profile = summary["profile"]
    assert profile["total_s"]["prefill"]["mean"] == pytest.approx(0.5)
    assert profile["total_s"]["decode"]["mean"] == pytest.approx(0.8)
    assert profile["token_ms"]["prefill"]["mean"] == pytest.approx(50.0)
    assert profile["token_ms"]["decode"]["mean"] == pytest.approx(200.0)
    decode = sum(MODEL.decode(1, context).flops for context in range(10, 14))
    assert profile["phases"]["decode"]["gflop"] == pytest.approx(decode / 1e9, abs=1e-6)


def test_a_step_beside_its_roof(summary: dict[str, Any]) -> None:
    [prefill] = summary["prefill"]
    cost = MODEL.prefill(8, 512)
    assert prefill["time_ms"]["mean"] == pytest.approx(375.0)
    assert prefill["tokens_per_s"]["mean"] == pytest.approx(24.0)
    assert prefill["intensity"] == pytest.approx(cost.intensity, abs=1e-4)
    assert prefill["roof_ms"] == pytest.approx(1e3 * max(cost.flops / 3e9, cost.num_bytes / 1.5e9), abs=1e-5)
    assert prefill["added_ms"] == pytest.approx(1e3 * (cost.flops / 3e9 + cost.num_bytes / 1.5e9), abs=1e-5)
    assert prefill["bound"] == ("compute" if cost.intensity > 2 else "memory")
    assert [(step["batch"], step["context"]) for step in summary["decode"]] == [(1, 16), (4, 16), (16, 16)]
    assert summary["decode"][0]["bound"] == "memory"


def test_the_measured_ridge(summary: dict[str, Any]) -> None:
    [ridge] = summary["ridge"]
    assert ridge["doubling_batch"]["mean"] == pytest.approx(7.0)  # 0.1 + 0.02 n = 2 (0.1 + 0.02)
    assert ridge["half_saturation_batch"]["mean"] == pytest.approx(5.0)
    assert (ridge["fixed_ms"]["mean"], ridge["each_ms"]["mean"]) == pytest.approx((100.0, 20.0))
    assert ridge["saturated_tokens_per_s"]["mean"] == pytest.approx(50.0)
    assert ridge["formula_batch"] == 2.0
    assert ridge["predicted_doubling_batch"] == pytest.approx(MODEL.doubling_batch(16, 3e9, 1.5e9), abs=1e-3)


def test_a_step_that_never_doubles_has_no_doubling_batch() -> None:
    assert doubling_batch({1: 1.0, 8: 1.5}) is None
    assert fitted_line({1: 1.0}) is None
    assert fitted_line({1: 1.0, 2: 0.5}) is None
    flat = cell("decode/16", [{"repeat": 0, "batch": b, "time_s": 0.1} for b in (1, 4)],
                part="decode", context=16, batches=[1, 4])  # fmt: skip
    summary = summary_of(flat)
    [ridge] = summary["ridge"]
    assert (ridge["doubling_batch"], ridge["largest_batch"]) == (None, 4)
    report = Primer(PrimerOptions()).report(RunData("primer", {}, {}, (flat,), ()), summary)
    assert "none of the measured batches" in report.answer


def test_the_report_states_figures_and_caveats(summary: dict[str, Any], tmp_path: Path) -> None:
    report = Primer(PrimerOptions()).report(RunData("primer", {}, {}, CELLS, ()), summary)
    assert "not measurably less" in report.answer  # two repeats have no interval
    assert "from a batch of 7" in report.answer
    assert any("the first 75 %" in caveat for caveat in report.caveats)
    assert any("T4" in caveat for caveat in report.caveats)
    assert any("Fewer than 6 repeats" in caveat for caveat in report.caveats)
    pictures = {block.stem for block in report.blocks if isinstance(block, Picture)}
    assert pictures == {"kv_cache", "phases", "step_time", "saturation", "roofline"}
    report.save(tmp_path)
    assert {path.stem for path in tmp_path.glob("*.png")} == pictures


def test_an_interrupted_run_reports_what_it_has(tmp_path: Path) -> None:
    for each in CELLS:
        summary = summary_of(each)
        Primer(PrimerOptions()).report(RunData("primer", {}, {}, (each,), ()), summary).save(tmp_path)


async def test_an_error_of_the_engine_is_raised_here() -> None:
    task = Task(model="dummy:none", device="cpu", core=None, repeats=1, seed=0, cases=(StepCase(1, 8),))
    with pytest.raises(ModelError, match="unknown dummy"):
        await measure_alone(task, lambda message: None)


def test_a_run_with_the_tiny_model(tmp_path: Path) -> None:
    given = {"model": "tiny", "repeats": 1, "cache_prompt_len": 8, "cache_output_len": 6, "profile_prompt_len": 16,
             "profile_output_len": 4, "prefill_lens": "4,600", "batches": "1,3", "contexts": "16"}  # fmt: skip
    summary, folder, _ = measured(Primer(PrimerOptions.choose(given)), tmp_path)
    assert len(summary["kv_cache"]["token_ms"]["with"]) == 6
    assert [point["tokens"] for point in summary["prefill"]] == [4, 600]
    assert [point["batch"] for point in summary["decode"]] == [1, 3]
    assert summary["machine"]["peak_gflops"]["n"] == 4
    assert (folder / "roofline.png").is_file()
