"""The two calls that generate text."""

from __future__ import annotations

import asyncio
import uuid
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from gateway.chat_template import ChatTemplate
from gateway.http_api.answers import Answer, ChatAnswer, CompletionAnswer
from gateway.http_api.bodies import Bodies, Body
from gateway.http_api.exchange import Exchange, parsed
from gateway.http_api.requests import ChatBody, CompletionBody, GenerationBody
from gateway.http_api.submissions import chat, completions, tool_calls
from gateway.inference import Arrival, Completion, Inference, OutputToken
from gateway.submission import Submission
from gateway.validation import check_request_id
from pdserve.core.errors import UnknownModel

Output = OutputToken | Completion


@dataclass(frozen=True, slots=True)
class Served:
    """What the calls need: the service, the name of its model, its chat template, and the bodies that arrive."""

    inference: Inference
    model: str
    chat_template: ChatTemplate | None
    bodies: Bodies

    def check_model(self, asked: str | None) -> None:
        """`UnknownModel` unless ``asked`` is the served model, or None."""
        if asked not in (None, self.model):
            raise UnknownModel(f"model: {asked!r} is not served here; use {self.model!r}")


class GenerationExchange(Exchange):
    """A call that generates text. ``request_id`` is the header's, or empty."""

    prefix: str

    def __init__(self, served: Served, request_id: str) -> None:
        self._served = served
        self._request_id = request_id or f"{self.prefix}-{uuid.uuid4().hex}"
        super().__init__(served.inference, served.bodies)

    @abstractmethod
    def read(self, data: bytearray) -> tuple[GenerationBody, list[Submission], Answer]:
        """The body, its submissions, and the answer to fill. May run in another thread."""

    async def respond(self, body: Body, arrival: Arrival) -> None:
        """Send the outputs, as a whole or as a stream."""
        asked, submissions, answer = await self._bodies.parse(body, self.read, arrival.deadline)
        stream, options, timeout_s = asked.stream, asked.stream_options, asked.pdserve.timeout_s
        with_usage = options is not None and options.include_usage
        with_counts = options is not None and options.continuous_usage_stats
        del asked, options  # unknown fields, which both keep, may take much memory
        if timeout_s is not None:
            self._inference.within(arrival, timeout_s)
        self.add_header("x-request-id", self._request_id)
        self._inference.admit_outputs(arrival, len(submissions))
        outputs = self._outputs(submissions, arrival)
        async with aclosing(outputs):
            if stream:
                await self._stream(answer, outputs, arrival, len(submissions), with_usage, with_counts)
            else:
                await self._whole(answer, outputs, arrival, len(submissions))

    def _take_id(self, body: GenerationBody) -> None:
        """Use the body's request id rather than the header's. `InvalidRequest` if it is not a valid one."""
        check_request_id(self._request_id)  # of the header, also if the body's replaces it
        if body.request_id:
            self._request_id = body.request_id
            check_request_id(self._request_id)

    async def _whole(
        self, answer: Answer, outputs: AsyncGenerator[tuple[int, Output], None], arrival: Arrival, count: int
    ) -> None:
        tokens: list[list[OutputToken]] = [[] for _ in range(count)]
        completions: dict[int, Completion] = {}
        async for index, output in outputs:
            if isinstance(output, Completion):
                completions[index] = output
            else:
                tokens[index].append(output)
        content = answer.whole([(completions[index], tokens[index]) for index in range(count)])
        await arrival.deadline.bound(self.send_json(content), "the client was reading the answer")

    async def _stream(
        self,
        answer: Answer,
        outputs: AsyncGenerator[tuple[int, Output], None],
        arrival: Arrival,
        count: int,
        with_usage: bool,
        with_counts: bool,
    ) -> None:
        bound = arrival.deadline.bound
        completions: dict[int, Completion] = {}
        last: dict[int, OutputToken] = {}  # tokens whose chunk waits for the completion
        async for index, output in outputs:
            if isinstance(output, Completion):
                completions[index] = output
                event = answer.chunk(index, last[index], output, with_counts)
            elif output.last:
                last[index] = output
                continue
            else:
                event = answer.chunk(index, output, None, with_counts)
            # Bounded, because a client that stops reading blocks the write.
            await bound(self.send_event(event), "the client was reading the answer")
        if with_usage:
            usage = answer.usage([completions[index] for index in range(count)])
            await bound(self.send_event(answer.usage_chunk(usage)), "the client was reading the answer")
        await bound(self.end_events(), "the client was reading the answer")

    async def _outputs(
        self, submissions: Sequence[Submission], arrival: Arrival
    ) -> AsyncGenerator[tuple[int, Output], None]:
        """The outputs of all submissions, each with its index, as they come. The first failure ends all."""
        if len(submissions) == 1:
            async with aclosing(self._inference.generate(submissions[0], arrival)) as outputs:
                async for output in outputs:
                    yield 0, output
            return
        merged: asyncio.Queue[tuple[int, Output]] = asyncio.Queue(maxsize=2 * len(submissions))
        answering = asyncio.current_task()

        async def run(index: int, submission: Submission) -> None:
            async with aclosing(self._inference.generate(submission, arrival, answering)) as outputs:
                async for output in outputs:
                    await merged.put((index, output))

        tasks = [asyncio.create_task(run(index, each)) for index, each in enumerate(submissions)]
        everything = asyncio.gather(*tasks)
        try:
            left = len(submissions)
            while left:
                getting = asyncio.ensure_future(merged.get())
                await asyncio.wait((getting, everything), return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    getting.cancel()
                    everything.result()  # raises the failure; without one, everything was put before it ended
                    continue
                index, output = getting.result()
                left -= isinstance(output, Completion)
                yield index, output
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, everything, return_exceptions=True)


class CompletionExchange(GenerationExchange):
    """``POST /v1/completions``."""

    body_type = CompletionBody
    prefix = "cmpl"

    def read(self, data: bytearray) -> tuple[GenerationBody, list[Submission], Answer]:
        """See `GenerationExchange.read`."""
        body = parsed(CompletionBody, data)
        self._served.check_model(body.model)
        self._take_id(body)
        submissions = completions(body, self._request_id)
        echoes = self._echoes(submissions) if body.echo else {}
        return body, submissions, CompletionAnswer(
            self._request_id,
            self._served.model,
            self._inference.tokenizer,
            per_prompt=body.n or 1,
            token_ids=body.return_token_ids,
            account=body.pdserve.breakdown,
            echoes=echoes,
        )  # fmt: skip

    def _echoes(self, submissions: Sequence[Submission]) -> Mapping[int, str]:
        decode = self._inference.tokenizer.decode if self._inference.tokenizer else lambda token_ids: ""
        return {
            index: each.prompt if isinstance(each.prompt, str) else decode(each.prompt or ())
            for index, each in enumerate(submissions)
        }


class ChatExchange(GenerationExchange):
    """``POST /v1/chat/completions``."""

    body_type = ChatBody
    prefix = "chatcmpl"

    def read(self, data: bytearray) -> tuple[GenerationBody, list[Submission], Answer]:
        """See `GenerationExchange.read`."""
        body = parsed(ChatBody, data)
        self._served.check_model(body.model)
        self._take_id(body)
        template = self._served.chat_template
        submissions = chat(body, template, self._request_id)
        return body, submissions, ChatAnswer(
            self._request_id,
            self._served.model,
            self._inference.tokenizer,
            per_prompt=body.n or 1,
            token_ids=body.return_token_ids,
            account=body.pdserve.breakdown,
            parser=lambda: tool_calls(body, template),
        )  # fmt: skip
