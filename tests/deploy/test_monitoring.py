"""The Grafana dashboard and the alert rules, held against the metrics that a service really exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import Metrics, service_metrics

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"
HISTOGRAM = ("_bucket", "_sum", "_count")


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """Names of all time series."""
    metrics = Metrics(lambda: service_metrics([], {}, 0, 0, True, {"version": "0"}))
    names: set[str] = set()
    for family in text_string_to_metric_families(metrics.text().decode()):
        if family.type == "histogram":
            names |= {family.name + suffix for suffix in HISTOGRAM}
        else:
            names.add(family.name + ("_total" if family.type == "counter" else ""))
    return names


def dashboard() -> dict[str, Any]:
    return dict(json.loads((FOLDER / "dashboard.json").read_text()))


def expressions() -> Iterator[str]:
    for panel in dashboard()["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_expressions_use_metrics_that_exist(expression: str, exported: set[str]) -> None:
    used = set(re.findall(r"pdserve_\w+", expression))
    assert used <= exported
    for histogram in re.findall(r"histogram_quantile\(.*?(pdserve_\w+)", expression):
        assert histogram.endswith("_bucket")
    assert expression.count("(") == expression.count(")")


def test_the_dashboard_shows_every_metric(exported: set[str]) -> None:
    """All but the state that `pdserve status` shows better."""
    used = {name for expression in expressions() for name in re.findall(r"pdserve_\w+", expression)}
    stems = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    assert stems - shown == {
        "pdserve_info",
        "pdserve_kv_blocks_total",
        "pdserve_kv_request_to_ready_seconds",
        "pdserve_kv_wire_seconds",
        "pdserve_request_seconds",
        "pdserve_worker_blocks_cached",
        "pdserve_worker_blocks_stored",
        "pdserve_worker_tokens_outstanding",
    }


def test_panels_do_not_overlap_and_name_their_source() -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not taken & cells, panel["title"]
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_alerts_say_what_to_do() -> None:
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
