"""Every experiment of the catalogue: what it would start, and that its tests run it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiments.catalogue import EXPERIMENTS
from experiments.experiment import Experiment
from experiments.runner import new_folder


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("kind", EXPERIMENTS, ids=lambda kind: kind.name)
def test_its_services_have_settings_that_the_configuration_knows(
    tmp_path: Path, kind: type[Experiment], quick: bool
) -> None:
    """Its own tests run it on a service that is there already; a setting that was renamed would not be noticed."""
    experiment = kind(kind.options_type.choose({}, quick))
    assert experiment.cells(None)
    folder = new_folder(experiment, tmp_path)
    assert folder.config[0] == kind.name


@pytest.mark.parametrize("kind", EXPERIMENTS, ids=lambda kind: kind.name)
def test_its_tests_run_it(kind: type[Experiment]) -> None:
    tests = Path(__file__).parent / f"test_{kind.name.replace('-', '_')}.py"
    assert re.search(r"\brun_experiment\(|\bpdserve\(\s*\"experiment\"", tests.read_text())
