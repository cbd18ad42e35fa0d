"""The experiments and other kinds of runs by name."""

from __future__ import annotations

from experiments.added_ttft import AddedTtft
from experiments.batching import Batching
from experiments.bench_report import BenchRun
from experiments.experiment import Experiment, RunKind
from experiments.goodput import Goodput
from experiments.interference import ChunkedPrefill, Interference
from experiments.link_sweep import LinkSweep
from experiments.prefix import Prefix
from experiments.primer import Primer
from experiments.routing import Routing
from experiments.run_folder import RunFolder
from experiments.sweep import Sweep
from experiments.transport import Transport
from pdserve.core.errors import InvalidRequest

EXPERIMENTS: tuple[type[Experiment], ...] = (
    AddedTtft,
    Goodput,
    Routing,
    Primer,
    Prefix,
    Interference,
    ChunkedPrefill,
    Batching,
    Transport,
    LinkSweep,
)


RUN_KINDS: tuple[type[RunKind], ...] = (*EXPERIMENTS, Sweep, BenchRun)
"""Everything that writes a run folder."""


def kind_of(name: str) -> type[RunKind]:
    """The kind of run called ``name``. InvalidRequest if there is none."""
    for each in RUN_KINDS:
        if each.name == name:
            return each
    raise InvalidRequest(f"experiment: {name!r} is none of {', '.join(each.name for each in RUN_KINDS)}")


def run_of(folder: RunFolder) -> RunKind:
    """The run in ``folder``, with its options. InvalidRequest if this version cannot read it."""
    name, _ = folder.config
    return kind_of(name).of(folder)


def experiment_of(name: str) -> type[Experiment]:
    """The experiment called ``name``. InvalidRequest if there is none."""
    for each in EXPERIMENTS:
        if each.name == name:
            return each
    raise InvalidRequest(f"experiment: {name!r} is none of {', '.join(each.name for each in EXPERIMENTS)}")
