"""The prefix experiment: its figures against arithmetic, and a run against a real service."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from checkpoints.arithmetic import ModelArithmetic
from experiments.prefix import ARMS, BOTH, NONE, PREFILL, Prefix, PrefixOptions
from experiments.report.page import Report
from experiments.run_folder import FinishedCell, RequestRow, RunData
from pdserve import Client
from pdserve.core.errors import InvalidRequest
from tests.experiments.quiet import holds, judged, measured, told
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


def found(run: RunData) -> tuple[dict[str, Any], Report]:
    """The summary, with its ``cells`` by shared length and arm, and the report."""
    summary, report = judged(Prefix, run)
    assert json.loads(json.dumps(summary)) == summary
    return {**summary, "cells": {f"{each['shared_len']}-{each['arm']}": each for each in summary["cells"]}}, report


def changed(**changes: Any) -> RunData:
    """The run with the second row of arm ``both`` at 40 shared tokens changed."""
    place = f"40/{LENGTH}", BOTH, 1
    rows = (
        msgspec.structs.replace(each, **changes) if (each.cell, each.arm, each.index) == place else each
        for each in RUN.rows
    )
    return replace(RUN, rows=tuple(rows))


def test_every_key_of_a_cell() -> None:
    summary, _ = found(RUN)
    assert len(summary["cells"]) == 9
    two_blocks = 2 * 2 * BLOCK_BYTES
    figures = {"cell": f"40/{LENGTH}", "prompt_len": LENGTH, "n": 2, "errors": 0, "ttft_ms.mean": 62.5,
               "ttft_decode_ms.mean": 82.5, "saved_ms.ttft.median": 48.0, "saved_ms.ttft_decode.median": 48.0,
               "prefill_ms": 100.5, "kv_exposed_ms": 3.0, "prefill_cached_tokens": 32, "computed_tokens": 32,
               "kv_blocks_skipped": 2, "kv_blocks_sent": 2, "kv_bytes": two_blocks, "kv_bytes_expected": two_blocks,
               "kv_bytes_arithmetic": two_blocks, "reuse_as_arranged": True, "tokens_equal": True}  # fmt: skip
    holds(summary["cells"]["40-both"], figures)
    # A prompt that is shared as a whole moves nothing, and computes its last block.
    whole = {"computed_tokens": 16, "kv_bytes": 0, "kv_bytes_arithmetic": 0, "reuse_as_arranged": True}
    holds(summary["cells"]["64-both"], whole)
    others = {"failed": [], "cells.40-none.saved_ms": {}, "cells.40-prefill.kv_bytes": 2 * 4 * BLOCK_BYTES}
    holds(summary, others)


def test_the_prediction_scales_the_prefill_by_the_flops_that_are_left() -> None:
    summary, _ = found(RUN)
    left = MODEL.prefill(LENGTH, 512, 32).flops / MODEL.prefill(LENGTH, 512).flops
    figures = {"40-prefill.predicted_ttft_ms": 110.5 - 100.5 * (1 - left), "40-none.predicted_ttft_ms": 110.5}
    holds(summary["cells"], figures, abs=1e-4)
    lines = summary["predicted"]
    assert [(line["shared_len"], line["kv_bytes"][BOTH] // BLOCK_BYTES) for line in lines] == [
        (0, 4), (16, 3), (32, 2), (48, 1), (64, 0),
    ]  # fmt: skip
    assert {line["kv_bytes"][arm] for line in lines for arm in (NONE, PREFILL)} == {4 * BLOCK_BYTES}
    times_ms = [line["ttft_ms"][PREFILL] for line in lines]
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
    (failed,) = found(changed(**changes))[0]["failed"]
    assert failed.startswith(f"40/{LENGTH}, arm both")
    assert failure in failed


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_without_any_answer_fails_the_experiment(arm: str) -> None:
    failing = RequestRow(cell=f"40/{LENGTH}", arm=arm, repeat=0, index=0, error="WorkerLost: gone")
    run = replace(RUN, rows=(*(each for each in RUN.rows if (each.cell, each.arm) != (failing.cell, arm)), failing))
    summary, report = found(run)
    assert summary["failed"] == [f"40/{LENGTH}, arm {arm}: 1 request failed, first with WorkerLost: gone"]
    assert report.answer


def test_reuse_that_did_not_happen_is_a_caveat() -> None:
    summary, report = found(changed(prefill_cached_tokens=0))
    holds(summary, {"cells.40-both.reuse_as_arranged": False, "failed": []})
    assert told(report.caveats, "another worker")


def test_an_unknown_model_has_no_predicted_time(tmp_path: Path) -> None:
    facts = {key: value for key, value in FACTS.items() if key != "arithmetic"}
    run = replace(RUN, cells=tuple(msgspec.structs.replace(each, facts=facts) for each in RUN.cells))
    summary, report = found(run)
    assert {each["predicted_ttft_ms"] for each in summary["cells"].values()} == {None}
    assert told(report.caveats, "No prediction")
    report.save(tmp_path)


def test_the_report_states_what_was_saved(tmp_path: Path) -> None:
    rows = tuple(row(shared, arm, index) for shared in CACHED for index in range(6) for arm in ARMS)
    _, report = found(replace(RUN, rows=rows))
    computed = "With 40 of 64 tokens cached on prefill, 32 tokens are computed"
    assert told([report.answer], computed, "50.00 ms [50.00, 50.00] earlier", "2 blocks are skipped")
    report.save(tmp_path)
    assert {path.stem for path in tmp_path.glob("*.png")} == {"ttft_over_shared"}


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
