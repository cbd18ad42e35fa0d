"""Which worker has which blocks in its prefix cache, by what the workers announce, and what of a prompt that is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pdserve.core.prefix_digests import SNAPSHOT, BlockUpdate, PrefixDigests, unpack

MAX_BLOCKS = 16_384
"""Blocks of one worker that are kept: with 64 tokens each, the KV of a million tokens."""


class PrefixIndex:
    """For each block, the workers that have it cached.

    A block's hash covers everything before it (`pdserve.core.prefix_digests`), so that a walk along the hashes of a
    prompt, while any worker has the block, is a walk down a radix tree of prompts. Of each worker at most
    ``max_blocks`` are kept; a further one replaces the one that was announced first, of those in no prompt lately: the
    blocks that begin many prompts are old, and nothing is found without them. The index lags behind the caches by a
    heartbeat.

    Workers are bits of a number, so a step of the walk costs the same for any number of them.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._workers: dict[str, _Announced] = {}
        self._names: dict[int, str] = {}  # worker ids by bit
        self._holders: dict[int, int] = {}  # the bits of the workers that have a block, by its hash
        self._used: set[int] = set()  # blocks of prompts that were looked up lately, at most max_blocks
        self.version = 0
        """Grows with every change."""

    def __len__(self) -> int:
        """Number of different blocks."""
        return len(self._holders)

    def position(self, worker_id: str, epoch: str) -> int:
        """Up to where the changes of this incarnation are known; `SNAPSHOT` if it has to announce all its blocks."""
        worker = self._workers.get(worker_id)
        return SNAPSHOT if worker is None or worker.epoch != epoch else worker.position

    def apply(self, worker_id: str, epoch: str, update: BlockUpdate) -> None:
        """Apply an announcement. One that does not continue the last one has no effect: the worker learns `position`
        from the answer and announces the changes since then, or all blocks."""
        if update.begins == SNAPSHOT:
            self.remove(worker_id)
            bit = next(1 << n for n in range(len(self._names) + 1) if 1 << n not in self._names)
            worker = self._workers[worker_id] = _Announced(epoch, bit)
            self._names[bit] = worker_id
        elif update.begins != self.position(worker_id, epoch):
            return
        else:
            worker = self._workers[worker_id]
        worker.position = update.ends
        for block in unpack(update.removed):
            if block in worker.blocks:
                self._drop(worker, block)
        blocks, holders, bit = worker.blocks, self._holders, worker.bit
        for block in unpack(update.added):
            blocks[block] = None
            holders[block] = holders.get(block, 0) | bit
        spared = 0
        while len(blocks) > self._max_blocks:
            block = next(iter(blocks))
            if block in self._used and spared < self._max_blocks:
                spared += 1
                del blocks[block]
                blocks[block] = None  # as if it were announced now
            else:
                self._drop(worker, block)
        self.version += 1

    def remove(self, worker_id: str) -> None:
        """Forget a worker, because it is lost. Unknown workers are ignored."""
        if (worker := self._workers.pop(worker_id, None)) is not None:
            for block in list(worker.blocks):
                self._drop(worker, block)
            del self._names[worker.bit]
            self.version += 1

    def cached(self, hashes: Iterable[int]) -> Mapping[str, int]:
        """How many blocks from the first of ``hashes`` each worker has, without workers that have none. Reads no
        further than the first block that nobody has."""
        found: dict[str, int] = {}
        holders, holding, count = self._holders, -1, 0
        if len(self._used) > self._max_blocks:
            self._used.clear()
        for block in hashes:
            still = holding & holders.get(block, 0)
            if still != holding and count:
                self._note(holding ^ still, count, found)
            holding = still
            if not holding:
                return found
            self._used.add(block)
            count += 1
        if count:
            self._note(holding, count, found)
        return found

    def _note(self, bits: int, count: int, found: dict[str, int]) -> None:
        while bits:
            bit = bits & -bits
            found[self._names[bit]] = count
            bits ^= bit

    def _drop(self, worker: _Announced, block: int) -> None:
        del worker.blocks[block]
        left = self._holders[block] ^ worker.bit
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]


class _Announced:
    """What one incarnation of a worker has announced: its blocks, the first announced first."""

    __slots__ = ("bit", "blocks", "epoch", "position")

    def __init__(self, epoch: str, bit: int) -> None:
        self.epoch = epoch
        self.bit = bit
        self.position = SNAPSHOT
        self.blocks: dict[int, None] = {}


class Prompt:
    """Looks the tokens of one request up in a `PrefixIndex`. Each block is hashed once, when the lookup comes to it."""

    def __init__(self, index: PrefixIndex, salt: str, block_size: int, token_ids: Sequence[int]) -> None:
        self._index = index
        self._token_ids = token_ids
        self._block_size = block_size
        self._digests = PrefixDigests(salt, block_size)
        self._version = -1
        self._cached: Mapping[str, int] = {}

    def cached(self) -> Mapping[str, int]:
        """How many of its first tokens each worker has in its prefix cache, without workers that have none."""
        if self._version != self._index.version:
            self._version = self._index.version
            blocks = self._index.cached(self._digests.hashes(self._token_ids))
            self._cached = {worker_id: count * self._block_size for worker_id, count in blocks.items()}
        return self._cached
