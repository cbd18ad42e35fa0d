"""KV bytes are arithmetic, and two layouts agree only if every field does."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from pdserve.core.errors import LayoutMismatch
from pdserve.core.kv_layout import DTYPE_BYTES, MAX_BLANK_BYTES, MAX_PROBE_BYTES, KVLayout, blank_memory

LLAMA_3_8B = KVLayout("h", "bfloat16", 64, 32, 8, 128)


def test_known_sizes() -> None:
    assert LLAMA_3_8B.token_bytes == 128 * 1024
    assert LLAMA_3_8B.block_bytes == 8 * 2**20
    assert replace(LLAMA_3_8B, dtype="float32").token_bytes == 256 * 1024
    assert replace(LLAMA_3_8B, dtype="float16").token_bytes == LLAMA_3_8B.token_bytes
    assert KVLayout("h", "float32", 64, 30, 3, 64).token_bytes == 46_080


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert LLAMA_3_8B.blocks_for(tokens) == blocks


def test_expected_bytes_are_whole_blocks_less_the_skipped() -> None:
    assert LLAMA_3_8B.expected_bytes(65) == 2 * LLAMA_3_8B.block_bytes
    assert LLAMA_3_8B.expected_bytes(65, blocks_skipped=1) == LLAMA_3_8B.block_bytes
    assert LLAMA_3_8B.expected_bytes(64, blocks_skipped=1) == 0


@given(
    st.integers(1, 100_000),
    st.integers(1, 256),
    st.integers(1, 80),
    st.integers(1, 64),
    st.integers(1, 256),
    st.sampled_from(sorted(DTYPE_BYTES)),
)
def test_expected_bytes_is_the_designs_formula(
    prompt: int, block_size: int, layers: int, kv_heads: int, head_dim: int, dtype: str
) -> None:
    layout = KVLayout("h", dtype, block_size, layers, kv_heads, head_dim)
    full, rest = divmod(prompt, block_size)
    blocks = full + (rest > 0)
    dtype_bytes = {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]
    assert layout.expected_bytes(prompt) == blocks * 2 * layers * kv_heads * head_dim * dtype_bytes * block_size


def test_equal_layouts_agree() -> None:
    LLAMA_3_8B.check_compatible(replace(LLAMA_3_8B))


@pytest.mark.parametrize("name", KVLayout.__struct_fields__)
def test_each_field_must_agree_and_is_named(name: str) -> None:
    mine = getattr(LLAMA_3_8B, name)
    theirs = f"{mine}x" if isinstance(mine, str) else mine + 1
    with pytest.raises(LayoutMismatch, match=f"differs in {name}: {mine!r} here, {theirs!r} at the peer"):
        LLAMA_3_8B.check_compatible(KVLayout(**asdict(LLAMA_3_8B) | {name: theirs}))


def test_wire_round_trip_through_msgpack() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(LLAMA_3_8B), type=KVLayout) == LLAMA_3_8B


@pytest.mark.parametrize("changes", [{"head_dim": "128"}, {"dtype": None}])
def test_wire_with_wrong_fields_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(asdict(LLAMA_3_8B) | changes, KVLayout)
    data = asdict(LLAMA_3_8B)
    del data["head_dim"]
    with pytest.raises(msgspec.ValidationError, match="head_dim"):
        msgspec.convert(data, KVLayout)


def test_what_lies_behind_a_pool_has_pages_of_its_own_and_room_for_a_probe() -> None:
    for pool_bytes, size in ((0, 2**23), (5000, 2**23), (2**29, 2**25), (2**29 + 1, 2**25), (2**40, MAX_BLANK_BYTES)):
        offset, blank_bytes = blank_memory(pool_bytes)
        assert pool_bytes <= offset < pool_bytes + 4096
        assert (offset % 4096, blank_bytes) == (0, size)
        assert blank_bytes >= MAX_PROBE_BYTES
