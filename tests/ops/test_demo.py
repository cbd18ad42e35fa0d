"""The demo against a scripted service, and its verdict on failures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ops.cli.main import main
from ops.demo import run
from ops.demo.prompts import demo_prompts
from ops.demo.report import DemoReport, PairedRound
from ops.machine_load import MachineLoad
from pdserve.core.errors import NotReady
from pdserve.core.timeline import Figure
from pdserve.pb import inference_pb2 as pb
from tests.ops.made_up import made_up
from tests.pdserve.scripted_service import ScriptedService

FINDINGS = {"requests", "failed", "tokens_equal_colocated", "kv_bytes_equal_expected", "unattributed", "leaked_blocks",
            "rounds", "machine_load", "added_ttft_ms"}  # fmt: skip


def demo(service: ScriptedService, png: Path, *options: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["demo", "--target", service.target, "--png", str(png), *options])
    return int(exit_.value.code or 0)


def test_the_demo_tells_its_findings(
    service: ScriptedService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(service, tmp_path / "w.png", "--rounds", "1", "--json") == 0
    shown = capsys.readouterr()
    out, findings = shown.err, json.loads(shown.out)
    assert set(findings) == FINDINGS
    assert findings["added_ttft_ms"]["ttft_decode"]["n"] == 8
    assert "added ttft_decode: " in out
    assert "[" in out.split("added ttft_decode: ")[1].split("median over the prompts")[0]
    assert findings["requests"] == 8
    assert (findings["failed"], findings["leaked_blocks"]) == (0, 0)
    assert findings["tokens_equal_colocated"] is findings["kv_bytes_equal_expected"] is True
    assert set(findings["unattributed"]["ttft_decode"]) == {"ms_max", "pct_max"}
    assert (tmp_path / "w.png").read_bytes().startswith(b"\x89PNG")
    assert "one request at a time" in out
    assert "kv_exposed" in out
    measured = service.servicer.requests[2:]  # the others warm up
    assert len({request.salt for request in measured} - {""}) == len(measured) == 3 * 8, "each must find a cold cache"


@pytest.mark.parametrize(("fault", "key"), [("tokens", "tokens_equal_colocated"), ("bytes", "kv_bytes_equal_expected")])
def test_the_demo_fails_when_tokens_or_bytes_differ(
    service: ScriptedService, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, key: str
) -> None:
    if fault == "tokens":
        service.servicer.token_shift[pb.MODE_COLOCATED] = 1
    else:
        service.servicer.lost_bytes = 1
    assert demo(service, tmp_path / "w.png", "--rounds", "1", "--json") == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)[key] is False
    told = "token 1 differs; the log-probabilities of the two likeliest are 1.0000 apart there"
    assert " ".join(shown.err.split()).count(told) == (8 if fault == "tokens" else 0)


def test_rounds_that_are_asked_for_are_run_and_others_end_in_time(
    service: ScriptedService, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "ROUNDS_BUDGET_S", 0.0)
    assert demo(service, tmp_path / "w.png", "--rounds", "3") == 0
    out = capsys.readouterr().out
    assert "3 rounds; medians" in out
    assert not any(line.startswith("{") for line in out.splitlines())  # JSON only where it is asked for
    assert demo(service, tmp_path / "w.png") == 0
    assert "1 of 5 rounds were run in 0 s; --rounds 5 runs all of them" in capsys.readouterr().out


def test_the_demo_names_other_load_and_what_would_narrow_an_interval_that_contains_0(
    service: ScriptedService, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = {"machine_load": {"cores": 2, "before_cores": 0.0, "during_cores": 1.3}}
    monkeypatch.setattr(MachineLoad, "facts", lambda self: load)
    assert demo(service, tmp_path / "w.png", "--rounds", "2") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "disaggregated against colocated (beside other load: 1.3 of 2 cores): the same 8 prompts" in out
    assert "(no difference could be measured)" in out
    assert "To measure smaller differences: a quiet machine, more rounds (--rounds 8), more cores." in out


def test_prompts_have_very_different_lengths_and_fit() -> None:
    chars_per_token, max_tokens = 3.0, 32
    prompts = demo_prompts(chars_per_token, 4096, max_tokens)
    lengths = [len(text) / chars_per_token for text in prompts.values()]
    assert len(prompts) == 8
    assert lengths == sorted(lengths)
    assert lengths[0] < 8
    assert lengths[-1] > 1200
    short = demo_prompts(chars_per_token, 256, max_tokens)
    assert max(map(len, short.values())) <= (256 - max_tokens) * chars_per_token


def report() -> DemoReport:
    pairs = [PairedRound(i, made_up(n), made_up(n, mode="colocated")) for i, n in enumerate((10, 100))]
    return DemoReport(requests=2, live=[made_up(10), made_up(100)], pairs=pairs)


def test_the_report_takes_the_worst_residue_and_the_median_of_pairs() -> None:
    good = report()
    assert good.ok
    shortest = made_up(10).breakdowns[Figure.TTFT]
    assert good.unattributed(Figure.TTFT) == {"ms_max": 0.25, "pct_max": round(25 / shortest.total_ms, 3)}
    none = {"lo": None, "hi": None, "n": 2}  # an interval takes six prompts
    assert good.to_dict()["added_ttft_ms"] == {"ttft": {"median": 0.0, **none}, "ttft_decode": {"median": 1.5, **none}}


def test_the_report_is_not_ok_when_anything_is_wrong() -> None:
    failed, leaked, unpaired, unequal, idle = report(), report(), report(), report(), report()
    failed.errors.append(NotReady("gone"))
    leaked.leaked_blocks = 1
    unpaired.pairs.pop()
    unequal.pairs[0] = replace(unequal.pairs[0], pd=replace(unequal.pairs[0].pd, token_ids=(1,)))
    idle.live, idle.pairs = [], [replace(pair, pd=pair.colocated) for pair in idle.pairs]
    assert not any(broken.ok for broken in (failed, leaked, unpaired, unequal, idle))
    assert DemoReport(requests=8).unattributed(Figure.TTFT) == {"ms_max": None, "pct_max": None}
