"""The calls that convert between text and tokens, under the names that vLLM gives them."""

from __future__ import annotations

from functools import partial

from gateway.http_api.bodies import Body
from gateway.http_api.exchange import Exchange, parsed
from gateway.http_api.generation import Served
from gateway.http_api.requests import DetokenizeBody, TokenizeBody
from gateway.http_api.submissions import render
from gateway.inference import Arrival
from gateway.tokenizer import Tokenizer
from gateway.validation import check_token_ids, text_to_token_ids
from pdserve.core.errors import InvalidRequest


class _TokenizerExchange(Exchange):
    def __init__(self, served: Served) -> None:
        self._served = served
        super().__init__(served.inference, served.bodies)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; `InvalidRequest` if it has none."""
        if self._inference.tokenizer is None:
            raise InvalidRequest("model: it has no tokenizer")
        return self._inference.tokenizer


class TokenizeExchange(_TokenizerExchange):
    """``POST /tokenize``."""

    body_type = TokenizeBody

    async def respond(self, body: Body, arrival: Arrival) -> None:
        """Send the token ids of a prompt or of messages."""
        asked, text = await self._bodies.parse(body, self._read_text, arrival.deadline)
        tokenizer, limits = self.tokenizer, await self._inference.limits(arrival)
        special = asked.messages is None if asked.add_special_tokens is None else asked.add_special_tokens
        reading = text_to_token_ids(text, tokenizer, limits, special, arrival.client())
        token_ids = await arrival.deadline.bound(reading, "its prompt was tokenized")
        answer = {"count": len(token_ids), "max_model_len": limits.context_length, "tokens": token_ids}
        if asked.return_token_strs:
            answer["token_strs"] = [tokenizer.token_text(token_id) for token_id in token_ids]
        await self.send_json(answer)

    def _read_text(self, data: bytearray) -> tuple[TokenizeBody, str]:
        """The body, and the text that it asks for."""
        asked = parsed(TokenizeBody, data)
        self._served.check_model(asked.model)
        if asked.messages is None:
            return asked, asked.prompt or ""
        return asked, render(self._served.chat_template, asked.messages, asked.tools, asked.add_generation_prompt)


class DetokenizeExchange(_TokenizerExchange):
    """``POST /detokenize``."""

    body_type = DetokenizeBody

    async def respond(self, body: Body, arrival: Arrival) -> None:
        """Send the text of token ids."""
        asked = await self._bodies.parse(body, partial(parsed, DetokenizeBody), arrival.deadline)
        self._served.check_model(asked.model)
        check_token_ids("tokens", asked.tokens, await self._inference.limits(arrival))
        await self.send_json({"prompt": self.tokenizer.decode(asked.tokens)})
