"""Waterfalls of hand-made generations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from ops.waterfall import picture
from ops.waterfall.bars import COLORS, bars, human_bytes, longest, proof, reused
from ops.waterfall.picture import FORMATS, save_waterfalls
from ops.waterfall.terminal import overview, waterfall
from pdserve.core.request import FailedAttempt
from pdserve.core.timeline import STAGE_NAMES, UNATTRIBUTED, Breakdown, Figure
from tests.ops.made_up import made_up


def printed(renderable: RenderableType, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(renderable)
        return console.export_text()


def test_every_stage_has_a_colour() -> None:
    assert list(COLORS) == [*STAGE_NAMES, UNATTRIBUTED]


def test_each_bar_begins_where_the_one_before_ended() -> None:
    breakdown = Breakdown(Figure.TTFT, 10.0, {"network": 2.0, "prefill": 9.0, UNATTRIBUTED: -1.0}, 0.0)
    placed = bars(breakdown)
    assert [(bar.stage, bar.start_ms, bar.length_ms) for bar in placed] == [
        ("network", 0.0, 2.0),
        ("prefill", 2.0, 9.0),
        (UNATTRIBUTED, 11.0, -1.0),
    ]
    assert [bar.left_ms for bar in placed] == [0.0, 2.0, 10.0]
    assert sum(bar.percent for bar in placed) == pytest.approx(100)


def test_the_terminal_shows_both_figures_residue_and_proof() -> None:
    generation = replace(made_up(prompt_tokens=70), failures=(FailedAttempt("decode-1", "WorkerLost", "it is gone"),))
    text = printed(waterfall(generation))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "tried again: decode-1: WorkerLost: it is gone" in text
    assert "req-1 · 70 + 3 tokens · pd · prefill-0 → decode-0" in lines[0]
    assert any(line.split()[:2] == ["ttft", f"{generation.ttft_ms:.2f}"] for line in lines)
    assert any(line.split()[:2] == ["ttft_decode", f"{generation.ttft_decode_ms:.2f}"] for line in lines)
    assert "kv 1.3 MB = expected, 5 blocks over grpc_stream, xxh3-64 verified" in text
    assert "transfer exposed 1.50 ms; export 0.50, wire 2.00, import 0.40 ms" in text
    assert "request to ready 12.00 ms; 1.25 GB/s, 50% of its link" in text
    assert "unattributed -0.25 ms of ttft, +0.25 ms of ttft_decode; clock error ± 0.125 ms" in text
    assert sum(line.startswith("kv_exposed") for line in lines) == 1
    rows = [line for line in lines if " % " in line]
    drawn = {line.split()[0]: min(line.index(mark) for mark in "█▏▎▍▌▋▊▉" if mark in line) for line in rows}
    assert drawn["network"] < drawn["prefill"] < drawn["kv_exposed"] < drawn["first_decode"]


def test_stages_without_value_are_left_out() -> None:
    colocated = printed(waterfall(made_up(mode="colocated")))
    assert "kv_exposed" not in colocated
    assert "kv not transferred (colocated)" in colocated
    one_token = printed(waterfall(made_up(second_token=False)))
    assert "first_decode" not in one_token
    assert "no second token" in one_token


def test_the_overview_fits_eight_requests_into_80_columns() -> None:
    generations = [made_up(n, seed=n) for n in (4, 40, 120, 260, 510, 760, 1100)]
    generations.append(made_up(1500, mode="colocated"))
    lines = printed(overview(generations)).splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert next(line for line in lines if line.startswith("tokens")).split()[1:] == [
        str(generation.prompt_tokens) for generation in generations
    ]
    assert next(line for line in lines if "kv_exposed" in line).split()[-1] == "–"
    drawn = [line for line in lines if "█" in line and line.rstrip().endswith(" ms")]
    assert len(drawn) == 2 * len(generations)
    for generation, token_1, token_2 in zip(generations, drawn[::2], drawn[1::2], strict=True):
        assert token_1.split()[1:2] + token_1.split()[-2:-1] == ["1", f"{generation.ttft_ms:.1f}"]
        assert token_2.split()[0:1] + token_2.split()[-2:-1] == ["2", f"{generation.ttft_decode_ms:.1f}"]


def test_proof_says_when_bytes_differ_were_skipped_or_retried() -> None:
    good = made_up(70)
    assert "≠ expected 1.3 MB (7 ≠ 1310720 bytes)" in proof(replace(good, kv_bytes=7))
    assert "2 already on decode" in proof(replace(good, kv_blocks_skipped=2))
    held = replace(good, kv_bytes=0, kv_bytes_expected=0, kv_blocks_sent=0, kv_blocks_skipped=2)
    assert "kv 0 B = expected, 0 blocks over grpc_stream, 2 already on decode" in proof(held)
    assert "1.0 kB retried" in proof(replace(good, transfer=replace(good.transfer, kv_bytes_retried=1000)))
    assert proof(made_up(second_token=False)) == "kv not transferred (no hand-off needed)"


def test_what_prefix_caches_saved() -> None:
    good = made_up(70)
    assert reused(good) == "prefix cache: nothing found"
    found = replace(good, prefill_cached_tokens=64, kv_blocks_sent=1, kv_blocks_skipped=4)
    assert reused(found) == "prefix cache: 64 of 70 prompt tokens not computed, 4 of 5 blocks not sent"
    assert reused(found) in printed(waterfall(found))
    assert found.to_dict()["prefill_cached_tokens"] == 64


def test_what_speculation_guessed() -> None:
    assert "speculation" not in printed(waterfall(made_up(70)))
    told = printed(waterfall(replace(made_up(70), draft_tokens=64, accepted_draft_tokens=40)))
    assert "speculation: 40 of 64 guessed tokens right" in told


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1_234_567, "1.2 MB"), (5e15, "5000.0 TB")])
def test_human_bytes(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_the_picture_is_saved_for_one_and_for_several(tmp_path: Path) -> None:
    one = save_waterfalls([made_up(second_token=False)], tmp_path / "new" / "one.png")
    several = save_waterfalls([made_up(n) for n in (4, 400, 1500)], str(tmp_path / "several.png"), "three")
    for path in (one, several):
        assert path.read_bytes().startswith(b"\x89PNG")
    assert several.stat().st_size > one.stat().st_size > 10_000
    for suffix in FORMATS:
        assert save_waterfalls([made_up()], tmp_path / f"one{suffix}").stat().st_size > 1000


@pytest.mark.parametrize("prefill_ms", [7.0, 700.0])
def test_the_bars_of_a_figure_end_at_its_mark(prefill_ms: float, tmp_path: Path, monkeypatch: Any) -> None:
    """Control messages of token 2 take long here: one row of bars would have the prefill reach beyond token 1."""
    both = made_up()
    ttft = {"network": 1.0, "dispatch": 1.0, "prefill": prefill_ms, UNATTRIBUTED: 0.0}
    later = {"network": 9.0, "dispatch": 30.0, "prefill": prefill_ms, "first_decode": 3.0, UNATTRIBUTED: 0.0}
    breakdowns = {
        figure: Breakdown(figure, sum(stages.values()), stages, 0.0)
        for figure, stages in zip(Figure, (ttft, later), strict=True)
    }
    totals = [each.total_ms for each in breakdowns.values()]
    generation = replace(both, breakdowns=breakdowns, ttft_ms=totals[0], ttft_decode_ms=totals[1])
    ends: list[dict[str, float]] = []
    marks: list[float] = []
    draw = picture._draw_panel

    def panel(axes: Any, *rest: Any) -> None:
        draw(axes, *rest)
        bars_at = [(each.get_x() + each.get_width(), each.get_y()) for each in axes.patches]
        prefill = [end for end, y in bars_at if round(y + 0.18) == 2]  # the third stage: network, dispatch, prefill
        ends.append(dict(zip(("ttft", "ttft_decode"), prefill, strict=True)))
        marks.extend(line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--")

    monkeypatch.setattr(picture, "_draw_panel", panel)
    save_waterfalls([generation], tmp_path / "w.png")
    assert ends == [{"ttft": pytest.approx(prefill_ms + 2.0), "ttft_decode": pytest.approx(prefill_ms + 39.0)}]
    assert totals[0] == pytest.approx(ends[0]["ttft"])  # token 1 is there when its prefill has ended
    assert marks == pytest.approx(totals)


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    empty = replace(made_up(), breakdowns={})
    assert longest(empty) is None
    with pytest.raises(ValueError, match="no generation"):
        save_waterfalls([empty], tmp_path / "x.png")
