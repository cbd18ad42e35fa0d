"""The added-TTFT meter: its arithmetic on rows made by hand, and a run against a real service."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from experiments.added_ttft import AddedTtft, AddedTtftOptions
from experiments.request_row import RequestRow
from experiments.run_folder import FinishedCell, RunData, RunFolder
from experiments.runner import redraw, run_experiment
from pdserve.core.errors import InvalidRequest
from tests.experiments.quiet import Quiet
from tests.local_cluster import local_cluster, undisturbed

CELL = "128/shm/none/idle"
SHAPE = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}
KV_BYTES = 2 * 64 * 2 * 2 * 2 * 16 * 4  # 128 tokens are two blocks of 64; keys and values, 2 layers, 2 heads of 16


def row(arm: str, index: int, stages_ms: dict[str, float], **changes: Any) -> RequestRow:
    pd = arm == "pd"
    values: dict[str, Any] = {
        "cell": CELL,
        "arm": arm,
        "repeat": 0,
        "index": index,
        "mode": arm,
        "ttft_ms": 30.0 if pd else 28.0,
        "ttft_decode_ms": sum(stages_ms.values()),
        "stages_ms": {"ttft_decode": stages_ms, "ttft": {}},
        "token_hash": "same",
        "transport": "shm" if pd else "",
        "kv_bytes": KV_BYTES if pd else 0,
        "kv_bytes_expected": KV_BYTES if pd else 0,
        "transfer": {
            "exposed_ms": 2.5,
            "wire_ms": 1.0,
            "import_ms": 0.5,
            "request_to_ready_ms": 30.0,
            "ceiling_gbs": 0.02,
        }
        if pd
        else {},
    }
    return RequestRow(**{**values, **changes})


def run_of(rows: Sequence[RequestRow]) -> RunData:
    parameters = {"prompt_len": 128, "transport": "shm", "overlap": "none", "load": "idle"}
    cell = FinishedCell(CELL, parameters, 1.0, {"fixed_ms": 0.25, "block_size": 64, "layout": SHAPE})
    return RunData("added-ttft", {}, {}, (cell,), tuple(rows))


def pairs(count: int = 6, **changes: Any) -> list[RequestRow]:
    rows = []
    for index in range(count):
        rows.append(row("pd", index, {"prefill": 20.0, "kv_exposed": 2.5, "decode_queue": 0.5, "first_decode": 9.0,
                                      "unattributed": 0.1}, **changes))  # fmt: skip
        rows.append(row("colocated", index, {"prefill": 19.0, "decode_queue": 0.25, "first_decode": 9.0,
                                             "unattributed": 0.05}))  # fmt: skip
    return rows


def summary_of(rows: Sequence[RequestRow]) -> dict[str, Any]:
    return AddedTtft(AddedTtftOptions()).summarise(run_of(rows))


def test_causes_sum_to_the_added_latency() -> None:
    summary = summary_of(pairs())
    (cell,) = summary["cells"]

    assert cell["n"] == 6
    assert cell["added_ttft_ms"]["ttft"]["mean"] == pytest.approx(2.0)
    assert cell["added_ttft_ms"]["ttft_decode"]["mean"] == pytest.approx(3.8)
    causes = {name: value for name, value in cell["causes_ms"].items() if value}
    assert causes == pytest.approx({"prefill": 1.0, "kv_exposed": 2.5, "decode_queue": 0.25})
    assert sum(cell["causes_ms"].values()) + cell["unexplained_ms"] == pytest.approx(3.8)
    assert cell["explained_pct"] == pytest.approx(100 * (1 - 0.05 / 3.8), abs=0.01)
    assert summary["failed"] == []


def test_the_prediction_is_arithmetic() -> None:
    (cell,) = summary_of(pairs())["cells"]
    assert cell["predicted_ms"] == pytest.approx(KV_BYTES / 0.02e9 * 1e3 + 0.25, abs=1e-3)
    assert cell["achieved_ms"] == 2.5
    assert cell["wire_ms"] == 1.5
    assert cell["kv_bytes"] == cell["kv_bytes_expected"] == 6 * KV_BYTES


def test_a_link_that_was_not_measured_has_no_prediction() -> None:
    rows = pairs(transfer={"exposed_ms": 2.5})
    (cell,) = summary_of(rows)["cells"]
    assert cell["predicted_ms"] is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_hash": "other"}, "tokens differ"),
        ({"kv_bytes": KV_BYTES - 1}, "bytes moved differ"),
    ],
)
def test_a_token_or_byte_that_differs_fails_the_run(changes: dict[str, Any], words: str) -> None:
    (failure,) = summary_of([*pairs(5), *pairs(6, **changes)[10:]])["failed"]
    assert words in failure


def test_a_request_that_failed_fails_the_run_and_leaves_its_pair_out() -> None:
    rows = pairs(6)
    rows[2] = RequestRow(cell=CELL, arm="pd", repeat=0, index=1, error="WorkerLost: gone")
    summary = summary_of(rows)
    assert summary["cells"][0]["n"] == 5
    assert summary["failed"] == [f"{CELL}: 1 requests failed"]


def test_a_cell_without_any_pair_fails_the_run() -> None:
    rows = [RequestRow(cell=CELL, arm=arm, repeat=0, index=0, error="WorkerLost: gone") for arm in ("pd", "colocated")]
    assert summary_of(rows)["failed"] == [f"{CELL}: 2 requests failed"]


def test_nothing_measured_is_no_error() -> None:
    assert summary_of([])["cells"] == []


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"prompt_lens": "128,x"}, "--prompt-lens"),
        ({"prompt_lens": "0"}, "--prompt-lens"),
        ({"overlaps": "layer,all"}, "--overlaps"),
        ({"pairs": 0}, "--pairs"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, Any], option: str) -> None:
    with pytest.raises(InvalidRequest, match=option):
        AddedTtftOptions.choose(given)


LOADED = "128/shm/none/rate-2"


def loaded_row(arm: str, repeat: int, index: int, ttft_ms: float, gap_ms: float = 10.0, **changes: Any) -> RequestRow:
    values: dict[str, Any] = {
        "cell": LOADED,
        "arm": arm,
        "repeat": repeat,
        "index": index,
        "scheduled_s": 10.0 * repeat + index,
        "sent_s": 10.0 * repeat + index + 0.001,
        "ttft_ms": ttft_ms,
        "ttft_decode_ms": ttft_ms + gap_ms,
        "itl_ms": (gap_ms, gap_ms),
        "tpot_ms": gap_ms,
        "e2e_ms": ttft_ms + 2 * gap_ms,
        "token_hash": f"{repeat}/{index}",
    }
    return RequestRow(**{**values, **changes})


def loaded_run(rows: Sequence[RequestRow]) -> RunData:
    idle = {"prompt_len": 128, "transport": "shm", "overlap": "none", "load": "idle"}
    loads = [{"arm": arm, "repeat": repeat, "duration_s": 5.0, "took_s": 6.0, "lag": {"behind": arm == "pd"}}
             for repeat in range(2) for arm in ("pd", "colocated")]  # fmt: skip
    cells = (
        FinishedCell(CELL, idle, 1.0, {"fixed_ms": 0.25, "block_size": 64, "layout": SHAPE}),
        FinishedCell(LOADED, {**idle, "load": "rate-2", "rate": 2.0}, 1.0, {"loads": loads}),
    )
    return RunData("added-ttft", {}, {}, cells, tuple(rows))


def loaded_summary(rows: Sequence[RequestRow], **options: Any) -> dict[str, Any]:
    run = loaded_run(rows)
    experiment = AddedTtft(AddedTtftOptions(**options))
    summary = experiment.summarise(run)
    experiment.report(run, summary)  # can be drawn
    return summary


def ten_of_each(pd_ms: float = 20.0, colocated_ms: float = 20.0) -> list[RequestRow]:
    return [
        loaded_row(arm, repeat, index, ms)
        for arm, ms in (("pd", pd_ms), ("colocated", colocated_ms))
        for repeat in range(2)
        for index in range(5)
    ]


def test_a_load_is_judged_by_the_idle_cell_of_its_length() -> None:
    idle = pairs(itl_ms=(9.0, 8.0, 8.0))
    idle = [msgspec.structs.replace(each, itl_ms=(9.0, 8.0, 8.0)) for each in idle]
    rows = ten_of_each(pd_ms=50.0, colocated_ms=57.0)  # idle colocated: 28 ms, so the limit is 56 ms
    rows[0] = loaded_row("pd", 0, 0, 50.0, gap_ms=17.0)  # one gap above 16 ms
    summary = loaded_summary([*idle, *rows])
    _, cell = summary["cells"]

    assert (cell["load"], cell["rate"], cell["n"], cell["rounds"]) == ("rate-2", 2.0, 10, 2)
    assert cell["slo_ms"] == {"ttft": 56.0, "itl": 16.0}
    assert cell["attainment"]["pd"]["mean"] == pytest.approx(0.9)
    assert cell["attainment"]["colocated"]["mean"] == 0.0
    assert cell["offered_rps"] == {"pd": 1.0, "colocated": 1.0}  # ten requests in two loads of 5 s
    assert cell["goodput_rps"]["pd"]["mean"] == pytest.approx(0.9)
    assert cell["added_ttft_ms"]["ttft"]["mean"] == pytest.approx(-7.0)
    assert cell["arms_ms"]["colocated"]["ttft"] == 57.0
    assert cell["lag"]["pd"]["behind"]
    assert not cell["lag"]["colocated"]["behind"]
    assert cell["lag"]["pd"]["p99_ms"] == pytest.approx(1.0)
    assert cell["tokens_equal_share"] == 1.0
    assert summary["break_even"] == {
        "cell": LOADED,
        "prompt_len": 128,
        "rate": 2.0,
        "slo_ms": {"ttft": 56.0, "itl": 16.0},
        "attainment": {"pd": 0.9, "colocated": 0.0},
        "distinct": True,
    }
    assert summary["break_even_reason"] is None
    assert summary["failed"] == []


@pytest.mark.parametrize(
    ("pd_ms", "colocated_ms", "reason"),
    [(10.0, 10.0, "colocated met"), (99.0, 99.0, "at no load"), (99.0, 10.0, "colocated met")],
)
def test_there_may_be_no_break_even(pd_ms: float, colocated_ms: float, reason: str) -> None:
    summary = loaded_summary([*pairs(), *ten_of_each(pd_ms, colocated_ms)], slo="ttft=50")
    assert summary["break_even"] is None
    assert reason in summary["break_even_reason"]


def test_a_break_even_that_may_be_chance_is_told() -> None:
    late = {("pd", 0, 0), ("colocated", 0, 0), ("colocated", 0, 1)}  # 1 of 10, and 2 of 10
    rows = [
        msgspec.structs.replace(each, ttft_ms=99.0) if (each.arm, each.repeat, each.index) in late else each
        for each in ten_of_each(10.0, 10.0)
    ]
    run = loaded_run([*pairs(), *rows])
    meter = AddedTtft(AddedTtftOptions.choose({"slo": "ttft=50"}))
    summary = meter.summarise(run)
    assert summary["break_even"]["distinct"] is False
    assert "may be chance" in meter.report(run, summary).answer


def test_causes_below_the_clock_error_are_not_named() -> None:
    run = run_of(pairs(clock_error_ms=2.0))
    meter = AddedTtft(AddedTtftOptions())
    answer = meter.report(run, meter.summarise(run)).answer
    assert "The largest causes are kv_exposed (+2.50 ms);" in answer


def test_a_request_that_fails_under_load_misses_the_slo() -> None:
    rows = ten_of_each()
    rows[0] = RequestRow(cell=LOADED, arm="pd", repeat=0, index=0, error="DeadlineExceeded: late")
    summary = loaded_summary([*pairs(), *rows], slo="ttft=50")
    _, cell = summary["cells"]
    assert cell["errors"] == {"pd": 1, "colocated": 0}
    assert cell["attainment"]["pd"]["mean"] == pytest.approx(0.9)
    assert summary["failed"] == []


def test_cells_under_load_share_the_first_service() -> None:
    options = AddedTtftOptions.choose({"prompt_lens": "128,600", "rates": "1,2", "widths": ""})
    cells = AddedTtft(options).cells(None)
    loaded = [cell for cell in cells if "rate" in cell.parameters]
    assert [cell.name for cell in loaded] == [f"{n}/shm/layer/rate-{rate}" for n in (600,) for rate in (1, 2)]
    assert loaded[0].service == cells[0].service
    late = [cell for cell in cells if cell.parameters.get("first_token") == "decode"]
    assert [cell.name for cell in late] == ["first-token-decode/600/shm/layer"]
    assert late[0].service is not None
    assert late[0].service["router.first_token"] == "decode"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"load_prompt_lens": "512"}, "--load-prompt-lens: the automatic SLO needs idle requests of 512 tokens"),
        ({"rates": "1,-2"}, "--rates: -2 is not a positive number"),
        ({"rates": "1,1.0"}, "--rates: a rate is given twice"),
        ({"slo": "speed=3"}, "--slo: 'speed' is none of"),
        ({"transports": ""}, "--transports: is empty"),
    ],
)
def test_a_wrong_load_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        AddedTtft(AddedTtftOptions.choose({"prompt_lens": "128", **given})).cells(None)


def test_a_load_on_a_service(tmp_path: Path) -> None:
    options = AddedTtftOptions.choose(
        {"prompt_lens": "40", "pairs": 3, "rates": "8", "duration_s": 1.0, "rounds": 2, "load_output_len": 4}
    )
    folder = RunFolder.create(tmp_path, "added-ttft", options.model_dump(mode="json"))
    with local_cluster({}) as cluster:
        outcome = run_experiment(AddedTtft(options), folder, Quiet(), target=cluster.target)
    assert outcome.summary is not None
    assert outcome.failures == []
    _, cell = outcome.summary["cells"]
    rows = folder.load().rows_of(cell["cell"])
    sent = {arm: [(row.repeat, row.index) for row in rows if row.arm == arm] for arm in ("pd", "colocated")}
    assert sorted(sent["pd"]) == sorted(sent["colocated"])
    assert cell["n"] == len(sent["pd"]) > 4
    assert {row.mode for row in rows if row.arm == "pd"} == {"pd"}
    assert cell["kv_bytes"] == cell["kv_bytes_expected"] > 0
    assert (folder.path / "attainment.png").stat().st_size > 5_000


def test_an_unknown_width_is_named() -> None:
    with pytest.raises(InvalidRequest, match="--widths: 'wide' is none of mha, gqa, mla, mqa"):
        AddedTtft(AddedTtftOptions.choose({"widths": "wide"})).cells(None)


def test_a_run_against_a_service_is_measured_resumed_and_redrawn(tmp_path: Path) -> None:
    options = AddedTtftOptions.choose({"prompt_lens": "32,70", "pairs": 3, "rates": ""}, quick=True)
    folder = RunFolder.create(tmp_path, "added-ttft", options.model_dump(mode="json"))
    with local_cluster({"transfer": {"transport": "tcp"}}) as cluster:
        outcome = run_experiment(AddedTtft(options), folder, Quiet(), target=cluster.target)
        again = run_experiment(AddedTtft(options), folder, Quiet(), target=cluster.target)

    assert outcome.failures == []
    assert not outcome.interrupted
    assert outcome.summary is not None
    assert [cell["prompt_len"] for cell in outcome.summary["cells"]] == [32, 70]
    for cell in outcome.summary["cells"]:
        assert cell["tokens_equal"]
        assert cell["kv_bytes"] == cell["kv_bytes_expected"] > 0
        assert cell["transports_used"] == ["tcp"]
        assert cell["n"] == 3
        assert cell["predicted_ms"] is not None
    assert len(folder.load().rows) == 12  # the second run had nothing left to measure
    assert again.summary == outcome.summary

    before = (folder.path / "summary.json").read_text()
    for name in ("summary.json", "report.html", "causes.png"):
        (folder.path / name).unlink()
    redraw(AddedTtft(options), folder)
    assert (folder.path / "summary.json").read_text() == before
    assert (folder.path / "causes.png").stat().st_size > 10_000
    page = (folder.path / "report.html").read_text()
    assert "Predicted against measured" in page
    environment = json.loads((folder.path / "env.json").read_text())
    assert environment["service"]["links"][0]["transport"] == "tcp"
    assert environment["machine"]["packages"]["torch"]


def test_a_planted_delay_is_found_in_its_stage(tmp_path: Path) -> None:
    options = AddedTtftOptions.choose({"prompt_lens": "32", "pairs": 5, "rates": ""})

    def causes_ms(target: str) -> dict[str, float]:
        folder = RunFolder.create(tmp_path, "added-ttft", options.model_dump(mode="json"))
        outcome = run_experiment(AddedTtft(options), folder, Quiet(), target=target)
        assert outcome.summary is not None
        (cell,) = outcome.summary["cells"]
        return dict(cell["causes_ms"])

    with local_cluster({}) as plain:
        before = [causes_ms(plain.target)["kv_exposed"] for _ in range(3)]
    with local_cluster({}, delays_ms={"kv_exposed": 20.0}) as slow:

        def check(causes: dict[str, float]) -> None:
            assert causes["kv_exposed"] - statistics.median(before) == pytest.approx(20.0, abs=2.0)
            assert sum(abs(value) > 2.0 for value in causes.values()) == 1

        undisturbed(lambda: causes_ms(slow.target), check)
