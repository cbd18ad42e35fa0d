"""Errors in OpenAI's shape, and the table of errors and HTTP statuses."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from pdserve.core.errors import (
    BodyTooLarge,
    CapacityExceeded,
    ConfigError,
    DeadlineExceeded,
    DuplicateRequest,
    InvalidRequest,
    LaunchError,
    LayoutMismatch,
    ModelError,
    NotReady,
    PdserveError,
    RequestAborted,
    TransferError,
    Unauthenticated,
    UnknownModel,
    WorkerLost,
    to_wire,
)

STATUSES: Mapping[type[BaseException], int] = {
    InvalidRequest: 400,
    Unauthenticated: 401,
    UnknownModel: 404,
    DuplicateRequest: 409,
    BodyTooLarge: 413,
    CapacityExceeded: 429,
    NotReady: 503,
    WorkerLost: 503,
    TransferError: 503,
    LayoutMismatch: 503,
    ModelError: 503,
    ConfigError: 503,
    LaunchError: 503,
    DeadlineExceeded: 504,
    RequestAborted: 499,
    PdserveError: 500,
}

_TYPES = dict.fromkeys((400, 401, 404, 409, 413), "invalid_request_error") | {429: "rate_limit_error"}
_TYPE_NAMES = frozenset({"str", "list[str]", "list[TextPart]", "constrained-str", "[key]"})
"""How pydantic names the members of a union, and the key of an object, among the places of an error."""
_FIELD = re.compile(r"([a-z][\w.]*): ")


@dataclass(frozen=True, slots=True)
class Failure:
    """The answer to a request that failed."""

    status: int
    body: Mapping[str, Any]
    headers: Mapping[str, str]


def status_of(error: BaseException) -> int:
    """The status for an error: that of its class or nearest base class; 500 for unexpected errors."""
    for kind in type(error).__mro__:
        if kind in STATUSES:
            return STATUSES[kind]
    return 500


def failure_of(error: BaseException) -> Failure:
    """The answer for ``error``. ``error.param`` is the field, if one is wrong; ``error.code`` the class of the error.
    A request that can never fit has status 400; one that was refused for now has 429 and Retry-After."""
    kind, message = to_wire(error)
    status = status_of(error)
    retry_after_s = error.retry_after_s if isinstance(error, CapacityExceeded | NotReady) else None
    if isinstance(error, CapacityExceeded) and retry_after_s is None:
        status = 400
    field = _FIELD.match(message) if status < 500 else None
    described = {
        "message": message,
        "type": _TYPES.get(status, "server_error"),
        "param": field[1] if field else None,
        "code": kind,
    }
    headers = {} if retry_after_s is None else {"retry-after": str(max(1, math.ceil(retry_after_s)))}
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    return Failure(status, {"error": described}, headers)


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
    place = (
        ".".join(part for each in first["loc"] if (part := str(each)) not in _TYPE_NAMES and " " not in part) or "body"
    )
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"{place}: unknown field; leave it out")
    if first["type"] == "missing":
        return InvalidRequest(f"{place}: it is missing")
    given = repr(first["input"])
    shown = given if len(given) <= 80 else f"{given[:80]}…"
    return InvalidRequest(f"{place}: {message[:1].lower()}{message[1:]} (got {shown})")
