"""Sampling parameters, and the reasons for which a request ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from pdserve.core.errors import InvalidRequest

MAX_REPETITION_PENALTY = 10.0
MAX_BIASES = 300
MAX_BIAS = 100.0
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_TOKEN_IDS = 1024


class FinishReason(StrEnum):
    """Why the output ended."""

    STOP = "stop"  # end-of-sequence token, stop id or stop string
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are sampled. Sampling depends on ``(seed, position)`` only, so batches, hand-offs, and resumes do not
    change the result. The gateway makes a seed from the request id for requests without one.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 are off. The gateway handles the strings in ``stop``, the
    engine ``stop_token_ids``. With ``ignore_eos`` generation continues to ``max_tokens``.

    ``min_p`` drops tokens less than ``min_p`` times as likely as the likeliest one (0: off). ``repetition_penalty``
    divides positive and multiplies negative logits of tokens in prompt or output (1: off). From the logit of a token in
    the output, ``presence_penalty`` is subtracted once, and ``frequency_penalty`` for each occurrence (0: off).
    ``logit_bias`` is added to the logits of its token ids; -100 forbids a token, 100 forbids all others. ``logprobs``
    requests log-probabilities of each token and of that many likeliest ones (None: none), of the model's own
    distribution (`pdserve.core.logprobs.TokenLogprobs`). ``engine/model/sampler.py`` defines the order of these
    operations."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = msgspec.field(default_factory=dict)
    logprobs: int | None = None

    @property
    def penalises(self) -> bool:
        """Whether the tokens so far change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_plain(self) -> bool:
        """Whether the largest logit decides, and no logprobs are asked for."""
        return self.temperature == 0.0 and not self.penalises and not self.logit_bias and self.logprobs is None

    def validate(self) -> None:
        """Raise `InvalidRequest` naming the first field that is out of range."""
        if self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens: {self.max_tokens} is below 1; ask for at least one token")
        if not math.isfinite(self.temperature) or not 0.0 <= self.temperature <= 100.0:
            raise InvalidRequest(f"temperature: {self.temperature} is outside 0 to 100; 0 is greedy, 1 the model's own")
        if self.top_k < 0:
            raise InvalidRequest(f"top_k: {self.top_k} is negative; 0 turns it off")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(f"top_p: {self.top_p} is outside (0, 1]; 1 turns it off")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise InvalidRequest(f"seed: {self.seed} is outside 0 to 2^63-1")
        if any(not s for s in self.stop):
            raise InvalidRequest("stop: an empty string would stop at once; leave it out")
        if len(self.stop) > MAX_STOPS:
            raise InvalidRequest(f"stop: {len(self.stop)} strings are more than {MAX_STOPS}; send fewer")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop_token_ids: {len(self.stop_token_ids)} ids are more than {MAX_STOP_TOKEN_IDS}; send fewer"
            )
        if any(t < 0 for t in self.stop_token_ids):
            raise InvalidRequest("stop_token_ids: ids are never negative")
        if not 0.0 <= self.min_p <= 1.0:
            raise InvalidRequest(f"min_p: {self.min_p} is outside 0 to 1; 0 turns it off")
        if not 0.0 < self.repetition_penalty <= MAX_REPETITION_PENALTY:
            raise InvalidRequest(
                f"repetition_penalty: {self.repetition_penalty} is outside (0, {MAX_REPETITION_PENALTY:g}]; "
                "1 turns it off, more discourages repetition"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise InvalidRequest(f"{name}: {getattr(self, name)} is outside -2 to 2; 0 turns it off")
        self._validate_logit_bias()
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(
                f"logprobs: {self.logprobs} is outside 0 to {MAX_LOGPROBS}; 0 gives the sampled token's alone"
            )

    def _validate_logit_bias(self) -> None:
        if len(self.logit_bias) > MAX_BIASES:
            raise InvalidRequest(f"logit_bias: {len(self.logit_bias)} entries are more than {MAX_BIASES}; send fewer")
        for token_id, bias in self.logit_bias.items():
            if token_id < 0:
                raise InvalidRequest(f"logit_bias: token id {token_id} is negative; ids begin at 0")
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise InvalidRequest(
                    f"logit_bias: {bias} for token id {token_id} is outside -{MAX_BIAS:g} to {MAX_BIAS:g}; "
                    "-100 forbids a token, 100 allows no other"
                )
