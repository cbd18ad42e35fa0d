"""KV bytes are arithmetic, regions are where they lie, and two layouts fit only if one's regions are in the other."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pdserve.core.errors import LayoutMismatch
from pdserve.core.kv_layout import (
    DTYPE_BYTES,
    MAX_PROBE_AREA_BYTES,
    MAX_PROBE_BYTES,
    CacheSpec,
    KVLayout,
    Region,
    pair_regions,
    probe_area,
)
from tests.host_pool import changed

LLAMA_3_8B = KVLayout.uniform("h", "bfloat16", 64, 32, 8, 128)


def test_known_sizes() -> None:
    assert LLAMA_3_8B.token_bytes == 128 * 1024
    assert LLAMA_3_8B.block_bytes == 8 * 2**20
    assert replace(LLAMA_3_8B, dtype="float32").token_bytes == 256 * 1024
    assert replace(LLAMA_3_8B, dtype="float16").token_bytes == LLAMA_3_8B.token_bytes
    assert KVLayout.uniform("h", "float32", 64, 30, 3, 64).token_bytes == 46_080


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
    layout = KVLayout.uniform("h", dtype, block_size, layers, kv_heads, head_dim)
    full, rest = divmod(prompt, block_size)
    blocks = full + (rest > 0)
    dtype_bytes = {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]
    assert layout.expected_bytes(prompt) == blocks * 2 * layers * kv_heads * head_dim * dtype_bytes * block_size


def test_equal_layouts_agree() -> None:
    LLAMA_3_8B.check_source(replace(LLAMA_3_8B))


@pytest.mark.parametrize("name", ["model_hash", "dtype", "block_size", *CacheSpec.__struct_fields__])
def test_each_field_must_agree_and_is_named(name: str) -> None:
    of_cache = name in CacheSpec.__struct_fields__
    mine = getattr(LLAMA_3_8B.caches[0] if of_cache else LLAMA_3_8B, name)
    theirs = f"{mine}x" if isinstance(mine, str) else mine + 1
    with pytest.raises(LayoutMismatch, match=f"differs in {name}: {mine!r} here, {theirs!r} at the peer"):
        LLAMA_3_8B.check_source(changed(LLAMA_3_8B, **{name: theirs}))


def test_the_number_of_caches_must_agree() -> None:
    with pytest.raises(LayoutMismatch, match="differs in number of caches: 1 here, 2 at the peer"):
        LLAMA_3_8B.check_source(replace(LLAMA_3_8B, caches=LLAMA_3_8B.caches * 2))


HYBRID = KVLayout("h", "float32", 4, (CacheSpec(2, 8, 16), CacheSpec(1, 1, 24, planes=1), CacheSpec(1, 4, 8)))


def test_a_latent_cache_and_groups_of_layers_are_other_specs() -> None:
    sizes = [2 * 8 * 16 * 4 * 4] * 2 + [24 * 4 * 4] + [2 * 4 * 8 * 4 * 4]
    assert HYBRID.num_layers == 4
    assert [HYBRID.layer_bytes(range(layer, layer + 1)) for layer in range(4)] == sizes
    assert HYBRID.block_bytes == sum(sizes)
    assert HYBRID.regions([1], 2, range(2, 3)) == [Region(sum(sizes) + 2 * sizes[0], sizes[2])]
    assert HYBRID.regions([0, 1], 2) == [Region(0, 2 * sum(sizes))]


@given(st.data())
def test_blocks_map_between_pools(data: st.DataObject) -> None:
    """Blocks that are copied in pieces, in whatever layers they come, are the blocks of the source."""
    layout = data.draw(st.sampled_from([HYBRID, KVLayout.uniform("h", "bfloat16", 2, 3, 4, 8)]))
    num_blocks, size = 3, layout.block_bytes
    content = random.Random(1).randbytes(size * num_blocks)
    source_ids, target_ids = (data.draw(st.permutations(range(num_blocks))) for _ in range(2))
    cut = data.draw(st.integers(0, layout.num_layers))
    pool = bytearray(len(content))
    for layers in (range(cut), range(cut, layout.num_layers)):
        if layers:
            theirs = layout.regions(source_ids, num_blocks, layers)
            for into, out in pair_regions(layout.regions(target_ids, num_blocks, layers), theirs):
                pool[into.offset : sum(into)] = content[out.offset : sum(out)]
    for source, target in zip(source_ids, target_ids, strict=True):
        assert pool[target * size : (target + 1) * size] == content[source * size : (source + 1) * size]


@given(st.lists(st.integers(1, 9), max_size=6), st.lists(st.integers(1, 9), max_size=6))
def test_regions_are_cut_into_pairs_of_equal_size(ours: list[int], theirs: list[int]) -> None:
    regions = [[Region(100 * i, size) for i, size in enumerate(sizes)] for sizes in (ours, theirs)]
    if sum(ours) != sum(theirs):
        with pytest.raises(ValueError, match="differ in size"):
            list(pair_regions(*regions))
        return
    pairs = list(pair_regions(*regions))
    for side, whole in zip(zip(*pairs, strict=True), regions, strict=False):
        assert [at for start, size in side for at in range(start, start + size)] == [
            at for start, size in whole for at in range(start, start + size)
        ]
    assert all(mine.size == other.size > 0 for mine, other in pairs)


def test_wire_round_trip_through_msgpack() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(LLAMA_3_8B), type=KVLayout) == LLAMA_3_8B


@pytest.mark.parametrize("changes", [{"block_size": "128"}, {"dtype": None}, {"caches": 1}])
def test_wire_with_wrong_fields_is_refused(changes: dict[str, object]) -> None:
    data = msgspec.to_builtins(LLAMA_3_8B)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(data | changes, KVLayout)
    del data["caches"]
    with pytest.raises(msgspec.ValidationError, match="caches"):
        msgspec.convert(data, KVLayout)


def test_what_lies_behind_a_pool_has_pages_of_its_own_and_room_for_a_probe() -> None:
    for pool_bytes, size in (
        (0, 2**23),
        (5000, 2**23),
        (2**29, 2**25),
        (2**29 + 1, 2**25),
        (2**40, MAX_PROBE_AREA_BYTES),
    ):
        offset, area_bytes = probe_area(pool_bytes)
        assert pool_bytes <= offset < pool_bytes + 4096
        assert (offset % 4096, area_bytes) == (0, size)
        assert area_bytes >= MAX_PROBE_BYTES
