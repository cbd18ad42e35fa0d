"""Bodies of the HTTP API's requests: OpenAI's fields, vLLM's extensions of them, and the object ``pdserve``.

Fields that the service cannot honour are accepted only with the value that asks for nothing. Ranges of sampling are
checked by `gateway.validation`, for both APIs alike.

A body has few errors, whatever its size: lists and objects stop at their first wrong item, and unknown fields count
once. Pydantic would describe every one of them, which takes seconds for a million. How many values a body may hold is
checked before it is parsed: `CallBody.limits`."""

from __future__ import annotations

import re
import reprlib
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gateway.http_api.bodies import BodyLimits
from gateway.validation import MAX_SHORT_CHARACTERS
from pdserve.core.errors import InvalidRequest
from pdserve.core.request import MAX_PRIORITY, Mode
from pdserve.core.sampling import MAX_BIASES, MAX_STOP_TOKEN_IDS, MAX_STOPS

MAX_CHOICES = 128
"""Limit: outputs of one call, prompts times `n`."""
MAX_MESSAGES = 4096
"""Limit: messages of a chat."""
MAX_TOOLS = 128
"""Limit: tools of a chat."""
MAX_METADATA = 16
MAX_TOKEN_IDS = 2**19
"""Limit: token ids of all prompts of a completion; more if one prompt may have more.

Parsing so many takes 30 ms."""
MAX_COMPLETION_NODES = 1024
"""Limit: lists, objects and fields of a completion.

They are `MAX_CHOICES` lists of token ids, `MAX_BIASES`, and its other fields."""
MAX_CHAT_VALUES = 2**17
"""Limit: values of a chat, or of the arguments of all its tool calls."""
MAX_CHAT_NODES = 2**16
"""Limit: lists, objects and fields of a chat.

They are 16 for each of `MAX_MESSAGES`."""

UNKNOWN_FIELD = "unknown_field"
"""The type of the validation error for a field that the API does not have; its message is the field's name."""

_TYPE_NAMES = frozenset({"str", "constrained-str"})
"""How pydantic names members of unions among the places of an error, where such a name could be that of a field."""
_GUIDED = frozenset({"guided_json", "guided_regex", "guided_choice", "guided_grammar"})
"""Fields that older versions of vLLM have."""
_PLAIN_NAME = re.compile(r"[\w.-]{1,64}")

Count = Annotated[int, Field(ge=0, lt=2**32)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
LogitBias = Annotated[
    dict[TokenId, float],
    Field(max_length=MAX_BIASES, fail_fast=True),
    WithJsonSchema(  # keys of objects are strings
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number"},
            "maxProperties": MAX_BIASES,
        }
    ),
]


class _Body(BaseModel):
    # Extra fields are collected, to be refused together.
    model_config = ConfigDict(
        extra="allow",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        json_schema_extra={"additionalProperties": False},
    )

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        for name in self.model_extra or ():
            raise PydanticCustomError(UNKNOWN_FIELD, "{name}", {"name": name})
        return self


class CallBody(_Body):
    """A whole body."""

    model: str | None = Field(None, description="the served model's name; may be left out")

    @classmethod
    def limits(cls, context_length: int) -> BodyLimits:
        """The most that a body may hold, with a model of ``context_length`` tokens."""
        return BodyLimits(MAX_CHAT_VALUES, MAX_CHAT_NODES)


class StreamOptions(_Body):
    """Options of a stream."""

    include_usage: bool = Field(False, description="send the usage in a last chunk without choices")
    continuous_usage_stats: bool = Field(False, description="send the usage so far with every chunk")


class Extension(_Body):
    """What OpenAI's API has no field for."""

    mode: Annotated[Mode, Field(strict=False)] = Field(
        Mode.AUTO, description="where the request runs: auto, pd or colocated"
    )
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] | None = Field(
        None, description="deadline in seconds; default: gateway.default_timeout_s"
    )
    breakdown: bool = Field(
        False, description="answer with the object `pdserve`: workers, stages of TTFT, proof of the KV transfer"
    )


class JsonSchema(_Body):
    """A JSON schema of OpenAI's API. Its output matches the schema with and without ``strict``."""

    name: str
    definition: dict[str, Any] = Field({}, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Body):
    """The format of the output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("json_schema: it belongs to the type json_schema, which needs it")
        return self


class Structure(_Body):
    """What the output has to match, in the fields that vLLM has; one of them."""

    json_schema: dict[str, Any] | str | None = Field(None, alias="json", description="a JSON schema, or its text")
    json_object: Literal[True] | None = None
    regex: str | None = Field(None, description="as the Rust crate regex reads it")
    choice: Annotated[list[str], Field(fail_fast=True, min_length=1)] | None = None
    grammar: str | None = Field(None, description="in Lark's notation")


class GenerationBody(CallBody):
    """Fields that both kinds of generation have."""

    stream: bool | None = Field(False, description="send server-sent events, one for each token")
    stream_options: StreamOptions | None = None
    max_completion_tokens: Count | None = Field(None, description="the same as max_tokens")
    temperature: float | None = Field(None, description="0 is greedy; default 1")
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**32)] | None = Field(None, description="0 and -1 turn it off")
    min_p: float | None = None
    seed: Seed | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(
        None, description="outputs per prompt; with a seed they use seed, seed + 1, and so on"
    )
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool = False
    min_tokens: Count = Field(0, description="only with ignore_eos, or 0")
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias | None = None
    speculation: bool | None = Field(None, description="verify guesses of the next tokens; default: as far as it pays")
    response_format: ResponseFormat | None = None
    structured_outputs: Structure | None = Field(None, description="not together with a response_format")
    return_token_ids: bool = Field(False, description="send the token ids of prompt and outputs")
    cache_salt: Annotated[str, Field(max_length=MAX_SHORT_CHARACTERS)] | None = Field(
        None, description="cached KV is shared only within one salt"
    )
    priority: Priority = Field(0, description="lower values are served earlier")
    session_id: Annotated[str, Field(max_length=MAX_SHORT_CHARACTERS)] | None = Field(
        None, description="requests of one session run on the same workers, if the routing policy is session"
    )
    request_id: str | None = Field(None, description="default: the header x-request-id, else a new one")
    pdserve: Extension = Field(default_factory=Extension)

    user: str | None = Field(
        None, description="in a service without tokens: the client that takes turns with others in the queue"
    )
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA, fail_fast=True)] | None = Field(
        None, description="accepted, not used"
    )
    prompt_cache_key: str | None = Field(None, description="accepted, not used")
    safety_identifier: str | None = Field(None, description="accepted, not used")
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    skip_special_tokens: Literal[True] = True
    spaces_between_special_tokens: Literal[True] = True
    include_stop_str_in_output: Literal[False] = False
    use_beam_search: Literal[False] = False

    @model_validator(mode="after")
    def _check_needs(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: they need stream: true")
        if self.min_tokens and not self.ignore_eos:
            raise ValueError("min_tokens: it is not supported without ignore_eos: true; leave it out")
        return self


def _kind_of_prompt(value: object) -> str:
    if not isinstance(value, list):
        return "a text"
    first = value[0] if value else 0
    return (
        "the texts" if isinstance(first, str) else "lists of token ids" if isinstance(first, list) else "the token ids"
    )


Prompts = Annotated[
    Annotated[str, Tag("a text")]
    | Annotated[list[str], Field(fail_fast=True, max_length=MAX_CHOICES), Tag("the texts")]
    | Annotated[TokenIds, Tag("the token ids")]
    | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_CHOICES), Tag("lists of token ids")],
    Discriminator(_kind_of_prompt),
]


class CompletionBody(GenerationBody):
    """The body of ``POST /v1/completions``."""

    prompt: Prompts = Field(description="a text, a list of texts, a list of token ids, or a list of such lists")
    max_tokens: Count | None = Field(None, description="default 16")
    logprobs: Count | None = Field(None, description="with each token that many likeliest ones (at most 20)")
    echo: bool | None = Field(
        False, description="begin text and logprobs with the prompt; with max_tokens 0 nothing follows"
    )
    best_of: Count | None = Field(None, description="only the value of n")
    suffix: Literal[""] | None = None

    @classmethod
    def limits(cls, context_length: int) -> BodyLimits:
        """See `CallBody.limits`."""
        token_ids = min(MAX_CHOICES * context_length, max(MAX_TOKEN_IDS, context_length))
        return BodyLimits(token_ids + MAX_STOP_TOKEN_IDS + MAX_COMPLETION_NODES, MAX_COMPLETION_NODES)

    @property
    def is_prompt_alone(self) -> bool:
        """Whether the answer has the prompt and no output."""
        return bool(self.echo) and 0 in (self.max_tokens, self.max_completion_tokens)

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.best_of not in (None, self.n or 1):
            raise ValueError(f"best_of: {self.best_of} is not n ({self.n or 1}); outputs are not ranked, leave it out")
        return self


class TextPart(_Body):
    """A part of a message's content."""

    type: Literal["text"] = Field(description="only text is supported")
    text: str


class ChatMessage(BaseModel):
    """A message of a chat. Further fields go to the chat template as they are."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)]


class FunctionName(_Body):
    """The function of a tool."""

    name: str


class ToolChoice(_Body):
    """The tool to call."""

    type: Literal["function"]
    function: FunctionName


class ChatBody(GenerationBody):
    """The body of ``POST /v1/chat/completions``."""

    messages: Messages
    max_tokens: Count | None = Field(None, description="default: what fits into the context")
    logprobs: bool | None = None
    top_logprobs: Count | None = Field(None, description="with each token that many likeliest ones (at most 20)")
    tools: Tools | None = Field(
        None, description="functions that the model may call, if its chat template is of a family that is known"
    )
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = Field(
        None, description="default: auto. With none, tools go to the chat template alone"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: required is one call")
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="further variables of the chat template")
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    verbosity: Literal["medium"] | None = None
    reasoning_effort: Literal["none"] | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: it needs logprobs: true")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("tool_choice: it needs tools")
        return self


class TokenizeBody(CallBody):
    """The body of ``POST /tokenize``: a prompt, or messages."""

    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = Field(None, description="default: true for a prompt, false for messages")
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")
        return self


class DetokenizeBody(CallBody):
    """The body of ``POST /detokenize``."""

    tokens: TokenIds

    @classmethod
    def limits(cls, context_length: int) -> BodyLimits:
        """See `CallBody.limits`. So a body with a few tokens too many still learns that of its field."""
        return BodyLimits(2 * context_length + MAX_COMPLETION_NODES, MAX_COMPLETION_NODES)


class _Repr(reprlib.Repr):
    """Shows what was given, without writing out what is long."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 80
        self.maxlevel = self.maxlist = self.maxdict = 3

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write out very long numbers."""
        return super().repr_int(x, level) if x.bit_length() < 1024 else f"a whole number of {x.bit_length()} bits"


_SHOWN = _Repr()


B = TypeVar("B", bound=CallBody)


def parsed(body_type: type[B], data: bytes | bytearray) -> B:
    """The body as ``body_type``. `InvalidRequest` names the first field that is wrong."""
    try:
        return body_type.model_validate_json(data)
    except ValidationError as error:
        raise invalid_body(error) from None


def invalid_body(error: ValidationError) -> InvalidRequest:
    """The refusal of a body, for the first field that is wrong."""
    errors = error.errors(include_url=False, include_context=False)
    field = errors[0]["loc"][:1]
    # Of a field that takes several types, the error of the type that fits best.
    first = max((each for each in errors if each["loc"][:1] == field), key=lambda each: len(each["loc"]))
    if first["type"] == "json_invalid":
        return InvalidRequest(f"body: it is not valid JSON in UTF-8: {first['msg'].removeprefix('Invalid JSON: ')}")
    message = first["msg"]
    if first["type"] == "value_error":  # of a validator of ours, which names the field itself
        return InvalidRequest(message.removeprefix("Value error, "))
    places = map(str, first["loc"])
    parts = [part for part in places if _PLAIN_NAME.fullmatch(part) and part not in _TYPE_NAMES]
    place = ".".join(parts) or "body"
    if first["type"] == UNKNOWN_FIELD:
        if _PLAIN_NAME.fullmatch(message):
            advice = "leave it out"
            if message in _GUIDED:
                advice = f"send structured_outputs: {{{message.removeprefix('guided_')}: ...}} instead"
            return InvalidRequest(f"{'.'.join([*parts, message])}: unknown field; {advice}")
        return InvalidRequest(f"{place}: unknown field {_SHOWN.repr(message)}; leave it out")
    if first["type"] == "missing":
        return InvalidRequest(f"{place}: it is missing")
    return InvalidRequest(f"{place}: {message[:1].lower()}{message[1:]} (got {_SHOWN.repr(first['input'])})")
