"""What waits to go out on one control stream: replies one by one, outputs batched (a whole step's in one message)."""

from __future__ import annotations

import asyncio

from pdserve.core.errors import PdserveError
from pdserve.core.worker import TokenOutput
from pdserve.pb import worker_pb2 as pb
from worker.wire import error_to_proto, output_to_proto


class Outbox:
    """Filled by flows and calls, emptied by the stream's writer."""

    def __init__(self) -> None:
        self._replies: list[pb.Reply] = []
        self._outputs: list[pb.Output] = []
        self._filled = asyncio.Event()
        self.closed = False

    def reply(self, reply: pb.Reply) -> None:
        """Answer a call."""
        self._replies.append(reply)
        self._filled.set()

    def output(self, request_id: str, output: TokenOutput) -> None:
        """Tell of a token (or a last message without one)."""
        self._outputs.append(output_to_proto(request_id, output))
        self._filled.set()

    def error(self, request_id: str, error: PdserveError) -> None:
        """Tell that a request is over because of ``error``."""
        self._outputs.append(pb.Output(request_id=request_id, error=error_to_proto(error)))
        self._filled.set()

    def close(self) -> None:
        """Nothing more will be read."""
        self.closed = True
        self._filled.set()

    async def take(self) -> list[pb.ControlResponse]:
        """Everything that waits, as few messages as possible; waits for something. Empty once closed."""
        await self._filled.wait()
        self._filled.clear()
        if self.closed:
            return []
        messages = [pb.ControlResponse(reply=reply) for reply in self._replies]
        if self._outputs:
            messages.append(pb.ControlResponse(outputs=pb.Outputs(outputs=self._outputs)))
        self._replies, self._outputs = [], []
        return messages
