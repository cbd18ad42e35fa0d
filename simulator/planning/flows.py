"""Transfers that share links: each gets its max-min fair share of every link on its way, at any time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from simulator.loop import Callback, WorldLoop

_DONE_S = 1e-9
"""What is moved in less time is a rounding error of the clock."""


class Pipe:
    """A link, or one direction of it, that carries ``bytes_per_s``. ``carried`` are the bytes that it has carried."""

    def __init__(self, name: str, bytes_per_s: float) -> None:
        self.name, self.bytes_per_s = name, bytes_per_s
        self.flows: dict[Flow, None] = {}
        """Those that have bytes to move, in the order in which they began."""
        self.carried = 0.0


class Flow:
    """Bytes on their way over ``pipes``. ``most_bytes_per_s`` limits it beside the pipes. `add` gives it more bytes;
    ``drained`` is called when all have arrived."""

    def __init__(
        self, loop: WorldLoop, pipes: Sequence[Pipe], drained: Callable[[], None], most_bytes_per_s: float = math.inf
    ) -> None:
        self._loop, self.pipes, self._drained, self.most_bytes_per_s = loop, tuple(pipes), drained, most_bytes_per_s
        self._left = 0.0
        self.rate = 0.0
        self._since_s = 0.0
        self._timer: Callback | None = None

    def add(self, num_bytes: float) -> None:
        """Move more bytes, after those that were added before."""
        if num_bytes <= 0:
            return
        began = not self._left
        self._settle()
        self._left += num_bytes
        if not began:
            self._schedule()
            return
        for pipe in self.pipes:
            pipe.flows[self] = None
        share(self)

    @property
    def is_busy(self) -> bool:
        """Whether bytes are on their way."""
        return self._left > 0

    def _leave(self) -> None:
        self._left = 0.0
        if self._timer is not None:
            self._timer.cancel()
        for pipe in self.pipes:
            pipe.flows.pop(self, None)
        share(self)

    def _settle(self) -> None:
        """Count what has been moved since the last time."""
        now_s = self._loop.time()
        moved = min(self._left, self.rate * (now_s - self._since_s))
        self._since_s = now_s
        if moved > 0:
            self._left -= moved
            for pipe in self.pipes:
                pipe.carried += moved

    def set_rate(self, rate: float) -> None:
        """Go on at another rate."""
        if rate != self.rate or self._timer is None:
            self._settle()
            self.rate = rate
            self._schedule()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._left / self.rate, self._arrived) if self.rate > 0 else None

    def _arrived(self) -> None:
        self._settle()
        if self._left > self.rate * _DONE_S:
            self._schedule()
            return
        self._timer = None
        self._leave()
        self.rate = 0.0
        self._drained()


def share(changed: Flow) -> None:
    """Divide the pipes anew among all flows that are connected with ``changed`` by pipes that they share."""
    if not any(other is not changed for pipe in changed.pipes for other in pipe.flows):
        if changed.is_busy:
            changed.set_rate(min(changed.most_bytes_per_s, *(pipe.bytes_per_s for pipe in changed.pipes)))
        return
    pipes, flows = _connected(changed.pipes)
    left = {pipe: pipe.bytes_per_s for pipe in pipes}
    open_flows = dict.fromkeys(pipes, 0)
    for flow in flows:
        for pipe in flow.pipes:
            open_flows[pipe] += 1
    waiting = dict.fromkeys(flows)
    while waiting:
        fair = min((left[pipe] / count for pipe, count in open_flows.items() if count), default=math.inf)
        limited = [flow for flow in waiting if flow.most_bytes_per_s <= fair]
        if not limited:
            full = {pipe for pipe, count in open_flows.items() if count and left[pipe] / count <= fair * (1 + 1e-12)}
            limited = [flow for flow in waiting if not full.isdisjoint(flow.pipes)]
        for flow in limited:
            rate = min(fair, flow.most_bytes_per_s)
            for pipe in flow.pipes:
                left[pipe] = max(0.0, left[pipe] - rate)
                open_flows[pipe] -= 1
            del waiting[flow]
            flow.set_rate(rate)


def _connected(pipes: Iterable[Pipe]) -> tuple[dict[Pipe, None], dict[Flow, None]]:
    """Pipes and flows that are connected with ``pipes``."""
    known, flows = dict.fromkeys(pipes), dict[Flow, None]()
    todo = list(known)
    while todo:
        for flow in todo.pop().flows:
            if flow not in flows:
                flows[flow] = None
                for pipe in flow.pipes:
                    if pipe not in known:
                        known[pipe] = None
                        todo.append(pipe)
    return known, flows
