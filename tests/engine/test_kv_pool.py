"""The pool and a worker's mapping of it are the same bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from engine.model.kv_pool import KVPool
from engine.process.mapped_pool import MappedPool
from pdserve.core import memory_file
from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import MAX_PROBE_BYTES, KVLayout, blank_memory
from tests.engine.harness import fill

LAYOUT = KVLayout("m", "float32", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)
BLOCKS = 10


@pytest.fixture
def pools() -> Iterator[tuple[KVPool, MappedPool]]:
    """The engine's pool and the worker's view of it."""
    fd = memory_file.create("test")
    pool = KVPool.on_memory_file(LAYOUT, BLOCKS, fd)
    mapped = MappedPool(LAYOUT, BLOCKS, pool.handle, fd)
    os.close(fd)
    yield pool, mapped
    mapped.close()


def _bytes(pool: KVPool, block: int) -> bytes:
    return pool.tensor[block].contiguous().numpy().tobytes()


def test_a_block_is_one_run_of_bytes(pools: tuple[KVPool, MappedPool]) -> None:
    pool, mapped = pools
    assert pool.tensor.shape == (BLOCKS, 3, 2, 2, 4, 8)
    assert not pool.tensor.any()
    pool.tensor.copy_(torch.randn(pool.tensor.shape))
    for block in range(BLOCKS):
        (view,) = mapped.read_blocks([block])
        assert bytes(view) == _bytes(pool, block)
        assert len(view) == LAYOUT.block_bytes


def test_layer_views_are_the_pool(pools: tuple[KVPool, MappedPool]) -> None:
    pool, mapped = pools
    pool.layers[2].v[7, 1, 3, 5] = 42.0
    values = torch.frombuffer(bytearray(mapped.read_blocks([7])[0]), dtype=torch.float32).view(3, 2, 2, 4, 8)
    assert values[2, 1, 1, 3, 5] == 42.0
    assert values.count_nonzero() == 1


def test_adjacent_blocks_are_one_view(pools: tuple[KVPool, MappedPool]) -> None:
    pool, mapped = pools
    pool.tensor.copy_(torch.randn(pool.tensor.shape))
    views = mapped.read_blocks([4, 5, 6, 2, 1, 9])
    assert [len(v) // LAYOUT.block_bytes for v in views] == [3, 1, 1, 1]
    assert b"".join(views) == b"".join(_bytes(pool, b) for b in (4, 5, 6, 2, 1, 9))


def test_written_blocks_arrive_in_order(pools: tuple[KVPool, MappedPool]) -> None:
    pool, mapped = pools
    data = os.urandom(LAYOUT.block_bytes * 4)
    fill(mapped, [8, 2, 3, 0], data)
    assert b"".join(_bytes(pool, b) for b in (8, 2, 3, 0)) == data
    assert not pool.tensor[[1, 4, 5, 6, 7, 9]].any()


@pytest.mark.parametrize("ids", [[10], [-1], [0, 1, 99]])
def test_foreign_blocks_are_refused(pools: tuple[KVPool, MappedPool], ids: list[int]) -> None:
    pool, mapped = pools
    with pytest.raises(ValueError, match="outside the pool"):
        mapped.read_blocks(ids)
    with pytest.raises(ValueError, match="outside the pool"):
        mapped.land(ids)
    assert not pool.tensor.any()


def test_layers_of_blocks(pools: tuple[KVPool, MappedPool]) -> None:
    pool, mapped = pools
    pool.tensor.copy_(torch.randn(pool.tensor.shape))
    views = mapped.read_blocks([4, 5, 2], range(1, 3))
    assert [*map(bytes, views)] == [pool.tensor[block, 1:3].contiguous().numpy().tobytes() for block in (4, 5, 2)]
    fill(mapped, [7, 8], bytes(2 * LAYOUT.layer_bytes), range(2, 3))
    assert not pool.tensor[7:9, 2].any()
    assert pool.tensor[7:9, :2].all()
    for layers in (range(2, 4), range(1, 1), range(-1, 2)):
        with pytest.raises(ValueError, match="layers"):
            mapped.land([1], layers)


def test_a_workers_peers_can_map_the_pool_and_trust_its_size(pools: tuple[KVPool, MappedPool]) -> None:
    _, mapped = pools
    assert mapped.file is not None
    fd, view = mapped.file
    assert memory_file.is_sealed(fd)
    assert view.nbytes == os.fstat(fd).st_size == sum(blank_memory(BLOCKS * LAYOUT.block_bytes))
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(fd, 0)


def test_what_lies_behind_the_pool_holds_nothing(pools: tuple[KVPool, MappedPool]) -> None:
    """It is of the same file, so that peers read it as they read blocks, and no block reaches into it."""
    pool, mapped = pools
    pool.tensor.fill_(1.0)
    fill(mapped, range(BLOCKS), b"\7" * BLOCKS * LAYOUT.block_bytes)
    blank = mapped.blank(0, MAX_PROBE_BYTES)
    assert not any(blank)
    assert mapped.file is not None
    blank[17] = 1  # only to find it again
    assert mapped.file[1][blank_memory(BLOCKS * LAYOUT.block_bytes)[0] + 17] == 1
    assert mapped.blank(16, 2) == b"\0\1"
    for start, size in ((0, MAX_PROBE_BYTES + 1), (MAX_PROBE_BYTES, 1), (-1, 1)):
        with pytest.raises(ValueError, match=f"of {MAX_PROBE_BYTES}"):
            mapped.blank(start, size)


def test_views_outlive_close(pools: tuple[KVPool, MappedPool]) -> None:
    pool, mapped = pools
    pool.tensor.fill_(1.0)
    (view,) = mapped.read_blocks([3])
    mapped.close()
    mapped.close()
    assert bytes(view) == _bytes(pool, 3)
    with pytest.raises(ValueError, match="released"):
        mapped.read_blocks([3])


def test_a_pool_of_another_size_is_refused() -> None:
    fd = memory_file.create("test")
    with pytest.raises(ValueError, match="its layout needs"):
        MappedPool(LAYOUT, BLOCKS, {"kind": "memfd", "bytes": 17}, fd)
    os.close(fd)


def test_a_pool_that_does_not_fit_names_the_key() -> None:
    fd = memory_file.create("test")
    with pytest.raises(ConfigError, match=r"^engine\.kv_memory_mb: .* does not fit: the host has"):
        KVPool.on_memory_file(LAYOUT, 2**50, fd)
    os.close(fd)
