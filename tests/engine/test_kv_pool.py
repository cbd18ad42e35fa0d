"""The pool and a worker's mapping of it are the same bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest

from engine.model.kv_pool import KVPool
from kv_transfer.memory import HostMemory
from kv_transfer.pool import Pool
from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import MAX_PROBE_BYTES, KVLayout, Region, probe_area
from runtime import memory_file

LAYOUT = KVLayout.uniform("m", "float32", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)
BLOCKS = 10


@pytest.fixture
def pools() -> Iterator[tuple[KVPool, Pool]]:
    """The engine's pool and the worker's view of it."""
    fd = memory_file.create("test")
    pool = KVPool.on_memory_file(LAYOUT, BLOCKS, fd)
    mapped = Pool.open(LAYOUT, BLOCKS, pool.handle, fd)
    os.close(fd)
    yield pool, mapped
    mapped.close()


def fill(pool: Pool, block_ids: Sequence[int], data: bytes, layers: range | None = None) -> None:
    """Write ``data`` into blocks, as a receiver does."""
    assert isinstance(pool.memory, HostMemory)
    for region in pool.regions(block_ids, layers):
        pool.memory.view(region)[:], data = data[: region.size], data[region.size :]
    assert not data


def read(pool: Pool, block_ids: Sequence[int], layers: range | None = None) -> bytes:
    """What blocks hold."""
    assert isinstance(pool.memory, HostMemory)
    return b"".join(pool.memory.view(region) for region in pool.regions(block_ids, layers))


def test_a_block_is_one_run_of_bytes(pools: tuple[KVPool, Pool]) -> None:
    pool, mapped = pools
    assert pool.tensor.shape == (BLOCKS, 3, 2, 2, 4, 8)
    assert not pool.tensor.any()
    pool.layers[2].v[7, 1, 3, 5] = 42.0
    assert pool.tensor[7, 2, 1, 1, 3, 5] == 42.0
    assert pool.tensor.count_nonzero() == 1
    data = os.urandom(LAYOUT.block_bytes * 4)
    fill(mapped, [8, 2, 3, 0], data)
    assert pool.tensor[[8, 2, 3, 0]].numpy().tobytes() == data
    for block in range(BLOCKS):
        assert mapped.regions([block]) == [Region(block * LAYOUT.block_bytes, LAYOUT.block_bytes)]
        assert read(mapped, [block]) == pool.tensor[block].numpy().tobytes()


def test_a_workers_peers_can_map_the_pool_and_trust_its_size(pools: tuple[KVPool, Pool]) -> None:
    _, mapped = pools
    assert isinstance(mapped.memory, HostMemory)
    fd = mapped.memory.fd
    assert memory_file.is_sealed(fd)
    assert mapped.memory.size == os.fstat(fd).st_size == sum(probe_area(BLOCKS * LAYOUT.block_bytes))
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(fd, 0)


def test_what_lies_behind_the_pool_holds_nothing(pools: tuple[KVPool, Pool]) -> None:
    """It is of the same file, so that peers read it as they read blocks, and no block reaches into it."""
    pool, mapped = pools
    pool.tensor.fill_(1.0)
    fill(mapped, range(BLOCKS), b"\7" * BLOCKS * LAYOUT.block_bytes)
    assert isinstance(mapped.memory, HostMemory)
    (region,) = mapped.probe(0, MAX_PROBE_BYTES)
    assert region == probe_area(BLOCKS * LAYOUT.block_bytes)
    assert not any(mapped.memory.view(region))
    assert mapped.probe(16, 2) == [Region(region.offset + 16, 2)]
    for start, size in ((0, MAX_PROBE_BYTES + 1), (MAX_PROBE_BYTES, 1), (-1, 1)):
        with pytest.raises(ValueError, match=f"of {MAX_PROBE_BYTES}"):
            mapped.probe(start, size)
    parts = [mapped.next_probe(MAX_PROBE_BYTES // 2) for _ in range(3)]
    assert parts == [mapped.probe(start * MAX_PROBE_BYTES // 2, MAX_PROBE_BYTES // 2) for start in (0, 1, 0)]


def test_views_outlive_close(pools: tuple[KVPool, Pool]) -> None:
    pool, mapped = pools
    pool.tensor.fill_(1.0)
    assert isinstance(mapped.memory, HostMemory)
    view = mapped.memory.view(*mapped.regions([3]))
    mapped.close()
    mapped.close()
    assert bytes(view) == pool.tensor[3].numpy().tobytes()
    with pytest.raises(ValueError, match="released"):
        read(mapped, [3])


def test_a_pool_of_another_size_is_refused() -> None:
    fd = memory_file.create("test")
    with pytest.raises(ValueError, match="its layout needs"):
        Pool.open(LAYOUT, BLOCKS, {"kind": "memfd", "bytes": 17}, fd)
    os.close(fd)


def test_a_pool_that_does_not_fit_names_the_key() -> None:
    fd = memory_file.create("test")
    with pytest.raises(ConfigError, match=r"^engine\.kv_memory_mb: .* does not fit: the host has"):
        KVPool.on_memory_file(LAYOUT, 2**50, fd)
    os.close(fd)
