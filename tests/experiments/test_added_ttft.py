"""The added-TTFT meter: its arithmetic on rows made by hand, and a run against a real service."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace as with_
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from experiments.added_ttft import AddedTtft, AddedTtftOptions, break_even_of
from experiments.modes import overlap_of
from experiments.report.drawing import Mark, Picture
from experiments.run_folder import FinishedCell, RequestRow, RunData, RunFolder
from experiments.runner import redraw, run_experiment
from pdserve.core.interval import Interval
from tests.experiments.quiet import Quiet, holds, judged, told
from tests.local_cluster import LocalCluster

CELL = "128/shm/none/idle"
SHAPE = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}
KV_BYTES = 2 * 64 * 2 * 2 * 2 * 16 * 4  # 128 tokens are two blocks of 64; keys and values, 2 layers, 2 heads of 16
TRANSFER = {"exposed_ms": 2.5, "wire_ms": 1.0, "import_ms": 0.5, "request_to_ready_ms": 30.0, "ceiling_gbs": 0.02}
MOVED = {"transport": "shm", "kv_bytes": KV_BYTES, "kv_bytes_expected": KV_BYTES, "transfer": TRANSFER}
PARAMETERS = {"prompt_len": 128, "transport": "shm", "overlap": "none", "load": "idle"}
FACTS = {"fixed_ms": 0.25, "block_size": 64, "layout": SHAPE}
NOISY_MS = [-14.5, -5.7, 150.8, -2.3, 3.1, 8.2, 9.5, 97.1]
"""The differences of a quiet machine, of which two pairs were disturbed."""


def row(arm: str, index: int, stages_ms: dict[str, float], **changes: Any) -> RequestRow:
    values: dict[str, Any] = {
        "cell": CELL, "arm": arm, "repeat": 0, "index": index, "mode": arm, "request_id": f"{arm}-{index}",
        "ttft_ms": 30.0 if arm == "pd" else 28.0, "ttft_decode_ms": sum(stages_ms.values()),
        "stages_ms": {"ttft_decode": stages_ms, "ttft": {}}, "token_hash": "same", **(MOVED if arm == "pd" else {}),
    }  # fmt: skip
    return RequestRow(**{**values, **changes})


def run_of(rows: Sequence[RequestRow], environment: Any = None, **facts: Any) -> RunData:
    cell = FinishedCell(CELL, PARAMETERS, 1.0, {**FACTS, **facts})
    return RunData("added-ttft", {}, environment or {}, (cell,), tuple(rows))


def pairs(count: int = 6, **changes: Any) -> list[RequestRow]:
    pd = {"prefill": 20.0, "kv_exposed": 2.5, "decode_queue": 0.5, "first_decode": 9.0, "unattributed": 0.1}
    colocated = {"prefill": 19.0, "decode_queue": 0.25, "first_decode": 9.0, "unattributed": 0.05}
    return [
        each for index in range(count) for each in (row("pd", index, pd, **changes), row("colocated", index, colocated))
    ]


def summary_of(rows: Sequence[RequestRow]) -> dict[str, Any]:
    return judged(AddedTtft, run_of(rows))[0]


def answer_of(rows: Sequence[RequestRow], **facts: Any) -> str:
    environment = {"machine": {"cores": 2}, "service": {"workers": [{}, {}]}}
    return judged(AddedTtft, run_of(rows, environment, **facts))[1].answer


def noisy_pairs(added_ms: Sequence[float], others_cpu_s: Sequence[float | None] = (0.0,) * 8) -> list[RequestRow]:
    """Pairs that take 100 ms colocated, and so much longer disaggregated: three quarters of it in the prefill, the rest
    in kv_exposed, but for what a disturbance of 20 ms in decode_queue takes turns to add and to leave out."""
    rows = []
    for index, (extra_ms, others_s) in enumerate(zip(added_ms, others_cpu_s, strict=True)):
        swing_ms = 20.0 if index % 2 else -20.0
        colocated = {"prefill": 80.0, "first_decode": 20.0, "unattributed": 0.0}
        stages = {**colocated, "prefill": 80.0 + 0.75 * extra_ms, "kv_exposed": 0.25 * extra_ms - swing_ms,
                  "decode_queue": swing_ms}  # fmt: skip
        place = {"e2e_ms": 200.0, "others_cpu_s": others_s}
        rows += [row("pd", index, stages, **place), row("colocated", index, colocated, **place)]
    return rows


def test_causes_sum_to_the_added_latency_and_the_prediction_is_arithmetic() -> None:
    summary = summary_of(pairs())
    cell = summary["cells"][0]
    holds(
        cell,
        {
            "n": 6,
            "added_ttft_ms.ttft.median": 2.0,
            "added_ttft_ms.ttft_decode.median": 3.8,
            "explained_pct": 100 * (1 - 0.05 / 3.8),
            "predicted_ms": KV_BYTES / 0.02e9 * 1e3 + 0.25,
            "achieved_ms": 2.5,
            "wire_ms": 1.5,
            "kv_bytes": 6 * KV_BYTES,
            "kv_bytes_expected": 6 * KV_BYTES,
        },
        abs=0.01,
    )
    causes = {name: value for name, value in cell["causes_ms"].items() if value}
    assert causes == pytest.approx({"prefill": 1.0, "kv_exposed": 2.5, "decode_queue": 0.25})
    assert sum(causes.values()) + cell["unexplained_ms"] == pytest.approx(3.8)
    assert summary["failed"] == []
    (cell,) = summary_of(pairs(transfer={"exposed_ms": 2.5}))["cells"]
    assert cell["predicted_ms"] is None  # the link was not measured


def test_the_picture_of_causes_has_their_intervals_and_the_total() -> None:
    summary, report = judged(AddedTtft, run_of(noisy_pairs([4.0, 5.0, 6.0, 5.0, 4.5, 5.5] * 2, (0.0,) * 12)))
    (picture,) = (block for block in report.blocks if isinstance(block, Picture) and block.stem == "causes")
    (axes,) = picture.draw().axes
    assert [tick.get_text() for tick in axes.get_yticklabels()][-2:] == ["added", "disaggregated"]
    (mark,) = picture.panels[0].marks
    assert isinstance(mark, Mark)
    drawn = {bar["name"]: bar["ms"] for bar in mark.data}
    total = Interval.from_dict(summary["cells"][0]["added_ttft_ms"]["ttft_decode"])
    assert drawn["added"] == {"mean": total.value, "lo": total.lo, "hi": total.hi}
    assert drawn["prefill"]["lo"] < drawn["prefill"]["mean"] < drawn["prefill"]["hi"]
    assert any(line.get_segments() for line in axes.collections), "error bars"
    for bar, note in zip(mark.data, axes.texts, strict=True):
        assert note.xy[0] >= bar["from"] + (bar["ms"].get("hi") or bar["ms"]["mean"]), "no note lies on an interval"


def test_causes_sum_to_an_estimate_that_outliers_do_not_move() -> None:
    (cell,) = summary_of(noisy_pairs(NOISY_MS))["cells"]
    added, causes = cell["added_ttft_ms"]["ttft_decode"], cell["causes_ms"]
    middle_ms = sum((-2.3, 3.1, 8.2, 9.5)) / 4
    holds(added, {"median": 5.65, "mean": 30.775})
    assert added["differences_ms"] == pytest.approx(NOISY_MS)
    assert sum(causes.values()) + cell["unexplained_ms"] == pytest.approx(added["median"], abs=1e-3)
    assert sum(causes.values()) == pytest.approx(middle_ms, abs=1e-3)
    assert causes["prefill"] == pytest.approx(0.75 * middle_ms, abs=1e-3)
    assert abs(cell["unexplained_ms"]) < 1.1


def test_pairs_beside_other_load_are_marked_and_counted() -> None:
    others_s = [0.0, 0.2, 0.01, None, 0.06, 0.0, 0.0]  # of 400 ms, in both requests; a quarter of a core is 0.1 s
    rows = noisy_pairs([5.0] * 7, others_s)
    holds(summary_of(rows), {"cells.0.added_ttft_ms.ttft.disturbed": None})  # of one pair it is not known
    known = summary_of([each for each in rows if each.others_cpu_s is not None])
    holds(known, {"cells.0.added_ttft_ms.ttft.disturbed": [1, 3], "cells.0.added_ttft_ms.ttft.n": 6})


def test_a_headline_without_a_result_says_so_and_why() -> None:
    assert told(
        [answer_of(noisy_pairs(NOISY_MS, [0.0, 0.0, 0.2] + [0.0] * 5))],
        "no difference of token 2 could be measured (±101 ms, 95 %)",
        "disaggregation adds +2.00 ms [2.00, 2.00] (95 %) to token 1",
        "other processes used the machine beside 1 of 8 pairs",
        "2 workers, the gateway and the client share 2 cores",
        "What would help: a quiet machine, more cores, more time for pairs (--pairs-s).",
    )
    assert "largest causes" not in answer_of(noisy_pairs(NOISY_MS))
    clear = answer_of(pairs())
    causes = "The largest causes are kv_exposed (+2.50 ms) and prefill (+1.00 ms)"
    assert told([clear], "disaggregation adds +3.80 ms [3.80, 3.80] (95 %) to token 2", causes)
    assert "Reasons" not in clear
    few = answer_of(pairs(5))
    assert "the median difference of token 2 is +3.80 ms over 5 pairs, too few for an interval (it takes 6)" in few
    assert "adds" not in few
    # Causes below the clock error are not named.
    assert "The largest causes are kv_exposed (+2.50 ms);" in answer_of(pairs(clock_error_ms=2.0))


def test_engines_that_tell_no_transfer_have_an_answer() -> None:
    colocated = {"prefill_leg": 19.0, "first_decode": 9.0}
    none = {"transfer": {}, "kv_bytes": 0, "kv_bytes_expected": 0}
    pd = {**colocated, "decode_leg": 4.0}
    rows = [each for n in range(6) for each in (row("pd", n, pd, **none), row("colocated", n, colocated))]
    assert "The largest causes are decode_leg (+4.00 ms);" in answer_of(rows)


def test_the_headline_also_names_other_lengths_with_a_clear_difference() -> None:
    run = run_of(noisy_pairs(NOISY_MS))
    short = replace(run.cells[0], cell="64 tokens", parameters={**PARAMETERS, "prompt_len": 64})
    rows = (*run.rows, *(replace(row, cell="64 tokens") for row in pairs()))
    answer = judged(AddedTtft, with_(run, cells=(*run.cells, short), rows=rows))[1].answer
    assert "With prompts of 64 tokens, disaggregation adds +3.80 ms [3.80, 3.80] (95 %) to token 2." in answer


def test_a_cell_beside_other_load_says_so_in_its_heading(tmp_path: Path) -> None:
    load = {"cores": 2, "before_cores": 1.3, "during_cores": 0.1}
    assert "one request at a time (beside other load: 1.3 of 2 cores)," in answer_of(pairs(), machine_load=load)
    folder = RunFolder.create(tmp_path, "added-ttft", AddedTtftOptions().model_dump(mode="json"))
    for each in pairs():
        folder.append(each)
    folder.finish_cell(run_of((), machine_load=load).cells[0])
    redraw(AddedTtft(AddedTtftOptions()), folder)
    page = (folder.path / "report.html").read_text()
    beside = "beside other load: 1.3 of 2 cores"
    assert told([page], f"{CELL} ({beside})", f"128 tokens, shm, {beside}")
    rows = [re.sub(r"<[^>]*>|\s+", " ", row) for row in re.findall(r"<tr>.*?</tr>", page, re.S)]
    assert [row.split() for row in rows if "1.30" in row] == [[CELL, "2", "1.30", "0.10"]]


def test_bytes_that_no_engine_has_told_are_unknown() -> None:
    unknown = {"transport": "", "kv_bytes": 0, "kv_bytes_expected": 0, "output_tokens": 3}
    summary = summary_of(pairs(6, **unknown))
    holds(summary, {"cells.0.kv_bytes_equal": None, "cells.0.unproven": 6})
    assert not summary["failed"]
    rows = pairs(6)
    rows[0] = replace(rows[0], **unknown)
    holds(summary_of(rows), {"cells.0.kv_bytes_equal": True, "cells.0.unproven": 1})
    lost = summary_of(pairs(6, **{**unknown, "kv_bytes_expected": KV_BYTES}))  # of pdserve's own engine
    holds(lost, {"cells.0.kv_bytes_equal": False, "cells.0.unproven": 0})


@pytest.mark.parametrize(
    ("counts", "notes", "computed_itself", "said"),
    [
        (False, [], None, "would not be seen in them"),
        (True, [], False, "decode has fetched the KV of all prompts of these cells"),
        (True, ["decode-0 has computed 5 of 5 prompt tokens whose KV it should have fetched"], True, "not be seen"),
    ],
)
def test_counters_of_a_cell_tell_whether_decode_has_fetched_its_prompts(
    counts: bool, notes: list[str], computed_itself: bool | None, said: str
) -> None:
    rows = pairs(6, transport="", kv_bytes=0, kv_bytes_expected=0, output_tokens=3)
    summary, report = judged(AddedTtft, run_of(rows, prompts_counted=counts, notes=notes))
    holds(summary, {"cells.0.computed_itself": computed_itself})
    assert any(said in str(text) for text in report.caveats)


def test_bytes_and_tokens_are_compared_request_by_request() -> None:
    (failure,) = summary_of([*pairs(5), *pairs(6, token_hash="other")[10:]])["failed"]
    assert failure == f"{CELL}: tokens differ between the arms in 1 pairs, first in requests pd-5 and colocated-5"
    differing = run_of([*pairs(5), *pairs(6, token_hash="other")[10:]], margins={"5": 0.0031})
    (failure,) = judged(AddedTtft, differing)[0]["failed"]
    assert failure.endswith("in requests pd-5 and colocated-5, whose two likeliest tokens are at least 0.0031 apart")
    rows = pairs(6)
    for index, off in ((4, 1), (6, -1)):  # as many bytes in all as expected
        rows[index] = replace(rows[index], kv_bytes=KV_BYTES + off)
    summary = summary_of(rows)
    holds(summary, {"cells.0.kv_bytes": 6 * KV_BYTES, "cells.0.kv_bytes_equal": False})
    assert summary["failed"] == [
        f"{CELL}: bytes moved differ from bytes expected in 2 requests, first in pd-2: {KV_BYTES + 1} instead of "
        f"{KV_BYTES}"
    ]


def test_the_prediction_goes_by_the_chunks_of_the_service() -> None:
    run = run_of(pairs(), config={"engine": {"chunk_tokens": 64}, "transfer": {"overlap": "chunk"}})
    chunked = replace(run.cells[0], parameters={**PARAMETERS, "overlap": "chunk"})
    half_ms = KV_BYTES / 2 / 0.02e9 * 1e3  # the first chunk is ready after half of the 20 ms of prefill
    predicted_ms = half_ms + max(half_ms - 10.0, 0.0) + 0.25
    holds(judged(AddedTtft, with_(run, cells=(chunked,)))[0], {"cells.0.predicted_ms": predicted_ms}, abs=1e-3)


def test_a_request_that_failed_fails_the_run_and_leaves_its_pair_out() -> None:
    lost = RequestRow(cell=CELL, arm="pd", repeat=0, index=1, error="WorkerLost: gone")
    failed = [f"{CELL}: 1 request failed, first with WorkerLost: gone"]
    summary = summary_of([*pairs(6)[:2], lost, *pairs(6)[3:]])
    holds(summary, {"cells.0.n": 5, "cells.0.errors": {"pd": 1, "colocated": 0}, "failed": failed})
    holds(summary_of([lost]), {"cells": [], "failed": failed})


LOADED = "128/shm/none/rate-2"


def loaded_row(arm: str, repeat: int, index: int, ttft_ms: float, gap_ms: float = 10.0, **changes: Any) -> RequestRow:
    due_s = 10.0 * repeat + index
    later = {"prefill_queue": ttft_ms - 8.0, "prefill": 8.0, "first_decode": gap_ms - 1.0, "unattributed": 1.0}
    values: dict[str, Any] = {
        "cell": LOADED, "arm": arm, "repeat": repeat, "index": index, "scheduled_s": due_s, "sent_s": due_s + 0.001,
        "ttft_ms": ttft_ms, "ttft_decode_ms": ttft_ms + gap_ms, "itl_ms": (gap_ms, gap_ms), "tpot_ms": gap_ms,
        "e2e_ms": ttft_ms + 2 * gap_ms, "token_hash": f"{repeat}/{index}", "request_id": f"{arm}-{repeat}-{index}",
        "output_tokens": 3, "stages_ms": {"ttft": {"prefill": ttft_ms}, "ttft_decode": later},
    }  # fmt: skip
    if arm == "pd":
        values |= {**MOVED, "transfer": {**TRANSFER, "exposed_ms": 4.0, "request_to_ready_ms": 9.0}}
    return RequestRow(**{**values, **changes})


def loaded_run(rows: Sequence[RequestRow], unsent: int = 0) -> RunData:
    loads = [
        {"arm": arm, "repeat": repeat, "duration_s": 5.0, "took_s": 6.0, "lag": {"behind": arm == "pd"},
         "unsent": unsent if arm == "pd" else 0}
        for repeat in range(2)
        for arm in ("pd", "colocated")
    ]  # fmt: skip
    parameters, facts = {**PARAMETERS, "load": "rate-2", "rate": 2.0}, {**FACTS, "loads": loads, "fixed_ms": 0.5}
    run = run_of(rows)
    return with_(run, cells=(*run.cells, FinishedCell(LOADED, parameters, 1.0, facts)))


def loaded_summary(rows: Sequence[RequestRow], **options: Any) -> dict[str, Any]:
    return judged(AddedTtft, loaded_run([*pairs(), *rows]), **options)[0]


def ten_of_each(pd_ms: float = 20.0, colocated_ms: float = 20.0) -> list[RequestRow]:
    return [
        loaded_row(arm, repeat, index, ms)
        for arm, ms in (("pd", pd_ms), ("colocated", colocated_ms))
        for repeat in range(2)
        for index in range(5)
    ]


def test_a_load_is_judged_by_the_idle_cell_of_its_length() -> None:
    idle = [replace(each, itl_ms=(9.0, 8.0, 8.0)) for each in pairs()]
    rows = ten_of_each(pd_ms=50.0, colocated_ms=57.0)  # idle colocated: 28 ms, so the limit is 56 ms. 1 ms of lag
    rows[0] = loaded_row("pd", 0, 0, 50.0, gap_ms=17.0)  # one gap above 16 ms
    summary, _ = judged(AddedTtft, loaded_run([*idle, *rows]))
    slo_ms = {"ttft": 56.0, "itl": 16.0}
    holds(
        summary["cells"][1],
        {
            "load": "rate-2",
            "rate": 2.0,
            "n": 10,
            "rounds": 2,
            "slo_ms": slo_ms,
            "attainment.pd.mean": 0.9,
            "attainment.colocated.mean": 0.0,
            "offered_rps": {"pd": 1.0, "colocated": 1.0},  # ten requests in two loads of 5 s
            "goodput_rps.pd.mean": 0.9,
            "added_ttft_ms.ttft.mean": -7.0,
            "arms_ms.colocated.ttft": 58.0,
            "lag.pd.behind": True,
            "lag.colocated.behind": False,
            "lag.pd.p99_ms": 1.0,
            "tokens_equal_share": 1.0,
            "added_ttft_ms.ttft_decode.mean": -6.3,
            "causes_ms.prefill_queue": -7.0,
            "causes_ms.first_decode": 0.7,
            "unexplained_ms": 0.0,
            "predicted_ms": KV_BYTES / 0.02e9 * 1e3 + 0.5,  # its own calibration
            "achieved_ms": 4.0,
            "wire_ms": 1.5,
            "request_to_ready_ms": 9.0,
        },
        abs=1e-3,
    )
    point = {"cell": LOADED, "prompt_len": 128, "rate": 2.0, "transport": "shm", "overlap": "none", "slo_ms": slo_ms,
             "n": 10, "attainment": {"pd": 0.9, "colocated": 0.0}, "only_pd": [LOADED], "neither": [],
             "distinct": False}  # two rounds tell nothing  # fmt: skip
    holds(summary, {"break_even": point, "break_even_reason": None, "failed": []})


CONTRACT = ("prompt_len", "transport", "overlap", "load", "n", "added_ttft_ms", "causes_ms", "explained_pct",
            "predicted_ms", "achieved_ms", "kv_bytes", "kv_bytes_expected", "tokens_equal")  # fmt: skip


def test_what_the_load_generator_was_late_counts() -> None:
    late_s = {"pd": 0.101, "colocated": 0.001}
    rows = [replace(each, sent_s=each.scheduled_s + late_s[each.arm]) for each in ten_of_each()]
    cell = loaded_summary(rows, slo="ttft=50")["cells"][1]
    figures = {"attainment.pd.mean": 0.0, "attainment.colocated.mean": 1.0, "arms_ms.pd.ttft": 121.0,
               "arms_ms.pd.tpot": 10.0, "added_ttft_ms.ttft_decode.mean": 100.0, "lag.pd.p50_ms": 101.0}  # fmt: skip
    holds(cell, figures)
    assert {name: value for name, value in cell["causes_ms"].items() if value} == pytest.approx({"lag": 100.0})


def test_requests_that_failed_or_were_never_sent_miss_the_slo() -> None:
    summary, report = judged(AddedTtft, loaded_run([*pairs(), *ten_of_each()], unsent=5), slo="ttft=50")
    figures = {"unsent": {"pd": 10, "colocated": 0}, "attainment.pd.mean": 0.5,
               "offered_rps": {"pd": 2.0, "colocated": 1.0}, "goodput_rps.pd.mean": 1.0}  # fmt: skip
    holds(summary["cells"][1], figures)
    assert told(report.caveats, "10 requests were due")
    late = RequestRow(cell=LOADED, arm="pd", repeat=0, index=0, error="DeadlineExceeded: late")
    summary = loaded_summary([late, *ten_of_each()[1:]], slo="ttft=50")
    figures = {"cells.1.errors": {"pd": 1, "colocated": 0}, "cells.1.attainment.pd.mean": 0.9, "failed": []}
    holds(summary, figures)
    # An arm that answered nothing has no causes.
    rows = [replace(late, repeat=each.repeat, index=each.index) if each.arm == "pd" else each for each in ten_of_each()]
    cell = loaded_summary(rows)["cells"][1]
    assert set(CONTRACT) <= set(cell)
    holds(cell, {"causes_ms": None, "achieved_ms": None, "tokens_equal": None})


def test_other_tokens_under_load_are_told_and_another_number_of_tokens_fails() -> None:
    rows = ten_of_each()
    rows[3] = replace(rows[3], token_hash="other")
    summary, report = judged(AddedTtft, loaded_run([*pairs(), *rows]))
    holds(summary, {"cells.1.tokens_equal": False, "cells.1.tokens_equal_share": 0.9, "failed": []})
    assert told(report.caveats, "engine.batch_invariant")
    rows[3] = replace(rows[3], output_tokens=2)
    assert told(loaded_summary(rows)["failed"], "the number of tokens differs", "pd-0-3 and colocated-0-3")


def load_of(length: int, rate: float, pd: float, colocated: float, transport: str = "shm") -> dict[str, Any]:
    """A cell under load in which so many of a hundred requests met the SLO."""
    shares = {arm: {"mean": share / 100, "lo": share / 100, "hi": share / 100, "n": 100}
              for arm, share in (("pd", pd), ("colocated", colocated))}  # fmt: skip
    return {"cell": f"{length}/{transport}/{rate:g}", "prompt_len": length, "n": 10, "rate": rate,
            "transport": transport, "overlap": "layer", "slo_ms": {"ttft": 50.0}, "attainment": shares}  # fmt: skip


BOTH_MEET, ONLY_PD, NEITHER, ONLY_COLOCATED = (99, 95), (95, 50), (20, 10), (50, 95)


def grid(*rows: Sequence[tuple[int, int]], transport: str = "shm") -> list[dict[str, Any]]:
    """A row per prompt length (128, 256, …), a column per rate (1, 2, …)."""
    return [
        load_of(128 * (number + 1), place + 1.0, *shares, transport)
        for number, row in enumerate(rows)
        for place, shares in enumerate(row)
    ]


@pytest.mark.parametrize(
    ("cells", "point", "only_pd", "neither"),
    [
        (grid([BOTH_MEET, ONLY_PD, NEITHER]), (128, 2.0), 1, 1),
        (grid([BOTH_MEET, BOTH_MEET], [BOTH_MEET, ONLY_PD]), (256, 2.0), 1, 0),
        (grid([BOTH_MEET, ONLY_PD], [ONLY_PD, NEITHER]), (128, 2.0), 1, 1),
        # 128 tokens at rate 1 is no break-even: at rate 2 colocated meets it as well. From rate 3 on it does not.
        (grid([ONLY_PD, BOTH_MEET, ONLY_PD]), (128, 3.0), 1, 0),
        # Nor is it where longer prompts at the same rate are met by colocated alone.
        (grid([BOTH_MEET, ONLY_PD], [BOTH_MEET, ONLY_COLOCATED], [ONLY_PD, ONLY_PD]), (384, 1.0), 2, 0),
    ],
)
def test_the_break_even_holds_from_there_on(
    cells: list[dict[str, Any]], point: tuple[int, float], only_pd: int, neither: int
) -> None:
    found = break_even_of(cells)
    assert found["break_even_reason"] is None
    assert (found["break_even"]["prompt_len"], found["break_even"]["rate"]) == point
    assert (len(found["break_even"]["only_pd"]), len(found["break_even"]["neither"])) == (only_pd, neither)
    assert break_even_of(cells[::-1])["break_even"] == {
        **found["break_even"],
        "only_pd": found["break_even"]["only_pd"][::-1],
        "neither": found["break_even"]["neither"][::-1],
    }


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (
            grid([BOTH_MEET, BOTH_MEET]),
            r"colocated sustained every one of the 2 measured loads \(at least 90 % of the requests within the SLO\)",
        ),
        (grid([NEITHER, NEITHER]), "pd sustained none of the 2 measured loads"),
        (grid([BOTH_MEET, ONLY_COLOCATED, NEITHER]), "colocated sustained every load that pd sustained"),
        (
            grid([ONLY_PD, BOTH_MEET]),
            "only pd sustained 128/shm/1, but with .* as large colocated sustained 128/shm/2 too",
        ),
        ([], "no load was measured: give --rates"),
        ([{**load_of(128, 1.0, 95, 50), "slo_ms": None}], "there is no SLO: the idle cells were not measured"),
    ],
)
def test_why_there_is_no_break_even(cells: list[dict[str, Any]], reason: str) -> None:
    found = break_even_of(cells)
    assert found["break_even"] is None
    assert re.match(reason, found["break_even_reason"])


def test_every_transport_has_its_own_break_even() -> None:
    found = break_even_of([*grid([BOTH_MEET, BOTH_MEET]), *grid([BOTH_MEET, ONLY_PD], transport="tcp")])
    assert (found["break_even"]["transport"], found["break_even"]["rate"]) == ("tcp", 2.0)
    assert [each["break_even"] is None for each in found["break_evens"]] == [True, False]
    neither = break_even_of([*grid([BOTH_MEET]), *grid([NEITHER], transport="tcp")])
    assert neither["break_even_reason"].startswith("shm, layer: colocated sustained")
    assert "; tcp, layer: pd sustained" in neither["break_even_reason"]


def test_a_break_even_that_may_be_chance_is_told() -> None:
    late = {("pd", 0, 0), ("colocated", 0, 0), ("colocated", 0, 1)}  # 1 of 10, and 2 of 10
    rows = [
        replace(each, ttft_ms=99.0) if (each.arm, each.repeat, each.index) in late else each
        for each in ten_of_each(10.0, 10.0)
    ]
    summary, report = judged(AddedTtft, loaded_run([*pairs(), *rows]), slo="ttft=50")
    assert summary["break_even"]["distinct"] is False
    assert "may be chance" in report.answer


@pytest.mark.parametrize(
    ("combinations", "quick", "places"),
    [
        (None, False, ["shm/layer", "tcp/layer"]),
        ("all", False, ["shm/layer", "shm/none", "tcp/layer", "tcp/none"]),
        ("first", False, ["shm/layer"]),
        (None, True, ["shm/layer"]),
        ("all", True, ["shm/layer", "shm/none"]),
    ],
)
def test_what_is_measured_under_load(combinations: str | None, quick: bool, places: list[str]) -> None:
    given = {"prompt_lens": "128", "rates": "1,2", "overlaps": "layer,none", "load_combinations": combinations}
    options = AddedTtftOptions.choose({**given, "duration_s": 3.0, "rounds": 4}, quick)
    cells = [cell for cell in AddedTtft(options).cells(None) if "rate" in cell.parameters]
    assert [cell.name for cell in cells] == [f"128/{place}/rate-{rate}" for place in places for rate in (1, 2)]
    assert {cell.sending_s for cell in cells} == {2 * 4 * 3.0}


def test_cells_under_load_share_the_first_service() -> None:
    options = AddedTtftOptions.choose(
        {"prompt_lens": "128,600", "rates": "1,2", "widths": "", "load_combinations": "first"}
    )
    cells = AddedTtft(options).cells(None)
    loaded = [cell for cell in cells if "rate" in cell.parameters]
    assert [cell.name for cell in loaded] == [f"{n}/shm/layer/rate-{rate}" for n in (600,) for rate in (1, 2)]
    assert loaded[0].service == cells[0].service
    late = [cell for cell in cells if cell.parameters.get("first_token") == "decode"]
    assert [cell.name for cell in late] == ["first-token-decode/600/shm/layer"]
    assert late[0].service is not None
    assert late[0].service["router.first_token"] == "decode"


def test_a_run_against_a_service_is_measured_resumed_and_redrawn(tmp_path: Path, tcp_service: LocalCluster) -> None:
    given = {"prompt_lens": "32,70", "pairs": 3, "pairs_s": 0, "rates": "8", "load_prompt_lens": "32"}
    given |= {"duration_s": 1.0, "load_output_len": 4}
    options = AddedTtftOptions.choose(given, quick=True)
    folder = RunFolder.create(tmp_path, "added-ttft", options.model_dump(mode="json"))
    outcome = run_experiment(AddedTtft(options), folder, Quiet(), target=tcp_service.target)
    rows = folder.load().rows
    again = run_experiment(AddedTtft(options), folder, Quiet(), target=tcp_service.target)
    assert outcome.failures == []
    assert not outcome.interrupted
    assert outcome.summary is not None
    *idle, loaded = sorted(outcome.summary["cells"], key=lambda cell: cell["load"])
    assert [cell["prompt_len"] for cell in idle] == [32, 70]
    for cell in outcome.summary["cells"]:
        assert all(cell[key] is not None for key in CONTRACT)
        assert cell["kv_bytes"] == cell["kv_bytes_expected"] > 0
        assert cell["transports_used"] == ["tcp"]
    assert [(cell["n"], cell["tokens_equal"]) for cell in idle] == [(3, True)] * 2
    assert folder.load().rows == rows  # the second run had nothing left to measure
    assert again.summary == outcome.summary

    rows_of_load = folder.load().rows_of(loaded["cell"])
    sent = {arm: [(row.repeat, row.index) for row in rows_of_load if row.arm == arm] for arm in ("pd", "colocated")}
    assert sorted(sent["pd"]) == sorted(sent["colocated"])
    assert loaded["n"] == len(sent["pd"]) > 4
    assert {row.mode for row in rows_of_load if row.arm == "pd"} == {"pd"}
    added_ms = loaded["added_ttft_ms"]["ttft_decode"]["mean"]
    assert sum(loaded["causes_ms"].values()) + loaded["unexplained_ms"] == pytest.approx(added_ms, abs=0.01)

    before = (folder.path / "summary.json").read_text()
    for name in ("summary.json", "report.html", "causes.png"):
        (folder.path / name).unlink()
    redraw(AddedTtft(options), folder)
    assert (folder.path / "summary.json").read_text() == before
    stems = {path.stem for path in folder.path.glob("*.png")}
    assert stems == {"causes", "added_over_length", "causes_under_load", "attainment"}
    for finished in folder.load().cells:
        assert overlap_of(finished) == "chunk", "a running service tells its settings"
        assert finished.config.transfer.layer_groups == 3
        assert finished.facts["config"]["router"]["policy"] == "kv_aware"
    environment = json.loads((folder.path / "env.json").read_text())
    assert environment["service"]["links"][0]["transport"] == "tcp"
    assert environment["machine"]["packages"]["torch"]
