"""Our histograms count as those of prometheus_client do."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import LatencyHistogram

BOUNDS = (0.0001, 0.00025, 0.5, 1.0, 2.5, 60.0)
LABELS = ("mode", "stage")
SERIES = (("pd", "prefill"), ("colocated", 'a "quoted" one'))


def samples(registry: CollectorRegistry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """What a scrape gives: name and labels, and the value."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@pytest.mark.parametrize("seed", range(5))
def test_it_counts_as_the_library_does(seed: int) -> None:
    draw = random.Random(seed)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    own = LatencyHistogram("wait_seconds", "Time of waiting", LABELS, BOUNDS, ours)
    reference = Histogram("wait_seconds", "Time of waiting", LABELS, registry=theirs, buckets=BOUNDS)
    values = [*BOUNDS, 0.0, 1e9, *(draw.choice(BOUNDS) * draw.uniform(0.0, 3.0) for _ in range(500))]
    for value in values:
        labels = draw.choice(SERIES)
        own.of(*labels).observe(value)
        reference.labels(*labels).observe(value)
    expected = samples(theirs)
    assert samples(ours) == pytest.approx(expected, rel=1e-12)
    assert sum(value for (name, _), value in expected.items() if name == "wait_seconds_count") == len(values)


def test_one_without_labels_is_there_before_its_first_value() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    own = LatencyHistogram("gap_seconds", "Time between two", (), BOUNDS, ours)
    reference = Histogram("gap_seconds", "Time between two", registry=theirs, buckets=BOUNDS)
    assert samples(ours) == samples(theirs)
    for value in BOUNDS:
        own.of().observe(value)
        reference.observe(value)
    assert samples(ours) == pytest.approx(samples(theirs))
