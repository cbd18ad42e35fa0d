"""Random token ids."""

from __future__ import annotations

import random

import numpy as np


def random_tokens(key: str, length: int, vocab_size: int) -> tuple[int, ...]:
    """``length`` token ids below ``vocab_size``, determined by ``key``. A longer list with the same key begins with the
    shorter one."""
    words = np.frombuffer(random.Random(key).randbytes(4 * length), dtype="<u4")
    return tuple((words % np.uint32(vocab_size)).tolist())
