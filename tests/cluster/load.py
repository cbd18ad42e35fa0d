"""Clients that ask a service the same things again and again while something happens to it."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from pdserve import Client
from pdserve.client.generation import Generation
from pdserve.core.errors import PdserveError

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Answer:
    """What became of one request; times by this process's monotonic clock."""

    prompt: int
    began_s: float
    ended_s: float
    result: Generation | None
    error: str = ""

    @property
    def took_s(self) -> float:
        """From asking to the last token."""
        return self.ended_s - self.began_s

    @property
    def retried(self) -> bool:
        """Whether it lost a worker on its way."""
        return self.result is not None and self.result.attempts > 1


class Load:
    """``clients`` at once, for as long as the ``with`` lasts, then to the end of what has begun. ``expected`` are the
    right tokens for each prompt: those of one worker that does it all."""

    def __init__(self, target: str, *, clients: int, tokens: int, lengths: Sequence[int]) -> None:
        draw = random.Random(7)
        self.answers: list[Answer] = []
        self._target, self._tokens = target, tokens
        self._prompts = [[draw.randrange(4000) for _ in range(length)] for length in lengths]
        with Client(target) as client:
            self._expected = [
                client.generate(prompt, max_tokens=tokens, mode="colocated", ignore_eos=True).result().token_ids
                for prompt in self._prompts
            ]
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(first,), daemon=True) for first in range(clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * TIMEOUT_S)

    def _ask(self, prompt: int) -> None:
        with Client(self._target) as client:
            while not self._stop.is_set():
                prompt = (prompt + 1) % len(self._prompts)
                began_s = time.monotonic()
                result, error = None, ""
                try:
                    stream = client.generate(
                        self._prompts[prompt],
                        max_tokens=self._tokens,
                        mode="pd",
                        ignore_eos=True,
                        timeout_s=TIMEOUT_S,
                    )
                    result = stream.result()
                except PdserveError as failure:
                    error = f"{type(failure).__name__}: {failure}"
                if result is not None and result.token_ids != self._expected[prompt]:
                    error = f"prompt {prompt}: {result.token_ids} instead of {self._expected[prompt]}"
                self.answers.append(Answer(prompt, began_s, time.monotonic(), result, error))

    @property
    def errors(self) -> list[str]:
        """Requests that were lost, or answered with wrong tokens."""
        return [answer.error for answer in self.answers if answer.error]

    def usual_s(self, prompt: int) -> float:
        """What this prompt takes when nothing happens to it, under the same load: a median."""
        return statistics.median(a.took_s for a in self.answers if a.prompt == prompt and not a.retried)

    def added_s(self) -> list[float]:
        """For each request that lost a worker, how much longer than usual it took; in order."""
        return sorted(answer.took_s - self.usual_s(answer.prompt) for answer in self.answers if answer.retried)
