"""Two processes that move bytes from the memory of one to that of the other, and how fast several such pairs do that in
turns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.child_process import ChildFailed, ChildProcess, program
from experiments.messages import Done, WrongMessage
from experiments.pairs.endpoint import Call, Expecting, Unavailable

TIMEOUT_S = 60.0
_PROBE_BYTES = 4096
_CEILINGS = "experiments.pairs.ceilings"


class PairUnavailable(RuntimeError):
    """The pair cannot run on this machine; the message says why. Benchmarks report it and skip the pair."""


class Pair(AbstractContextManager["Pair"]):
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
        self._stack = ExitStack()
        self.close()

    def start(self, max_bytes: int) -> None:
        """Make source and target, with memory of this size; PairUnavailable where this cannot run, ChildFailed or
        WrongMessage if it does not. Nothing is left running then."""
        self._max_bytes = max_bytes
        try:
            python = self._python()
            for role in ("source", "target"):
                command = program(self._module, *self._arguments, role, str(max_bytes), python=python)
                child = ChildProcess(f"{self.name}'s {role}", command, self._environment)
                self._children.append(self._stack.enter_context(child))
            addresses = [_address(child) for child in self._children]
            for child, address in zip(self._children, reversed(addresses), strict=True):
                child.send(Call("connect", address))  # both at once: either may need the other's answers
            for child in self._children:
                child.receive(TIMEOUT_S, Done)
            if self._checks:
                self.seconds(min(max_bytes, _PROBE_BYTES))
        except (ChildFailed, PairUnavailable, WrongMessage):
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids of source and target, while they run."""
        return [child.pid for child in self._children]

    def seconds(self, num_bytes: int) -> float:
        """One transfer of the first bytes, until all of them are in the target's memory. ChildFailed if the bytes
        differ or a process gave up, WrongMessage if one did not send what was expected."""
        if not 0 < num_bytes <= self._max_bytes:
            raise ChildFailed(f"{self.name} cannot move {num_bytes} bytes: its buffers have {self._max_bytes}")
        if not self._checks or num_bytes in self._checked:
            return self._move(num_bytes)
        self._children[1].ask(TIMEOUT_S, Call("clear", num_bytes), Done)
        seconds = self._move(num_bytes)
        if len({child.ask(TIMEOUT_S, Call("digest", num_bytes), Done).value for child in self._children}) > 1:
            raise ChildFailed(f"{self.name} moved {num_bytes} bytes, and the target has others than the source")
        self._checked.add(num_bytes)
        return seconds

    def _move(self, num_bytes: int) -> float:
        source, target = self._children
        first, second = (source, target) if self._pulls else (target, source)
        move = Call("transfer", num_bytes)
        first.ask(TIMEOUT_S, move, Expecting)
        at_s = {second: second.ask(TIMEOUT_S, move, Done).value}
        if self._pulls:
            first.send(Call("rest"))
        at_s[first] = first.receive(TIMEOUT_S, Done).value
        if self._pulls:
            first.receive(TIMEOUT_S, Done)
        return float(at_s[target] - at_s[source])

    def close(self) -> None:
        """End every process that was started. May be called again."""
        self._max_bytes, self._checked = 0, set[int]()
        self._children: list[ChildProcess] = []
        self._stack.close()

    def __exit__(self, *raised: object) -> None:
        self.close()


def _address(child: ChildProcess) -> Any:
    answer: Done | Unavailable = child.receive(TIMEOUT_S, Done | Unavailable)
    if isinstance(answer, Unavailable):
        raise PairUnavailable(f"{answer.reason}{child.log_tail()}")
    return answer.value


def memcpy() -> Pair:
    """The ceiling of transports within a host: one thread that copies memory."""
    return Pair("memcpy", _CEILINGS, "memcpy", pulls=True)


def socket() -> Pair:
    """The ceiling of network transports: one blocking loopback socket."""
    return Pair("socket", _CEILINGS, "socket")


def torch_send(device: str) -> Pair:
    """The ceiling of links between GPUs (``device`` cuda; cpu: over Gloo): torch.distributed's send and recv."""
    return Pair("bare", _CEILINGS, "torch", device, checked=False)


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
            for number in range(-1, rounds + 1):
                order = 1 if number % 2 == 0 else -1
                for pair in self.pairs if number < 0 else self.pairs[::order]:
                    try:
                        if number < 0:
                            self.seconds[pair.name] = {size: [] for size in self.sizes}
                            stack.enter_context(pair).start(max(self.sizes))
                        elif pair.name in self.seconds:
                            pair.seconds(min(self.sizes))  # a pair that has slept takes longer to wake
                            for size in self.sizes[::order]:
                                taken_s = pair.seconds(size)
                                if number:
                                    self.seconds[pair.name][size].append(taken_s)
                    except (ChildFailed, PairUnavailable) as error:
                        if isinstance(error, ChildFailed) and not may_fail(pair):
                            raise
                        self.unavailable[pair.name] = str(error)
                        del self.seconds[pair.name]
                    yield pair.name
