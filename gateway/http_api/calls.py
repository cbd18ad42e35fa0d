"""The calls of the HTTP API that have a body: two generate text, two convert between text and tokens."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.datastructures import Headers

from gateway.admitted_call import AdmittedCall
from gateway.http_api.answers import Answer, ChatAnswer, CompletionAnswer
from gateway.http_api.exchange import Exchange, ServedModel
from gateway.http_api.requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from gateway.http_api.submissions import chat, completions, render
from gateway.inference import Completion, OutputToken
from gateway.tokenizer import Tokenizer
from gateway.validation import Submission, check_request_id, check_token_ids, text_to_token_ids
from pdserve.core.errors import InvalidRequest

Output = OutputToken | Completion
Prepared = tuple[list[Submission], Answer, float | None]
_READS = "the client was reading the answer"


def generation(served: ServedModel, body_type: type[CompletionBody] | type[ChatBody], headers: Headers) -> Exchange:
    """A call that generates text. Its ``headers`` may have its request id."""
    prefix = "chatcmpl" if body_type is ChatBody else "cmpl"
    request_id = headers.get("x-request-id") or f"{prefix}-{uuid.uuid4().hex}"
    tokenizer = served.inference.tokenizer

    def prepare(body: CompletionBody | ChatBody) -> Prepared:
        answer_id = body.request_id or request_id
        for each in (request_id, answer_id):
            check_request_id(each)
        answer: Answer
        if isinstance(body, ChatBody):
            submissions, parser = chat(body, served.chat_template, answer_id)
            new_parser = None if parser is None else partial(replace, parser)
            answer = ChatAnswer(body, answer_id, served.model, tokenizer, new_parser=new_parser)
        else:
            submissions = completions(body, answer_id)
            echoes = {index: _text(each, tokenizer) for index, each in enumerate(submissions)} if body.echo else {}
            answer = CompletionAnswer(body, answer_id, served.model, tokenizer, echoes=echoes)
        return submissions, answer, body.pdserve.timeout_s

    return Exchange(served, body_type, prepare, partial(_generate, served))


async def _generate(served: ServedModel, exchange: Exchange, prepared: Prepared, call: AdmittedCall) -> None:
    """Send the outputs, as a whole or as a stream."""
    submissions, answer, timeout_s = prepared
    if timeout_s is not None:
        served.inference.within(call, timeout_s)
    exchange.headers_sent["x-request-id"] = answer.id
    call.take(len(submissions) - 1)  # the call itself counts as the first
    tokens: list[list[OutputToken]] = [[] for _ in submissions]
    completions: dict[int, Completion] = {}
    bound = call.deadline.bound  # because a client that stops reading blocks the write

    async def made(make: Callable[..., Any], *what: Any) -> Any:
        """A part of the answer. Log-probabilities of prompts may be many; in a thread, other calls have turns."""
        return await asyncio.to_thread(make, *what) if call.prompt_logprobs else make(*what)

    async with aclosing(_outputs(served, submissions, call)) as outputs:
        async for index, output in outputs:
            own = tokens[index]
            if isinstance(output, Completion):
                completions[index] = output
                if answer.streams:
                    await bound(exchange.send_event(await made(answer.chunk, index, own[-1], output)), _READS)
            elif answer.streams and not output.last:
                await bound(exchange.send_event(await made(answer.chunk, index, output)), _READS)
            else:  # the last chunk of a stream waits for the completion
                own.append(output)
    ordered = [completions[index] for index in range(len(submissions))]
    if not answer.streams:
        content = await made(answer.whole, list(zip(ordered, tokens, strict=True)))
        await bound(exchange.send_json(content), _READS)
        return
    if answer.ends_with_usage:
        await bound(exchange.send_event(answer.usage_chunk(ordered)), _READS)
    await bound(exchange.end_events(), _READS)


async def _outputs(
    served: ServedModel, submissions: Sequence[Submission], call: AdmittedCall
) -> AsyncGenerator[tuple[int, Output], None]:
    """The outputs of all submissions, each with its index, as they come. The first failure ends all."""
    if len(submissions) == 1:
        async with aclosing(served.inference.generate(submissions[0], call)) as outputs:
            async for output in outputs:
                yield 0, output
        return
    merged: asyncio.Queue[tuple[int, Output | Exception]] = asyncio.Queue(maxsize=2 * len(submissions))
    answering = asyncio.current_task()

    async def run(index: int, submission: Submission) -> None:
        try:
            async with aclosing(served.inference.generate(submission, call, answering)) as outputs:
                async for output in outputs:
                    await merged.put((index, output))
        except Exception as error:  # noqa: BLE001 - it is raised where outputs are taken
            await merged.put((index, error))

    tasks = [asyncio.create_task(run(index, each)) for index, each in enumerate(submissions)]
    try:
        left = len(submissions)
        while left:
            index, put = await merged.get()
            if isinstance(put, Exception):
                raise put
            left -= isinstance(put, Completion)
            yield index, put
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _text(submission: Submission, tokenizer: Tokenizer | None) -> str:
    prompt = submission.prompt or ()
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt) if tokenizer else ""


def tokenization(served: ServedModel) -> Exchange:
    """``POST /tokenize``: the token ids of a prompt or of messages."""

    def prepare(body: TokenizeBody) -> tuple[str, bool | None, bool]:
        """The text, whether it gets special tokens, and whether the tokens' texts are sent."""
        if body.messages is None:
            return body.prompt or "", body.add_special_tokens is not False, body.return_token_strs
        text = render(served.chat_template, body.messages, body.tools, body.add_generation_prompt)
        return text, bool(body.add_special_tokens), body.return_token_strs

    async def respond(exchange: Exchange, prepared: tuple[str, bool, bool], call: AdmittedCall) -> None:
        text, special, with_texts = prepared
        tokenizer, limits = _tokenizer(served), await served.inference.limits(call)
        reading = text_to_token_ids(text, tokenizer, limits, special, call.client())
        token_ids = await call.deadline.bound(reading, "its prompt was tokenized")
        answer = {"count": len(token_ids), "max_model_len": limits.context_length, "tokens": token_ids}
        if with_texts:
            answer["token_strs"] = [tokenizer.token_text(token_id) for token_id in token_ids]
        await exchange.send_json(answer)

    return Exchange(served, TokenizeBody, prepare, respond)


def detokenization(served: ServedModel) -> Exchange:
    """``POST /detokenize``: the text of token ids."""

    async def respond(exchange: Exchange, token_ids: list[int], call: AdmittedCall) -> None:
        check_token_ids("tokens", token_ids, await served.inference.limits(call))
        await exchange.send_json({"prompt": _tokenizer(served).decode(token_ids)})

    return Exchange(served, DetokenizeBody, lambda body: body.tokens, respond)


def _tokenizer(served: ServedModel) -> Tokenizer:
    if served.inference.tokenizer is None:
        raise InvalidRequest("model: it has no tokenizer")
    return served.inference.tokenizer
