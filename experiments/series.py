"""``pdserve experiment all``: the experiments of the catalogue one after the other, with an index page.

The folder of a series is ``results/all/STAMP``: ``series.json`` has its plan and the state of each experiment, which
has a run folder ``NAME/STAMP`` in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import msgspec

from experiments.catalogue import EXPERIMENTS, experiment_of
from experiments.deployment import Service
from experiments.experiment import Experiment
from experiments.report.page import PAGE, save_index
from experiments.run_folder import RunFolder, stamped
from experiments.runner import Outcome, Progress, new_folder, run_experiment
from pdserve.client.target import AccessOptions
from pdserve.core.errors import InvalidRequest, PdserveError

SERIES = "series.json"
WAITING, INTERRUPTED, FINISHED = "not measured yet", "interrupted", "finished"


class SeriesPlan(msgspec.Struct, frozen=True):
    """Which experiments, and the options that all of them get."""

    names: list[str]
    quick: bool = False
    model: str | None = None
    target: str | None = None
    config: str | None = None
    settings: dict[str, Any] = {}


class Entry(msgspec.Struct):
    """An experiment of a series. ``folder`` is relative to that of the series, and empty before the first attempt.
    ``state`` is `WAITING`, `INTERRUPTED`, `FINISHED`, or says what failed."""

    name: str
    state: str = WAITING
    folder: str = ""
    answer: str = ""


class _Saved(msgspec.Struct):
    plan: SeriesPlan
    entries: list[Entry]


class Series:
    """The experiments of one folder, and how far they are."""

    def __init__(self, path: Path, saved: _Saved) -> None:
        self.path = path
        self._saved = saved

    @staticmethod
    def names(only: Sequence[str] | None) -> list[str]:
        """Names of all experiments that measure something, or those of ``only`` after checking them."""
        if only is None:
            return [each.name for each in EXPERIMENTS if not each.simulated]
        if not only:
            raise InvalidRequest("--only: is empty; name at least one experiment")
        return [experiment_of(name).name for name in dict.fromkeys(only)]

    @classmethod
    def create(cls, root: Path, plan: SeriesPlan) -> Self:
        """A new series ``root/all/stamp``. InvalidRequest if it cannot be written, or an option is wrong."""
        for name in plan.names:
            _options(name, plan)
        series = cls(stamped(root / "all"), _Saved(plan, [Entry(name) for name in plan.names]))
        series._save()
        return series

    @classmethod
    def open(cls, path: Path) -> Self:
        """The series in a folder. InvalidRequest if it is none."""
        try:
            saved = msgspec.json.decode((path / SERIES).read_bytes(), type=_Saved)
        except OSError:
            raise InvalidRequest(f"--resume: {path} is not the folder of a series: it has no {SERIES}") from None
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"--resume: {path / SERIES}: {error}") from None
        return cls(path, saved)

    def states(self) -> list[dict[str, Any]]:
        """Name, state, answer and folder of every experiment."""
        return [msgspec.to_builtins(entry) for entry in self._saved.entries]

    def run(
        self, progress: Callable[[str], AbstractContextManager[Progress]], access: AccessOptions | None = None
    ) -> bool:
        """Run what is not finished, in order. An experiment that fails is noted, and the next one begins. Returns
        whether Ctrl-C ended the series; everything measured until then is kept. ``access`` is how to reach services."""
        for entry in self._saved.entries:
            if entry.state == FINISHED:
                continue
            try:
                with progress(entry.name) as shown:
                    interrupted = self._run(entry, shown, access)
            except KeyboardInterrupt:
                entry.state, interrupted = INTERRUPTED, True
            except (PdserveError, OSError) as error:
                entry.state, interrupted = f"failed: {' '.join(str(error).split())}", False
            self._save()
            if interrupted:
                return True
        return False

    def _run(self, entry: Entry, progress: Progress, access: AccessOptions | None) -> bool:
        """Run an experiment; returns whether it was interrupted."""
        plan = self._saved.plan
        kind = experiment_of(entry.name)
        service: Service = {
            "target": plan.target,
            "access": access,
            "config": None if plan.config is None else Path(plan.config),
            "settings": plan.settings,
        }
        if entry.folder:
            folder = RunFolder.open(self.path / entry.folder)
            experiment = kind.of(folder)
        else:
            experiment = _options(entry.name, plan)
            folder = new_folder(experiment, self.path, **service)
            entry.folder = str(folder.path.relative_to(self.path))
            self._save()
        outcome = run_experiment(experiment, folder, progress, **service)
        self._note(entry, outcome)
        return outcome.interrupted

    def _note(self, entry: Entry, outcome: Outcome) -> None:
        if outcome.summary is not None:
            entry.answer = outcome.summary["answer"]
        if outcome.interrupted:
            entry.state = INTERRUPTED
        elif outcome.failures:
            entry.state = f"failed: {outcome.failures[0]}"
        else:
            entry.state = FINISHED

    def _save(self) -> None:
        """Write the state and the index page."""
        temporary = self.path / f".{SERIES}.new"
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(self._saved), indent=1))
        temporary.replace(self.path / SERIES)
        save_index(
            self.path,
            f"Experiments of {self.path.name}",
            [
                {
                    "name": entry.name,
                    "question": experiment_of(entry.name).question,
                    "answer": entry.answer,
                    "state": entry.state,
                    "href": f"{entry.folder}/{PAGE}" if (self.path / entry.folder / PAGE).is_file() else "",
                }
                for entry in self._saved.entries
            ],
        )


def _options(name: str, plan: SeriesPlan) -> Experiment:
    kind = experiment_of(name)
    return kind(kind.options_type.choose({"model": plan.model}, plan.quick))
