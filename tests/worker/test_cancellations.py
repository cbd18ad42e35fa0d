"""Cancelling a request at each of its waits, and again while it ends: its engine gets blocks back only when nothing
writes or reads them any more.

Two real workers with their engines, linked over shared memory. A copy between their pools takes a while, and cannot be
stopped once it has begun, like a one-sided read of a network card.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from contract import control
from contract.engine import Abort, Command, Release
from engine.process.client import EngineClient
from kv_transfer import send_transfer
from kv_transfer.fetch import Fetch
from kv_transfer.receive_transfer import ReceiveTransfer
from kv_transfer.receiver import KVReceiver
from kv_transfer.transports.unix_socket import SharingLink
from ops.launch.worker import HANDLERS
from pdserve.core.handoff import PrefixSource, prefix_transfer_id
from pdserve.core.kv_layout import Region
from pdserve.core.request import Request
from pdserve.core.sampling import SamplingParams
from pdserve.core.worker import Role
from tests.output_stream import QueueSink, sent
from tests.worker.test_requests import check_idle, outputs, running, until
from worker.request_table import Handler, ServedRequest

COPY_S = 0.05
PREFIX_TOKENS = 48
PROMPT_TOKENS = 56
SETTINGS: dict[str, Any] = {"engine": {"prefix_caching": True}, "transfer": {"transport": "shm"}}
EACH = 0  # the second cancellation comes at each further wait
CASES: dict[str, type[control.Work]] = {
    "run": control.Run,
    "push": control.Push,
    "push of a fetched prefix": control.Push,
    "receive": control.Receive,
    "send_prefix": control.SendPrefix,
}


class Copies:
    """The copies between the pools, which are slow, and what engines are told of a request while its blocks are
    copied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way: Counter[str] = Counter()  # by transfer
        self.too_early: list[Command] = []
        of_transfer: ContextVar[str] = ContextVar("of_transfer")
        fill, fetch_references, send = KVReceiver._fill, SharingLink._fetch_references, EngineClient.send

        async def receive(receiver: KVReceiver, link: Any, transfer: ReceiveTransfer, *message: Any) -> None:
            of_transfer.set(transfer.attempt_id)
            await fill(receiver, link, transfer, *message)

        async def copy(link: SharingLink, references: Sequence[Region], fetch: Fetch) -> None:
            name = of_transfer.get("a probe")
            self.under_way[name] += 1
            try:
                with fetch.writing():
                    await asyncio.sleep(COPY_S)
                    await fetch_references(link, references, fetch)
            finally:
                self.under_way[name] -= 1

        def tell(engine: EngineClient, command: Command) -> None:
            if isinstance(command, Abort | Release):
                of_it = [command.attempt_id]
                if isinstance(command, Abort):  # a fetched prefix is written to the request's blocks
                    of_it.append(prefix_transfer_id(command.attempt_id))
                if any(self.under_way[name] for name in of_it):
                    self.too_early.append(command)
            send(engine, command)

        monkeypatch.setattr(KVReceiver, "_fill", receive)
        monkeypatch.setattr(SharingLink, "_fetch_references", copy)
        monkeypatch.setattr(EngineClient, "send", tell)
        # Otherwise a sender that waits longer for its receiver's copies cuts the link, after which they do not count.
        monkeypatch.setattr(send_transfer, "_SETTLE_S", 60.0)

    @property
    def any(self) -> bool:
        """Whether anything is copied."""
        return any(self.under_way.values())


@dataclass
class Cancels:
    """Cancels a request at its wait number ``first``, and again at number ``second``. ``copying``: the first time only
    while there is a copy."""

    copies: Copies
    first: int
    second: int | None
    copying: bool
    waits: int = 0
    struck: list[bool] = field(default_factory=list)
    """For each cancellation whether there was a copy."""

    def on_wait(self) -> None:
        """Cancel at this wait, if it is one of those."""
        self.waits += 1
        is_second = bool(self.struck) and self.second in (EACH, self.waits)
        if self.waits == self.first or is_second:
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_soon(self._strike, task, self.waits, self.copying and not is_second)

    def _strike(self, task: asyncio.Task[None], number: int, only_copying: bool) -> None:
        if task.done() or self.waits != number:
            return
        if only_copying and not self.copies.any:
            asyncio.get_running_loop().call_later(1e-3, self._strike, task, number, only_copying)
            return
        self.struck.append(self.copies.any)
        task.cancel()


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


class Pair:
    """The ``worker`` whose requests are cancelled, and the ``other`` at the end of its hand-offs."""

    def __init__(self, case: str, copies: Copies) -> None:
        self.case, self.copies = case, copies
        self._draw = random.Random(case)
        self._plans: dict[str, Cancels] = {}  # by attempt id

    def stepped(self, handler: Handler) -> Handler:
        """A handler of ``worker`` whose requests are cancelled as planned."""

        async def serve(served: ServedRequest) -> None:
            if (plan := self._plans.get(served.attempt_id)) is None:
                await handler(served)
            else:
                await Steps(handler(served), plan.on_wait)

        return serve

    @contextlib.asynccontextmanager
    async def linked(self, model: Path) -> AsyncIterator[None]:
        """Both workers are up and linked."""
        handlers = {**HANDLERS, CASES[self.case]: self.stepped(HANDLERS[CASES[self.case]])}
        async with (
            running(model, Role.PREFILL, handlers, **SETTINGS) as (self.worker, self.client),
            running(model, Role.DECODE, HANDLERS, **SETTINGS) as (self.other, self.to_other),
        ):
            await self.worker.incarnation.kv.connect(self.to_other.info.peer)
            await self.other.incarnation.kv.connect(self.client.info.peer)
            yield

    async def cancelled(self, first: int, second: int | None, copying: bool) -> Cancels:
        """Serve a request with a new prompt, and cancel it so. Returns when both workers are idle."""
        name = f"{first}/{second}/{copying}"
        prompt = tuple(self._draw.randrange(300) for _ in range(PROMPT_TOKENS))
        request, prefix_id = _request(name, prompt), prefix_transfer_id(name)
        here, there, sink = self.client, self.to_other, QueueSink()
        source: PrefixSource | None = None
        target_id = prefix_id if self.case == "send_prefix" else name
        if self.case in ("run", "push of a fetched prefix", "send_prefix"):
            sender, taker = (here, there) if self.case == "send_prefix" else (there, here)
            await outputs(sent(sender.run, _request(f"{name}/before", prompt)))
            source = PrefixSource(sender.info.peer, PREFIX_TOKENS, 30.0)
        cancels = self._plans[target_id] = Cancels(self.copies, first, second, copying)
        if source is not None:
            sender.send_prefix(_request(prefix_id, prompt[:PREFIX_TOKENS]), taker.info.peer, sink)
        if self.case == "run":
            here.run(request, sink, source)
        elif self.case == "send_prefix":
            there.run(request, sink, source)
        elif self.case == "receive":
            there.push(request, here.info.peer, sink)
            here.receive(request, there.info.peer, sink)
        else:
            there.receive(request, here.info.peer, sink)
            here.push(request, there.info.peer, sink, source)
        await until(lambda: cancels.waits > 0 and target_id not in self.worker._table)
        for attempt_id in (name, prefix_id):
            await here.abort(attempt_id)
            await there.abort(attempt_id)
        await check_idle(self.worker)
        await check_idle(self.other)
        return cancels


def _request(attempt_id: str, prompt: tuple[int, ...], max_tokens: int = 4) -> Request:
    sampling = SamplingParams(max_tokens, seed=1, ignore_eos=True)
    return Request(attempt_id, prompt, sampling, timeout_s=60.0, attempt_id=attempt_id)


@pytest.mark.parametrize("case", CASES)
async def test_an_engine_is_told_of_an_abort_when_nothing_uses_the_blocks(
    model: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    copies = Copies(monkeypatch)
    pair = Pair(case, copies)
    struck: list[list[bool]] = []
    async with pair.linked(model):
        for copying in (False, True):
            for first in itertools.count(1):
                cancels = await pair.cancelled(first, None, copying)
                struck.append(cancels.struck)
                if cancels.waits < first:
                    break
                if not cancels.struck:
                    continue  # nothing is copied during this wait
                await pair.cancelled(first, EACH, copying)
                for second in itertools.count(first + 1):
                    cancels = await pair.cancelled(first, second, copying)
                    struck.append(cancels.struck)
                    if len(cancels.struck) < 2:
                        break
    assert [True, True] in struck, "no request was cancelled twice while its blocks were copied"
    assert copies.too_early == []


async def test_a_worker_that_is_stopped_while_an_incarnation_ends_stops_its_engine(model: Path) -> None:
    for number in itertools.count(1):
        waits = 0

        def on_wait(number: int = number) -> None:
            nonlocal waits
            waits += 1
            task = asyncio.current_task()
            if waits == number and task is not None:
                asyncio.get_running_loop().call_soon(task.cancel)

        async with running(model, Role.DECODE, HANDLERS, **SETTINGS) as (worker, client):
            client.run(_request("r", (1, 2, 3), max_tokens=400), QueueSink())
            await until(lambda: "r" in worker._table)
            engine, kv = worker.incarnation.engine, worker.incarnation.kv
            await asyncio.gather(_stepped(worker._end_incarnation(), on_wait), return_exceptions=True)
            assert engine.returncode is not None
            assert not kv._thread.runs
        if waits < number:
            break
    assert number > 2


async def _stepped(work: Coroutine[Any, Any, None], on_wait: Callable[[], None]) -> None:
    await Steps(work, on_wait)
