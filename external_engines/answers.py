"""What servers that speak OpenAI's API answer: parts of a stream, and refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import msgspec

from pdserve.core.errors import CapacityExceeded, InvalidRequest, NotReady, PdserveError, WorkerLost

UNREADABLE = (KeyError, TypeError, ValueError, IndexError)
"""What reading an answer raises if it has not the expected form."""

TIMEOUT = httpx2.Timeout(None, connect=5.0)
"""A request may wait for as long as its deadline allows."""

_DATA = "data:"
_DONE = "[DONE]"
_LONGEST_MESSAGE = 500


async def parts_of(answer: httpx2.Response, server: str) -> AsyncIterator[dict[str, Any]]:
    """The objects of a streamed answer, which ``server`` gives. Raises its refusal, and `WorkerLost` if a part is no
    JSON object."""
    if answer.status_code != 200:
        raise refusal(server, answer.status_code, (await answer.aread()).decode(errors="replace"), answer.headers)
    async for line in answer.aiter_lines():
        if not line.startswith(_DATA):
            continue
        if (data := line[len(_DATA) :].strip()) == _DONE:
            return
        yield object_of(data.encode(), server)


def object_of(data: bytes, server: str) -> dict[str, Any]:
    """The JSON object ``data``; `WorkerLost` if it is none."""
    try:
        value = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise WorkerLost(f"{server} sent what is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise WorkerLost(f"{server} sent a {type(value).__name__} instead of an object")
    return value


def refusal(server: str, status: int, text: str, headers: httpx2.Headers) -> PdserveError:
    """The error that an answer with ``status`` other than 200 and the body ``text`` means."""
    try:
        message = msgspec.json.decode(text)["error"]["message"]
    except (*UNREADABLE, msgspec.DecodeError):
        message = text
    what = f"{server} answered {status}: {str(message)[:_LONGEST_MESSAGE]}"
    seconds = headers.get("Retry-After", "")
    wait_s = float(seconds) if seconds.isdecimal() else None
    if status == 429:
        return CapacityExceeded(what, retry_after_s=wait_s)
    if status == 503:
        return NotReady(what, retry_after_s=wait_s)
    return InvalidRequest(f"request: {what}") if 400 <= status < 500 and status != 404 else WorkerLost(what)


def error_of(error: Any, server: str) -> PdserveError:
    """The error that an error object in a stream describes."""
    is_object = isinstance(error, dict)
    message = str(error.get("message", error) if is_object else error)[:_LONGEST_MESSAGE]
    code = error.get("code") if is_object else None
    if isinstance(code, int) and 400 <= code < 500:
        return InvalidRequest(f"request: {server} refuses it: {message}")
    return WorkerLost(f"{server} failed: {message}")
