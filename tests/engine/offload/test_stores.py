"""Stores keep what they got or forget it, and never give anything else."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine import offload
from engine.offload import DiskStore, MemoryStore
from pdserve.core.chance import SYSTEM
from pdserve.core.errors import ConfigError

SIZE = 1000
HEADER = 48


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def data(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def written(store: DiskStore, count: int) -> None:
    deadline_s = time.monotonic() + 30
    while store._unwritten or store.num_blocks != count:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cold" / "decode-0"


def make(folder: Path, kind: str = "model a", blocks: int = 10) -> DiskStore:
    return DiskStore(folder, kind, blocks * (SIZE + HEADER))


def test_blocks_survive_their_engine(folder: Path) -> None:
    store = make(folder)
    for number in range(5):
        store.put(digest(number), data(number))
        assert store.get(digest(number)) == data(number), "before or after it is written"
    store.close()
    again = make(folder)
    assert again.num_blocks == 5
    assert [again.get(digest(number)) for number in range(5)] == [data(number) for number in range(5)]
    assert digest(7) not in again
    assert again.get(digest(7)) is None
    again.close()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_least_recently_used_make_room_across_restarts(folder: Path) -> None:
    store = make(folder, blocks=4)
    for number in range(4):
        store.put(digest(number), data(number))
        written(store, number + 1)
        os.utime(folder / digest(number).hex(), (number, number))
    assert store.get(digest(0)) == data(0)
    store.close()
    store = make(folder, blocks=4)
    store.put(digest(4), data(4))
    written(store, 4)
    assert [number for number in range(5) if digest(number) in store] == [0, 2, 3, 4]
    store.close()
    store = make(folder, blocks=2)
    assert [number for number in range(5) if digest(number) in store] == [0, 4]
    store.close()
    assert sum(path.stat().st_size for path in folder.iterdir() if path.name != "lock") == 2 * (SIZE + HEADER)


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "longer", "another's"])
def test_damage_is_found_when_a_block_is_read(folder: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    store = make(folder)
    store.put(digest(1), data(1))
    written(store, 1)
    path = folder / digest(1).hex()
    content = bytearray(path.read_bytes())
    content[HEADER + 500] ^= 1
    path.write_bytes(
        {
            "flipped": bytes(content),
            "cut": path.read_bytes()[:-1],
            "empty": b"",
            "longer": path.read_bytes() + b"x",
            "another's": path.read_bytes().replace(digest(1), digest(2)),
        }[damage]
    )
    assert store.get(digest(1)) is None
    assert digest(1) not in store
    assert not path.exists()
    store.put(digest(1), data(1))
    written(store, 1)
    assert store.get(digest(1)) == data(1)
    store.close()


def test_unfinished_files_and_blocks_of_other_models_are_deleted(folder: Path) -> None:
    store = make(folder)
    store.put(digest(1), data(1))
    store.close()
    (folder / f"{digest(2).hex()}.new").write_bytes(b"half")
    (folder / "notes.txt").write_text("not ours")
    store = make(folder)
    assert sorted(path.name for path in folder.iterdir()) == [digest(1).hex(), "lock", "notes.txt"]
    store.close()
    other = make(folder, kind="model b")
    assert other.num_blocks == 0
    other.close()
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "notes.txt"]


def test_folders_of_others_are_refused(folder: Path, tmp_path: Path) -> None:
    store = make(folder)
    with pytest.raises(ConfigError, match="another engine uses"):
        make(folder)
    store.close()
    make(folder).close()
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 700"):
        make(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Not a directory"):
        make(tmp_path / "file" / "decode-0")


def test_a_disk_that_is_too_slow_or_full_loses_blocks_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(offload, "MAX_UNWRITTEN_BYTES", 3 * SIZE)
    store = make(folder)
    with store._changed:  # the writer cannot go on
        for number in range(5):
            store.put(digest(number), data(number))
    written(store, 3)
    assert [number for number in range(5) if digest(number) in store] == [0, 1, 2]
    assert "the disk is slower than the engine" in caplog.text
    big = bytes(20 * SIZE)
    monkeypatch.setattr(offload, "MAX_UNWRITTEN_BYTES", 2**20)
    store.put(digest(9), big)  # more than the folder may hold
    store.close()
    assert digest(9) not in store


def test_a_process_that_is_killed_while_it_writes_leaves_whole_blocks(folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from engine.offload import DiskStore\n"
        "store = DiskStore(Path(sys.argv[1]), 'k', 2**30)\n"
        "number = 0\n"
        "while True:\n"
        "    store.put(number.to_bytes(16, 'big'), number.to_bytes(4, 'big') * 2**16)\n"
        "    number += 1\n"
        "    if number == 20: print('on', flush=True)\n"
    )
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(SYSTEM.uniform(0.0, 0.1))
        process.kill()
        process.wait()
        process.stdout.close()
        store = DiskStore(folder, "k", 2**30)
        for found in list(store._sizes):
            assert store.get(found) == found[-4:] * 2**16
        store.close()
        assert not list(folder.glob("*.new"))


def test_memory_passes_on_what_it_has_no_room_for(folder: Path) -> None:
    disk = make(folder)
    memory = MemoryStore(3 * SIZE, disk)
    for number in range(5):
        memory.put(digest(number), data(number))
        if number == 2:
            assert memory.get(digest(0)) == data(0)  # used again
    written(disk, 2)
    assert [number for number in range(5) if digest(number) in disk] == [1, 2]
    assert [memory.get(digest(number)) for number in range(6)] == [*map(data, range(5)), None]
    assert memory.num_blocks == 5
    memory.close()
    alone = MemoryStore(2 * SIZE)
    for number in range(3):
        alone.put(digest(number), data(number))
    assert (alone.get(digest(0)), alone.get(digest(2)), alone.num_blocks) == (None, data(2), 2)
    alone.close()
