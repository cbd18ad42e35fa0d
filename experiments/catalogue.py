"""The experiments and other kinds of runs by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from experiments.added_ttft import AddedTtft
from experiments.batching import Batching
from experiments.bench_report import BenchRun
from experiments.experiment import Experiment, RunKind
from experiments.goodput import Goodput
from experiments.interference import ChunkedPrefill, Interference
from experiments.link_sweep import LinkSweep
from experiments.plan import Planner
from experiments.prefix import Prefix
from experiments.primer import Primer
from experiments.profile import Profile
from experiments.routing import Routing
from experiments.run_folder import RunFolder
from experiments.speculation import Speculation
from experiments.sweep import Sweep
from experiments.transport import Transport
from pdserve.core import plugins
from pdserve.core.errors import InvalidRequest

_OWN: tuple[type[Experiment], ...] = (
    AddedTtft,
    Goodput,
    Routing,
    Primer,
    Prefix,
    Interference,
    ChunkedPrefill,
    Batching,
    Speculation,
    Transport,
    LinkSweep,
    Profile,
    Planner,
)

EXPERIMENTS: tuple[type[Experiment], ...] = (
    *_OWN,
    *plugins.load_all(plugins.EXPERIMENTS, Experiment, [each.name for each in _OWN]),
)
"""pdserve's own, and those of plug-ins."""

RUN_KINDS: tuple[type[RunKind], ...] = (*EXPERIMENTS, Sweep, BenchRun)
"""Everything that writes a run folder."""


K = TypeVar("K", bound=RunKind)


def _named(kinds: Sequence[type[K]], name: str) -> type[K]:
    found = {each.name: each for each in kinds}
    if name not in found:
        raise InvalidRequest(f"experiment: {name!r} is none of {', '.join(found)}")
    return found[name]


def run_of(folder: RunFolder) -> RunKind:
    """The run in ``folder``, with its options. InvalidRequest if this version cannot read it."""
    name, _ = folder.config
    return _named(RUN_KINDS, name).of(folder)


def experiment_of(name: str) -> type[Experiment]:
    """The experiment called ``name``. InvalidRequest if there is none."""
    return _named(EXPERIMENTS, name)
