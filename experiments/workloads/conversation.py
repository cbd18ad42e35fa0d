"""What a load consists of: conversations of one or more turns, and the interface of everything that makes them."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, Self, Unpack

import numpy as np

from ops.settled import ReportsStatus
from pdserve.client.generation import Generation
from pdserve.client.request import GenerateOptions, Prompt
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import CapacityExceeded, InvalidRequest, NotReady


class Sent(Protocol):
    """One request of a load."""

    async def result(self) -> Generation:
        """The whole answer; `PdserveError` if the request failed."""


class LoadTarget(ReportsStatus, Protocol):
    """What conversations are sent to: `pdserve.AsyncClient`, or `experiments.openai_server.OpenAIServer`."""

    async def connect(self) -> None:
        """Reach the service; `PdserveError` if it does not answer."""

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Sent:
        """A request, which is sent when its result is asked for."""


@dataclass(frozen=True, slots=True)
class Room:
    """A request's prompt and output together fit into the model's context and into the KV pool of the smallest
    worker."""

    context_length: int
    pool_tokens: int

    @classmethod
    def of(cls, status: ServiceStatus) -> Self:
        """The room on a service, of which only the context is known if it says nothing of its workers. `NotReady` if no
        worker has registered."""
        if not status.vocab_size:
            raise NotReady("no worker has registered with the service; wait until `pdserve status` shows some")
        return cls(status.context_length, status.pool_tokens if status.workers else status.context_length)

    @property
    def tokens(self) -> int:
        """Most tokens of a prompt and its output together."""
        return min(self.context_length, self.pool_tokens)

    def check(self, prompt_len: int, output_len: int, where: str = "") -> None:
        """Raise the error that a request of these lengths would fail with: `InvalidRequest` if it exceeds the context,
        `CapacityExceeded` if it exceeds the pool. ``where`` replaces the name of the option (a file and its line)."""
        if prompt_len >= self.context_length:
            raise InvalidRequest(
                f"{where or 'input_len'}: {prompt_len} tokens leave no room in the service's context of "
                f"{self.context_length}; use at most {self.context_length - 1}"
            )
        if prompt_len + output_len > self.context_length:
            raise InvalidRequest(
                f"{where or 'output_len'}: {output_len} after {prompt_len} tokens of input exceed the service's "
                f"context of {self.context_length}; use at most {self.context_length - prompt_len}"
            )
        if prompt_len + output_len > self.pool_tokens:
            raise CapacityExceeded(
                f"{where or 'input_len and output_len'}: {prompt_len} + {output_len} tokens exceed the "
                f"{self.pool_tokens} that the KV pool of the service's smallest worker holds; use less, or raise "
                "engine.kv_memory_mb"
            )


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


class Workload(ABC):
    """A source of conversations. Equal seeds give equal conversations."""

    @property
    def most_turns(self) -> int:
        """Turns of its longest conversation."""
        return 1

    @property
    def own_count(self) -> int | None:
        """How many conversations it has; None if it makes as many as are asked for."""
        return None

    @abstractmethod
    def conversations(self, count: int, seed: int, vocab_size: int) -> Iterator[Conversation]:
        """The first ``count`` conversations, each made when it is asked for. Token ids are below ``vocab_size``."""

    @abstractmethod
    def within(self, room: Room) -> Self:
        """This workload, with requests that fit ``room`` only. Raises what a request that does not fit would fail with
        (`InvalidRequest`, `CapacityExceeded`) if the workload cannot be limited without becoming another one."""

    @abstractmethod
    def describe(self) -> str:
        """The workload in one line: where its prompts come from, their lengths, and what was scaled or left out."""


def random_tokens(key: str, length: int, vocab_size: int) -> tuple[int, ...]:
    """``length`` token ids below ``vocab_size``, determined by ``key``. A longer list with the same key begins with the
    shorter one."""
    words = np.frombuffer(random.Random(key).randbytes(4 * length), dtype="<u4")
    return tuple((words % np.uint32(vocab_size)).tolist())
