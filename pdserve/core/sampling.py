"""Sampling parameters, and the reasons for which a request ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal

import msgspec

from pdserve.core.errors import InvalidRequest

MAX_REPETITION_PENALTY = 10.0
MAX_BIASES = 300
"""Limit: entries of `Sampling.logit_bias`, each from -100 to 100."""
MAX_BIAS = 100.0
MAX_LOGPROBS = 20
"""Limit: `Sampling.logprobs` and `Sampling.prompt_logprobs`; over HTTP `logprobs` and `top_logprobs`."""
MAX_STOPS = 16
"""Limit: strings of `Sampling.stop`."""
MAX_STRUCTURE_CHARACTERS = 2**16
"""Limit: characters of `StructuredOutputs.json`, `StructuredOutputs.regex` or `StructuredOutputs.grammar`."""
MAX_STOP_TOKEN_IDS = 1024
"""Limit: ids of `Sampling.stop_token_ids`."""


class FinishReason(StrEnum):
    """Why the output ended."""

    STOP = "stop"  # end-of-sequence token, stop id or stop string
    LENGTH = "length"  # max_tokens reached


class StructuredOutputs(msgspec.Struct, frozen=True):
    """What the output has to match: a JSON schema (``json``), a regular expression as the Rust crate regex reads it
    (``regex``), or a grammar in Lark's notation (``grammar``). ``text`` is its source."""

    kind: Literal["json", "regex", "grammar"]
    text: str

    @classmethod
    def of(cls, asked: Any) -> StructuredOutputs:
        """Of an object as vLLM has it, with one of the fields ``json`` (a schema, or its text), ``json_object`` (true),
        ``regex``, ``choice`` (a list of texts) and ``grammar``. `InvalidRequest` for anything else."""
        if not isinstance(asked, Mapping):
            raise InvalidRequest(f"structured_outputs: must be an object, not {type(asked).__name__}")
        kinds = ("json", "json_object", "regex", "choice", "grammar")
        if unknown := [key for key in asked if key not in kinds]:
            raise InvalidRequest(
                f"structured_outputs: {', '.join(unknown)[:100]}: unknown; give one of {', '.join(kinds)}, "
                'a JSON schema as {"json": SCHEMA}'
            )
        given = {kind: value for kind, value in asked.items() if value is not None and value is not False}
        if len(given) != 1:
            raise InvalidRequest(f"structured_outputs: it has {len(given)} of {', '.join(kinds)}; give one")
        ((kind, value),) = given.items()
        match kind, value:
            case "json_object", True:
                return cls("json", '{"type": "object"}')
            case "json", Mapping():
                return cls("json", _json("structured_outputs", value))
            case "choice", [_, *_] if all(isinstance(each, str) and each for each in value):
                return cls("grammar", "start: " + " | ".join(_json("structured_outputs", each) for each in value))
            case (("json" | "regex" | "grammar"), str()):
                return cls(kind, value)
        raise InvalidRequest(
            f"structured_outputs: {kind} cannot be {type(value).__name__}; give json as a schema, json_object as true, "
            "regex and grammar as text, or choice as a list of texts that are not empty"
        )

    def validate(self) -> None:
        """Raise `InvalidRequest` if it is too long, or a JSON schema that is not JSON. A worker's engine compiles it,
        and refuses what it cannot compile."""
        if not self.text:
            raise InvalidRequest("structured_outputs: it is empty; give one of json, regex and grammar")
        if len(self.text) > MAX_STRUCTURE_CHARACTERS:
            raise InvalidRequest(
                f"structured_outputs: {len(self.text)} characters are more than {MAX_STRUCTURE_CHARACTERS}; shorten it"
            )
        try:
            encoded = self.text.encode()
            if self.kind == "json" and not isinstance(msgspec.json.decode(encoded), dict):
                raise InvalidRequest("structured_outputs: the schema is not an object; give one like {}")
        except UnicodeEncodeError:
            raise InvalidRequest("structured_outputs: it has a lone surrogate, which is not valid Unicode") from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"structured_outputs: the schema is not valid JSON: {error}") from None


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
    distribution (`pdserve.core.sampling.TokenLogprobs`). ``prompt_logprobs`` requests the same of the prompt's tokens
    after the first; the prompt is then computed without a prefix cache. ``structured_outputs`` limits the output to
    texts that match it; the end of the text ends the output. ``engine/model/sampler.py`` defines the order of these
    operations.

    ``speculation``: steps of the decode may verify guesses of the next tokens, which changes no token: as many as can
    be made (True), none (False), or as many as pay (None). It cannot be True in a service that makes no guesses."""

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
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = None
    speculation: bool | None = None

    @property
    def penalises(self) -> bool:
        """Whether the tokens so far change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def validate(self) -> None:
        """Raise `InvalidRequest` naming the first field that is out of range."""
        if self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens: {self.max_tokens} is below 1; ask for at least one token")
        if not 0.0 <= self.temperature <= 100.0:  # also if it is no number
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
        for name in ("logprobs", "prompt_logprobs"):
            if (wanted := getattr(self, name)) is not None and not 0 <= wanted <= MAX_LOGPROBS:
                raise InvalidRequest(f"{name}: {wanted} is outside 0 to {MAX_LOGPROBS}; 0 gives no likeliest ones")
        if self.structured_outputs is not None:
            self.structured_outputs.validate()
            if self.ignore_eos:
                raise InvalidRequest("ignore_eos: structured_outputs end the output; leave out one of them")
            if any(abs(bias) == MAX_BIAS for bias in self.logit_bias.values()):
                raise InvalidRequest(
                    "logit_bias: beside structured_outputs, -100 and 100 could leave no token; use biases between them"
                )


def _json(field: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field}: it cannot be written as JSON: {error}") from None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities under the model's own distribution, ``log_softmax(logits)``, before bias,
    penalties, temperature, and filters. They do not depend on how the token was sampled.

    ``logprob`` is that of the sampled token. ``top`` are the likeliest ``(token id, logprob)``, likeliest first (ties:
    lower id first); the sampled token is included only if it is among them."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
