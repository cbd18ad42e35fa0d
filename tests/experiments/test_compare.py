"""`pdserve compare`: figures of two runs, their differences, and limits."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.compare import Comparison, Difference, Limit, Missing, compare, differences, flatten, violations
from experiments.run_folder import FinishedCell, RequestRow, RunFolder
from pdserve.core.errors import InvalidRequest
from pdserve.core.interval import Interval
from tests.local_cluster import ROOT


def run(
    root: Path, ttft_ms: list[float], summary: dict[str, Any], name: str = "bench", arms: Sequence[str] = ("pd",)
) -> RunFolder:
    folder = RunFolder.create(root, name, {"model": "tiny", "seed": len(list(root.glob("*/*")))})
    for index, value in enumerate(ttft_ms):
        for arm in arms:
            folder.append(RequestRow(cell="load", arm=arm, repeat=0, index=index, ttft_ms=value, e2e_ms=2 * value))
    folder.append(RequestRow(cell="load", arm=arms[0], repeat=0, index=99, error="WorkerLost: gone"))
    folder.write_summary(summary)
    return folder


SUMMARY = {"cells": [{"cell": "x", "n": 3, "added": {"mean": 2.0, "lo": 1.5, "hi": 2.5, "n": 3}}], "goodput_rps": 4.0}


def test_rows_are_compared_with_an_interval(tmp_path: Path) -> None:
    added = {"mean": 3.0, "lo": 2.75, "hi": 3.5, "n": 9}
    other = {"cells": [{"cell": "x", "n": 9, "added": added}], "goodput_rps": 3.0}
    found, _ = compare(run(tmp_path, [10.0, 12.0, 11.0] * 2, SUMMARY), run(tmp_path, [20.0, 22.0, 21.0] * 2, other))
    by_key = {each.key: each for each in found}
    assert list(by_key) == ["rows.load.pd.ttft_ms", "rows.load.pd.e2e_ms", "cells.x.added", "goodput_rps"]
    ttft = by_key["rows.load.pd.ttft_ms"]
    assert (ttft.a, ttft.b, ttft.difference, ttft.distinct) == (11.0, 21.0, 10.0, True)
    assert ttft.percent == pytest.approx(100 * 10 / 11)
    assert ttft.interval is not None
    assert 8.0 <= ttft.interval.lo < 10.0 < ttft.interval.hi <= 12.0
    assert by_key["cells.x.added"].interval == Interval(1.0, 0.25, 2.0, 3)
    assert by_key["goodput_rps"].interval is None


def test_requests_of_one_load_are_not_taken_as_independent(tmp_path: Path) -> None:
    """By simulation: two runs of one version under load, in which what delays a request delays those beside it."""
    draw, changed, runs = np.random.default_rng(5), 0, 60

    def loaded() -> RunFolder:
        folder = RunFolder.create(tmp_path, "bench", {"model": "tiny", "seed": len(list(tmp_path.glob("*/*")))})
        delay_ms = 0.0
        for index in range(200):
            delay_ms = 0.9 * delay_ms + draw.normal(0.0, 10.0)
            sent_s = index * 0.06
            times: dict[str, Any] = {"scheduled_s": sent_s, "sent_s": sent_s, "e2e_ms": 500.0 + delay_ms}
            folder.append(RequestRow(cell="load", arm="pd", repeat=0, index=index, **times))
        folder.write_summary({})
        return folder

    for _ in range(runs):
        ((each,), _) = compare(loaded(), loaded())
        assert each.key == "rows.load.pd.e2e_ms"
        changed += each.distinct
    assert changed / runs <= 0.15


def test_a_load_without_times_counts_from_the_sending(tmp_path: Path) -> None:
    folders = []
    for scheduled in (True, False):
        folder = RunFolder.create(tmp_path, "bench", {"model": "tiny", "scheduled": scheduled})
        for index in range(6):
            times: dict[str, Any] = {"scheduled_s": index, "sent_s": index + 0.5, "e2e_ms": 100.0}
            folder.append(RequestRow(cell="load", arm="pd", repeat=0, index=index, **times))
        folder.write_summary({})
        folders.append(folder)
    ((each,), _) = compare(*folders)
    assert (each.a, each.b) == (600.0, 100.0)


@pytest.mark.parametrize(
    ("summary", "figures"),
    [
        (
            {"a": 1, "list": [{"system": "1P1D", "x": 2.5}, 7], "n": 3, "flag": True, "text": "no", "none": None},
            {"a": 1.0, "list.1P1D.x": 2.5, "list.1": 7.0},
        ),
        # Entries of a list are named by what tells them apart.
        (
            {"cells": [{"cell": "x", "arm": "none", "y": 1}, {"cell": "x", "arm": "both", "y": 2}]},
            {"cells.x.none.y": 1.0, "cells.x.both.y": 2.0},
        ),
        (
            [{"rate_per_device": 0.5, "y": 1}, {"batch": 4, "tokens": 8, "y": 2}, {"shared_len": 16, "y": 3}],
            {"rate_per_device=0.5.y": 1.0, "batch=4,tokens=8.y": 2.0, "shared_len=16.y": 3.0},
        ),
    ],
)
def test_a_summary_is_flattened_by_names(summary: Any, figures: dict[str, float]) -> None:
    assert flatten(summary) == figures


def test_requests_of_different_kinds_are_apart(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "interference", {})
    for kind, ttft_ms in (("decoding", 10.0), ("long", 200.0)):
        folder.append(RequestRow(cell="x", arm="pd", repeat=0, index=0, kind=kind, ttft_ms=ttft_ms))
    folder.write_summary({})
    assert {each.key: each.a for each in compare(folder, folder)[0]} == {
        "rows.x.pd.decoding.ttft_ms": 10.0,
        "rows.x.pd.long.ttft_ms": 200.0,
    }


@pytest.mark.parametrize(
    ("key", "a", "b", "interval", "percent", "worse"),
    [
        ("ttft_ms", 100.0, 108.0, (6.0, 10.0), 5.0, True),
        ("ttft_ms", 100.0, 108.0, (4.0, 12.0), 5.0, False),  # not beyond the interval
        ("ttft_ms", 100.0, 90.0, (-12.0, -8.0), 5.0, False),
        ("ttft_ms", 100.0, 106.0, None, 5.0, True),
        ("goodput_rps", 4.0, 3.0, None, 10.0, True),
        ("goodput_rps", 4.0, 5.0, None, 10.0, False),
        ("attainment.pd", 0.9, 0.5, (-0.5, -0.3), 10.0, True),
        ("attainment.pd", 0.9, 0.5, (-0.5, -0.05), 10.0, False),
        ("failed", 0.0, 1.0, None, 10.0, True),
        ("cells.x.both.saved_ms.ttft", 50.0, 20.0, None, 10.0, True),
        ("machine.peak_gflops", 100.0, 200.0, None, 10.0, False),
        ("predicted.shared_len=16.ttft_ms.none", 100.0, 120.0, None, 10.0, True),
    ],
)
def test_worse_means_beyond_limit_and_interval(
    key: str, a: float, b: float, interval: tuple[float, float] | None, percent: float, worse: bool
) -> None:
    of = None if interval is None else Interval(b - a, *interval, 5)
    assert Comparison(key, a, b, of).exceeds(percent) == worse


def test_limits_name_figures() -> None:
    found = [Comparison("rows.x.pd.ttft_ms", 1.0, 2.0, None), Comparison("rows.x.pd.e2e_ms", 1.0, 2.0, None)]
    assert [each.key for each, _ in violations(found, [Limit.parse("ttft_ms=5")])] == ["rows.x.pd.ttft_ms"]
    assert len(violations(found, [Limit.parse("rows.*=5%")])) == 2
    assert violations(found, [Limit.parse("*_ms=100")]) == []
    gone = Missing("rows.x.colocated.ttft_ms", "B")
    assert [each.key for each, _ in violations([*found, gone], [Limit.parse("ttft_ms=500")])] == [gone.key]
    with pytest.raises(InvalidRequest, match="no figure 'itl_ms'"):
        violations(found, [Limit.parse("itl_ms=5")])
    for wrong in ("ttft_ms", "=5", "ttft_ms=-1", "ttft_ms=x"):
        with pytest.raises(InvalidRequest, match="is not KEY=PERCENT"):
            Limit.parse(wrong)


def test_the_command(tmp_path: Path, pdserve: Any) -> None:
    a, b = (run(tmp_path, values, SUMMARY) for values in ([10.0, 12.0, 11.0] * 2, [20.0, 22.0, 21.0] * 2))
    ran = pdserve("compare", str(a.path), str(b.path))
    assert ran.code == 0
    assert ran.out.startswith(
        "A: pdserve ?, commit unknown and B: pdserve ?, commit unknown; of the 3 figures that have an "
    )
    assert "B is worse in 2 (most: rows.load.pd.ttft_ms +91 %); the other 1 did not change beyond it" in ran.out
    assert "rows.load.pd.ttft_ms" in ran.out.split("\n", 1)[1]
    assert "goodput_rps" not in ran.out  # equal, and without an interval
    assert "2 other figures: --all" in ran.out
    assert "goodput_rps" in pdserve("compare", str(a.path), str(b.path), "--all").out
    same = pdserve("compare", str(a.path), str(a.path)).out
    assert "none of the 3 figures that have an interval changed beyond it" in same
    assert ran.err == "note: the runs differ in seed: 0 and 1\n"
    ran = pdserve("compare", str(a.path), str(b.path), "--limit", "ttft_ms=5", "--limit", "goodput_rps=1", "--json")
    assert ran.code == 1
    assert ran.json["violations"] == [{"key": "rows.load.pd.ttft_ms", "limit_percent": 5.0}]
    assert "worse: rows.load.pd.ttft_ms: 11 became 21" in ran.err
    assert pdserve("compare", str(b.path), str(a.path), "--limit", "ttft_ms=5").code == 0


@pytest.mark.parametrize(
    ("document", "call"),
    [
        (path.name, call)
        for path in sorted((ROOT / "docs").glob("*.md"))
        for call in re.findall(r"^pdserve (compare .*)$", path.read_text(), re.MULTILINE)
    ],
)
def test_documented_calls(
    tmp_path: Path, pdserve: Any, monkeypatch: pytest.MonkeyPatch, document: str, call: str
) -> None:
    monkeypatch.chdir(tmp_path)
    _, *arguments = shlex.split(call)
    for place, values in zip(arguments[:2], ([10.0, 12.0, 11.0] * 2, [20.0, 22.0, 21.0] * 2), strict=True):
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        made = run(tmp_path / "made", values, SUMMARY, "added-ttft")
        for index, value in enumerate(values):
            made.append(RequestRow(cell="load", arm="pd", repeat=0, index=index, ttft_decode_ms=value))
        made.path.rename(place)
    limits = [value for option, value in itertools.pairwise(arguments) if option == "--limit"]
    ran = pdserve("compare", *arguments)
    assert ran.code == 1, "B takes twice as long"
    assert limits
    for limit in limits:
        assert f"worse: rows.load.pd.{limit.partition('=')[0]}: 11 became 21" in ran.err


def surrounded(folder: RunFolder, packages: dict[str, str], model: str, decode: int, **cells: Any) -> RunFolder:
    workers = [{"role": role, "device": "cpu", "num_blocks": 64} for role in ("prefill", *("decode",) * decode)]
    service = {"model": model, "dtype": "float32", "workers": workers, "links": [{"transport": "shm"}] * decode}
    folder.write_environment({"machine": {"cpu": "one", "packages": packages}, "service": service})
    for name, settings in cells.items():
        folder.finish_cell(FinishedCell(name, {}, 1.0, {"config": settings}))
    return folder


def test_machine_service_and_settings_that_differ_are_told(tmp_path: Path, pdserve: Any) -> None:
    plain: dict[str, Any] = {"engine": {"chunk_tokens": None, "num_blocks": 64}, "router": {"policy": "kv_aware"}}
    chunked = {**plain, "engine": {"chunk_tokens": 64, "num_blocks": 64}}
    a = surrounded(run(tmp_path, [1.0], SUMMARY), {"torch": "2.0"}, "tiny", 1, x=plain, y=plain, only_in_a=plain)
    b = surrounded(run(tmp_path, [1.0], SUMMARY), {"torch": "2.1"}, "tiny", 2, x=chunked, y=chunked)
    assert differences(a, a) == []
    assert differences(a, b) == [
        Difference("machine: torch", "2.0", "2.1"),
        Difference(
            "service: workers",
            "1 decode on cpu with 64 blocks, 1 prefill on cpu with 64 blocks",
            "2 decode on cpu with 64 blocks, 1 prefill on cpu with 64 blocks",
        ),
        Difference("service: links", "1 shm", "2 shm"),
        Difference("engine.chunk_tokens", None, 64, ("x", "y")),
    ]
    ran = pdserve("compare", str(a.path), str(b.path), "--json")
    assert "note: the runs differ in engine.chunk_tokens: unset and 64 (in 2 cells, such as x)" in ran.err
    assert ran.json["differences"][-1] == {"key": "engine.chunk_tokens", "a": None, "b": 64, "cells": ["x", "y"]}


def test_arms_of_other_names_correspond_where_each_run_has_one(tmp_path: Path, pdserve: Any) -> None:
    arms = {name: {"arms": {name: {"requests_per_s": value}}} for name, value in (("pd", 4.0), ("colocated", 5.0))}
    a = run(tmp_path, [10.0, 11.0], arms["pd"])
    b = run(tmp_path, [20.0, 21.0], arms["colocated"], arms=("colocated",))
    ran = pdserve("compare", str(a.path), str(b.path), "--limit", "ttft_ms=5", "--all")
    assert "note: arm colocated of B is compared with arm pd of A" in ran.err
    assert "lacks" not in ran.err
    assert "rows.load.pd→colocated.ttft_ms" in ran.out
    assert "arms.pd→colocated.requests_per_s" in ran.out
    assert "worse: rows.load.pd→colocated.ttft_ms: 10.5 became 20.5" in ran.err

    both = run(tmp_path, [10.0, 11.0], arms["pd"], arms=("pd", "colocated"))
    ran = pdserve("compare", str(a.path), str(both.path))
    assert "note: arms of A: pd; of B: colocated, pd; compared: pd" in ran.err


def test_what_is_missing_or_failed_is_noted(tmp_path: Path, pdserve: Any) -> None:
    a, b = run(tmp_path, [1.0], {**SUMMARY, "more": 1.0}), run(tmp_path, [1.0], {**SUMMARY, "failed": ["x: no token"]})
    ran = pdserve("compare", str(a.path), str(b.path))
    assert "note: figures of A that B lacks: 1, such as more" in ran.err
    assert "note: B failed: x: no token" in ran.err


def test_a_figure_with_a_limit_that_vanished_breaks_it(tmp_path: Path, pdserve: Any) -> None:
    a, b = run(tmp_path, [1.0], {**SUMMARY, "phi_gbps": 1.0}), run(tmp_path, [1.0], {**SUMMARY, "phi_gbps": None})
    for first, second, lacks in ((a, b, "B"), (b, a, "A")):
        arguments = ("compare", str(first.path), str(second.path))
        assert pdserve(*arguments, "--limit", "goodput_rps=1").code == 0
        ran = pdserve(*arguments, "--limit", "phi_gbps=1", "--json")
        assert ran.code == 1
        assert f"missing: phi_gbps has a limit of 1 %, and {lacks} lacks it" in ran.err
        assert ran.json["missing"] == [{"key": "phi_gbps", "run": lacks}]
        assert ran.json["violations"] == [{"key": "phi_gbps", "limit_percent": 1.0}]


def test_a_figure_is_compared_with_the_mean_of_an_interval(tmp_path: Path) -> None:
    a, b = run(tmp_path, [1.0], SUMMARY), run(tmp_path, [1.0], {**SUMMARY, "cells": [{"cell": "x", "added": 5.0}]})
    found, lacking = compare(a, b)
    assert lacking == []
    assert Comparison("cells.x.added", 2.0, 5.0, None) in found


def test_runs_that_cannot_be_compared_are_refused(tmp_path: Path, pdserve: Any) -> None:
    a, b = run(tmp_path, [1.0], SUMMARY), run(tmp_path, [1.0], SUMMARY, "goodput")
    ran = pdserve("compare", str(a.path), str(b.path))
    assert ran.code == 2
    assert "give two runs of the same experiment" in ran.err
    ran = pdserve("compare", str(a.path), str(tmp_path))
    assert ran.code == 2
    assert "error: B: " in ran.err
