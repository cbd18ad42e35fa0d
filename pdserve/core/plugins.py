"""Plug-ins: what installed packages add to pdserve, by the name of an entry point. A name is loaded when it is used."""

from __future__ import annotations

import functools
from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pdserve.core.errors import ConfigError

COMMANDS = "pdserve.commands"
"""Functions that get the `typer.Typer` of the command ``pdserve``."""
TRANSPORTS = "pdserve.transports"
"""Classes of `kv_transfer.base.KVTransport`, made as `kv_transfer.factory.create_transport` makes pdserve's own."""
POLICIES = "pdserve.policies"
"""Functions as in `router.policies`."""
MODEL_FAMILIES = "pdserve.model_families"
"""Values of `checkpoints.families.Family`, by the architecture that ``config.json`` names."""
EXPERIMENTS = "pdserve.experiments"
"""Classes of `experiments.experiment.Experiment`."""


@functools.cache
def installed(group: str) -> dict[str, EntryPoint]:
    """The plug-ins of a group by name. ConfigError if two packages have one of the same name."""
    found: dict[str, EntryPoint] = {}
    for plugin in entry_points(group=group):
        other = found.setdefault(plugin.name, plugin)
        if other is not plugin:
            raise ConfigError(f"{group}: {_package(other)} and {_package(plugin)} both have {plugin.name}; remove one")
    return found


def names(group: str, own: Collection[str]) -> tuple[str, ...]:
    """The names of a group: pdserve's ``own``, then those of plug-ins. ConfigError if a plug-in has one of ``own``."""
    added = installed(group)
    for name in added.keys() & set(own):
        raise ConfigError(f"{group}: {_package(added[name])} has {name}, which is a name of pdserve; remove it")
    return (*own, *added)


@functools.cache
def load(group: str, name: str, kind: Any) -> Any:
    """The plug-in ``name``: a subclass of ``kind``, or a value of it. ConfigError names its package if it cannot be
    imported or is something else."""
    plugin = installed(group)[name]
    try:
        found = plugin.load()
        if not (issubclass(found, kind) if isinstance(found, type) else isinstance(found, kind)):
            raise TypeError(f"{found!r} is not of kind {kind.__name__}")
        if getattr(found, "name", name) != name:
            raise ValueError(f"its own name is {found.name}")
    except Exception as error:
        raise ConfigError(
            f"{group}: {name} of {_package(plugin)} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    return found


def load_all(group: str, kind: Any, own: Collection[str] = ()) -> list[Any]:
    """`load` all plug-ins of a group, whose names are not among pdserve's ``own``."""
    return [load(group, name, kind) for name in names(group, own)[len(own) :]]


def _package(plugin: EntryPoint) -> str:
    return "an unknown package" if plugin.dist is None else f"package {plugin.dist.name} {plugin.dist.version}"
