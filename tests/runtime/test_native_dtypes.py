"""Engines compute in what their device computes natively: planted CPUs, and real engines under oneDNN's own limit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from contract.engine import KVRole, Step
from engine.process.client import EngineClient
from engine.spec import EngineSpec
from runtime import dtypes
from runtime.dtypes import NativeDtypes, native_dtypes
from tests.engine.harness import submit
from tests.random_models import save_random_model
from tests.runtime.test_dtypes import AVX2, ZEN4

START_S = 60.0


@pytest.fixture
def dummy(tmp_path: Path) -> str:
    """A small model of random weights whose config.json says bfloat16."""
    folder = save_random_model(tmp_path, "gqa")
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return f"dummy:{folder / 'config.json'}"


def _plant(monkeypatch: pytest.MonkeyPatch, folder: Path, cpuinfo: str) -> None:
    path = folder / "cpuinfo"
    path.write_text(cpuinfo)
    monkeypatch.setattr(dtypes, "CPUINFO", path)
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)


def test_the_host_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _plant(monkeypatch, tmp_path, AVX2)
    assert native_dtypes("cpu") == [NativeDtypes("a CPU without bfloat16 instructions", ("float32",))]
    _plant(monkeypatch, tmp_path, ZEN4)
    assert native_dtypes("cpu")[0].dtypes == ("float32", "bfloat16")
    for name in ("DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA"):
        monkeypatch.setenv(name, "AVX2")
        assert native_dtypes("cpu")[0].dtypes == ("float32",)
        monkeypatch.delenv(name)
    (tmp_path / "cpuinfo").unlink()
    assert native_dtypes("cpu")[0].dtypes == ("float32",)


async def _dtype_of_engine(spec: EngineSpec) -> str:
    """Start a real engine, have it sample three tokens, and return the dtype of its pool."""
    client = EngineClient()
    ready = await client.start(spec, START_S)
    try:
        client.send(submit("r", KVRole.LOCAL, [5, 6, 7], 3, ignore_eos=True))
        tokens = 0
        async for event in client.events():
            tokens += len(event.tokens) if isinstance(event, Step) else 0
            if tokens == 3:
                break
        return ready.layout.dtype
    finally:
        await client.stop(5.0)


@pytest.mark.parametrize(("asked", "dtype"), [("auto", "float32"), ("bfloat16", "bfloat16")])
async def test_an_engine_without_bfloat16_instructions(
    dummy: str, asked: str, dtype: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """oneDNN is really kept from them; what is asked for by name is computed all the same, with a warning."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert await _dtype_of_engine(EngineSpec(dummy, asked, num_blocks=4)) == dtype
    said = capfd.readouterr().err
    assert ("auto converts the bfloat16 weights to float32" in said) == (asked == "auto")
    assert (f"{dtype} is emulated on a CPU " in said) == (asked == "bfloat16")
