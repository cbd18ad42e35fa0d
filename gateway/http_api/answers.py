"""The objects of OpenAI's API that answers consist of: whole ones, and chunks of a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from gateway.account import account_of
from gateway.inference import Completion, OutputToken
from gateway.tokenizer import Tokenizer
from gateway.tool_calls import ToolCallParser
from pdserve.core.sampling import FinishReason
from router.request_record import RequestRecord

Object = dict[str, Any]


def _usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> Object:
    """The object ``usage``. ``cached_tokens`` are known at the end of a request."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": None if cached_tokens is None else {"cached_tokens": cached_tokens},
    }


class Answer(ABC):
    """The answer of one call. ``count``: outputs of it; each prompt has ``per_prompt`` of them. ``token_ids``: with the
    token ids of prompts and outputs. ``account``: with the account of each request as ``pdserve``."""

    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self,
        answer_id: str,
        model: str,
        tokenizer: Tokenizer | None,
        *,
        per_prompt: int = 1,
        token_ids: bool = False,
        account: bool = False,
    ) -> None:
        self._head = {"id": answer_id, "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._per_prompt = per_prompt
        self._token_ids = token_ids
        self._account = account

    @abstractmethod
    def whole_choice(self, completion: Completion, tokens: Sequence[OutputToken]) -> Object:
        """What a whole output adds to its choice."""

    @abstractmethod
    def first(self, index: int) -> Object:
        """What the first chunk of an output has besides its token."""

    @abstractmethod
    def token_choice(self, token: OutputToken) -> Object:
        """What a token adds to the choice of its chunk."""

    def whole(self, outputs: Sequence[tuple[Completion, Sequence[OutputToken]]]) -> Object:
        """The answer that is no stream."""
        choices = []
        for index, (completion, tokens) in enumerate(outputs):
            choice = {"index": index, **self.whole_choice(completion, tokens), **self._end(completion)}
            if self._token_ids:
                choice["token_ids"] = list(completion.output.token_ids)
                choice["prompt_token_ids"] = list(completion.record.request.prompt_token_ids)
            choices.append(choice)
        completions = [completion for completion, _ in outputs]
        return {**self._head, "object": self.object, "choices": choices, "usage": self.usage(completions),
                **self._accounts(completions)}  # fmt: skip

    def chunk(
        self, index: int, token: OutputToken, completion: Completion | None = None, counts: bool = False
    ) -> Object:
        """The chunk of a token of output ``index``; that of the last token has the finish reason and the account of
        its ``completion``. ``counts``: with the output's usage so far."""
        choice = {"index": index, **self.token_choice(token), "finish_reason": None}
        if token.index == 0:
            choice = _merged(self.first(index), choice)
        if self._token_ids:
            choice["token_ids"] = [token.token_id]
        prompt = token.record.request.prompt_token_ids
        usage = _usage_of(len(prompt), token.index + 1, None) if counts else None
        if completion is None:
            return self._chunk([choice], usage)
        choice |= self._end(completion)
        if self._token_ids:
            choice["prompt_token_ids"] = list(prompt)
        return {**self._chunk([choice], usage), **self._accounts([completion])}

    def usage_chunk(self, usage: Object) -> Object:
        """The chunk without choices at the end of a stream."""
        return self._chunk([], usage)

    def usage(self, completions: Sequence[Completion]) -> Object:
        """The usage of a call. A prompt with several outputs counts once."""
        prompts = completions[:: self._per_prompt]
        return _usage_of(
            sum(len(each.record.request.prompt_token_ids) for each in prompts),
            sum(len(each.record.output_token_ids) for each in completions),
            sum(each.result.prefill_cached_tokens for each in prompts),
        )

    def _chunk(self, choices: list[Object], usage: Object | None) -> Object:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        if usage is not None:
            chunk["usage"] = usage
        return chunk

    def _end(self, completion: Completion) -> Object:
        hit = completion.output.stop_string
        return {"finish_reason": completion.finish_reason.value, "stop_reason": hit}

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

    def __init__(self, *args: Any, echoes: Mapping[int, str] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._echoes = echoes or {}

    def whole(self, outputs: Sequence[tuple[Completion, Sequence[OutputToken]]]) -> Object:
        """As in `Answer`, with the prompts' texts."""
        answer = super().whole(outputs)
        for choice in answer["choices"]:
            choice["text"] = self._echoes.get(choice["index"], "") + choice["text"]
        return answer

    def whole_choice(self, completion: Completion, tokens: Sequence[OutputToken]) -> Object:
        """Text and log-probabilities."""
        kept = tokens[: len(completion.output.token_ids)]
        return {"text": completion.output.text, "logprobs": self._logprobs(kept)}

    def first(self, index: int) -> Object:
        """The prompt's text."""
        return {"text": self._echoes.get(index, "")}

    def token_choice(self, token: OutputToken) -> Object:
        """Text and log-probabilities."""
        return {"text": token.text, "logprobs": self._logprobs([token])}

    def _logprobs(self, tokens: Sequence[OutputToken]) -> Object | None:
        if not tokens or tokens[0].logprobs is None:
            return None
        offset, offsets = 0, []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        known = [token.logprobs for token in tokens if token.logprobs is not None]
        return {
            "tokens": [self._token_text(token.token_id) for token in tokens],
            "token_logprobs": [each.logprob for each in known],
            "top_logprobs": [{self._token_text(token_id): value for token_id, value in each.top} for each in known],
            "text_offset": offsets,
        }


class ChatAnswer(Answer):
    """Of ``/v1/chat/completions``. ``parser`` makes the parser of tool calls of one output; None if it is to have no
    calls."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, *args: Any, parser: Callable[[], ToolCallParser | None] = lambda: None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._new_parser = parser
        self._parsers: dict[str, ToolCallParser | None] = {}  # by request

    def whole_choice(self, completion: Completion, tokens: Sequence[OutputToken]) -> Object:
        """The message and log-probabilities."""
        parts = self._parts(completion.record, completion.output.text, last=True)
        message = {"role": "assistant", **parts, "refusal": None}
        if "tool_calls" in parts:
            message["content"] = parts["content"] or None
            message["tool_calls"] = [{key: call[key] for key in call if key != "index"} for call in parts["tool_calls"]]
        return {"message": message, "logprobs": self._logprobs(tokens[: len(completion.output.token_ids)])}

    def first(self, index: int) -> Object:
        """The role."""
        return {"delta": {"role": "assistant"}}

    def token_choice(self, token: OutputToken) -> Object:
        """Text, tool calls that it completes, and log-probabilities."""
        return {"delta": self._parts(token.record, token.text, token.last), "logprobs": self._logprobs([token])}

    def _parts(self, record: RequestRecord, text: str, last: bool) -> Object:
        """What ``text`` adds to the content and to the tool calls of an output."""
        request_id = record.request.request_id
        if request_id not in self._parsers:
            self._parsers[request_id] = self._new_parser()
        parser = self._parsers[request_id]
        if parser is None:
            return {"content": text}
        before = parser.num_calls
        content, calls = parser.feed(text, last)
        if not calls:
            return {"content": content}
        described = [
            {
                "index": index,
                "id": f"call-{request_id}-{index}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate(calls, before)
        ]
        return {"content": content, "tool_calls": described}

    def _end(self, completion: Completion) -> Object:
        end = super()._end(completion)
        parser = self._parsers.get(completion.record.request.request_id)
        if parser is not None and parser.num_calls and completion.finish_reason is FinishReason.STOP:
            end["finish_reason"] = "tool_calls"
        return end

    def _logprobs(self, tokens: Sequence[OutputToken]) -> Object | None:
        if not tokens or tokens[0].logprobs is None:
            return None
        content = []
        for token in tokens:
            assert token.logprobs is not None, "all tokens of a request have log-probabilities, or none"
            described = self._logprob(token.token_id, token.logprobs.logprob)
            described["top_logprobs"] = [self._logprob(token_id, value) for token_id, value in token.logprobs.top]
            content.append(described)
        return {"content": content, "refusal": None}

    def _logprob(self, token_id: int, logprob: float) -> Object:
        text = self._token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _merged(first: Object, choice: Object) -> Object:
    """The choice of the first chunk: the text of ``first`` stands before the token's, other objects are united."""
    merged = dict(choice)
    for key, value in first.items():
        merged[key] = {**value, **choice[key]} if isinstance(value, dict) else value + choice[key]
    return merged
