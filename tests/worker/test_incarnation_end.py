"""A worker that is stopped at each wait of what ends an incarnation of its engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

from ops.launch.worker import HANDLERS
from pdserve.core.request import Request
from pdserve.core.sampling import SamplingParams
from pdserve.core.worker import Role
from tests.output_stream import QueueSink
from tests.worker.test_requests import running, until


class Steps:
    """Awaits ``work``, and calls ``on_wait`` whenever it waits."""

    def __init__(self, work: Coroutine[Any, Any, None], on_wait: Callable[[], None]) -> None:
        self._work, self._on_wait = work, on_wait

    def __await__(self) -> Generator[Any, Any, None]:
        step: Callable[[], Any] = lambda: self._work.send(None)  # noqa: E731
        while True:
            try:
                waited_for = step()
            except StopIteration:
                return
            self._on_wait()
            try:
                yield waited_for
            except asyncio.CancelledError as error:
                step = lambda error=error: self._work.throw(error)  # type: ignore[misc] # noqa: E731
            else:
                step = lambda: self._work.send(None)  # noqa: E731


async def test_a_worker_that_is_stopped_while_an_incarnation_ends_stops_its_engine(model: Path) -> None:
    sampling = SamplingParams(400, seed=1, ignore_eos=True)
    request = Request("r", (1, 2, 3), sampling, timeout_s=60.0, attempt_id="r")
    for number in itertools.count(1):
        waits = 0

        def on_wait(number: int = number) -> None:
            nonlocal waits
            waits += 1
            task = asyncio.current_task()
            if waits == number and task is not None:
                asyncio.get_running_loop().call_soon(task.cancel)

        async with running(model, Role.DECODE, HANDLERS) as (worker, client):
            client.run(request, QueueSink())
            await until(lambda: "r" in worker._table)
            engine, kv = worker.incarnation.engine, worker.incarnation.kv
            await asyncio.gather(Steps(worker._end_incarnation(), on_wait), return_exceptions=True)
            assert engine.returncode is not None
            assert not kv._thread.runs
        if waits < number:
            break
    assert number > 2
