"""What is checked and told before a service starts anything."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ops.launch.preparation import prepare
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import ConfigError
from tests.conftest import ROOT


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
