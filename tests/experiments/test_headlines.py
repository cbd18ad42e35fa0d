"""The headlines of all questions on data without an effect: none claims one."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from experiments.catalogue import RUN_KINDS
from experiments.experiment import RunKind
from experiments.run_folder import FinishedCell, RequestRow, RunData
from tests.experiments import (
    test_added_ttft,
    test_batching,
    test_chunked_prefill,
    test_goodput,
    test_interference,
    test_link_sweep,
    test_plan,
    test_prefix,
    test_primer,
    test_profile,
    test_routing,
    test_speculation,
    test_transport,
)

ARMS = ("pd", "colocated")
draw = random.Random()


@pytest.fixture(autouse=True)
def seed() -> None:
    """Each question draws the same data, whichever were planted before it."""
    draw.seed(7)


def noise() -> float:
    """A factor of a latency that has nothing to do with its arm; now and then a disturbance."""
    return 1 + draw.gauss(0.0, 0.05) + (draw.random() < 0.1) * draw.expovariate(1.0)


def alike(row: RequestRow, ms: float = 100.0) -> RequestRow:
    """The row with latencies that do not depend on its arm."""
    ttft_ms = ms * noise()
    stages_ms = {figure: {"prefill": ttft_ms} for figure in ("ttft", "ttft_decode")}
    return msgspec.structs.replace(
        row,
        ttft_ms=ttft_ms,
        ttft_decode_ms=ttft_ms + 10.0 * noise(),
        e2e_ms=ttft_ms + 100.0,
        itl_ms=tuple(10.0 * noise() for _ in range(10)),
        stages_ms=stages_ms,
    )


def pairs(cell: str, count: int = 12) -> Iterator[RequestRow]:
    """Every other pair is the one before it with the arms exchanged, so that the differences have no sign at all."""
    for index in range(0, count, 2):
        first, second = (alike(RequestRow(cell=cell, arm="", repeat=0, index=0)) for _ in range(2))
        for later, arms in enumerate((ARMS, ARMS[::-1])):
            for row, arm in zip((first, second), arms, strict=True):
                yield msgspec.structs.replace(row, arm=arm, index=index + later, transfer={"exposed_ms": 2.0})


def added_ttft() -> tuple[dict[str, Any], RunData]:
    loads = [test_added_ttft.loaded_row(arm, repeat, index, 100.0)
             for arm in ARMS for repeat in range(6) for index in range(10)]  # fmt: skip
    rows = [*pairs(test_added_ttft.CELL), *(alike(each) for each in loads)]
    run = test_added_ttft.loaded_run(rows)
    more: dict[str, dict[str, str]] = {"a": {"width": "mha"}, "b": {"width": "mqa"}, "c": {"first_token": "decode"}}
    idle = run.cells[0]
    cells = [msgspec.structs.replace(idle, cell=name, parameters={**idle.parameters, **what})
             for name, what in more.items()]  # fmt: skip
    rows += [msgspec.structs.replace(row, kv_bytes=9, kv_bytes_expected=9) for name in more for row in pairs(name)]
    return {"slo": "ttft=103"}, RunData(run.name, {}, {}, (*run.cells, *cells), tuple(rows))


def sweep() -> tuple[dict[str, Any], RunData]:
    parameters = {"workers": "1P1D", "transport": "shm", "overlap": "layer", "prompt_len": 64, "load": "idle"}
    cells = tuple(FinishedCell(name, parameters, 1.0, {}) for name in ("x", "y"))
    return {}, RunData("sweep", {}, {}, cells, tuple(row for cell in cells for row in pairs(cell.cell)))


def bench() -> tuple[dict[str, Any], RunData]:
    facts = {"loads": [{"mode": "both", "duration_s": 1.0, "unsent": 0, "partial": False, "planned": 24}]}
    cell = FinishedCell("load", {"mode": "both"}, 1.0, facts)
    return {"paired": True}, RunData("bench", {}, {}, (cell,), tuple(pairs("load")))


def goodput() -> tuple[dict[str, Any], RunData]:
    cell, rows = test_goodput.loaded("1P1D", 1.0, dict.fromkeys(ARMS, 8))
    loads = [{"arm": arm, "repeat": repeat, "duration_s": 5.0, "took_s": 6.0, "lag": None}
             for arm in ARMS for repeat in range(6)]  # fmt: skip
    spread = [alike(msgspec.structs.replace(row, repeat=repeat)) for row in rows for repeat in range(6)]
    cell = msgspec.structs.replace(cell, facts={**cell.facts, "loads": loads})
    return {"slo": "ttft=103"}, RunData("goodput", {}, {}, (cell,), tuple(spread))


def routing() -> tuple[dict[str, Any], RunData]:
    loads = [test_routing.loaded(policy, number, [100.0 * noise() for _ in range(20)], 0)
             for policy in ("round_robin", "kv_aware") for number in range(6)]  # fmt: skip
    calibration = FinishedCell("calibration", {}, 1.0, {"rate": 4.0, "cold_ttft_ms": 250.0, "prompt_tokens": 100})
    return {}, RunData(
        "routing", {}, {}, (calibration, *(c for c, _ in loads)), tuple(r for _, rs in loads for r in rs)
    )


def prefix() -> tuple[dict[str, Any], RunData]:
    run = test_prefix.RUN
    rows = [alike(msgspec.structs.replace(row, index=row.index + 2 * more)) for row in run.rows for more in range(6)]
    rows = [msgspec.structs.replace(row, stages_ms={"ttft": {"prefill": 1.0}, "ttft_decode": {"kv_exposed": 1.0}})
            for row in rows]  # fmt: skip
    return {}, RunData("prefix", {}, {}, run.cells, tuple(rows))


def windows(run: RunData) -> RunData:
    """The run with gaps that do not depend on the arm: every other repeat has those of the one before it, exchanged
    between the arms."""
    arms = sorted({row.arm for row in run.rows})
    drawn: dict[tuple[int, int], tuple[float, ...]] = {}
    rows = []
    for row in run.rows:
        place = row.repeat // 2, (arms.index(row.arm) + row.repeat) % 2
        gaps = drawn.setdefault(place, tuple(10.0 * noise() for _ in range(20)))
        rows.append(msgspec.structs.replace(row, itl_ms=gaps if row.itl_ms else ()))
    return RunData(run.name, {}, {}, run.cells, tuple(rows))


def interference() -> tuple[dict[str, Any], RunData]:
    return {"chunk_sizes": "64,128"}, windows(test_interference.run_of(8))


def chunked_prefill() -> tuple[dict[str, Any], RunData]:
    run = test_chunked_prefill.run_of(8)
    rows = tuple(msgspec.structs.replace(row, prompt_tokens=min(row.prompt_tokens, 79)) for row in run.rows)
    return {"chunk_sizes": "64,256"}, windows(RunData(run.name, {}, {}, run.cells, rows))


def batching() -> tuple[dict[str, Any], RunData]:
    cells, rows = test_batching.service_cells(8)
    for cell in cells[1:]:
        for each in cell.facts["runs"]:
            each["duration_s"] = noise()
    return {}, RunData("batching", {}, {}, tuple(cells), tuple(alike(row) for row in rows))


def primer() -> tuple[dict[str, Any], RunData]:
    samples = [{"repeat": repeat, "arm": arm, "times_s": [0.3 * noise(), 0.3 * noise()], "token_ids": [1, 2]}
               for repeat in range(8) for arm in ("with", "without")]  # fmt: skip
    cell = test_primer.cell("cache", samples, part="cache", prompt_len=4, output_len=2)
    return {}, RunData("primer", {}, {}, (cell,), ())


def speculation() -> tuple[dict[str, Any], RunData]:
    cell = test_speculation.cell(1, [{arm: noise() for arm in ("off", "auto", "always")} for _ in range(8)])
    return {"acceptances": (0.5,)}, RunData("speculation", {}, {}, (cell,), ())


def link_sweep() -> tuple[dict[str, Any], RunData]:
    cells = [test_link_sweep.cell_of(gbps, 0.0, "none") for gbps in (0.5, 2.0)]
    rows = [alike(row) for cell in cells for row in test_link_sweep.rows_of(cell.cell, 2.0, 12)]
    return {}, RunData("link-sweep", {}, {}, tuple(cells), tuple(rows))


def transport() -> tuple[dict[str, Any], RunData]:
    return {}, test_transport.local_run(6)


def plan() -> tuple[dict[str, Any], RunData]:
    return {}, test_plan.run_of(4.0, 4.05)


def profile() -> tuple[dict[str, Any], RunData]:
    return {}, test_profile.whole_run()


CLAIM = re.compile(
    r"disaggregation adds|has the lowest|have the lowest|(more|less) than the|it pays|ms \[[^]]*\] earlier|times less"
    r"|times the t|is [0-9.]+ times|times as much"
)
"""What only the headline of a run that shows an effect says."""
NUMBER = re.compile(r"[0-9.]+ (ms|s|µs|GB/s|Gbit/s|requests/s|(output )?tokens/s)\b")
COUNTED = re.compile(
    r"\[|±|by arithmetic|by simulation"
    r"|\b[1-9][0-9,]* (disaggregated )?(request|pair|gap|long prompt|cell|measured load)s?\b"
)
"""A measured figure, and the interval or the count that has to stand in its sentence."""
PLANTED: dict[str, tuple[Callable[[], tuple[dict[str, Any], RunData]], str]] = {
    "added-ttft": (added_ttft, "no difference of token 1 could be measured (±"),
    "sweep": (sweep, "no difference of token 2 could be measured (±"),
    "bench": (bench, "no difference of token 1 could be measured (±"),
    "goodput": (goodput, "not distinguishable from"),
    "routing": (routing, "could not be told from"),
    "prefix": (prefix, "token 1 comes not measurably earlier"),
    "interference": (interference, "could not be told from"),
    "chunked-prefill": (chunked_prefill, "No lowest p99 ITL could be told"),
    "batching": (batching, "No difference in throughput between static and continuous"),
    "primer": (primer, "not measurably less"),
    "speculation": (speculation, "give no difference in tokens per second that could be measured"),
    "link-sweep": (link_sweep, "within 15 % or 3 ms of the prediction"),  # nothing is compared
    "plan": (plan, "It makes no difference"),
    "profile": (profile, "is predicted with a median error of"),  # nothing is compared
    "transport": (transport, "GB/s"),  # figures of each, and no comparison
}


@pytest.mark.parametrize("kind", RUN_KINDS, ids=lambda kind: kind.name)
def test_no_headline_claims_an_effect_that_is_not_there(tmp_path: Path, kind: type[RunKind]) -> None:
    plant, told = PLANTED[kind.name]
    options, run = plant()
    experiment = kind(kind.options_type.choose(options))
    summary = experiment.summarise(run)
    report = experiment.report(run, summary)
    report.save(tmp_path)  # its pictures can be drawn
    answer = report.answer
    assert told in answer
    assert not CLAIM.search(answer), answer
    for sentence in re.split(r"(?<=[.;]) ", answer):
        assert not NUMBER.search(sentence) or COUNTED.search(sentence), sentence
