"""What is checked and told before a service starts anything."""

from __future__ import annotations

import pytest

from ops.launch.preparation import prepare
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import ConfigError


@pytest.mark.parametrize(("prefill", "decode", "only"), [(1, 0, "prefill"), (0, 2, "decode"), (1, 1, None)])
def test_a_service_of_one_role_says_that_pd_cannot_run(prefill: int, decode: int, only: str | None) -> None:
    cluster = {"prefill": prefill, "decode": decode, "address": "auto"}
    config = PdserveConfig.parse({"cluster": cluster, "gateway": {"port": 0, "http_port": 0}})
    expected = (
        () if only is None else (f"all workers are {only} workers: mode pd cannot run, and auto means colocated",)
    )
    assert prepare(config).notes == expected


def test_a_context_longer_than_the_models_is_refused_before_anything_starts() -> None:
    config = PdserveConfig.parse({"engine": {"max_model_len": 4096}, "gateway": {"port": 0, "http_port": 0}})
    with pytest.raises(ConfigError, match=r"^engine\.max_model_len: 4096 exceeds the model's context of 2048 tokens$"):
        prepare(config)
