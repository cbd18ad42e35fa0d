"""The bodies of HTTP calls: how large they may be, what they may hold, how many bytes of them the gateway keeps, and
where they are parsed.

A JSON parser makes a tree of the whole body before a field is checked, and a list of two bytes takes it a hundred bytes
and half a microsecond. So values are counted while a body arrives, which takes 2 to 10 ms per MiB in steps of one part,
and a body with too many is refused before it is parsed. Parsing holds Python's global interpreter lock, in any thread,
so only this bound keeps it short."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

from starlette.datastructures import Headers

from gateway.shared_threads import SharedThreads
from pdserve.core.errors import CapacityExceeded, InvalidRequest
from router.deadline import Deadline

IN_THREAD_BYTES = 8 * 2**10
"""Larger bodies are parsed in a thread, one after the other, of each client one in line."""
FREE_BYTES = 64 * 2**10
"""Bytes of each body that do not count among those that the gateway keeps."""
MIN_ROOM_BYTES = 256 * 2**20
"""Limit: all bodies in progress, without the first 64 KiB of each (room for four of the largest, if more); half of it
for one client. Then: 429."""
MAX_DEPTH = 64
"""Limit: lists and objects within each other."""
RETRY_S = 1.0
PART_CHARACTERS = 2**16

_DEPTH = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in _DEPTH)

T = TypeVar("T")


class BodyLimits(NamedTuple):
    """The most that a JSON text may hold: ``values`` in all, and among them ``nodes``, which cost most: lists, objects,
    and their fields."""

    values: int
    nodes: int


class JsonCount:
    """Counts the values of a JSON text while its parts arrive. `InvalidRequest`, which begins with ``what``, once they
    exceed ``limits``. What comes after a mistake in the JSON may be miscounted, but no parser reads it either."""

    def __init__(self, limits: BodyLimits, what: str) -> None:
        self._limits = limits
        self._what = what
        self._values = self._nodes = self._depth = 0
        self._in_string = False
        self._escape = b""  # a backslash at the end of the last part

    def add(self, part: bytes) -> None:
        """Count the next part."""
        part = self._escape + part
        self._escape = b""
        if b"\\" in part:
            part = part.replace(b"\\\\", b"").replace(b'\\"', b"")
            if part.endswith(b"\\"):
                self._escape = b"\\"
        pieces = part.split(b'"')  # by turns outside and inside of strings
        outside = b"".join(pieces[self._in_string :: 2])
        self._in_string ^= len(pieces) % 2 == 0
        containers = outside.count(b"[") + outside.count(b"{")
        self._values += containers + outside.count(b",")
        self._nodes += containers + outside.count(b":")
        if self._nodes > self._limits.nodes:
            raise InvalidRequest(
                f"{self._what} more than {self._limits.nodes} lists, objects and fields; send less at a time"
            )
        if self._values > self._limits.values:
            raise InvalidRequest(f"{self._what} more than {self._limits.values} values; send less at a time")
        for bracket in outside.translate(None, _NO_BRACKETS):
            self._depth += _DEPTH[bracket]
            if self._depth > MAX_DEPTH:
                raise InvalidRequest(f"{self._what} lists and objects nested more than {MAX_DEPTH} deep; nest less")
            if self._depth < 0:
                break

    def add_text(self, text: str) -> None:
        """Count a text that is there as a whole."""
        for start in range(0, len(text), PART_CHARACTERS):
            self.add(text[start : start + PART_CHARACTERS].encode())


class Body:
    """A body of ``client`` that arrives, one of ``bodies``."""

    def __init__(self, bodies: Bodies, client: str, limits: BodyLimits) -> None:
        self._bodies = bodies
        self.client = client
        self._count = JsonCount(limits, "body: it has")
        self._data = bytearray()
        self._kept_bytes = 0

    def expect(self, size_bytes: int) -> None:
        """Count so many bytes in all. `InvalidRequest` if these are too many, `CapacityExceeded` if there is no room
        for them now."""
        if size_bytes > self._bodies.max_body_bytes:
            why = f"body: it is larger than {self._bodies.max_body_bytes} bytes; shorten it"
            raise InvalidRequest(why, kind="BodyTooLarge")
        if (more_bytes := size_bytes - FREE_BYTES - self._kept_bytes) > 0:
            self._bodies.keep(self.client, more_bytes)
            self._kept_bytes += more_bytes

    def add(self, part: bytes) -> None:
        """Take the next part. `InvalidRequest` if the body holds too much, and what `expect` raises."""
        self.expect(len(self._data) + len(part))
        self._count.add(part)
        self._data += part

    def take(self) -> bytearray:
        """The whole body, which is not kept here any longer."""
        data, self._data = self._data, bytearray()
        return data

    def end(self) -> None:
        """Count its bytes no longer."""
        self._bodies.keep(self.client, -self._kept_bytes)
        self._kept_bytes = 0


class Bodies:
    """Those of one gateway, whose model has a context of ``context_length`` tokens. ``max_body_bytes`` bounds each."""

    def __init__(self, context_length: int, max_body_bytes: int) -> None:
        self._context_length = context_length
        self.max_body_bytes = max_body_bytes
        self._room_bytes = max(MIN_ROOM_BYTES, 4 * max_body_bytes)
        self._kept_bytes: Counter[str] = Counter()  # by client
        self._parser = SharedThreads(1, "bodies")

    @contextlib.contextmanager
    def arriving(self, client: str, headers: Headers, limits: Callable[[int], BodyLimits]) -> Iterator[Body]:
        """A body that has not been read yet. ``limits`` gives its limits for a context length. Its bytes count until
        this context manager ends, because a call keeps what was parsed of them. `InvalidRequest` if it is not JSON, and
        what `Body.expect` raises."""
        _check_media_type(headers.get("content-type", ""))
        body = Body(self, client, limits(self._context_length))
        try:
            body.expect(int(headers.get("content-length", 0)))
            yield body
        finally:
            body.end()

    def keep(self, client: str, more_bytes: int) -> None:
        """Count bytes of a client. `CapacityExceeded` if there is no room for them: one client may have half of it."""
        kept_bytes = self._kept_bytes
        if more_bytes > 0:
            for whose, kept, most in (
                ("all calls", kept_bytes.total(), self._room_bytes),
                ("one client", kept_bytes[client], self._room_bytes // 2),
            ):
                if kept + more_bytes > most:
                    raise CapacityExceeded(
                        f"body: with it the bodies of {whose} would have more than {most} bytes; come back later",
                        retry_after_s=RETRY_S,
                    )
        kept_bytes[client] += more_bytes
        if not kept_bytes[client]:
            del kept_bytes[client]

    async def parse(self, body: Body, read: Callable[[bytearray], T], deadline: Deadline) -> T:
        """What ``read`` makes of a whole body."""
        data = body.take()
        if len(data) <= IN_THREAD_BYTES:
            return read(data)
        return await deadline.bound(self._parser.run(body.client, partial(read, data)), "its body was parsed")


def _check_media_type(value: str) -> None:
    """`InvalidRequest` unless it is JSON. Web pages of other sites can send forms, plain text, and bodies without
    a type to every address that their reader reaches."""
    if value.partition(";")[0].strip().lower() != "application/json":
        raise InvalidRequest(
            f"content-type: {value[:80]!r} is not application/json; send the header `content-type: application/json`",
            kind="UnsupportedMediaType",
        )
