"""Chunk sizes: summary and report on rows made by hand, and a run against a real service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.interference import ChunkedPrefill, ChunkedPrefillOptions
from experiments.run_folder import RunData
from tests.experiments.quiet import measured_on_service
from tests.experiments.test_interference import windows_of

FIGURES: dict[str, tuple[float, float | None, int]] = {
    "64": (10.0, 400.0, 79),
    "256": (20.0, 300.0, 99),
    "off": (50.0, 200.0, 99),
}
"""Gaps of the decoding request, TTFT of the long prompt, and its tokens."""


def run_of(repeats: int = 6) -> RunData:
    return windows_of("chunked-prefill", {f"{chunk}/pass-1": [chunk] for chunk in FIGURES}, FIGURES, repeats)


def experiment(**options: Any) -> ChunkedPrefill:
    return ChunkedPrefill(ChunkedPrefillOptions.choose({"chunk_sizes": (64, 256), **options}))


def test_the_best_chunk_size_is_named() -> None:
    summary = experiment().summarise(run_of())
    assert list(summary["arms"]) == ["64", "256", "off"]
    assert summary["best_chunk"] == 256  # 101 of 121 tokens per second are too few
    assert experiment(throughput_share=0.8).summarise(run_of())["best_chunk"] == 64
    assert summary["traffic"]["long_prompt_s"] == 0.5


def test_the_report_shows_every_chunk_size(tmp_path: Path) -> None:
    run, meter = run_of(), experiment()
    report = meter.report(run, meter.summarise(run))
    page = report.save(tmp_path).read_text(encoding="utf-8")
    assert report.answer.startswith("Chunks of 256 tokens")
    assert "whole prompts" in page
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "over_chunk.png",
        "itl_over_time.png",
        "itl_distribution.png",
    }


def test_services_differ_in_their_chunks_alone() -> None:
    cells = experiment(repeats=2, decoding=3).cells(None)
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
