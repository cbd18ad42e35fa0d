"""Errors of a GPU that poison their process: every later CUDA call fails as well, so the process has to end."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

POISONED_STATUS = 70
"""Exit status of a process that ended because of such an error."""

_log = logging.getLogger(__name__)


def is_poison(error: BaseException) -> bool:
    """Whether ``error``, or one that caused it, is an error of the GPU. Lack of memory is none, and neither is an error
    of NCCL: what the GPU has to do with it shows in the next call."""
    return any(_is_of_gpu(each) for each in _causes(error))


@contextlib.contextmanager
def ends_if_poisoned() -> Iterator[None]:
    """A context around calls to a GPU: `end_if_poisoned` for an error, which then goes on."""
    try:
        yield
    except RuntimeError as error:
        end_if_poisoned(error)
        raise


def end_if_poisoned(error: BaseException) -> None:
    """End this process at once if ``error`` is poison: clean-up would make further CUDA calls, which may hang. Who
    started the process starts another one."""
    if is_poison(error):
        _log.critical("the GPU failed, and this process ends: %s", " ".join(str(error).split())[:500])
        logging.shutdown()
        os._exit(POISONED_STATUS)


def _is_of_gpu(error: BaseException) -> bool:
    text = str(error).lower()
    if not isinstance(error, RuntimeError) or "out of memory" in text or "nccl" in text:
        return False
    named = any(kind.__name__ == "AcceleratorError" for kind in type(error).__mro__)
    return named or "cuda error:" in text or "cuda driver error:" in text


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
