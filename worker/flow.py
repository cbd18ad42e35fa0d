"""One request's life on one worker: the base of the three ways a worker can serve it.

`LocalFlow` (here) runs prefill and decode in place. `prefill_worker.flow.PrefillFlow` runs the prompt and pushes its
blocks; `decode_worker.flow.DecodeFlow` makes room, receives and goes on. A flow is driven by the worker from engine
events and ends in exactly one of: its last token, an error told to the gateway, an abort.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, ClassVar

from engine.messages import Abort, Finished, KVRole, PrefixFound, Progress, Reserved, Step, Submit, TokenOut
from pdserve.core.errors import LayoutMismatch, PdserveError, from_wire, to_wire
from pdserve.core.handoff import KVDestination
from pdserve.core.sampling import FinishReason
from pdserve.core.timeline import Event, EventKind
from pdserve.core.worker import TokenOutput, Work

if TYPE_CHECKING:
    from worker.outbox import Outbox
    from worker.worker import Worker

log = logging.getLogger(__name__)


class Flow(ABC):
    """A request on this worker. ``received_s`` is when its call was there, by the worker's clock."""

    kv_role: ClassVar[KVRole]

    def __init__(
        self, worker: Worker, work: Work, outbox: Outbox, received_s: float, destination: KVDestination | None = None
    ) -> None:
        self.worker = worker
        self.work = work
        self.outbox = outbox
        self.received_s = received_s
        self.destination = destination
        self.deadline_s = received_s + work.timeout_s
        # Whatever comes later, the request's blocks are this engine's and no other's.
        self.incarnation = worker.incarnation
        self.cached_tokens = 0  # of the prompt, found in this engine's prefix cache

    @property
    def request_id(self) -> str:
        """The request's id, the same everywhere."""
        return self.work.request_id

    @abstractmethod
    async def start(self) -> KVDestination | None:
        """Take the request on; what it returns is the answer to the call. Raises what the caller should know."""

    @abstractmethod
    def on_token(self, token: TokenOut, step: Step) -> TokenOutput:
        """A step made a token: what the gateway is told. After a finish reason the worker forgets the flow, unless
        `holds_after_finish`."""

    def on_reserved(  # noqa: B027 - most flows have nothing to do
        self, reserved: Reserved
    ) -> None:
        """The engine has set blocks aside for the request."""

    def on_prefix_found(self, found: PrefixFound) -> None:
        """The engine begins with the prompt, and had the KV of its beginning."""
        self.cached_tokens = found.num_tokens

    def on_progress(  # noqa: B027 - most flows have nothing to do
        self, progress: Progress
    ) -> None:
        """A step has put more of the request's KV into the pool."""

    def on_layers(  # noqa: B027 - most flows have nothing to do
        self, progress: Progress, num_layers: int
    ) -> None:
        """The step that runs will bring the request so far, and has put its first layers' KV into the pool."""

    def on_finished(self, finished: Finished) -> None:
        """The engine ended the request by a token that it did not sample, and for which nothing has ended it yet: the
        worker that did sample it goes by other end ids. The request fails at once."""
        why = f"request {self.request_id}: token 1 ends it on worker {self.worker.spec.worker_id}"
        self.worker.fail(
            self,
            LayoutMismatch(
                f"{why} ({finished.finish_reason}) and not where it was sampled; all workers of a service must run a "
                "model with the same eos_token_ids"
            ),
        )

    def on_failed(  # noqa: B027 - most flows have nothing to do
        self, error: PdserveError
    ) -> None:
        """The flow is over because of ``error``; wake whoever waits inside it."""

    @property
    def holds_after_finish(self) -> bool:
        """Whether the flow has something to do after its last token; it then calls `Worker.forget` itself."""
        return False

    async def close(self) -> None:
        """Give back everything the request holds, in whatever state it is. Called once, after the flow has failed."""
        self.incarnation.engine.send(Abort(self.request_id))

    def follow(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a part of the request's life in a task. An error that it does not deal with fails the request, which
        would otherwise wait for its deadline."""

        def ended(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                log.error("%s: request %s", self.worker.spec.worker_id, self.request_id, exc_info=error)
                self.worker.fail(self, from_wire(*to_wire(error)))

        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(ended)
        return task

    def submit(self, max_tokens: int | None = None) -> None:
        """Hand the request to the engine."""
        sampling = self.work.sampling
        self.incarnation.engine.send(
            Submit(
                request_id=self.request_id,
                kv_role=self.kv_role,
                prompt_token_ids=list(self.work.token_ids),
                max_tokens=sampling.max_tokens if max_tokens is None else max_tokens,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                seed=sampling.seed or 0,
                stop_token_ids=list(sampling.stop_token_ids),
                ignore_eos=sampling.ignore_eos,
                min_p=sampling.min_p,
                repetition_penalty=sampling.repetition_penalty,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                logit_bias=dict(sampling.logit_bias),
                logprobs=sampling.logprobs,
                num_prior_outputs=self.work.num_prior_outputs,
                salt=self.work.salt,
            )
        )

    def event(self, kind: EventKind, time_s: float) -> Event:
        """Something happened here."""
        return Event(kind, self.worker.spec.worker_id, time_s)

    def prefill_events(self, token: TokenOut, step: Step) -> tuple[Event, ...]:
        """What the worker that computed the prompt knows when token 1 is there."""
        return (
            self.event(EventKind.PREFILL_RECEIVED, self.received_s),
            self.event(EventKind.PREFILL_SCHEDULED, token.first_scheduled_s),
            self.event(EventKind.TOKEN_1_SAMPLED, step.sampled_s),
        )


class LocalFlow(Flow):
    """Prefill and decode in place (colocated), or a single token without any hand-off."""

    kv_role = KVRole.LOCAL

    def __init__(
        self, worker: Worker, work: Work, outbox: Outbox, received_s: float, destination: KVDestination | None = None
    ) -> None:
        super().__init__(worker, work, outbox, received_s, destination)
        self._num_tokens = 0

    async def start(self) -> None:
        """Submit; there is nothing to answer."""
        self.submit()

    def on_token(self, token: TokenOut, step: Step) -> TokenOutput:
        """A token, with the events of the first or the second."""
        self._num_tokens += 1
        events: tuple[Event, ...] = ()
        cached_tokens = 0
        if self._num_tokens == 1:
            events = self.prefill_events(token, step)
            cached_tokens = self.cached_tokens
        elif self._num_tokens == 2:
            events = (
                self.event(EventKind.DECODE_SCHEDULED, step.step_started_s),
                self.event(EventKind.TOKEN_2_SAMPLED, step.sampled_s),
            )
        return TokenOutput(
            token.token_id, finish_reason(token), events, logprobs=token.logprobs, cached_tokens=cached_tokens
        )


def finish_reason(token: TokenOut) -> FinishReason | None:
    """The engine's finish reason as `FinishReason`; None while the request goes on."""
    return FinishReason(token.finish_reason) if token.finish_reason else None
