"""Clients that ask a service the same things again and again while something happens to it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from pdserve import Client, Generation
from pdserve.core.errors import PdserveError

TIMEOUT_S = 120.0
PAUSE_S = 0.02  # after each answer: the machine has more to do


class Load:
    """``clients`` at once, each with a connection of its own, for as long as the ``with`` lasts, then to the end of
    what has begun. The right tokens for each prompt are those of one worker that does it all."""

    def __init__(
        self, target: str, prompts: Sequence[str | Sequence[int]], *, clients: int = 3, **options: Any
    ) -> None:
        self.answers: list[Generation] = []
        self.errors: list[str] = []
        self._target, self._prompts = target, prompts
        self._options = {"ignore_eos": True, "timeout_s": TIMEOUT_S, **options}
        with Client(target) as client:
            self._expected = [
                client.generate(prompt, **{**self._options, "mode": "colocated"}).result().token_ids
                for prompt in prompts
            ]
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(first,), daemon=True) for first in range(clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End it before the context does."""
        self._ending.set()
        for thread in self._threads:
            thread.join(2 * TIMEOUT_S)

    def _ask(self, number: int) -> None:
        with Client(self._target) as client:
            while True:
                number = (number + 1) % len(self._prompts)
                try:
                    answer = client.generate(self._prompts[number], **self._options).result()
                except PdserveError as error:
                    self.errors.append(f"{type(error).__name__}: {error}")
                else:
                    self.answers.append(answer)
                    if answer.token_ids != (expected := self._expected[number]):
                        self.errors.append(f"prompt {number}: {answer.token_ids} instead of {expected}")
                if self._ending.wait(PAUSE_S):
                    return

    def check(self) -> int:
        """The most attempts that a request took. AssertionError if one was lost or answered with wrong tokens, or a
        client got no answer."""
        assert not self.errors, self.errors[:5]
        assert len(self.answers) >= len(self._threads)
        return max(answer.attempts for answer in self.answers)
