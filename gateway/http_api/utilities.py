"""The calls that convert between text and tokens, under the names that vLLM gives them."""

from __future__ import annotations

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
        super().__init__(served.inference, served.max_body_bytes)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; `InvalidRequest` if it has none."""
        if self._inference.tokenizer is None:
            raise InvalidRequest("model: it has no tokenizer")
        return self._inference.tokenizer


class TokenizeExchange(_TokenizerExchange):
    """``POST /tokenize``."""

    async def respond(self, data: bytes, arrival: Arrival) -> None:
        """Send the token ids of a prompt or of messages."""
        body, tokenizer, limits = parsed(TokenizeBody, data), self.tokenizer, self._inference.limits()
        self._served.check_model(body.model)
        special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
        if body.messages is not None:
            template = self._served.chat_template
            text = render(template, body.messages, body.tools, body.add_generation_prompt)
        else:
            text = body.prompt or ""
        reading = text_to_token_ids(text, tokenizer, limits, special)
        token_ids = await arrival.deadline.bound(reading, "its prompt was tokenized")
        answer = {"count": len(token_ids), "max_model_len": limits.context_length, "tokens": token_ids}
        if body.return_token_strs:
            answer["token_strs"] = [tokenizer.token_text(token_id) for token_id in token_ids]
        await self.send_json(answer)


class DetokenizeExchange(_TokenizerExchange):
    """``POST /detokenize``."""

    async def respond(self, data: bytes, arrival: Arrival) -> None:
        """Send the text of token ids."""
        body, tokenizer = parsed(DetokenizeBody, data), self.tokenizer
        self._served.check_model(body.model)
        check_token_ids("tokens", body.tokens, self._inference.limits())
        await self.send_json({"prompt": tokenizer.decode(body.tokens)})
