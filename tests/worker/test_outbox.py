"""Outputs of a step are sent in one message, replies one by one, and nothing after a stream is closed."""

from __future__ import annotations

import asyncio

from contract.control import TO_GATEWAY, Failure, Outputs, Reply
from pdserve.core.errors import WorkerLost
from pdserve.core.worker import TokenOutput
from worker.server import Outbox


async def test_outputs_are_batched() -> None:
    outbox = Outbox()
    replies = [Reply(1, 2.0, 3.0), Reply(2, 2.0, 3.0, Failure("WorkerLost", "gone"))]
    outbox.reply(replies[0])
    outputs = [(f"r{i}", TokenOutput(i)) for i in range(3)]
    for attempt_id, output in outputs:
        outbox.output(attempt_id, output)
    outbox.error("r9", WorkerLost("gone"))
    outbox.reply(replies[1])
    messages = [TO_GATEWAY.decode(frame) for frame in await outbox.take()]
    assert messages == [*replies, Outputs(outputs, [("r9", Failure("WorkerLost", "gone"))])]


async def test_take_waits_for_something_and_ends_with_the_stream() -> None:
    outbox = Outbox()
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    outbox.close()
    assert await taking == []
