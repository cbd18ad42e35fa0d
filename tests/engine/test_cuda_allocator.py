"""The pool's memory can be shared whatever the user's environment says of torch's allocator."""

from __future__ import annotations

import logging

import pytest

from engine.process.client import _environment, shareable_allocator
from engine.spec import EngineSpec


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_turned_off_and_nothing_else(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128,expandable_segments:True,garbage_collection_threshold:0.6")
    with caplog.at_level(logging.WARNING):
        engine = _environment(EngineSpec("tiny", device="cuda"))
    assert engine[name] == "max_split_size_mb:128,expandable_segments:False,garbage_collection_threshold:0.6"
    assert f"{name}=max_split_size_mb" in caplog.text
    assert _environment(EngineSpec("tiny"))[name].count("True") == 1, "engines on CPUs are not affected"


@pytest.mark.parametrize("value", ["", "expandable_segments:False", "backend:cudaMallocAsync"])
def test_other_settings_stay(value: str) -> None:
    assert shareable_allocator({"PYTORCH_CUDA_ALLOC_CONF": value}) == {}
