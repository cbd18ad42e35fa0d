"""The KV connector of an engine that keeps cold blocks: it stores what the prefix cache forgets, and reads it back into
the blocks of requests that begin with it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from contract.engine import KVReady
from engine.offload.stores import BlockStore
from engine.scheduling.kv_connector import TransferConnector
from engine.scheduling.sequence import Sequence
from pdserve.core.clock import Clock
from pdserve.core.kv_layout import KVLayout

_log = logging.getLogger(__name__)


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


class OffloadConnector(TransferConnector):
    """A `TransferConnector` that also keeps cold blocks in ``store``.

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
