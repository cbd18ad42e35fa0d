"""The objects of OpenAI's API that answers consist of: whole ones, and chunks of a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

from gateway.account import account_of
from gateway.http_api.requests import ChatBody, CompletionBody, GenerationBody, StreamOptions
from gateway.inference import Completion, OutputToken
from gateway.tokenizer import Tokenizer
from gateway.tool_calls import ToolCallParser
from pdserve.core.sampling import FinishReason, TokenLogprobs
from router.session import Session

Object = dict[str, Any]


def _usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int | None, drafts: tuple[int, int] = (0, 0)
) -> Object:
    """The object ``usage``. ``cached_tokens``, and ``drafts`` verified and accepted, are known at the end of a
    request."""
    usage: Object = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": None if cached_tokens is None else {"cached_tokens": cached_tokens},
    }
    verified, accepted = drafts
    if verified:
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": verified - accepted}
        usage["completion_tokens_details"] = details
    return usage


class Answer(ABC):
    """The answer of one call, in the form that its ``body`` asks for."""

    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, body: GenerationBody, answer_id: str, model: str, tokenizer: Tokenizer | None) -> None:
        # The body itself is not kept: it may be large.
        options = body.stream_options or StreamOptions()
        self.id = answer_id
        self.streams = bool(body.stream)
        self.ends_with_usage = options.include_usage
        self._counts = options.continuous_usage_stats
        self._per_prompt = body.n or 1
        self._token_ids = body.return_token_ids
        self._account = body.pdserve.breakdown
        self._is_prompt_alone = isinstance(body, CompletionBody) and body.is_prompt_alone
        self._head = {"id": answer_id, "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer

    @abstractmethod
    def _choice(
        self, index: int, record: Session, text: str, tokens: Sequence[OutputToken], part: OutputToken | None
    ) -> Object:
        """What the choice of output ``index`` says of ``text`` and its ``tokens``: those of the whole output, or of
        this ``part`` of a stream."""

    def whole(self, outputs: Sequence[tuple[Completion, Sequence[OutputToken]]]) -> Object:
        """The answer that is no stream."""
        choices = []
        for index, (completion, tokens) in enumerate(outputs):
            text, token_ids = completion.output.text, list(completion.output.token_ids)
            if self._is_prompt_alone:
                text, token_ids = "", []
            content = self._choice(index, completion.record, text, tokens[: len(token_ids)], None)
            choices.append({"index": index, **content, **self._end(completion)})
            if self._token_ids:
                choices[-1]["token_ids"] = token_ids
        completions = [completion for completion, _ in outputs]
        return {**self._head, "object": self.object, "choices": choices, "usage": self.usage(completions),
                **self._accounts(completions)}  # fmt: skip

    def chunk(self, index: int, token: OutputToken, completion: Completion | None = None) -> Object:
        """The chunk of a token of output ``index``; that of the last token has the finish reason and the account of
        its ``completion``."""
        text, tokens = ("", []) if self._is_prompt_alone else (token.text, [token])
        choice = {"index": index, **self._choice(index, token.record, text, tokens, token), "finish_reason": None}
        if self._token_ids:
            choice["token_ids"] = [token.token_id for token in tokens]
        chunk = {**self._head, "object": self.chunk_object, "choices": [choice]}
        if self._counts:
            count = token.index + len(tokens)
            chunk["usage"] = _usage(len(token.record.request.prompt_token_ids), count, None)
        if completion is not None:
            choice |= self._end(completion)
            chunk |= self._accounts([completion])
        return chunk

    def usage_chunk(self, completions: Sequence[Completion]) -> Object:
        """The chunk without choices at the end of a stream."""
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": self.usage(completions)}

    def usage(self, completions: Sequence[Completion]) -> Object:
        """The usage of a call. A prompt with several outputs counts once."""
        prompts = completions[:: self._per_prompt]
        return _usage(
            sum(len(each.record.request.prompt_token_ids) for each in prompts),
            0 if self._is_prompt_alone else sum(len(each.record.output_token_ids) for each in completions),
            sum(each.result.prefill_cached_tokens for each in prompts),
            (
                sum(each.result.draft_tokens for each in completions),
                sum(each.result.accepted_draft_tokens for each in completions),
            ),
        )

    def _end(self, completion: Completion) -> Object:
        reason = FinishReason.LENGTH if self._is_prompt_alone else completion.finish_reason
        end: Object = {"finish_reason": reason.value, "stop_reason": completion.output.stop_string}
        if self._token_ids:
            end["prompt_token_ids"] = list(completion.record.request.prompt_token_ids)
        return end

    def _accounts(self, completions: Sequence[Completion]) -> Object:
        if not self._account:
            return {}
        accounts = [account_of(completion) for completion in completions]
        return {"pdserve": accounts[0] if len(accounts) == 1 else accounts}

    def _token_text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id) if self._tokenizer else f"token_id:{token_id}"


class CompletionAnswer(Answer):
    """Of ``/v1/completions``. ``echoes``: the prompts' texts that outputs begin with, by output; empty without echo."""

    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, body: CompletionBody, *args: Any, echoes: Mapping[int, str]) -> None:
        super().__init__(body, *args)
        self._echoes = echoes

    def _choice(
        self, index: int, record: Session, text: str, tokens: Sequence[OutputToken], part: OutputToken | None
    ) -> Object:
        """Text and log-probabilities."""
        echo = self._echoes.get(index, "")
        told = [(token.token_id, len(echo) + token.start, token.logprobs) for token in tokens]
        wanted = record.request.sampling.logprobs is not None
        if self._echoes and (part is None or part.index == 0):
            text = echo + text
            if wanted:
                prompt = record.request.prompt_token_ids
                starts = accumulate([len(piece) for piece in self._pieces(prompt)[:-1]], initial=0)
                told = [*zip(prompt, starts, (None, *record.prompt_logprobs), strict=True), *told]
        return {"text": text, "logprobs": self._logprobs(told) if wanted and told else None}

    def _pieces(self, token_ids: Sequence[int]) -> list[str]:
        """What each of these tokens adds to their text."""
        detokenizer = self._tokenizer and self._tokenizer.detokenizer(())
        return [detokenizer.add(token_id) if detokenizer else "" for token_id in token_ids]

    def _logprobs(self, told: Sequence[tuple[int, int, TokenLogprobs | None]]) -> Object:
        """Of tokens with the offsets of their texts; the first token of a prompt has no log-probability. Of top tokens
        with the same text, such as parts of characters, the likeliest one is shown."""
        return {
            "tokens": [self._token_text(token_id) for token_id, _, _ in told],
            "token_logprobs": [None if each is None else each.logprob for _, _, each in told],
            "top_logprobs": [
                None if each is None else {self._token_text(token_id): value for token_id, value in reversed(each.top)}
                for _, _, each in told
            ],
            "text_offset": [start for _, start, _ in told],
        }


class ChatAnswer(Answer):
    """Of ``/v1/chat/completions``. ``new_parser`` makes the parser of tool calls of one output; without it there are no
    calls."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, body: ChatBody, *args: Any, new_parser: Callable[[], ToolCallParser] | None) -> None:
        super().__init__(body, *args)
        self._new_parser = new_parser
        self._parsers: dict[str, ToolCallParser] = {}  # by request

    def _choice(
        self, index: int, record: Session, text: str, tokens: Sequence[OutputToken], part: OutputToken | None
    ) -> Object:
        """A message, or what a token adds to it: text, and parts of tool calls. And log-probabilities."""
        logprobs = None
        if record.request.sampling.logprobs is not None and tokens:
            content = [self._told(token.token_id, token.logprobs) for token in tokens if token.logprobs is not None]
            logprobs = {"content": content, "refusal": None}
        message = self._parts(record.request.request_id, text, part is None or part.last)
        if part is not None:
            return {"delta": {"role": "assistant", **message} if part.index == 0 else message, "logprobs": logprobs}
        if "tool_calls" in message:
            message["content"] = message["content"] or None
            for call in message["tool_calls"]:
                del call["index"]
        return {"message": {"role": "assistant", "refusal": None, **message}, "logprobs": logprobs}

    def _parts(self, request_id: str, text: str, last: bool) -> Object:
        """What ``text`` adds to the content and to the tool calls of an output."""
        if self._new_parser is None:
            return {"content": text}
        if (parser := self._parsers.get(request_id)) is None:
            parser = self._parsers[request_id] = self._new_parser()
        content, calls = parser.feed(text, last)
        described: list[Object] = []
        for number, name, arguments in calls:
            call: Object = {"index": number, "function": {"arguments": arguments}}
            if name:
                call |= {"id": f"call-{request_id}-{number}", "type": "function"}
                call["function"] = {"name": name, "arguments": arguments}
            described.append(call)
        return {"content": content, "tool_calls": described} if described else {"content": content}

    def _end(self, completion: Completion) -> Object:
        end = super()._end(completion)
        parser = self._parsers.get(completion.record.request.request_id)
        if parser is not None and parser.is_complete and completion.finish_reason is FinishReason.STOP:
            end["finish_reason"] = "tool_calls"
        return end

    def _told(self, token_id: int, logprobs: TokenLogprobs) -> Object:
        top = [self._logprob(*each) for each in logprobs.top]
        return {**self._logprob(token_id, logprobs.logprob), "top_logprobs": top}

    def _logprob(self, token_id: int, logprob: float) -> Object:
        told = list(self._tokenizer.token_bytes(token_id)) if self._tokenizer else None
        return {"token": self._token_text(token_id), "logprob": logprob, "bytes": told}
