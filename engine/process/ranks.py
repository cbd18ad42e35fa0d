"""The ranks of a tensor-parallel engine on CPUs: a process each. Rank 0 is the engine's process. It starts the others
(`engine.process.rank`), tells them each step, and adds numbers with them in a memory file. A rank that ends ends them
all."""

from __future__ import annotations

import logging
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import msgspec
import torch

from contract.engine import encode_frame
from contract.message import Message
from engine.model.share import Ranks
from engine.scheduling.batch import ScheduledSeq
from engine.scheduling.sequence import PromptLogprobs
from engine.spec import EngineSpec
from pdserve.core.sampling import SamplingParams
from runtime import memory_file

log = logging.getLogger(__name__)

_SLOT_BYTES = 2**21
"""Numbers that are added at a time, or logits of a row."""
_LINE = 8  # words of a cache line
_SPINS = 64  # looks at the others before one lets other threads run
_HASTY_S = 0.02  # after this time they are not expected any more
_MOST_PAUSE_S = 1.0
_GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)


class SharedSums(Ranks):
    """Adds the numbers of ``ranks`` processes that have mapped the memory file ``fd``, which `create` makes.

    Each has two slots, used in turns: who fills one again has met the others since they have read it. A rank says where
    it is by a counter that it alone writes; taking and leaving a lock orders that with the numbers, also on processors
    that reorder writes."""

    def __init__(self, fd: int, rank: int, ranks: int) -> None:
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
        self._rank, self._others = rank, [_LINE * other for other in range(ranks) if other != rank]
        self._counters = memoryview(memory)[: 8 * _LINE * ranks].cast("Q")
        numbers = torch.frombuffer(memory, dtype=torch.uint8, offset=8 * _LINE * ranks)
        self._slots = numbers.view(2, ranks, _SLOT_BYTES)
        self._views: dict[torch.dtype, torch.Tensor] = {}
        self._count = 0
        self._fence = threading.Lock()

    @staticmethod
    def create(ranks: int) -> int:
        """The descriptor of a memory file for so many ranks."""
        fd = memory_file.create("pdserve-sums")
        os.ftruncate(fd, ranks * (8 * _LINE + 2 * _SLOT_BYTES))
        memory_file.seal(fd)
        return fd

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """See `engine.model.share.Ranks`."""
        x = x.contiguous()
        for part in torch.split(x.view(-1), _SLOT_BYTES // x.itemsize):
            slots = self._exchange(part)
            torch.add(slots[0], slots[1], out=part)
            for slot in slots[2:]:
                part.add_(slot)
        return x

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """See `engine.model.share.Ranks`."""
        rows = max(1, _SLOT_BYTES // (max(sizes) * x.itemsize))
        found: list[torch.Tensor] = []
        for part in torch.split(x, rows) if x.shape[0] else ():
            mine = part.reshape(-1)
            slots = self._exchange(mine, max(sizes) * part.shape[0])
            if not self._rank:
                parts = [slot[: part.shape[0] * size].view(-1, size) for slot, size in zip(slots, sizes, strict=True)]
                found.append(torch.cat(parts, dim=1))
        return torch.cat(found) if found else x

    def meet(self) -> None:
        """See `engine.model.share.Ranks`."""
        self._count += 1
        with self._fence:
            self._counters[_LINE * self._rank] = self._count
        looks, began_s = 0, 0.0
        for other in self._others:
            while self._counters[other] < self._count:
                looks += 1
                if looks % _SPINS == 0:
                    began_s = began_s or time.monotonic()
                    if (waited_s := time.monotonic() - began_s) < _HASTY_S:
                        os.sched_yield()
                    else:  # with hardly any processor time, so that `worker.watchdog` sees that another rank hangs
                        time.sleep(min(_MOST_PAUSE_S, waited_s / 10))
        with self._fence:
            pass

    def _exchange(self, mine: torch.Tensor, size: int | None = None) -> Sequence[torch.Tensor]:
        """Show ``mine`` to the others. Returns the first ``size`` numbers (default: as many) of all ranks."""
        views = self._views.get(mine.dtype)
        if views is None:
            views = self._views[mine.dtype] = self._slots.view(mine.dtype)
        slots = views[self._count % 2]
        slots[self._rank, : mine.shape[0]].copy_(mine)
        self.meet()
        return slots[:, : size or mine.shape[0]].unbind()


class _Part(msgspec.Struct, array_like=True):
    """What another rank needs to know of a `ScheduledSeq`. ``told``: the positions of its prompt that get logprobs."""

    attempt_id: str
    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    sample: bool
    num_drafts: int
    told: tuple[int, int] | None


class PoolReady(Message, frozen=True):
    """The pool is there."""

    num_blocks: int
    max_positions: int


class RankStep(Message, frozen=True):
    """Compute this."""

    parts: list[_Part]


class _Told(PromptLogprobs):
    """A prompt whose tokens are not known here, but which of them get logprobs."""

    def __init__(self, positions: range) -> None:
        super().__init__((), 0)
        self._positions = positions

    def missing(self, start: int, end: int) -> tuple[range, Sequence[int]]:
        return self._positions, [0] * len(self._positions)


class OtherRanks:
    """The processes of the other ranks of the engine with this ``spec``, whose pool is in the memory file
    ``pool_fd``."""

    def __init__(self, spec: EngineSpec, pool_fd: int) -> None:
        ranks = spec.tensor_parallel
        sums_fd = SharedSums.create(ranks)
        self.sums = SharedSums(sums_fd, 0, ranks)
        self._steps: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, ranks):
            steps_read, steps_write = os.pipe()
            inherited = (pool_fd, sums_fd, steps_read)
            command = ["-m", "engine.process.rank", spec.to_json(), str(rank), *map(str, inherited)]
            self._processes.append(
                subprocess.Popen([sys.executable, "-P", *command], stdin=subprocess.DEVNULL, pass_fds=inherited)
            )
            os.close(steps_read)
            self._steps.append(steps_write)
        os.close(sums_fd)

    def begin(self, begin: PoolReady) -> None:
        """Tell them that the pool is there, and wait until they are ready. From now on this process ends if one of them
        does."""
        for process in self._processes:
            threading.Thread(target=self._watch, args=(process,), daemon=True).start()
        self._tell(begin)
        self.sums.meet()

    def lead(self, seqs: Sequence[ScheduledSeq]) -> None:
        """Have them `follow` a step."""
        self._tell(RankStep([_part(seq) for seq in seqs]))

    def _tell(self, message: PoolReady | RankStep) -> None:
        frame = encode_frame(message)
        for fd in self._steps:
            data = memoryview(frame)
            while data:
                data = data[os.write(fd, data) :]

    @staticmethod
    def _watch(process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        log.error("another rank of this engine (process %d) has ended (exit status %d)", process.pid, status)
        logging.shutdown()
        os._exit(1)


def _part(seq: ScheduledSeq) -> _Part:
    told: tuple[int, int] | None = None
    if seq.prompt_logprobs is not None:
        positions, _ = seq.prompt_logprobs.missing(seq.start, seq.end)
        told = (positions.start, positions.stop) if positions else None
    return _Part(seq.attempt_id, seq.token_ids, seq.start, seq.block_ids, seq.sample, seq.num_drafts, told)


def scheduled(part: _Part) -> ScheduledSeq:
    """A part of a step as another rank needs it."""
    told = None if part.told is None else _Told(range(*part.told))
    return ScheduledSeq(
        part.attempt_id,
        part.token_ids,
        part.start,
        part.block_ids,
        part.sample,
        _GREEDY,
        prompt_logprobs=told,
        num_drafts=part.num_drafts,
    )
