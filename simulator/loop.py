"""Event loops on one virtual clock. Each stands for a thread of the world; a seed decides which of those that are ready
runs next. Within a loop the order is that of asyncio: first come, first served."""

from __future__ import annotations

import asyncio
import heapq
import random
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, Generic, TypeVar, TypeVarTuple

import msgspec

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

BEGIN_S = 1_000.0
"""What the world's clock says when a world begins."""

TURN_S = 1e-6
"""Virtual seconds that a turn takes, so that a loop that polls does not stop the clock."""
LOOK_S = 0.005
"""How often a condition is looked at."""
MAX_BURST = 8
"""The most callbacks that a loop runs before others may."""


class Stuck(Exception):
    """Nothing is ready, and no timer is left."""


class Callback(msgspec.Struct, eq=False):
    """A callback of a loop, as `asyncio.TimerHandle`, but without a context of its own unless one is given: it is made
    a hundred thousand times per run. Once cancelled, it has no ``call``."""

    loop: WorldLoop
    call: Callable[..., object] | None
    args: tuple[Any, ...]
    context: Context | None
    when_s: float = 0.0

    def cancel(self) -> None:
        """Do not call it."""
        self.call = None
        self.args = ()

    def cancelled(self) -> bool:
        """Whether it is not called."""
        return self.call is None

    def when(self) -> float:
        """The time of a timer."""
        return self.when_s


class World:
    """The clock, and all loops. ``chance`` decides which of them runs. ``on_error`` is told of exceptions that no code
    has handled (as asyncio's exception handlers are). A turn of a loop takes ``turn_s``."""

    def __init__(
        self, chance: random.Random, on_error: Callable[[dict[str, Any]], None], turn_s: float = TURN_S
    ) -> None:
        self.now_s, self._turn_s = BEGIN_S, turn_s
        self.turns = 0
        self.random = chance.random
        """Draws a number from 0 to 1."""
        self.on_error = on_error
        self._timers: list[tuple[float, int, Callback]] = []
        self._numbers = 0
        self.runnable: list[WorldLoop] = []
        """Loops with callbacks to run, in no order that means anything."""
        self.left: list[object] = []
        """What dead loops would have run: tasks that are freed would run their last blocks."""

    def now(self) -> float:
        """Virtual seconds (`pdserve.core.clock.Clock`)."""
        return self.now_s

    def add_timer(self, callback: Callback) -> None:
        """Have its loop run ``callback`` at its time."""
        self._numbers += 1
        heapq.heappush(self._timers, (callback.when_s, self._numbers, callback))

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Run loops in turn until the condition holds, which is looked at every `LOOK_S`. False if virtual time reaches
        ``limit_s`` first. `Stuck` if nothing is left to run."""
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=_close_generator)
        try:
            while not until():
                if self.now_s >= limit_s:
                    return False
                look_s = self.now_s + LOOK_S
                while self.now_s < look_s:
                    self._run_ready()
                    self._next_timer()
            return True
        finally:
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def _run_ready(self) -> None:
        runnable, draw, timers = self.runnable, self.random, self._timers
        while runnable:
            place = int(draw() * len(runnable))
            loop = runnable[place]
            ready = loop.ready
            if loop.paused or not ready:
                loop.listed, loop.rests = False, not loop.paused
                runnable[place] = runnable[-1]
                runnable.pop()
                continue
            asyncio._set_running_loop(loop)
            for _ in range(min(len(ready), 1 + int(draw() * MAX_BURST))):
                callback = ready.popleft()
                if (call := callback.call) is not None:
                    try:
                        if callback.context is None:
                            call(*callback.args)
                        else:
                            callback.context.run(call, *callback.args)
                    except Exception as error:  # noqa: BLE001 - as asyncio does
                        loop.call_exception_handler({"message": f"{call}", "exception": error})
                if loop.paused or not ready:
                    break
            self.turns += 1
            self.now_s += self._turn_s
            while timers and timers[0][0] <= self.now_s:
                self._fire()

    def _next_timer(self) -> None:
        """Move the clock to the next timer, and make it ready."""
        timers = self._timers
        while timers:
            when_s, _, callback = timers[0]
            if callback.call is None or callback.loop.dead:
                self.left.append(heapq.heappop(timers)[2])
                continue
            self.now_s = max(self.now_s, when_s)
            self._fire()
            return
        raise Stuck("every task waits for another, and no timer is left to wake one")

    def _fire(self) -> None:
        callback = heapq.heappop(self._timers)[2]
        if callback.loop.dead:
            self.left.append(callback)
        elif callback.call is not None:
            callback.loop.add(callback)


class WorldLoop(asyncio.AbstractEventLoop):
    """One thread of the world, called ``name``. It runs when `World.run` has it run."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.ready: deque[Callback] = deque()
        self.listed = False
        """Whether it is in `World.runnable`."""
        self.rests = True
        """Whether the next callback puts it there."""
        self.paused = self.dead = False
        self._numbers = 0

    def add(self, callback: Callback) -> None:
        """Run ``callback`` after those that are ready."""
        self.ready.append(callback)
        if self.rests:
            self._list()

    def _list(self) -> None:
        self.listed, self.rests = True, False
        self.world.runnable.append(self)

    def pause(self) -> None:
        """Run nothing until `resume`, as a process that was stopped."""
        self.paused, self.rests = True, False

    def resume(self) -> None:
        """Go on."""
        if self.dead:
            return
        self.paused, self.rests = False, not self.listed
        if self.rests and self.ready:
            self._list()

    def kill(self) -> None:
        """Never run anything again. Nothing that its tasks would do at their end is done."""
        self.dead = self.paused = True
        self.rests = False
        self.world.left.append(self.ready)
        self.ready = deque(maxlen=0)  # takes nothing more

    def number(self) -> int:
        """The next number of a task or future of this loop, which makes the order of sets the same in every run."""
        self._numbers += 1
        return self._numbers

    # --- asyncio -----------------------------------------------------------------------------------------------------

    def call_soon(  # type: ignore[override]
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> Callback:
        soon = Callback(self, callback, args, context)
        self.ready.append(soon)
        if self.rests:
            self._list()
        return soon

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> Callback:
        timer = Callback(self, callback, args, context, self.world.now_s + delay)
        self.world.add_timer(timer)
        return timer

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> Callback:
        timer = Callback(self, callback, args, context, when)
        self.world.add_timer(timer)
        return timer

    def time(self) -> float:
        return self.world.now_s

    def create_future(self) -> asyncio.Future[Any]:
        return WorldFuture(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        task = WorldTask(coro, loop=self, name=name or self.name, context=context)
        task._log_destroy_pending = False
        return task

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Threads that compute take no time."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is the future's
            future.set_exception(error)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.dead:  # else its tasks end because they are freed
            self.world.on_error({**context, "thread": self.name})

    default_exception_handler = call_exception_handler

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self.dead

    def stop(self) -> None:
        self.kill()

    def close(self) -> None:
        self.kill()


class WorldFuture(asyncio.Future[T]):
    """A future whose hash is a number of its loop, so that sets of futures have the same order in every run."""

    _number = 0

    def __hash__(self) -> int:
        return _number(self)


class WorldTask(asyncio.Task[T]):
    """A task whose hash is a number of its loop. If its loop is killed, it is forgotten without a word."""

    _number = 0
    _log_destroy_pending: bool

    def __hash__(self) -> int:
        return _number(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def _number(future: WorldFuture[Any] | WorldTask[Any]) -> int:
    if not future._number:
        loop = future.get_loop()
        assert isinstance(loop, WorldLoop), "a world runs it"
        future._number = loop.number()
    return future._number


class Mailbox(Generic[T]):
    """A queue that one task reads."""

    __slots__ = ("_items", "_reader")

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        """Add an item, on the reader's thread."""
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> T:
        """The next item."""
        while not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._items.popleft()


class Interrupted(Coroutine[Any, Any, T]):
    """``work``, whose task is cancelled at its wait number ``at``: when what it waits for has come, and it has not run
    since. Who hands something to a waiting task must be prepared for that."""

    def __init__(self, work: Coroutine[Any, Any, T], at: int) -> None:
        self._work, self._left = work, at

    def send(self, value: Any) -> Any:
        """See `Coroutine`."""
        return self._waits(self._work.send(value))

    def throw(self, *error: Any) -> Any:
        """See `Coroutine`."""
        return self._waits(self._work.throw(*error))

    def close(self) -> None:
        """See `Coroutine`."""
        self._work.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._work.__await__()

    def _waits(self, awaited: Any) -> Any:
        self._left -= 1
        if not self._left and awaited is not None:
            task = asyncio.current_task()
            assert task is not None, "a task runs it"
            awaited.add_done_callback(lambda _: task.cancel())  # before the callback that wakes the task
        return awaited


def _close_generator(generator: AsyncGenerator[Any, Any]) -> None:
    """Close an asynchronous generator that nothing refers to any more, on the loop that runs."""
    loop = asyncio._get_running_loop()
    if isinstance(loop, WorldLoop) and not loop.dead:
        loop.call_soon(lambda: loop.create_task(generator.aclose()))
