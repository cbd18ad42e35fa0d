"""The request of both clients, as it is sent to one gateway after another. It is checked first, so that a mistake needs
no round trip."""

from __future__ import annotations

import math
import operator
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

from pdserve.core.chance import SYSTEM
from pdserve.core.errors import DeadlineExceeded, InvalidRequest
from pdserve.core.request import Mode, check_priority
from pdserve.core.sampling import SamplingParams, StructuredOutputs
from pdserve.pb import inference_pb2 as pb

Prompt = str | Sequence[int]

MODES = {Mode.AUTO: pb.MODE_AUTO, Mode.PD: pb.MODE_PD, Mode.COLOCATED: pb.MODE_COLOCATED}
_MAX_TOKEN_ID = 2**32 - 1
_WHOLE = ("max_tokens", "top_k", "seed", "logprobs")
_REAL = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class GenerateOptions(TypedDict, total=False):
    """Options of `generate`. Omitted options (or None) take the service's defaults.

    ``timeout_s`` is the request's deadline, ``mode`` is auto, pd or colocated. ``salt`` (at most 256 characters, empty
    by default) separates cached KV: requests share it only within one salt. Requests of a lower ``priority`` (0 by
    default) are served earlier. Requests of one ``session_id`` (at most 256 characters) run on the same workers, if the
    service routes so. ``traceparent`` is the caller's W3C trace context; the service's spans then belong to its trace.
    ``structured_outputs`` is an object with one of the fields ``json`` (a JSON schema), ``json_object`` (true),
    ``regex``, ``choice`` (a list of texts), and ``grammar`` (in Lark's notation). The others are those of
    `SamplingParams`."""

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    structured_outputs: Mapping[str, Any] | None
    speculation: bool | None
    mode: Mode | str
    request_id: str | None
    timeout_s: float | None
    salt: str | None
    priority: int
    session_id: str | None
    traceparent: str | None


class Ask:
    """What every gateway is asked for. `InvalidRequest` names the first wrong field. With ``several`` gateways the
    request gets an id and, if it is sampled, a seed, so that another gateway can go on with it, token for token.
    ``now`` gives the monotonic seconds of all its times."""

    def __init__(
        self, prompt: Prompt, options: GenerateOptions, several: bool, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.now = now
        self._request = build_request(prompt, options)
        self._timeout_s, traceparent = options.get("timeout_s"), options.get("traceparent")
        if (limit := self._timeout_s) is not None and not (isinstance(limit, int | float) and 0 < limit < math.inf):
            raise InvalidRequest(f"timeout_s: {limit!r} is not a positive number of seconds")
        if traceparent and not (isinstance(traceparent, str) and traceparent.isascii() and traceparent.isprintable()):
            raise InvalidRequest(f"traceparent: {traceparent!r} is not a W3C trace context")
        self._ends_s: float | None = None
        self.metadata = (("traceparent", traceparent),) if traceparent else ()
        if several:
            self._request.request_id = self._request.request_id or f"req-{uuid.uuid4().hex}"
            if self._request.sampling.temperature > 0 and not self._request.sampling.HasField("seed"):
                self._request.sampling.seed = SYSTEM.getrandbits(63)

    def message(self, token_ids: Sequence[int]) -> pb.GenerateRequest:
        """The request of a client that has these tokens already."""
        if not token_ids:
            return self._request
        resumed = pb.GenerateRequest()
        resumed.CopyFrom(self._request)
        resumed.resume_token_ids.extend(token_ids)
        return resumed

    def connect_timeout_s(self, most_s: float) -> float:
        """How long a connection may take, which is ``most_s`` or less. `DeadlineExceeded` if no time is left."""
        left_s = self._timeout_s if self._ends_s is None else self.timeout_s()
        return min(most_s, left_s or most_s)

    def timeout_s(self) -> float | None:
        """The time that is left, counted from the first call; None without a deadline. `DeadlineExceeded` if it has
        passed."""
        if self._timeout_s is None:
            return None
        now_s = self.now()
        if self._ends_s is None:
            self._ends_s = now_s + self._timeout_s
        if now_s >= self._ends_s:
            raise DeadlineExceeded("the request's deadline passed; raise it or reduce the load")
        return self._ends_s - now_s


def build_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """The message for ``prompt``; `InvalidRequest` names the first wrong field."""
    unknown = sorted(set(options) - set(GenerateOptions.__annotations__))
    if unknown:
        raise InvalidRequest(f"{unknown[0]}: unknown option; known: {', '.join(GenerateOptions.__annotations__)}")
    request = pb.GenerateRequest(
        request_id=_text("request_id", options.get("request_id") or ""),
        mode=MODES[_mode(options.get("mode", Mode.AUTO))],
        salt=_text("salt", options.get("salt") or ""),
        priority=check_priority(int(_number("priority", options.get("priority"), int) or 0)),
        session_id=_text("session_id", options.get("session_id") or ""),
    )
    if isinstance(prompt, str):
        request.text = _text("prompt", prompt)
    else:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(_token_ids("prompt", prompt))
    _fill_sampling(request.sampling, options)
    return request


def _fill_sampling(sampling: pb.Sampling, options: GenerateOptions) -> None:
    stop = options.get("stop")
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    given: dict[str, Any] = {name: _number(name, options.get(name), int) for name in _WHOLE}
    given |= {name: _number(name, options.get(name), float) for name in _REAL}
    given = {name: value for name, value in given.items() if value is not None}
    structure = options.get("structured_outputs")
    params = SamplingParams(
        **given,
        structured_outputs=None if structure is None else StructuredOutputs.of(structure),
        stop=tuple(_text("stop", string) for string in strings),
        stop_token_ids=_token_ids("stop_token_ids", options.get("stop_token_ids") or ()),
        ignore_eos=bool(options.get("ignore_eos", False)),
        logit_bias=_logit_bias(options.get("logit_bias") or {}),
        speculation=_flag("speculation", options.get("speculation")),
    )
    params.validate()
    for name, value in given.items():
        if name in ("max_tokens", "top_k") and value > _MAX_TOKEN_ID:
            raise InvalidRequest(f"{name}: {value} is more than {_MAX_TOKEN_ID}")
        setattr(sampling, name, value)
    sampling.stop.extend(params.stop)
    sampling.stop_token_ids.extend(params.stop_token_ids)
    sampling.ignore_eos = params.ignore_eos
    sampling.logit_bias.update(params.logit_bias)
    if params.speculation is not None:
        sampling.speculation = params.speculation
    if params.structured_outputs is not None:
        setattr(sampling.structured_outputs, params.structured_outputs.kind, params.structured_outputs.text)


def _mode(mode: Any) -> Mode:
    try:
        return Mode(mode)
    except ValueError:
        raise InvalidRequest(f"mode: {mode!r} is none of {', '.join(Mode)}") from None


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name}: must be text, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name}: has a lone surrogate, which is not valid Unicode text") from None
    return value


def _flag(name: str, value: Any) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise InvalidRequest(f"{name}: must be true or false, got {value!r}")


def _number(name: str, value: Any, kind: type[int] | type[float]) -> int | float | None:
    if value is None:
        return None
    try:
        if isinstance(value, bool | str | bytes):
            raise TypeError
        return operator.index(value) if kind is int else float(value)
    except (TypeError, ValueError):
        what = "a whole number" if kind is int else "a number"
        raise InvalidRequest(f"{name}: must be {what}, got {value!r}") from None


def _logit_bias(biases: Any) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise InvalidRequest(f"logit_bias: must map token ids to numbers, not be {type(biases).__name__}")
    token_ids = _token_ids("logit_bias", biases)
    values = [_number("logit_bias", bias, float) for bias in biases.values()]
    if None in values:
        raise InvalidRequest("logit_bias: must be a number, got None")
    return {token_id: float(value or 0.0) for token_id, value in zip(token_ids, values, strict=True)}


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    if isinstance(values, bytes | bytearray) or not isinstance(values, Iterable):
        raise InvalidRequest(f"{name}: must be token ids (whole numbers), not {type(values).__name__}")
    ids = []
    for value in values:
        token_id = _number(name, value, int)
        if not isinstance(token_id, int) or not 0 <= token_id <= _MAX_TOKEN_ID:
            raise InvalidRequest(f"{name}: {value!r} is not a token id (a whole number from 0)")
        ids.append(token_id)
    return tuple(ids)
