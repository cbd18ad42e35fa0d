"""What pdserve needs to know of an engine that is not its own, and how that is spoken to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import httpx2

from pdserve.core.request import Request
from pdserve.core.sampling import FinishReason, TokenLogprobs
from pdserve.core.worker import Role, WorkerLoad

HandOff = Mapping[str, Any]
"""What decode has to know to get the KV from prefill, in the engine's own words."""


class Description(NamedTuple):
    """What a server says of itself. Two servers can hand KV to each other if they have the
    same engine, version, model, and blocks."""

    kind: str
    version: str
    model: str
    block_size: int
    kv_dtype: str
    max_model_len: int
    num_blocks: int
    life: str
    """Different after a restart."""
    hands_off: bool | None
    """Whether it can hand KV over; None: it does not show that."""
    kv_address: str | None = None
    """Where decode servers find a prefill server; None: they learn it with each hand-off."""
    role: Role | None = None
    """The only one that it can have; None: any, and it can also serve requests without another server."""

    @property
    def in_common(self) -> tuple[tuple[str, str], ...]:
        """What servers that hand KV to each other must have in common (`pdserve.core.handoff.KVPeer.engine`)."""
        names = ("kind", "version", "model", "block_size", "kv_dtype")
        return tuple((name, str(getattr(self, name))) for name in names)


def difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """The first of the values that two servers must have in common in which they differ, in words; empty if there is
    none."""
    for name, value in mine.items():
        if value != theirs.get(name):
            return f"{name} is {value!r} and {theirs.get(name)!r}"
    return ""


class Abilities(NamedTuple):
    """What an engine can do, as its adapter declares it. `lacking` refuses by name what it cannot; ``pdserve status``
    shows all of it."""

    name: str
    """Of the engine, in messages."""
    hand_off: str
    """How KV gets from prefill to decode."""
    proof: str
    """Which requests have a proof of the bytes that were moved."""
    logprobs: bool
    prompt_logprobs: bool
    structures: tuple[str, ...]
    """Kinds of `pdserve.core.sampling.StructuredOutputs`."""
    speculation: str
    """The option that decides on speculative decoding when a server starts."""
    layer_events: bool = False
    """Whether KV is sent by layers, while prefill computes."""

    @property
    def shown(self) -> dict[str, str]:
        """In words. Other engines draw anew after a retry and do not announce what they have cached. Every engine ends
        a request when its connection is closed."""
        words = {True: "yes", False: "no"}
        return {
            "hand_off": self.hand_off,
            "layer_events": words[self.layer_events],
            "proof": self.proof,
            "logprobs": words[self.logprobs],
            "prompt_logprobs": words[self.prompt_logprobs],
            "structured_outputs": ", ".join(self.structures),
            "speculation": f"chosen when it starts, {self.speculation}",
            "seeds": "a retry draws anew",
            "prefix_announcements": "no",
            "abort": "yes",
        }


def lacking(abilities: Abilities, request: Request) -> str:
    """What ``request`` asks for and an engine with these ``abilities`` cannot do, with the field's name first; empty if
    there is nothing."""
    name, sampling, asked = abilities.name, request.sampling, request.sampling.structured_outputs
    if sampling.speculation is not None:
        return f"speculation: {name} decides it when it starts ({abilities.speculation}); leave it out"
    if sampling.prompt_logprobs is not None and not abilities.prompt_logprobs:
        return f"prompt_logprobs (echo with logprobs): not read from {name} workers; leave it out"
    if sampling.logprobs is not None and not abilities.logprobs:
        return f"logprobs: not read from {name} workers; leave it out"
    if asked is not None and request.output_token_ids:
        return f"structured_outputs: {name} cannot continue a structure after the tokens so far; send the request again"
    if asked is not None and asked.kind not in abilities.structures:
        return f"structured_outputs: {name} workers know {', '.join(abilities.structures)} alone"
    return ""


class KVCounters(NamedTuple):
    """Where the KV of all prompt tokens of a server came from, in tokens, and the bytes that were moved for them, and
    the time that this took; since its start."""

    computed: int = 0
    cached: int = 0
    received: int = 0
    received_bytes: int = 0
    wire_ms: float = 0.0

    def since(self, start: KVCounters) -> KVCounters:
        """What has come in addition to ``start``."""
        return KVCounters(
            self.computed - start.computed,
            self.cached - start.cached,
            self.received - start.received,
            self.received_bytes - start.received_bytes,
            self.wire_ms - start.wire_ms,
        )

    @property
    def tokens(self) -> int:
        """All prompt tokens."""
        return self.computed + self.cached + self.received


class Step(NamedTuple):
    """A part of an answer: tokens, why the output ended (None: it goes on), how many tokens of the prompt were cached
    (None: not told), and the number of outputs before these tokens (None: those of the parts before)."""

    tokens: Sequence[tuple[int, TokenLogprobs | None]]
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None
    start: int | None = None


class Adapter(Protocol):
    """One kind of engine. Bodies of requests are made, and answers are read, by pure functions.

    A hand-off has two requests with the same id: prefill computes the prompt and one token, and decode gets the KV and
    repeats that token. Decode's request needs a `HandOff`: either both requests are sent at once with the one that
    `meeting` makes, or decode's follows prefill's answer, which has it."""

    kind: str
    path: str
    """Where requests are sent to."""
    transport: str
    """What moves the KV."""
    abilities: Abilities

    async def describe(self, http: httpx2.AsyncClient) -> Description | None:
        """What a server says of itself; None if it is an engine of another kind. httpx2.HTTPError if it does not
        answer."""
        ...

    async def load(self, http: httpx2.AsyncClient, num_blocks: int) -> tuple[WorkerLoad, KVCounters, str]:
        """What a server has to do, where its KV came from, and its `Description.life`. httpx2.HTTPError if it does not
        answer."""
        ...

    def alone(self, request: Request, model: str) -> dict[str, Any]:
        """The body of a request that one server serves."""
        ...

    def meeting(self, attempt_id: str, kv_address: str) -> HandOff | None:
        """How the two requests of an attempt find each other, if its prefill server is at ``kv_address``. None: only
        prefill's answer says that."""
        ...

    def prefill(self, request: Request, model: str, meeting: HandOff | None) -> dict[str, Any]:
        """The body of the prefill of a hand-off."""
        ...

    def decode(self, request: Request, model: str, hand_off: HandOff) -> dict[str, Any]:
        """The body of the decode of a hand-off."""
        ...

    def hand_off(self, answer: Mapping[str, Any]) -> HandOff:
        """What prefill's ``answer`` says for decode. `HandOffMissing` if it says nothing that decode can use."""
        ...

    def read(self, part: Mapping[str, Any]) -> Step:
        """Read an answer, or a part of one that is streamed. KeyError, TypeError, ValueError or IndexError if it is not
        what the engine is known to send; `PdserveError` if it reports an error."""
        ...
