"""Errors in OpenAI's shape, and the table of errors and HTTP statuses."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from pdserve.core.errors import (
    BodyIncomplete,
    BodyTooLarge,
    CapacityExceeded,
    ConfigError,
    DeadlineExceeded,
    DuplicateRequest,
    HostNotAllowed,
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
    UnsupportedMediaType,
    WorkerLost,
    field_of,
    to_wire,
)

STATUSES: Mapping[type[BaseException], int] = {
    InvalidRequest: 400,
    Unauthenticated: 401,
    HostNotAllowed: 403,
    UnknownModel: 404,
    BodyIncomplete: 408,
    DuplicateRequest: 409,
    BodyTooLarge: 413,
    UnsupportedMediaType: 415,
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

UNKNOWN_FIELD = "unknown_field"
"""The type of the validation error for a field that the API does not have; its message is the field's name."""

_TYPE_NAMES = frozenset({"str", "constrained-str"})
"""How pydantic names members of unions among the places of an error, where such a name could be that of a field."""
_PLAIN_NAME = re.compile(r"[\w.-]{1,64}")


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
    status = status_of(error)
    retry_after_s = error.retry_after_s if isinstance(error, CapacityExceeded | NotReady) else None
    if isinstance(error, CapacityExceeded) and retry_after_s is None:
        status = 400
    headers = {} if retry_after_s is None else {"retry-after": str(max(1, math.ceil(retry_after_s)))}
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    return Failure(status, described(error, status), headers)


def described(error: BaseException, status: int) -> Mapping[str, Any]:
    """The body of the answer for ``error``."""
    kind, message = to_wire(error)
    sort = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": sort, "param": field_of(error), "code": kind}}


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
            return InvalidRequest(f"{'.'.join([*parts, message])}: unknown field; leave it out")
        return InvalidRequest(f"{place}: unknown field {_SHOWN.repr(message)}; leave it out")
    if first["type"] == "missing":
        return InvalidRequest(f"{place}: it is missing")
    return InvalidRequest(f"{place}: {message[:1].lower()}{message[1:]} (got {_SHOWN.repr(first['input'])})")
