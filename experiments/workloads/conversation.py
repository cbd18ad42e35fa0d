"""What a load consists of: conversations of one or more turns, and the interface of everything that makes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, Self

from experiments.workloads.room import Room


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation: the new part of its prompt, as ``token_ids`` or as ``text`` (the other is empty),
    and how many tokens to generate. It is sent ``pause_s`` after the answer of the turn before."""

    token_ids: tuple[int, ...]
    output_len: int
    pause_s: float = 0.0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow each other. The prompt of a turn is everything before it (the new parts of earlier turns and
    the answers that were really generated) and its own new part. All turns have token ids, or all have text.

    ``salt`` separates prefix caches. None: the conversation gets a salt of its own, so that no cache holds any of its
    KV before its first turn. Conversations with an equal salt find each other's prompts in the cache. ``session_id`` is
    that of its requests (empty: none)."""

    turns: tuple[Turn, ...]
    salt: str | None = None
    session_id: str = ""


class Workload(Protocol):
    """A source of conversations. Equal seeds give equal conversations."""

    @property
    def most_turns(self) -> int:
        """Turns of its longest conversation."""

    @property
    def own_count(self) -> int | None:
        """How many conversations it has; None if it makes as many as are asked for."""

    def conversations(self, count: int, seed: int, vocab_size: int) -> Iterator[Conversation]:
        """The first ``count`` conversations, each made when it is asked for. Token ids are below ``vocab_size``."""

    def within(self, room: Room) -> Self:
        """This workload, with requests that fit ``room`` only. Raises what a request that does not fit would fail with
        (`InvalidRequest`, `CapacityExceeded`) if the workload cannot be limited without becoming another one."""

    def describe(self) -> str:
        """The workload in one line: where its prompts come from, their lengths, and what was scaled or left out."""
