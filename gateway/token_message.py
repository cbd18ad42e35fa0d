"""One token of a stream as the client gets it."""

from __future__ import annotations

from gateway.tokenizer import Tokenizer
from pdserve.pb import inference_pb2 as pb
from router.request_record import RoutedToken


def token_to_proto(token: RoutedToken, text: str, index: int, tokenizer: Tokenizer | None) -> pb.Token:
    """The message: ``text`` is what the token adds to the output. Its logprobs are the token's own, whatever of its
    text is held back or trimmed; so they are always in step with ``token_id``."""
    message = pb.Token(token_id=token.token_id, text=text, index=index)
    if (logprobs := token.logprobs) is not None:
        message.logprob = logprobs.logprob
        for token_id, logprob in logprobs.top:
            alone = tokenizer.token_text(token_id) if tokenizer else ""
            message.top_logprobs.append(pb.TopLogprob(token_id=token_id, text=alone, logprob=logprob))
    return message
