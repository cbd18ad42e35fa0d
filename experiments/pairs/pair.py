"""Two processes that move bytes from the buffer of one to that of the other, and how fast several such pairs do that in
turns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from experiments.child_process import ChildFailed, ChildProcess
from experiments.messages import WrongMessage
from experiments.pairs.endpoint import Connect, Digest, Digested, Expecting, Move, Moved, Ready, Rest, Unavailable

TIMEOUT_S = 60.0
_PROBE_BYTES = 4096


class PairUnavailable(RuntimeError):
    """The pair cannot run on this machine; the message says why. Benchmarks report it and skip the pair."""


class Pair:
    """``module`` (an `Endpoint`) as source and as target, with these arguments and environment variables. A context
    manager, which ends both.

    The source sends, or (``pulls``) the target reads; then the target measures the time alone. ``checked``: a small
    transfer at the start shows that it works, and the first one of each size is compared, outside its timed part.
    ``python`` gives the interpreter of both, or raises PairUnavailable."""

    def __init__(
        self,
        name: str,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        pulls: bool = False,
        checked: bool = True,
        python: Callable[[], Path] = lambda: Path(sys.executable),
    ) -> None:
        self.name = name
        self._module, self._arguments, self._environment = module, arguments, environment
        self._pulls, self._checks, self._python = pulls, checked, python
        self._max_bytes = 0
        self._checked: set[int] = set()
        self._stack = ExitStack()
        self._children: list[ChildProcess] = []

    @property
    def pids(self) -> list[int]:
        """The process ids of source and target, while they run."""
        return [child.pid for child in self._children]

    def start(self, max_bytes: int) -> None:
        """Make source and target, with buffers of this size; PairUnavailable where this cannot run, ChildFailed or
        WrongMessage if it does not. Nothing is left running then."""
        self._max_bytes = max_bytes
        try:
            self._open(self._python())
        except (ChildFailed, PairUnavailable, WrongMessage):
            self.close()
            raise

    def _open(self, python: Path) -> None:
        for role in ("source", "target"):
            arguments = (*self._arguments, role, str(self._max_bytes))
            label, environment = f"{self.name}'s {role}", self._environment
            child = ChildProcess(label, self._module, *arguments, python=python, environment=environment)
            self._children.append(self._stack.enter_context(child))
        addresses = [_address(child) for child in self._children]
        for child, address in zip(self._children, reversed(addresses), strict=True):
            child.send(Connect(address))  # both at once: either may need the other's answers
        for child in self._children:
            child.receive(TIMEOUT_S, Expecting)
        if self._checks:
            self.seconds(min(self._max_bytes, _PROBE_BYTES))

    def seconds(self, num_bytes: int) -> float:
        """One transfer of the buffers' first bytes, until all of them are in the target's memory. ChildFailed if the
        bytes differ or a process gave up, WrongMessage if one did not send what was expected."""
        if not 0 < num_bytes <= self._max_bytes:
            raise ChildFailed(f"{self.name} cannot move {num_bytes} bytes: its buffers have {self._max_bytes}")
        if not self._checks or num_bytes in self._checked:
            return self._move(num_bytes)
        source, target = self._children
        target.ask(TIMEOUT_S, Digest(num_bytes, clear=True), Digested)
        seconds = self._move(num_bytes)
        if len({child.ask(TIMEOUT_S, Digest(num_bytes), Digested).digest for child in (source, target)}) > 1:
            raise ChildFailed(f"{self.name} moved {num_bytes} bytes, and the target has others than the source")
        self._checked.add(num_bytes)
        return seconds

    def _move(self, num_bytes: int) -> float:
        source, target = self._children
        first, second = (source, target) if self._pulls else (target, source)
        first.ask(TIMEOUT_S, Move(num_bytes), Expecting)
        at_s = {second: second.ask(TIMEOUT_S, Move(num_bytes), Moved).seconds}
        if self._pulls:
            first.send(Rest())
        at_s[first] = first.receive(TIMEOUT_S, Moved).seconds
        return at_s[target] - at_s[source]

    def close(self) -> None:
        """End every process that was started. May be called again."""
        self._max_bytes = 0
        self._checked.clear()
        self._children.clear()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _address(child: ChildProcess) -> msgspec.Raw:
    answer: Ready | Unavailable = child.receive(TIMEOUT_S, Ready | Unavailable)
    if isinstance(answer, Unavailable):
        raise PairUnavailable(f"{answer.reason}{child.log_tail()}")
    return answer.address


def memcpy() -> Pair:
    """The ceiling of transports within a host: one thread that copies memory."""
    return Pair("memcpy", "experiments.pairs.ceilings", "memcpy", pulls=True)


def socket() -> Pair:
    """The ceiling of network transports: one blocking loopback socket."""
    return Pair("socket", "experiments.pairs.ceilings", "socket")


def torch_send(device: str) -> Pair:
    """The ceiling of links between GPUs (``device`` cuda; cpu: over Gloo): torch.distributed's send and recv."""
    return Pair("bare", "experiments.pairs.ceilings", "torch", device, checked=False)


@dataclass(slots=True)
class Turns:
    """Transfers of several pairs in turns, so that whatever else the machine does meets all of them."""

    pairs: Sequence[Pair]
    sizes: Sequence[int]
    seconds: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    """By pair and size, for each round."""
    unavailable: dict[str, str] = field(default_factory=dict)
    """By pair, why it cannot run, or how it failed."""

    def run(self, rounds: int, may_fail: Callable[[Pair], bool] = lambda pair: True) -> Iterator[str]:
        """Start the pairs, and have each move every size in every round, after a round that does not count. Yields the
        name of each pair that was started or had a turn. A pair that is unavailable or fails has no more turns, but the
        ChildFailed of one that may not fail is raised."""
        with ExitStack() as stack:
            for pair in self.pairs:
                self.seconds[pair.name] = {size: [] for size in self.sizes}
                stack.enter_context(pair)
                try:
                    pair.start(max(self.sizes))
                except (ChildFailed, PairUnavailable) as error:
                    self._give_up(pair, error, may_fail(pair))
                yield pair.name
            for number in range(rounds + 1):
                order = 1 if number % 2 == 0 else -1
                for pair in self.pairs[::order]:
                    try:
                        if pair.name not in self.unavailable:
                            self._turn(pair, self.sizes[::order], counts=number > 0)
                    except ChildFailed as error:
                        self._give_up(pair, error, may_fail(pair))
                    yield pair.name

    def _turn(self, pair: Pair, sizes: Sequence[int], *, counts: bool) -> None:
        pair.seconds(min(sizes))  # a pair that has slept takes longer to wake
        for size in sizes:
            taken_s = pair.seconds(size)
            if counts:
                self.seconds[pair.name][size].append(taken_s)

    def _give_up(self, pair: Pair, error: RuntimeError, may_fail: bool) -> None:
        if isinstance(error, ChildFailed) and not may_fail:
            raise error
        self.unavailable[pair.name] = str(error)
        del self.seconds[pair.name]
