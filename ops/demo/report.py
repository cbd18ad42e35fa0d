"""The demo's results, and the JSON object of ``--json``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.client.generation import Generation
from pdserve.core.errors import PdserveError
from pdserve.core.interval import Interval, median_interval
from pdserve.core.timeline import Figure


@dataclass(frozen=True, slots=True)
class PairedRound:
    """One prompt sent in both modes, one directly after the other."""

    prompt: int
    pd: Generation
    colocated: Generation

    @property
    def tokens_equal(self) -> bool:
        """Whether both modes generated the same tokens."""
        return self.pd.token_ids == self.colocated.token_ids

    def added_ms(self, figure: Figure) -> float | None:
        """The figure in pd mode minus colocated."""
        pd_ms, colocated_ms = self.pd.figure_ms(figure), self.colocated.figure_ms(figure)
        return None if pd_ms is None or colocated_ms is None else pd_ms - colocated_ms


@dataclass(slots=True)
class DemoReport:
    """What the demo found."""

    requests: int
    live: list[Generation] = field(default_factory=list)  # the concurrent requests, in the order of the prompts
    pairs: list[PairedRound] = field(default_factory=list)  # of all rounds
    errors: list[PdserveError] = field(default_factory=list)
    leaked_blocks: int = 0
    rounds: int = 0
    load_facts: Mapping[str, Any] = field(default_factory=dict)  # `MachineLoad.facts`

    @property
    def disaggregated(self) -> list[Generation]:
        """All requests that ran in pd mode."""
        return [*self.live, *(pair.pd for pair in self.pairs)]

    @property
    def tokens_equal_colocated(self) -> bool:
        """Whether every prompt was compared and all pairs are equal."""
        compared = {pair.prompt for pair in self.pairs}
        return len(compared) == self.requests and all(pair.tokens_equal for pair in self.pairs)

    @property
    def kv_bytes_equal_expected(self) -> bool:
        """Whether every hand-off transferred exactly the expected bytes, and at least one any."""
        generations = [*self.disaggregated, *(pair.colocated for pair in self.pairs)]
        moved = any(generation.kv_bytes for generation in self.disaggregated)
        return moved and all(generation.kv_bytes == generation.kv_bytes_expected for generation in generations)

    @property
    def ok(self) -> bool:
        """Whether nothing failed, differed, or leaked."""
        return (
            not self.errors and self.tokens_equal_colocated and self.kv_bytes_equal_expected and not self.leaked_blocks
        )

    def unattributed(self, figure: Figure) -> dict[str, float | None]:
        """The largest residue of a disaggregated request, in ms and in percent of its figure."""
        breakdowns = [g.breakdowns[figure] for g in self.disaggregated if figure in g.breakdowns]
        return {
            "ms_max": _rounded(max((abs(b.unattributed_ms) for b in breakdowns), default=None)),
            "pct_max": _rounded(max((100 * abs(b.unattributed_ms) / b.total_ms for b in breakdowns), default=None)),
        }

    def added_by_prompt_ms(self, figure: Figure) -> dict[int, float]:
        """For each prompt the median of its paired differences."""
        by_prompt: dict[int, list[float]] = {}
        for pair in self.pairs:
            if (added := pair.added_ms(figure)) is not None:
                by_prompt.setdefault(pair.prompt, []).append(added)
        return {prompt: statistics.median(values) for prompt, values in by_prompt.items()}

    def added_ms(self, figure: Figure) -> Interval | None:
        """The median over the prompts with its interval; None if no pair has the figure."""
        return median_interval(list(self.added_by_prompt_ms(figure).values()))

    def median_ms(self, prompt: int, mode: str, figure: Figure) -> float | None:
        """The median of one prompt's figure in one mode (pd or colocated) over the rounds."""
        generations: Sequence[Generation] = [
            pair.pd if mode == "pd" else pair.colocated for pair in self.pairs if pair.prompt == prompt
        ]
        values = [value for generation in generations if (value := generation.figure_ms(figure)) is not None]
        return statistics.median(values) if values else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values; times are in ms."""
        return {
            "requests": self.requests,
            "failed": len(self.errors),
            "tokens_equal_colocated": self.tokens_equal_colocated,
            "kv_bytes_equal_expected": self.kv_bytes_equal_expected,
            "unattributed": {figure.value: self.unattributed(figure) for figure in Figure},
            "leaked_blocks": self.leaked_blocks,
            "rounds": self.rounds,
            **self.load_facts,
            "added_ttft_ms": {
                figure.value: None if (added := self.added_ms(figure)) is None else added.to_dict() for figure in Figure
            },
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
