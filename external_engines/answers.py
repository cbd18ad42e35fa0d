"""What servers that speak OpenAI's API answer: parts of a stream, and refusals."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any

import httpx2
import msgspec

from pdserve.core.errors import CapacityExceeded, InvalidRequest, NotReady, PdserveError, WorkerLost
from pdserve.core.request import Request
from pdserve.core.sampling import TokenLogprobs

if TYPE_CHECKING:
    from external_engines.adapter import Adapter, Step

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


async def steps_of(
    http: httpx2.AsyncClient, adapter: Adapter, body: dict[str, Any], attempt_id: str, server: str
) -> AsyncGenerator[Step, None]:
    """The parts of the streamed answer to a request. If it asks for its usage, the last part is held back until the
    usage has come, which has the number of cached tokens. `WorkerLost` if the answer ends before its last token, or
    cannot be read; httpx2.HTTPError if the connection fails."""
    last: Step | None = None
    ended, num_outputs, has_usage = False, 0, "stream_options" in body
    content, headers = msgspec.json.encode(body), headers_of(attempt_id)
    async with http.stream("POST", adapter.path, content=content, headers=headers, timeout=TIMEOUT) as answer:
        async for part in parts_of(answer, server):
            step = step_of(adapter, part, server)
            if step.start is not None and step.start < num_outputs:  # each part has all outputs so far
                step = step._replace(tokens=step.tokens[num_outputs - step.start :])
            num_outputs += len(step.tokens)
            ended |= step.finish_reason is not None
            if last is not None:
                step, last = last._replace(cached_tokens=step.cached_tokens), None
            elif has_usage and step.finish_reason is not None:
                last = step
                continue
            yield step
    if not ended:
        raise WorkerLost(f"{server} ended its answer before the last token")
    if last is not None:  # the server has left its usage out
        yield last


def step_of(adapter: Adapter, part: dict[str, Any], server: str) -> Step:
    """What a part of an answer says; `WorkerLost` if it is none of this kind of engine."""
    try:
        return adapter.read(part)
    except UNREADABLE as error:
        what = f"{type(error).__name__}: {error}"
        raise WorkerLost(f"{server} does not answer as {adapter.kind} does ({what})") from None


def asked_logprobs(logprobs: TokenLogprobs | None, request: Request) -> TokenLogprobs | None:
    """As many as ``request`` asks for: engines add the sampled token to the likeliest ones."""
    wanted = request.sampling.logprobs
    if logprobs is None or wanted is None:
        return logprobs
    return TokenLogprobs(logprobs.logprob, logprobs.top[:wanted])


def headers_of(attempt_id: str) -> dict[str, str]:
    """The headers of a request."""
    return {"Content-Type": "application/json", "X-Request-Id": attempt_id}


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
