"""Every experiment of the catalogue: what it would start, what it refuses, and that its tests run it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from experiments.catalogue import EXPERIMENTS, RUN_KINDS, experiment_of
from experiments.experiment import Experiment, RunKind
from experiments.run_folder import RunData
from experiments.runner import new_folder
from pdserve.core.errors import InvalidRequest


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
    assert re.search(
        r"\b(run_experiment|measured|measured_on_service)\(|\bpdserve\(\s*\"experiment\"", tests.read_text()
    )


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("added-ttft", {"prompt_lens": "0"}, "--prompt-lens"),
        ("added-ttft", {"overlaps": "layer,all"}, "--overlaps"),
        ("added-ttft", {"pairs": 0}, "--pairs"),
        ("added-ttft", {"widths": "wide"}, "--widths: 'wide' is none of mha, gqa, mla, mqa"),
        (
            "added-ttft",
            {"prompt_lens": "128", "load_prompt_lens": "512"},
            "the automatic SLO needs idle requests of 512",
        ),
        ("added-ttft", {"rates": "1,-2"}, "--rates: -2 is not a positive number"),
        ("added-ttft", {"transports": ""}, "--transports: is empty"),
        ("link-sweep", {"gbps": "1,-2"}, "--gbps: -2 is not above 0"),
        ("link-sweep", {"gbps": ""}, "--gbps: give at least one"),
        ("link-sweep", {"round_trips_ms": "0"}, "--round-trips-ms: 0 is not"),
        ("goodput", {"splits": "1P1D,P2"}, "--splits: 'P2' is not a number of prefill and of decode workers"),
        ("goodput", {"slo": "ttft"}, "--slo: "),
        ("goodput", {"scale": "2"}, "scale: does not apply to the dataset random"),
        ("routing", {"policies": "round_robin,fastest"}, "--policies: 'fastest' is none of round_robin, random"),
        ("routing", {"prefixes": 0}, "prefixes: 0 is below 1"),
        ("routing", {"trace": "/nowhere"}, "dataset_path: /nowhere cannot be read"),
        ("transport", {"transports": "shm,cuda_ipc"}, "--transports: 'cuda_ipc' is none of"),
        ("transport", {"kib": "0"}, "--kib: give"),
        ("primer", {"batches": "2,4"}, "--batches"),
        ("primer", {"contexts": "64,64"}, "--contexts"),
        ("primer", {"model": "dummy:none"}, "--model"),
        ("primer", {"model": "tiny", "prefill_lens": "4096"}, "--prefill-lens"),
        ("primer", {"core": 4096}, "--core"),
        ("prefix", {"prompt_len": 64, "shared_lens": ""}, "--shared-lens"),
        ("prefix", {"prompt_len": 64, "shared_lens": "0,65"}, "--shared-lens"),
        ("interference", {"chunk_sizes": ""}, "--chunk-sizes: give at least one"),
        ("batching", {"decode_batches": (0,)}, "--decode-batches"),
    ],
)
def test_a_wrong_option_is_named(name: str, given: dict[str, Any], message: str) -> None:
    kind = experiment_of(name)
    with pytest.raises(InvalidRequest, match=message):
        kind(kind.options_type.choose(given)).cells(None)


@pytest.mark.parametrize("kind", [kind for kind in RUN_KINDS if kind.name != "primer"], ids=lambda kind: kind.name)
def test_nothing_measured_is_no_error(tmp_path: Path, kind: type[RunKind]) -> None:
    """Primer needs no service, and so has a cell whenever it has a report."""
    experiment, run = kind(kind.options_type.choose({})), RunData(kind.name, {}, {}, (), ())
    report = experiment.report(run, experiment.summarise(run))
    assert re.match("No |Nothing |There is no ", report.answer)
    report.save(tmp_path)
