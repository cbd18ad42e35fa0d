"""Prompts of random tokens: chosen lengths, shared prefixes, several turns, and the shapes of published traces."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from experiments.workloads.conversation import Conversation, Room, Turn, random_tokens
from experiments.workloads.lengths import Lengths, Lognormal
from pdserve.core.errors import InvalidRequest

SHARED_SALT = "shared"


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Conversations of ``turns`` turns, each with ``inputs`` new tokens and ``outputs`` generated ones, drawn
    independently, and ``pause_s`` between an answer and the next turn.

    With ``prefix_len`` each conversation begins with one of ``num_prefixes`` prefixes of that length, drawn at random;
    all conversations then share one salt, so that a prefix cache can hold the prefixes."""

    inputs: Lengths
    outputs: Lengths
    prefix_len: int = 0
    num_prefixes: int = 1
    turns: int = 1
    pause_s: float = 0.0
    name: str = "random"

    def validate(self) -> None:
        """Raise `InvalidRequest` naming the first option that is out of range."""
        for option, value, least in (
            ("prefix_len", self.prefix_len, 0),
            ("num_prefixes", self.num_prefixes, 1),
            ("turns", self.turns, 1),
        ):
            if value < least:
                raise InvalidRequest(f"{option}: {value} is below {least}")
        for option, lengths in (("input_len", self.inputs), ("output_len", self.outputs)):
            if isinstance(lengths, Lognormal):
                lengths.validate(option)

    @property
    def most_turns(self) -> int:
        return self.turns

    @property
    def own_count(self) -> int | None:
        return None

    def conversations(self, count: int, seed: int, vocab_size: int) -> Iterator[Conversation]:
        prefixes: dict[int, tuple[int, ...]] = {}
        for index in range(count):
            rng = random.Random(f"lengths/{seed}/{index}")
            turns = []
            for turn in range(self.turns):
                tokens = random_tokens(f"tokens/{seed}/{index}/{turn}", self.inputs.draw(rng), vocab_size)
                pause_s = self.pause_s if turn else 0.0
                turns.append(Turn(tokens, self.outputs.draw(rng), pause_s))
            if not self.prefix_len:
                yield Conversation(tuple(turns))
                continue
            which = rng.randrange(self.num_prefixes)
            if which not in prefixes:
                prefixes[which] = random_tokens(f"prefix/{seed}/{which}", self.prefix_len, vocab_size)
            turns[0] = replace(turns[0], token_ids=prefixes[which] + turns[0].token_ids)
            yield Conversation(tuple(turns), SHARED_SALT)

    def within(self, room: Room) -> Self:
        share = max(1, (room.tokens - self.prefix_len) // self.turns)  # of each turn; its output gets half at most
        outputs = self.outputs
        if isinstance(outputs, Lognormal):
            outputs = outputs.limited(min(share // 2, outputs.percentile(0.999)), "output_len")
        inputs = self.inputs
        if isinstance(inputs, Lognormal):
            inputs = inputs.limited(max(1, share - outputs.longest), "input_len")
        before_last = (self.turns - 1) * (inputs.longest + outputs.longest)
        room.check(self.prefix_len + before_last + inputs.longest, outputs.longest)
        return replace(self, inputs=inputs, outputs=outputs)

    def describe(self) -> str:
        parts = [f"{self.name}: input {self.inputs.describe()}; output {self.outputs.describe()}"]
        if self.prefix_len:
            parts.append(f"{self.num_prefixes} shared prefixes of {self.prefix_len} tokens")
        if self.turns > 1:
            parts.append(f"{self.turns} turns, {self.pause_s:g} s between them")
        return "; ".join(parts)


_PUBLISHED = {
    "azure-code": (7.00, 1.36, 2.79, 0.85),
    "azure-conv": (6.63, 0.99, 5.02, 0.86),
    "mooncake-conv": (8.74, 1.20, 5.34, 1.36),
    "sharegpt-like": (7.46, 0.93, 6.03, 0.54),
    "arxiv-summarization": (8.86, 0.48, 5.34, 0.45),
}
"""Mean and sigma of the logarithms of input and output lengths. azure-code, azure-conv: fits of the Azure LLM inference
traces of 2023. mooncake-conv: Mooncake's conversation trace. sharegpt-like, arxiv-summarization: the two data sets of
the Sarathi-Serve paper (openchat_sharegpt4, arxiv_summarization)."""

PUBLISHED_SHAPES = tuple(_PUBLISHED)
"""Names that `published` takes."""


def published(name: str, input_scale: float = 1.0, output_scale: float = 1.0) -> Synthetic:
    """Random tokens with the input and output lengths of a published trace, drawn independently. The scales multiply
    the lengths, for services whose context is smaller; `Synthetic.describe` states them."""
    input_mean, input_sigma, output_mean, output_sigma = _PUBLISHED[name]
    inputs = Lognormal(input_mean, input_sigma, scale=input_scale)
    outputs = Lognormal(output_mean, output_sigma, scale=output_scale)
    for lengths in (inputs, outputs):
        lengths.validate("scale")
    return Synthetic(inputs, outputs, name=name)
