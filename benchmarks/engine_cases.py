"""What the engine's benchmark measures: prefills, decode steps, and a step that does both."""

from __future__ import annotations

from dataclasses import dataclass

WARM_STEPS = 2
STEPS = 8


@dataclass(frozen=True, slots=True)
class Prefill:
    """The first token of a prompt of ``tokens``."""

    tokens: int

    @property
    def name(self) -> str:
        """As it is called in the JSON line."""
        return str(self.tokens)


@dataclass(frozen=True, slots=True)
class Decode:
    """A step that makes one token for each of ``batch`` requests, each with ``context`` tokens (and a few more, as the
    steps go on: the figure is the median of `STEPS`)."""

    batch: int
    context: int

    @property
    def name(self) -> str:
        """As it is called in the JSON line."""
        return f"b{self.batch}_c{self.context}"


@dataclass(frozen=True, slots=True)
class Mixed:
    """A chunk of ``chunk`` tokens of a prompt, after ``context`` others, and with it one token for each of ``batch``
    requests of ``context`` tokens. The baseline does one after the other."""

    chunk: int
    batch: int
    context: int

    @property
    def name(self) -> str:
        """As it is called in the JSON line."""
        return f"p{self.chunk}_b{self.batch}_c{self.context}"


Case = Prefill | Decode | Mixed
CPU_CASES: tuple[Case, ...] = (
    *(Prefill(tokens) for tokens in (128, 512, 2048, 4096)),
    *(Decode(batch, context) for context in (64, 1024) for batch in (1, 4, 16, 32)),
    Mixed(256, 8, 512),
)
CUDA_CASES: tuple[Case, ...] = (
    *(Prefill(tokens) for tokens in (512, 2048, 8192)),
    *(Decode(batch, context) for context in (64, 1024) for batch in (1, 8, 32)),
    Mixed(512, 8, 1024),
)
QUICK_CASES: tuple[Case, ...] = (Prefill(128), Decode(1, 64), Decode(4, 64), Mixed(64, 2, 64))
