"""The number of tokens that one request may have on a service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pdserve.client.status import ServiceStatus
from pdserve.core.errors import CapacityExceeded, InvalidRequest, NotReady


@dataclass(frozen=True, slots=True)
class Room:
    """A request's prompt and output together fit into the model's context and into the KV pool of the smallest
    worker."""

    context_length: int
    pool_tokens: int

    @classmethod
    def of(cls, status: ServiceStatus) -> Self:
        """The room on a service; `NotReady` if no worker has registered."""
        if not status.vocab_size:
            raise NotReady("no worker has registered with the service; wait until `pdserve status` shows some")
        return cls(status.context_length, status.pool_tokens)

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
