"""The KV connector of an engine that keeps cold blocks, and the stores outside of the pool that they go to, by the
digests of the prefix cache. The connector stores what the cache forgets, and reads it back into the blocks of requests
that begin with it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import xxhash

from contract.engine import KVReady
from engine.scheduling.kv_connector import KVConnector
from engine.scheduling.sequence import Sequence
from pdserve.core.clock import Clock
from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import KVLayout
from runtime.logs import LimitedLog

_log = logging.getLogger(__name__)

MAX_UNWRITTEN_BYTES = 64 * 2**20
"""Blocks that wait to be written. Further ones are dropped, because the disk is slower than the engine."""

_MAGIC = b"pdskv\0\0\1"
_HEADER = struct.Struct("<8s16sQ16s")  # magic, digest, bytes of the block, checksum
_LOCK, _TEMPORARY = "lock", ".new"
_DIGEST_CHARS = 32


@dataclass(slots=True, eq=False)
class _Reading:
    """Blocks of a request that are being read: digests and blocks. ``num_blocks`` are in place, cached ones included.
    They are written with ``lock`` held, and no more once it is ``cancelled``."""

    attempt_id: str
    num_blocks: int
    wanted: list[tuple[bytes, int]]
    lock: threading.Lock = field(default_factory=threading.Lock)
    cancelled: bool = False


class Reader(Protocol):
    """What reads blocks beside the engine's steps."""

    def put(self, work: Iterator[None]) -> None:
        """Exhaust ``work``, which reads a block at a time, after all that was put before."""
        ...

    def close(self) -> None:
        """Do what was put, and end."""
        ...


class ReaderThread:
    """A `Reader` with a thread of its own."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Iterator[None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="offload-reader", daemon=True)
        self._thread.start()

    def put(self, work: Iterator[None]) -> None:
        """See `Reader`."""
        self._queue.put(work)

    def close(self) -> None:
        """See `Reader`."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            for _ in work:
                pass


class OffloadConnector(KVConnector):
    """A `KVConnector` that also keeps cold blocks in ``store``.

    A block that the prefix cache forgets is copied from the pool at once, and the store keeps it. A request whose KV
    does not come from another worker, and whose beginning continues in the store where the prefix cache ends, awaits
    the blocks that ``reader`` (default: a thread) reads for it; ``done`` is called there with the command that lets it
    run. Blocks that cannot be read are computed. ``read`` copies a block of the pool, and ``write`` overwrites one:
    steps that are launched after it see that.
    """

    def __init__(
        self,
        clock: Clock,
        layout: KVLayout,
        layer_groups: int,
        store: BlockStore,
        read: Callable[[int], bytes],
        write: Callable[[int, bytes], None],
        done: Callable[[KVReady], None],
        reader: Reader | None = None,
    ) -> None:
        super().__init__(clock, layout, layer_groups)
        self._block_size = layout.block_size
        self._store = store
        self._read_block, self._write_block = read, write
        self._done = done
        self._planned: set[str] = set()
        self._readings: dict[str, _Reading] = {}
        self._reader = reader or ReaderThread()

    def remote_tokens(self, seq: Sequence, num_cached_blocks: int) -> int:
        """The tokens of the run of blocks that are in the cache or in the store, if the store has the last of them."""
        if num_tokens := super().remote_tokens(seq, num_cached_blocks):
            return num_tokens
        if seq.prefix is None:
            return 0
        most = (len(seq.token_ids) - 1) // self._block_size  # at least one token is computed
        digests = seq.prefix.first(most, seq.token_ids)
        end = num_cached_blocks
        while end < most and digests[end] in self._store:
            end += 1
        if end <= num_cached_blocks:
            return 0
        self._planned.add(seq.attempt_id)
        return end * self._block_size

    def allocate(self, seq: Sequence, num_cached_blocks: int) -> bool:
        """Begin to read the blocks of a request that awaits them."""
        pinned = super().allocate(seq, num_cached_blocks)
        if seq.attempt_id in self._planned and seq.prefix is not None:
            self._planned.remove(seq.attempt_id)
            end = seq.num_remote_tokens // self._block_size
            digests = seq.prefix.first(end, seq.token_ids)
            wanted = list(zip(digests, seq.block_ids, strict=False))[num_cached_blocks:end]
            reading = self._readings[seq.attempt_id] = _Reading(seq.attempt_id, num_cached_blocks, wanted)
            self._reader.put(self._read(reading))
        return pinned

    def release(self, seq: Sequence) -> bool:
        """Stop reading for the request as well."""
        self._planned.discard(seq.attempt_id)
        reading = self._readings.pop(seq.attempt_id, None)
        if reading is not None:
            with reading.lock:  # waits for the block that is being written
                reading.cancelled = True
        return super().release(seq)

    def evicted(self, block: int, digest: bytes) -> None:
        """Keep a block that the prefix cache has forgotten."""
        if digest not in self._store:
            self._store.put(digest, self._read_block(block))

    @property
    def num_stored_blocks(self) -> int:
        """Number of blocks in the store."""
        return self._store.num_blocks

    def close(self) -> None:
        """End the reader, and close the store."""
        self._reader.close()
        self._store.close()

    def _read(self, reading: _Reading) -> Iterator[None]:
        """Read the wanted blocks, up to the first that the store does not give, and let the request run."""
        try:
            for digest, block in reading.wanted:
                data = self._store.get(digest)
                with reading.lock:
                    if data is None or reading.cancelled:
                        break
                    self._write_block(block, data)
                reading.num_blocks += 1
                yield
        except (RuntimeError, ValueError, OSError, MemoryError):  # the request must not wait for ever
            _log.exception("%s: cold blocks cannot be read; they are computed", reading.attempt_id)
        if not reading.cancelled:
            self._done(KVReady(reading.attempt_id, None, reading.num_blocks * self._block_size))


class BlockStore:
    """Keeps the bytes of full blocks, up to a limit; the least recently used are dropped. A store is a cache: it may
    drop any block at any time. Thread-safe. This one drops all of them."""

    def __contains__(self, digest: bytes) -> bool:
        """Whether the block of ``digest`` is here, as far as is known without reading it."""
        return False

    def put(self, digest: bytes, data: bytes) -> None:
        """Keep a block, without waiting. No effect if it is here."""

    def get(self, digest: bytes) -> bytes | None:
        """The bytes of a block; None if it is not here, or damaged. May read a file."""
        return None

    def close(self) -> None:
        """Finish what is being written."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks here."""
        return 0


class MemoryStore(BlockStore):
    """A store of at most ``max_bytes`` in the memory of the host, for engines whose pool is on a GPU. Blocks that it
    drops go to ``colder``."""

    def __init__(self, max_bytes: int, colder: BlockStore | None = None) -> None:
        self._max_bytes = max_bytes
        self._colder = colder or BlockStore()
        self._lock = threading.Lock()
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()  # least recently used first
        self._held = 0

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._blocks or digest in self._colder

    def put(self, digest: bytes, data: bytes) -> None:
        dropped: list[tuple[bytes, bytes]] = []
        with self._lock:
            if digest in self._blocks:
                self._blocks.move_to_end(digest)
                return
            self._blocks[digest] = data
            self._held += len(data)
            while self._held > self._max_bytes:
                dropped.append(self._blocks.popitem(last=False))
                self._held -= len(dropped[-1][1])
        for each in dropped:
            self._colder.put(*each)

    def get(self, digest: bytes) -> bytes | None:
        with self._lock:
            data = self._blocks.get(digest)
            if data is not None:
                self._blocks.move_to_end(digest)
                return data
        return self._colder.get(digest)

    def close(self) -> None:
        """Close the colder store. What is in memory is lost."""
        self._colder.close()

    @property
    def num_blocks(self) -> int:
        """Number of blocks here and in the colder store; a block in both counts twice."""
        return len(self._blocks) + self._colder.num_blocks


class DiskStore(BlockStore):
    """A store of at most ``max_bytes`` in ``folder``, which is made if it is missing.

    There is one file per block, written by a thread: a header (`_HEADER`) and the block's bytes, with a checksum of
    both. It gets its name when it is complete, and is checked when it is read, so that a crash at any moment leaves
    nothing that could be taken for a block. Files of an engine's folder belong to it alone: it holds a lock while it
    lives.

    ``kind`` identifies model and layout: blocks of another kind that an earlier engine left in the folder are deleted.
    `ConfigError` if the folder cannot be used: another engine uses it, it belongs to another user, or others may enter
    it.
    """

    def __init__(self, folder: Path, kind: str, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # of files; least recently used first
        self._unwritten: OrderedDict[bytes, bytes] = OrderedDict()
        self._held = self._waiting = 0
        self._changed = threading.Condition()
        self._closed = False
        self._complaints = LimitedLog(_log)
        self._lock_fd = self._open(kind)
        self._load()
        self._writer = threading.Thread(target=self._write_all, name="offload-writer", daemon=True)
        self._writer.start()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._sizes or digest in self._unwritten

    def put(self, digest: bytes, data: bytes) -> None:
        """Have a block written. It is dropped if too many wait."""
        with self._changed:
            if digest in self or self._closed:
                return
            if self._waiting + len(data) > MAX_UNWRITTEN_BYTES:
                self._complaints.warning(
                    f"{self._folder}: cold blocks are dropped, because the disk is slower than the engine"
                )
                return
            self._unwritten[digest] = data
            self._waiting += len(data)
            self._changed.notify_all()

    def get(self, digest: bytes) -> bytes | None:
        """Read a block. A file that is damaged is deleted."""
        with self._changed:
            data = self._unwritten.get(digest)
            if data is not None or digest not in self._sizes:
                return data
            self._sizes.move_to_end(digest)
        path = self._path(digest)
        try:
            content = path.read_bytes()
            os.utime(path)  # the order of use survives a restart
        except OSError as error:
            self._complaints.warning(f"{path}: cannot read a block: {error.strerror}")
            content = b""
        data = content[_HEADER.size :]
        if content[: _HEADER.size] == _header(digest, data):
            return data
        if content:
            self._complaints.warning(f"{path}: the block is damaged and is deleted; it is computed again")
        with self._changed:
            self._delete(digest)
        return None

    def close(self) -> None:
        """Write what waits, and release the folder."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._writer.join()
        os.close(self._lock_fd)

    @property
    def num_blocks(self) -> int:
        return len(self._sizes)

    # --- the folder --------------------------------------------------------------------------------------------------

    def _open(self, kind: str) -> int:
        """Make the folder, lock it, and delete what is of another kind. Returns the lock."""
        folder = self._folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.stat()
            if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise ConfigError(
                    f"engine.offload_folder: {folder} belongs to another user or lets others in; KV tells what was in "
                    "prompts, so make it your own with mode 700"
                )
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise ConfigError(
                    f"engine.offload_folder: another engine uses {folder}; give each service a folder of its own"
                ) from None
            known = os.pread(lock, 256, 0).decode(errors="replace")
            if known != kind:
                for path in folder.iterdir():
                    if _digest_of(path) is not None:
                        path.unlink()
                os.ftruncate(lock, 0)
                os.pwrite(lock, kind.encode(), 0)
        except OSError as error:
            raise ConfigError(f"engine.offload_folder: cannot use {folder}: {error.strerror}") from None
        return lock

    def _load(self) -> None:
        """Find the blocks of earlier engines, and delete files that were not finished."""
        found: list[tuple[float, bytes, int]] = []
        for path in self._folder.iterdir():
            if path.suffix == _TEMPORARY:
                path.unlink(missing_ok=True)
            elif (digest := _digest_of(path)) is not None:
                status = path.stat()
                found.append((status.st_mtime, digest, status.st_size))
        for _, digest, size in sorted(found):
            self._sizes[digest] = size
            self._held += size
        self._make_room(0)

    def _path(self, digest: bytes) -> Path:
        return self._folder / digest.hex()

    def _make_room(self, size: int) -> None:
        while self._sizes and self._held + size > self._max_bytes:
            self._delete(next(iter(self._sizes)))

    def _delete(self, digest: bytes) -> None:
        self._held -= self._sizes.pop(digest, 0)
        with contextlib.suppress(OSError):
            self._path(digest).unlink()

    # --- the writer --------------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unwritten or self._closed)
                if not self._unwritten:
                    return
                digest, data = next(iter(self._unwritten.items()))
                size = _HEADER.size + len(data)
                fits = size <= self._max_bytes
                self._make_room(size)
            written = fits and self._write(digest, data)
            with self._changed:
                if written:
                    self._sizes[digest] = size
                    self._held += size
                del self._unwritten[digest]
                self._waiting -= len(data)

    def _write(self, digest: bytes, data: bytes) -> bool:
        path = self._path(digest)
        unfinished = path.with_suffix(_TEMPORARY)
        try:
            with unfinished.open("wb") as file:
                file.write(_header(digest, data))
                file.write(data)
            unfinished.rename(path)
        except OSError as error:
            self._complaints.warning(f"{path}: cannot write a block: {error.strerror}")
            with contextlib.suppress(OSError):
                unfinished.unlink()
            return False
        return True


def _header(digest: bytes, data: bytes) -> bytes:
    whole = xxhash.xxh3_128(_MAGIC + digest)
    whole.update(data)
    return _HEADER.pack(_MAGIC, digest, len(data), whole.digest())


def _digest_of(path: Path) -> bytes | None:
    """The digest that a file of a block has as its name; None for other files."""
    if len(path.name) != _DIGEST_CHARS:
        return None
    try:
        return bytes.fromhex(path.name)
    except ValueError:
        return None
