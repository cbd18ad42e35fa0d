"""The experiments by name."""

from __future__ import annotations

from experiments.added_ttft import AddedTtft
from experiments.experiment import Experiment
from experiments.link_sweep import LinkSweep
from pdserve.core.errors import InvalidRequest

EXPERIMENTS: tuple[type[Experiment], ...] = (AddedTtft, LinkSweep)


def experiment_of(name: str) -> type[Experiment]:
    """The experiment called ``name``. InvalidRequest if there is none."""
    for each in EXPERIMENTS:
        if each.name == name:
            return each
    raise InvalidRequest(f"experiment: {name!r} is none of {', '.join(each.name for each in EXPERIMENTS)}")
