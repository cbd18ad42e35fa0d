"""The prefix experiment: its figures against arithmetic, and a run against a real service."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from experiments.engine_alone.arithmetic import ModelArithmetic
from experiments.prefix import ARMS, BOTH, NONE, PREFILL, Prefix, PrefixOptions
from experiments.report.drawing import Picture, TableBlock
from experiments.run_folder import FinishedCell, RequestRow, RunData
from pdserve import Client
from pdserve.core.errors import InvalidRequest
from tests.experiments.quiet import measured
from tests.local_cluster import local_cluster

BLOCK, LENGTH = 16, 64
BYTES_PER_TOKEN = 100
BLOCK_BYTES = BLOCK * BYTES_PER_TOKEN
MODEL = ModelArithmetic(1000, 300, 8, 4, 5000, (None, None), 2)
FACTS = {"block_size": BLOCK, "kv_bytes_per_token": BYTES_PER_TOKEN, "arithmetic": MODEL.to_dict()}
CACHED = {0: 0, 40: 32, 64: 48}  # whole blocks, but never the last token
HELD = {0: 0, 40: 2, 64: 4}
TTFT_MS = {NONE: 110.0, PREFILL: 60.0, BOTH: 62.0}


def cell(shared: int, **facts: Any) -> FinishedCell:
    return FinishedCell(f"{shared}/{LENGTH}", {"shared_len": shared, "prompt_len": LENGTH}, 1.0, {**FACTS, **facts})


def row(shared: int, arm: str, index: int) -> RequestRow:
    skipped = HELD[shared] if arm == BOTH else 0
    ttft_ms = TTFT_MS[arm] + index
    return RequestRow(
        cell=f"{shared}/{LENGTH}",
        arm=arm,
        repeat=0,
        index=index,
        prompt_tokens=LENGTH,
        output_tokens=8,
        token_hash=f"tokens {index}",
        ttft_ms=ttft_ms,
        ttft_decode_ms=ttft_ms + 20.0,
        stages_ms={"ttft": {"prefill": 100.0 + index}, "ttft_decode": {"kv_exposed": 3.0}},
        block_size=BLOCK,
        kv_bytes=(4 - skipped) * BLOCK_BYTES,
        kv_bytes_expected=(4 - skipped) * BLOCK_BYTES,
        kv_blocks_sent=4 - skipped,
        kv_blocks_skipped=skipped,
        prefill_cached_tokens=CACHED[shared] if arm != NONE else 0,
    )


RUN = RunData(
    "prefix",
    {},
    {},
    tuple(cell(shared) for shared in CACHED),
    tuple(row(shared, arm, index) for shared in CACHED for index in range(2) for arm in ARMS),
)


def summary_of(run: RunData) -> dict[str, Any]:
    found = Prefix(PrefixOptions()).summarise(run)
    assert json.loads(json.dumps(found)) == found
    return found


def entry(summary: dict[str, Any], shared: int, arm: str) -> dict[str, Any]:
    [found] = [each for each in summary["cells"] if (each["shared_len"], each["arm"]) == (shared, arm)]
    return dict(found)


def changed(change: Callable[[RequestRow], RequestRow]) -> RunData:
    """The run with the second row of arm ``both`` at 40 shared tokens changed."""
    place = f"40/{LENGTH}", BOTH, 1
    return replace(
        RUN, rows=tuple(change(each) if (each.cell, each.arm, each.index) == place else each for each in RUN.rows)
    )


def test_every_key_of_a_cell() -> None:
    summary = summary_of(RUN)
    assert summary["failed"] == []
    assert len(summary["cells"]) == 9
    both = entry(summary, 40, BOTH)
    assert (both["cell"], both["prompt_len"], both["n"], both["errors"]) == (f"40/{LENGTH}", LENGTH, 2, 0)
    assert both["ttft_ms"]["mean"] == 62.5
    assert both["ttft_decode_ms"]["mean"] == 82.5
    assert both["saved_ms"]["ttft"]["median"] == both["saved_ms"]["ttft_decode"]["median"] == 48.0
    assert (both["prefill_ms"], both["kv_exposed_ms"]) == (100.5, 3.0)
    assert (both["prefill_cached_tokens"], both["computed_tokens"]) == (32, 32)
    assert (both["kv_blocks_skipped"], both["kv_blocks_sent"]) == (2, 2)
    assert both["kv_bytes"] == both["kv_bytes_expected"] == both["kv_bytes_arithmetic"] == 2 * 2 * BLOCK_BYTES
    assert both["reuse_as_arranged"]
    assert both["tokens_equal"]
    assert entry(summary, 40, NONE)["saved_ms"] == {}
    assert entry(summary, 40, PREFILL)["kv_bytes"] == 2 * 4 * BLOCK_BYTES


def test_a_prompt_shared_as_a_whole_moves_nothing_and_computes_its_last_block() -> None:
    both = entry(summary_of(RUN), 64, BOTH)
    assert (both["computed_tokens"], both["kv_bytes"], both["kv_bytes_arithmetic"]) == (16, 0, 0)
    assert both["reuse_as_arranged"]


def test_the_prediction_scales_the_prefill_by_the_flops_that_are_left() -> None:
    summary = summary_of(RUN)
    left = MODEL.prefill(LENGTH, 512, 32).flops / MODEL.prefill(LENGTH, 512).flops
    assert entry(summary, 40, PREFILL)["predicted_ttft_ms"] == pytest.approx(110.5 - 100.5 * (1 - left), abs=1e-4)
    assert entry(summary, 40, NONE)["predicted_ttft_ms"] == 110.5
    assert [line["shared_len"] for line in summary["predicted"]] == [0, 16, 32, 48, 64]
    assert [line["kv_bytes"][BOTH] // BLOCK_BYTES for line in summary["predicted"]] == [4, 3, 2, 1, 0]
    assert {line["kv_bytes"][arm] for line in summary["predicted"] for arm in (NONE, PREFILL)} == {4 * BLOCK_BYTES}
    times_ms = [line["ttft_ms"][PREFILL] for line in summary["predicted"]]
    assert times_ms[0] > times_ms[1] > times_ms[2] > times_ms[3] == times_ms[4]


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({"token_hash": "others"}, "tokens differ"),
        ({"kv_bytes": 1}, "bytes moved differ"),
        ({"kv_blocks_skipped": 3}, "did not fall by the skipped blocks"),
        ({"error": "WorkerLost: gone"}, "1 request failed, first with WorkerLost: gone"),
    ],
)
def test_what_fails_the_experiment(changes: dict[str, Any], failure: str) -> None:
    failed = summary_of(changed(lambda row: msgspec.structs.replace(row, **changes)))["failed"]
    assert len(failed) == 1
    assert failed[0].startswith(f"40/{LENGTH}, arm both")
    assert failure in failed[0]


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_without_any_answer_fails_the_experiment(arm: str) -> None:
    failing = RequestRow(cell=f"40/{LENGTH}", arm=arm, repeat=0, index=0, error="WorkerLost: gone")
    run = replace(RUN, rows=(*(each for each in RUN.rows if (each.cell, each.arm) != (failing.cell, arm)), failing))
    summary = summary_of(run)
    assert summary["failed"] == [f"40/{LENGTH}, arm {arm}: 1 request failed, first with WorkerLost: gone"]
    assert Prefix(PrefixOptions()).report(run, summary).answer


def test_reuse_that_did_not_happen_is_a_caveat() -> None:
    run = changed(lambda row: msgspec.structs.replace(row, prefill_cached_tokens=0))
    summary = summary_of(run)
    assert not entry(summary, 40, BOTH)["reuse_as_arranged"]
    assert summary["failed"] == []
    report = Prefix(PrefixOptions()).report(run, summary)
    assert any("another worker" in caveat for caveat in report.caveats)


def test_an_unknown_model_has_no_predicted_time(tmp_path: Path) -> None:
    facts = {key: value for key, value in FACTS.items() if key != "arithmetic"}
    run = replace(RUN, cells=tuple(msgspec.structs.replace(each, facts=facts) for each in RUN.cells))
    summary = summary_of(run)
    assert {each["predicted_ttft_ms"] for each in summary["cells"]} == {None}
    report = Prefix(PrefixOptions()).report(run, summary)
    assert any("No prediction" in caveat for caveat in report.caveats)
    report.save(tmp_path)


def test_the_report_states_what_was_saved(tmp_path: Path) -> None:
    rows = tuple(row(shared, arm, index) for shared in CACHED for index in range(6) for arm in ARMS)
    run = replace(RUN, rows=rows)
    report = Prefix(PrefixOptions()).report(run, summary_of(run))
    assert "With 40 of 64 tokens cached on prefill, 32 tokens are computed" in report.answer
    assert "50.00 ms [50.00, 50.00] earlier" in report.answer
    assert "2 blocks are skipped" in report.answer
    assert [type(block) for block in report.blocks] == [Picture, Picture, TableBlock]
    report.save(tmp_path)
    assert {path.stem for path in tmp_path.glob("*.png")} == {"ttft_over_shared", "bytes_over_shared"}


def test_a_run_against_a_service(tmp_path: Path) -> None:
    options = PrefixOptions.choose({"model": "tiny", "prompt_len": 70, "shared_lens": "0,40,70", "repeats": 2})
    settings = {"model": {"path": "tiny", "dtype": "float32"}, "engine": {"block_size": BLOCK, "num_blocks": 64}}
    with local_cluster(settings, decode=2) as cluster:
        summary, _, progress = measured(Prefix(options), tmp_path, cluster.target)
        with Client(cluster.target) as client:
            too_long = PrefixOptions.choose({"prompt_len": client.status().context_length})
            with pytest.raises(InvalidRequest, match="--prompt-len"):
                Prefix(too_long).cells(client.status())
    assert progress.steps == 3 * 2
    cells = {(each["shared_len"], each["arm"]): each for each in summary["cells"]}
    assert all(each["n"] == 2 and each["reuse_as_arranged"] for each in cells.values())
    assert {key: each["computed_tokens"] for key, each in cells.items() if key[1] == PREFILL} == {
        (0, PREFILL): 70, (40, PREFILL): 38, (70, PREFILL): 6,
    }  # fmt: skip
    assert {key: each["kv_blocks_skipped"] for key, each in cells.items() if key[1] == BOTH} == {
        (0, BOTH): 0, (40, BOTH): 2, (70, BOTH): 4,
    }  # fmt: skip
