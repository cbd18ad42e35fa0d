"""A step's outputs leave in one message, replies by themselves, and a closed stream takes nothing."""

from __future__ import annotations

import asyncio

from pdserve.core.errors import WorkerLost
from pdserve.core.worker import TokenOutput
from pdserve.pb import worker_pb2 as pb
from worker.outbox import Outbox


async def test_outputs_are_batched() -> None:
    outbox = Outbox()
    outbox.reply(pb.Reply(call_id=1))
    for i in range(3):
        outbox.output(f"r{i}", TokenOutput(i))
    outbox.error("r9", WorkerLost("gone"))
    reply, outputs = await outbox.take()
    assert reply.reply.call_id == 1
    assert [o.request_id for o in outputs.outputs.outputs] == ["r0", "r1", "r2", "r9"]
    assert outputs.outputs.outputs[3].error.kind == "WorkerLost"


async def test_take_waits_for_something_and_ends_with_the_stream() -> None:
    outbox = Outbox()
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    outbox.close()
    assert await taking == []
