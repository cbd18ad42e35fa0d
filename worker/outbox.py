"""What waits to go out on one control stream: replies one by one, outputs batched (a whole step's in one message)."""

from __future__ import annotations

import asyncio

from pdserve.core.errors import PdserveError
from pdserve.core.worker import TokenOutput
from pdserve.pb import worker_pb2 as pb
from worker.messages import Failure, Outputs, Reply, to_frame


class Outbox:
    """Filled by requests and calls, emptied by the stream's writer."""

    def __init__(self) -> None:
        self._replies: list[Reply] = []
        self._outputs: list[tuple[str, TokenOutput]] = []
        self._failures: list[tuple[str, Failure]] = []
        self._filled = asyncio.Event()
        self.closed = False

    def reply(self, reply: Reply) -> None:
        """Answer a call."""
        self._replies.append(reply)
        self._filled.set()

    def output(self, attempt_id: str, output: TokenOutput) -> None:
        """Tell of a token (or a last message without one)."""
        self._outputs.append((attempt_id, output))
        self._filled.set()

    def error(self, attempt_id: str, error: PdserveError) -> None:
        """Tell that a request is over because of ``error``, after its outputs."""
        self._failures.append((attempt_id, Failure.of(error)))
        self._filled.set()

    def close(self) -> None:
        """Nothing more will be read."""
        self.closed = True
        self._filled.set()

    async def take(self) -> list[pb.Frame]:
        """Everything that waits, as few messages as possible; waits for something. Empty once closed."""
        await self._filled.wait()
        self._filled.clear()
        if self.closed:
            return []
        frames = [to_frame(reply) for reply in self._replies]
        if self._outputs or self._failures:
            frames.append(to_frame(Outputs(self._outputs, self._failures)))
        self._replies, self._outputs, self._failures = [], [], []
        return frames
