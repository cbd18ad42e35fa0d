"""Another rank than 0 of a tensor-parallel engine (`engine.process.ranks`):
``python -m engine.process.rank SPEC RANK POOL_FD SUMS_FD STEPS_FD``. It ends when rank 0 does."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import NoReturn

from contract.engine import FrameReader
from engine.process.ranks import PoolReady, RankStep, SharedSums, scheduled
from engine.spec import EngineSpec
from runtime.logs import set_up_logging
from runtime.process import end_with_parent, freeze_heap, no_collection

_READ_BYTES = 2**20


def _messages(fd: int) -> Iterator[PoolReady | RankStep]:
    frames: FrameReader[PoolReady | RankStep] = FrameReader(PoolReady | RankStep)  # type: ignore[arg-type]  # a union
    while data := os.read(fd, _READ_BYTES):
        yield from frames.feed(data)


def main() -> NoReturn:
    """Run the process."""
    end_with_parent()
    set_up_logging()
    spec = EngineSpec.from_json(sys.argv[1])
    rank, pool_fd, sums_fd, steps_fd = map(int, sys.argv[2:])
    if spec.cores:
        os.sched_setaffinity(0, spec.cores_of(rank))
    with no_collection():  # after binding: torch counts the cores when it is imported
        from engine.process.build import build_rank

    sums = SharedSums(sums_fd, rank, spec.tensor_parallel)
    build = build_rank(spec, rank, sums)
    messages = _messages(steps_fd)
    begin = next(messages, None)
    if not isinstance(begin, PoolReady):
        os._exit(0)  # rank 0 has ended, and says why
    runner = build(begin.num_blocks, begin.max_positions, pool_fd)
    freeze_heap()
    sums.meet()
    for message in messages:
        assert isinstance(message, RankStep)
        runner.follow([scheduled(part) for part in message.parts])
    os._exit(0)


if __name__ == "__main__":
    main()
