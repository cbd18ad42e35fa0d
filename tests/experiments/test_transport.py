"""The transport meter: its arithmetic on made-up times, and runs over real processes and a real service."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from experiments.run_folder import FinishedCell, RequestRow, RunData
from experiments.transport import MESSAGE_BYTES, Transport, TransportOptions, fit_line
from tests.experiments.quiet import measured
from tests.local_cluster import LocalCluster

MIB = 2**20
LINES = {"memcpy": (1e-6, 10e9), "socket": (50e-6, 2e9), "shm": (100e-6, 8e9), "tcp": (200e-6, 1e9)}
SIZES = (64 * 2**10, MIB, 4 * MIB)
EXPERIMENT = Transport(TransportOptions())


def seconds(size: int, line: tuple[float, float], scale: float = 1.0) -> float:
    cost_s, rate = line
    return scale * (cost_s + size / rate)


def local_run(repeats: int = 6, unavailable: Mapping[str, str] | None = None, **changes: float) -> RunData:
    """Repeats of which the i-th is i percent slower; ``changes`` replace the times of payloads of 64 MiB."""
    cells = []
    for number in range(repeats):
        scale = 1 + number / 100
        times = {
            name: {str(size): [1.0, seconds(size, line, scale), 0.0] for size in SIZES}  # the median counts
            for name, line in LINES.items()
        }
        for name, time_s in changes.items():
            times[name][str(64 * MIB)] = [time_s]
        facts = {"seconds": times, "unavailable": dict(unavailable or {})}
        cells.append(FinishedCell(f"repeat-{number}", {"where": "local", "repeat": number}, 1.0, facts))
    return RunData("transport", {}, {}, tuple(cells), ())


def test_the_line_through_times_is_found() -> None:
    line = fit_line(SIZES, [seconds(size, (150e-6, 3e9)) for size in SIZES])
    assert line == pytest.approx((150e-6, 3e9))
    assert fit_line([1, 1], [1.0, 2.0]) is None
    assert fit_line([MIB, 2 * MIB], [2.0, 1.0]) is None  # faster the larger: no rate


def test_figures_of_pairs_are_arithmetic() -> None:
    summary = EXPERIMENT.summarise(local_run())
    assert (summary["experiment"], summary["where"], summary["failed"]) == ("transport", "local", [])
    assert summary["message_bytes"] == MESSAGE_BYTES
    assert [(cell["transport"], cell["size_bytes"]) for cell in summary["cells"]] == [
        (name, size) for name in ("shm", "tcp") for size in SIZES
    ]
    assert {cell["transport"] for cell in summary["ceilings"]} == {"memcpy", "socket"}
    scales = [1 + number / 100 for number in range(6)]
    for cell in summary["cells"]:
        size, line = cell["size_bytes"], LINES[cell["transport"]]
        assert cell["messages"] == 1
        assert cell["time_us"]["mean"] == pytest.approx(seconds(size, line) * 1e6 * 1.025, rel=1e-6)
        gbs = sum(size / seconds(size, line, scale) for scale in scales) / 6 / 1e9
        assert cell["gbs"]["mean"] == pytest.approx(gbs, abs=1e-6)
        assert cell["gbs"]["lo"] <= cell["gbs"]["mean"] <= cell["gbs"]["hi"]
        assert cell["ceiling"] == {"shm": "memcpy", "tcp": "socket"}[cell["transport"]]
        share = seconds(size, LINES[cell["ceiling"]]) / seconds(size, line)
        assert cell["share"]["mean"] == pytest.approx(share, abs=1e-6)
        assert cell["per_message_us"]["mean"] == pytest.approx(line[0] * 1e6 * 1.025, abs=1e-3)
    fits = {fit["transport"]: fit for fit in summary["fits"]}
    assert fits["tcp"]["rate_gbs"]["mean"] == pytest.approx(sum(1 / scale for scale in scales) / 6, abs=1e-5)
    assert fits["tcp"]["misfit_pct"] == 0


def test_larger_sizes_are_several_messages_and_not_in_the_fit() -> None:
    summary = EXPERIMENT.summarise(local_run(tcp=9.0))
    (large,) = [cell for cell in summary["cells"] if cell["size_bytes"] == 64 * MIB]
    assert (large["transport"], large["messages"], large["share"]) == ("tcp", 16, None)
    assert large["per_message_us"]["mean"] == pytest.approx(200 * 1.025, abs=1e-3)


def test_a_transport_that_cannot_be_measured_is_said_and_a_ceiling_fails_the_run() -> None:
    summary = EXPERIMENT.summarise(local_run(unavailable={"nixl": "no library"}))
    assert summary["failed"] == []
    assert "nixl was not measured: no library" in EXPERIMENT.report(local_run(), summary).caveats
    assert EXPERIMENT.summarise(local_run(unavailable={"memcpy": "odd"}))["failed"] == ["memcpy: odd"]


def service_row(length: int, index: int, **changes: Any) -> RequestRow:
    """100 µs and 1 GB/s, half of the time importing, over a link of 2 GB/s."""
    kv_bytes = length * 10_000
    busy_ms = 0.1 + kv_bytes / 1e6
    transfer = {
        "wire_ms": busy_ms / 2,
        "import_ms": busy_ms / 2,
        "exposed_ms": 1.5,
        "gbs": kv_bytes / busy_ms / 1e6,
        "ceiling_gbs": 2.0,
    }
    values: dict[str, Any] = {
        "cell": f"{length} tokens",
        "arm": "pd",
        "repeat": 0,
        "index": index,
        "prompt_tokens": length,
        "transport": "tcp",
        "kv_bytes": kv_bytes,
        "kv_bytes_expected": kv_bytes,
        "transfer": transfer,
    }
    return RequestRow(**{**values, **changes})


def service_run(*rows: RequestRow) -> RunData:
    cells = [
        FinishedCell(name, {"where": "service", "prompt_len": 1, "transport": "tcp"}, 1.0, {})
        for name in dict.fromkeys(row.cell for row in rows)
    ]
    return RunData("transport", {}, {}, tuple(cells), rows)


def test_figures_of_a_service_are_arithmetic() -> None:
    rows = [service_row(length, index) for index in range(5) for length in (100, 1000)]
    summary = EXPERIMENT.summarise(service_run(*rows))
    assert (summary["where"], summary["ceilings"], summary["failed"]) == ("service", [], [])
    for cell, length in zip(summary["cells"], (100, 1000), strict=True):
        assert (cell["transport"], cell["prompt_len"], cell["size_bytes"]) == ("tcp", length, length * 10_000)
        gbs = length * 1e4 / (0.1 + length / 100) / 1e6
        assert cell["gbs"]["mean"] == pytest.approx(gbs, abs=1e-6)
        assert cell["share"]["mean"] == pytest.approx(gbs / 2, abs=1e-6)
        assert cell["time_us"]["mean"] == pytest.approx(100 + length * 10)
        assert cell["exposed_us"]["mean"] == pytest.approx(1500)
        assert (cell["ceiling"], cell["ceiling_gbs"]) == ("link", 2.0)
        assert cell["per_message_us"]["mean"] == pytest.approx(100, abs=1e-3)
    (fit,) = summary["fits"]
    assert fit["rate_gbs"]["mean"] == pytest.approx(1.0, abs=1e-6)


def test_a_failed_request_and_a_missing_byte_fail_the_run() -> None:
    lost = RequestRow(cell="1 tokens", arm="pd", repeat=0, index=1, error="WorkerLost: gone")
    summary = EXPERIMENT.summarise(service_run(service_row(1, 0, kv_bytes_expected=7), lost))
    assert [each.partition(", first")[0] for each in summary["failed"]] == [
        "1 tokens: 1 request failed",
        "1 tokens: bytes moved differ from bytes expected in 1 request",
    ]


def test_pairs_of_processes_are_measured_and_redrawn(tmp_path: Path) -> None:
    options = TransportOptions.choose({"transports": "shm,tcp", "kib": "64,512", "repeats": 2, "rounds": 1})
    summary, folder, _ = measured(Transport(options), tmp_path)
    assert len(summary["cells"]) == 4
    assert all(cell["gbs"]["mean"] > 0 and cell["share"]["mean"] > 0 for cell in summary["cells"])
    assert len(summary["fits"]) <= 4
    for picture in ("rate_over_size", "time_over_size"):
        assert (folder / f"{picture}.png").stat().st_size > 10_000
    assert "have no intervals" in (folder / "report.html").read_text()


def test_the_links_of_a_service_are_measured(tmp_path: Path, tcp_service: LocalCluster) -> None:
    options = TransportOptions.choose({"prompt_lens": "32,70", "requests": 3})
    summary, _, _ = measured(Transport(options), tmp_path, tcp_service.target)
    assert [cell["prompt_len"] for cell in summary["cells"]] == [32, 70]
    for cell in summary["cells"]:
        assert cell["transport"] == "tcp"
        assert cell["ceiling_gbs"] > 0
        assert 0 < cell["share"]["mean"] <= 1
        assert cell["gbs"]["n"] == 3
