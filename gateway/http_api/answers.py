"""The objects of OpenAI's API that answers consist of: whole ones, and chunks of a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from gateway.account import account_of
from gateway.http_api.requests import ChatBody, CompletionBody, GenerationBody, StreamOptions
from gateway.inference import Completion, OutputToken
from gateway.tokenizer import Tokenizer
from gateway.tool_calls import ToolCallParser
from pdserve.core.sampling import FinishReason

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
    """The answer of one call, in the form that its ``body`` asks for."""

    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, body: GenerationBody, answer_id: str, model: str, tokenizer: Tokenizer | None) -> None:
        # The body itself is not kept: it may be large.
        options = body.stream_options or StreamOptions()
        self.id = answer_id
        self.streams = body.stream
        self.ends_with_usage = options.include_usage
        self._counts = options.continuous_usage_stats
        self._per_prompt = body.n or 1
        self._token_ids = body.return_token_ids
        self._account = body.pdserve.breakdown
        self._head = {"id": answer_id, "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer

    @abstractmethod
    def choice(self, index: int, text: str, tokens: Sequence[OutputToken], completion: Completion | None) -> Object:
        """What the choice of output ``index`` says of ``text`` and its ``tokens``: those of a whole output with this
        ``completion``, or one of a stream."""

    def whole(self, outputs: Sequence[tuple[Completion, Sequence[OutputToken]]]) -> Object:
        """The answer that is no stream."""
        choices = []
        for index, (completion, tokens) in enumerate(outputs):
            token_ids = list(completion.output.token_ids)
            content = self.choice(index, completion.output.text, tokens[: len(token_ids)], completion)
            choice = {"index": index, **content, **self._end(completion)}
            if self._token_ids:
                choice["token_ids"] = token_ids
            choices.append(choice)
        completions = [completion for completion, _ in outputs]
        return {**self._head, "object": self.object, "choices": choices, "usage": self._usage(completions),
                **self._accounts(completions)}  # fmt: skip

    def chunk(self, index: int, token: OutputToken, completion: Completion | None = None) -> Object:
        """The chunk of a token of output ``index``; that of the last token has the finish reason and the account of
        its ``completion``."""
        choice = {"index": index, **self.choice(index, token.text, [token], None), "finish_reason": None}
        if self._token_ids:
            choice["token_ids"] = [token.token_id]
        chunk = {**self._head, "object": self.chunk_object, "choices": [choice]}
        if self._counts:
            chunk["usage"] = _usage_of(len(token.record.request.prompt_token_ids), token.index + 1, None)
        if completion is not None:
            choice |= self._end(completion)
            chunk |= self._accounts([completion])
        return chunk

    def usage_chunk(self, completions: Sequence[Completion]) -> Object:
        """The chunk without choices at the end of a stream."""
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": self._usage(completions)}

    def _usage(self, completions: Sequence[Completion]) -> Object:
        """The usage of a call. A prompt with several outputs counts once."""
        prompts = completions[:: self._per_prompt]
        return _usage_of(
            sum(len(each.record.request.prompt_token_ids) for each in prompts),
            sum(len(each.record.output_token_ids) for each in completions),
            sum(each.result.prefill_cached_tokens for each in prompts),
        )

    def _end(self, completion: Completion) -> Object:
        end: Object = {"finish_reason": completion.finish_reason.value, "stop_reason": completion.output.stop_string}
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

    def choice(self, index: int, text: str, tokens: Sequence[OutputToken], completion: Completion | None) -> Object:
        """Text and log-probabilities."""
        if self._echoes and (completion is not None or tokens[0].index == 0):
            text = self._echoes[index] + text
        return {"text": text, "logprobs": self._logprobs(tokens)}

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
    """Of ``/v1/chat/completions``. ``new_parser`` makes the parser of tool calls of one output; without it there are no
    calls."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, body: ChatBody, *args: Any, new_parser: Callable[[], ToolCallParser] | None) -> None:
        super().__init__(body, *args)
        self._new_parser = new_parser
        self._parsers: dict[str, ToolCallParser] = {}  # by request

    def choice(self, index: int, text: str, tokens: Sequence[OutputToken], completion: Completion | None) -> Object:
        """A message, or what a token adds to it: text, and tool calls that it completes. And log-probabilities."""
        logprobs = self._logprobs(tokens)
        if completion is None:
            (token,) = tokens
            delta = self._parts(token.record.request.request_id, text, token.last)
            return {"delta": {"role": "assistant", **delta} if token.index == 0 else delta, "logprobs": logprobs}
        message: Object = {"role": "assistant", "refusal": None}
        message |= self._parts(completion.record.request.request_id, text, last=True)
        if "tool_calls" in message:
            message["content"] = message["content"] or None
            for call in message["tool_calls"]:
                del call["index"]
        return {"message": message, "logprobs": logprobs}

    def _parts(self, request_id: str, text: str, last: bool) -> Object:
        """What ``text`` adds to the content and to the tool calls of an output."""
        if self._new_parser is None:
            return {"content": text}
        if (parser := self._parsers.get(request_id)) is None:
            parser = self._parsers[request_id] = self._new_parser()
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
        known = [(token.token_id, token.logprobs) for token in tokens if token.logprobs is not None]
        content = [
            {
                **self._logprob(token_id, logprobs.logprob),
                "top_logprobs": [self._logprob(*each) for each in logprobs.top],
            }
            for token_id, logprobs in known
        ]
        return {"content": content, "refusal": None}

    def _logprob(self, token_id: int, logprob: float) -> Object:
        text = self._token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
