"""What the router gives back: tokens, and the account of how they came about."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.handoff import TransferProof
from pdserve.core.logprobs import TokenLogprobs
from pdserve.core.request import Mode
from pdserve.core.sampling import FinishReason


@dataclass(frozen=True, slots=True)
class RoutedToken:
    """A token on its way to the client; the last one says why it is the last."""

    token_id: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class RoutingResult:
    """What became of a request, complete once its tokens are. ``decode_worker`` is empty if nothing was decoded
    elsewhere; ``kv_bytes_expected`` is 0 then, and when the client had enough before decode gave anything; else it is
    what the last attempt's hand-off must weigh. ``prefill_cached_tokens`` of the prompt were cached where it ran."""

    mode: Mode | None = None
    prefill_worker: str = ""
    decode_worker: str = ""
    proof: TransferProof | None = None
    kv_bytes_expected: int = 0
    block_size: int = 0
    attempts: int = 0
    prefill_cached_tokens: int = 0
