"""What devices compute natively, and the one dtype that a service takes of it."""

from __future__ import annotations

import pytest

from pdserve.core.kv_layout import DTYPE_BYTES
from runtime.dtypes import NativeDtypes, choose_dtype, cpu_dtypes, gpu_dtypes

AVX2 = "processor\t: 0\nflags\t\t: fpu sse4_2 avx avx2 fma f16c\n"
ZEN4 = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 avx512_vnni\n"
SAPPHIRE_RAPIDS = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 avx512_fp16 amx_bf16 amx_tile\n"
GRAVITON3 = "processor\t: 0\nFeatures\t: fp asimd sve i8mm bf16 dgh\n"
GRAVITON2 = "processor\t: 0\nFeatures\t: fp asimd crc32 asimddp\n"
WITH, WITHOUT = cpu_dtypes(ZEN4), cpu_dtypes(AVX2)
T4, A100 = gpu_dtypes("Tesla T4", (7, 5)), gpu_dtypes("A100", (8, 0))


@pytest.mark.parametrize(
    ("cpuinfo", "max_isa", "bfloat16"),
    [
        (ZEN4, "", True),
        (SAPPHIRE_RAPIDS, "", True),
        (GRAVITON3, "", True),
        (AVX2, "", False),
        (GRAVITON2, "", False),
        ("", "", False),
        (ZEN4 + AVX2, "", False),
        (ZEN4, "AVX2", False),
        (ZEN4, "avx512_core", False),
        (ZEN4, "AVX512_CORE_BF16", True),
        (SAPPHIRE_RAPIDS, "AVX512_CORE_AMX", True),
        (ZEN4, "DEFAULT", True),
    ],
)
def test_what_cpus_compute_natively(cpuinfo: str, max_isa: str, bfloat16: bool) -> None:
    native = cpu_dtypes(cpuinfo, max_isa)
    assert native.dtypes == (("float32", "bfloat16") if bfloat16 else ("float32",))


def test_gpus_compute_bfloat16_from_ampere_on() -> None:
    assert "bfloat16" in A100.dtypes
    assert T4.dtypes == ("float32", "float16")
    assert T4.device == "Tesla T4 (compute capability 7.5)"


@pytest.mark.parametrize(
    ("checkpoint", "devices", "dtype"),
    [
        ("bfloat16", [WITH], "bfloat16"),
        ("bfloat16", [WITHOUT], "float32"),
        ("bfloat16", [WITH, WITHOUT], "float32"),
        ("bfloat16", [A100], "bfloat16"),
        ("bfloat16", [T4], "float16"),
        ("bfloat16", [A100, T4], "float16"),
        ("float16", [WITH], "float32"),
        ("float16", [A100, T4], "float16"),
        ("float32", [WITH], "float32"),
        ("float32", [T4], "float32"),
        ("bfloat16", [], "bfloat16"),
    ],
)
def test_auto_is_what_all_devices_compute_natively(checkpoint: str, devices: list[NativeDtypes], dtype: str) -> None:
    choice = choose_dtype("auto", checkpoint, {f"10.0.0.{i}": [device] for i, device in enumerate(devices)})
    assert choice.dtype == dtype
    assert bool(choice.note) == (dtype != checkpoint)


def test_a_conversion_is_explained_by_the_hosts_that_need_it() -> None:
    choice = choose_dtype("auto", "bfloat16", {"10.0.0.1": [WITH], "10.0.0.2": [WITHOUT, WITHOUT]})
    assert choice.note == (
        "model.dtype: auto converts the bfloat16 weights to float32: bfloat16 is emulated on 10.0.0.2 (a CPU without "
        "bfloat16 instructions)"
    )


@pytest.mark.parametrize("asked", DTYPE_BYTES)
def test_a_dtype_that_is_named_is_taken_with_a_warning_where_it_is_emulated(asked: str) -> None:
    choice = choose_dtype(asked, "bfloat16", {"": [WITHOUT]})
    assert choice.dtype == asked
    assert choice.note.startswith(f"model.dtype: {asked} is emulated on a CPU without" if asked != "float32" else "")
    assert ("as long as in float32, which model.dtype: auto takes" in choice.note) == (asked != "float32")
    assert choose_dtype(asked, "bfloat16", {"": [A100]}).note == ""
