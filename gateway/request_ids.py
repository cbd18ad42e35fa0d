"""The ids of running requests, each within its caller's own. A call that repeats a running one takes it over."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.submission import Submission
from gateway.validation import new_request_id
from pdserve.core.errors import DuplicateRequest
from router.request_record import Deadline


class Claim:
    """The use of a request id by one call, until `end`."""

    def __init__(
        self, request_id: str, caller: str, submission: Submission, ids: RequestIds, task: asyncio.Task[Any] | None
    ) -> None:
        self.request_id = request_id
        self._caller = caller
        self._submission = submission
        self._ids = ids
        self._task = task or asyncio.current_task()
        self._cancellations = 0 if self._task is None else self._task.cancelling()
        self._taken_over = False
        self._ended = asyncio.Event()

    def is_repeated_by(self, submission: Submission) -> bool:
        """Whether ``submission`` asks for the same again."""
        return submission.asks_the_same(self._submission)

    async def take_over(self) -> None:
        """End the call in favour of a later one. Returns when it has left its workers."""
        if not self._taken_over and self._task is not None:
            self._taken_over = True
            self._task.cancel()
        await self._ended.wait()

    def error(self) -> DuplicateRequest | None:
        """The error with which a cancelled call ends if it was cancelled because a later one has taken it over. Called
        once, in the call's own task or in one that awaits it."""
        task = asyncio.current_task()
        if not self._taken_over or task is None:
            return None
        others = task.uncancel() > self._cancellations if task is self._task else task.cancelling() > 0
        if others:  # have cancelled it, too
            return None
        return DuplicateRequest(
            f"request_id: a later call has {self.request_id!r} and asks for the same; it gets the answer"
        )

    def end(self) -> None:
        """Free the id."""
        self._ids.running.pop((self._caller, self.request_id), None)
        self._ended.set()


class RequestIds:
    """The ids in use, by the name of the caller and the id: callers neither see nor block each other's."""

    def __init__(self) -> None:
        self.running: dict[tuple[str, str], Claim] = {}

    async def claim(
        self, submission: Submission, caller: str, deadline: Deadline, task: asyncio.Task[Any] | None = None
    ) -> Claim:
        """Use the submission's id, or a new one if it has none, until the claim ends. ``task`` answers the call
        (default: the present one).

        If a call of the same ``caller`` uses it and asks for the same, that call ends first: a client whose connection
        broke need not wait until the gateway has noticed. `DuplicateRequest` if it asks for something else.
        """
        request_id = new_request_id(submission.request_id)
        key = caller, request_id
        while (earlier := self.running.get(key)) is not None:
            if not earlier.is_repeated_by(submission):
                raise DuplicateRequest(
                    f"request_id: {request_id!r} is in use by another request; choose another or leave it out"
                )
            await deadline.bound(earlier.take_over(), "an earlier call with its request_id ended")
        claim = self.running[key] = Claim(request_id, caller, submission, self, task)
        return claim
