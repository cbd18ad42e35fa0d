"""Chunk sizes: summary and report on rows made by hand, and a run against a real service."""

from __future__ import annotations

from pathlib import Path

from experiments.interference import ChunkedPrefill, ChunkedPrefillOptions
from experiments.run_folder import RunData
from tests.experiments.quiet import holds, judged, measured_on_service
from tests.experiments.test_interference import windows_of

FIGURES: dict[str, tuple[float, float | None, int]] = {
    "64": (10.0, 400.0, 79),
    "256": (20.0, 300.0, 99),
    "off": (50.0, 200.0, 99),
}
"""Gaps of the decoding request, TTFT of the long prompt, and its tokens."""


def run_of(repeats: int = 6) -> RunData:
    return windows_of("chunked-prefill", {f"{chunk}/pass-1": [chunk] for chunk in FIGURES}, FIGURES, repeats)


def test_the_best_chunk_size_is_named_and_every_one_is_shown(tmp_path: Path) -> None:
    summary, report = judged(ChunkedPrefill, run_of(), chunk_sizes=(64, 256))
    assert list(summary["arms"]) == ["64", "256", "off"]
    holds(summary, {"best_chunk": 256, "traffic.long_prompt_s": 0.5})  # 101 of 121 tokens per second are too few
    assert report.answer.startswith("Chunks of 256 tokens")
    assert "whole prompts" in report.save(tmp_path).read_text(encoding="utf-8")
    assert {path.stem for path in tmp_path.glob("*.png")} == {"trade", "itl_over_time", "itl_distribution"}
    less, _ = judged(ChunkedPrefill, run_of(), chunk_sizes=(64, 256), throughput_share=0.8)
    assert less["best_chunk"] == 64


def test_services_differ_in_their_chunks_alone() -> None:
    cells = ChunkedPrefill(ChunkedPrefillOptions.choose({"chunk_sizes": (64, 256), "repeats": 2, "decoding": 3})).cells(
        None
    )
    assert [cell.parameters.get("chunk") for cell in cells] == [None, "64", "256", "off", "off", "256", "64"]
    services = [dict(cell.service or {}) for cell in cells]
    assert {service.pop("engine.chunk_tokens") for service in services} == {"64", "256", "off"}
    assert all(service == services[0] for service in services)
    assert services[0]["engine.max_num_batched_tokens"] == 515


def test_a_run_against_a_service(tmp_path: Path) -> None:
    given = {"model": "tiny", "prompt_len": 64, "decoding": 2, "rate": 4.0, "arrive_s": 0.5, "repeats": 1}
    settings = {"model": {"path": "tiny"}, "engine": {"chunk_tokens": 32}}
    _, summary, _ = measured_on_service(tmp_path, ChunkedPrefill, given, settings, decode=0)
    arm = summary["arms"]["as-configured"]
    assert arm["windows"] == 1
    assert arm["itl_ms"]["n"] > 0
    assert arm["long_ttft_ms"]["n"] == summary["traffic"]["arrivals"] == 2
