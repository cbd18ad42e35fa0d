"""What is checked and told before a service starts anything."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ops.launch.preparation import Preparation, prepare
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import ConfigError, InvalidRequest, ModelError
from tests.conftest import ROOT
from tests.made_up_profile import write_profile


@pytest.mark.parametrize(("prefill", "decode", "only"), [(1, 0, "prefill"), (0, 2, "decode"), (1, 1, None)])
def test_a_service_of_one_role_says_that_pd_cannot_run(prefill: int, decode: int, only: str | None) -> None:
    cluster = {"prefill": prefill, "decode": decode, "address": "auto"}
    config = PdserveConfig.parse({"cluster": cluster, "gateway": {"port": 0, "http_port": 0}})
    expected = (
        () if only is None else (f"all workers are {only} workers: mode pd cannot run, and auto means colocated",)
    )
    assert prepare(config).notes == expected


def test_a_draft_model_is_checked_and_named_for_all_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepared(speculation: str) -> str:
        engine, gateway = {"speculation": speculation}, {"port": 0, "http_port": 0}
        return prepare(PdserveConfig.parse({"engine": engine, "gateway": gateway})).config.engine.speculation

    shutil.copytree(ROOT / "models" / "tiny", tmp_path / "org" / "draft")
    monkeypatch.chdir(tmp_path)
    assert prepared("org/draft") == str(tmp_path / "org" / "draft")
    assert prepared("ngram") == "ngram"
    with pytest.raises(
        ConfigError, match=r"^engine\.speculation: the draft model dummy:135m has other tokens than tiny"
    ):
        prepared("dummy:135m")


def test_a_context_longer_than_the_models_is_refused_before_anything_starts() -> None:
    config = PdserveConfig.parse({"engine": {"max_model_len": 4096}, "gateway": {"port": 0, "http_port": 0}})
    with pytest.raises(ConfigError, match=r"^engine\.max_model_len: 4096 exceeds the model's context of 2048 tokens$"):
        prepare(config)


def test_a_chat_template_is_compiled_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{% if %}")
    given = {"model": {"chat_template": str(path)}, "gateway": {"port": 0, "http_port": 0}}
    with pytest.raises(ModelError, match=r"^chat template: it cannot be compiled"):
        prepare(PdserveConfig.parse(given))


def test_a_profile_of_the_controller_is_read_before_anything_starts(tmp_path: Path) -> None:
    def prepared(**scaling: object) -> Preparation:
        objectives = {"controller": "roles", "ttft_ms": 100, "itl_ms": 50}
        return prepare(
            PdserveConfig.parse({"scaling": {**objectives, **scaling}, "gateway": {"port": 0, "http_port": 0}})
        )

    assert prepared().forecaster is None
    write_profile(tmp_path)
    assert prepared(profile=str(tmp_path)).forecaster is not None
    write_profile(tmp_path, model="dummy:8b")
    with pytest.raises(ConfigError, match=r"^scaling\.profile: it is of the model dummy:8b, and not of tiny$"):
        prepared(profile=str(tmp_path))
    wrong: list[tuple[dict[str, object], str]] = [
        ({"experiment": "plan"}, "is a run of plan, not of profile$"),
        ({"link": None}, "is not complete; go on with --resume"),
        ({"steps": {"knots": [1, 2]}}, "is of another version"),
        ({"chunk": "many"}, "is of another version"),
    ]
    for changes, why in wrong:
        write_profile(tmp_path, **changes)
        with pytest.raises(InvalidRequest, match=rf"^scaling\.profile: .* {why}"):
            prepared(profile=str(tmp_path))
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(InvalidRequest, match=r"^scaling\.profile: .*summary\.json is not JSON"):
        prepared(profile=str(tmp_path))
    (tmp_path / "summary.json").unlink()
    with pytest.raises(InvalidRequest, match=r"^scaling\.profile: .* cannot be read \(No such file or directory\)"):
        prepared(profile=str(tmp_path))
