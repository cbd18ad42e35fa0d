from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.grpc_api.messages import submission_of
from gateway.tokenizer import Tokenizer
from gateway.validation import (
    Limits,
    Submission,
    check_sampling,
    check_token_options,
    fit_max_tokens,
    max_message_bytes,
    prompt_of,
    seeded,
)
from pdserve.core.errors import CapacityExceeded, InvalidRequest
from pdserve.core.request import Mode
from pdserve.core.sampling import SamplingParams, StructuredOutputs
from pdserve.pb import inference_pb2 as pb

LIMITS = Limits(context_length=200, pool_tokens=1000, vocab_size=500)


def message(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**fields)


def submission(**fields: Any) -> Submission:
    return submission_of(message(**fields).SerializeToString())


def read_sampling(asked: Submission, tokenizer: Tokenizer | None) -> SamplingParams:
    check_sampling(asked.sampling, tokenizer)
    return seeded(asked.sampling, asked.request_id)


def test_modes() -> None:
    assert [submission(mode=number).mode for number in (0, 1, 2, 3)] == [
        Mode.AUTO, Mode.AUTO, Mode.PD, Mode.COLOCATED,
    ]  # fmt: skip
    with pytest.raises(InvalidRequest, match=r"^mode: 17 is unknown; use MODE_AUTO"):
        submission(mode=17)


def test_sampling_has_the_defaults_and_a_seed_of_its_own(tokenizer: Tokenizer) -> None:
    """A request that is sent again gets the same tokens."""
    a, again, b = (read_sampling(submission(request_id=name), tokenizer) for name in ("a", "a", "b"))
    assert msgspec.structs.replace(a, seed=None) == SamplingParams()
    assert a == again != b
    assert 0 <= (a.seed or 0) < 2**63


def test_every_kind_of_sampling_is_read(tokenizer: Tokenizer) -> None:
    given: dict[str, Any] = {
        "max_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.25, "seed": 0, "stop": ("x",), "ignore_eos": True,
        "stop_token_ids": (9, 3), "min_p": 0.5, "repetition_penalty": 1.5, "presence_penalty": -2.0, "logprobs": 0,
        "frequency_penalty": 2.0, "logit_bias": {4: -100.0}, "prompt_logprobs": 2,
    }  # fmt: skip
    assert {*given, "structured_outputs", "speculation"} == set(pb.Sampling.DESCRIPTOR.fields_by_name)
    twice = {**given, "stop_token_ids": [9, 3, 9, 9, 3]}
    assert read_sampling(submission(sampling=pb.Sampling(**twice)), tokenizer) == SamplingParams(**given)
    structure = pb.Sampling(structured_outputs=pb.StructuredOutputs(regex="a"))
    assert read_sampling(submission(sampling=pb.Sampling(speculation=False)), tokenizer).speculation is False
    found = read_sampling(submission(sampling=structure), tokenizer).structured_outputs
    assert found == StructuredOutputs("regex", "a")


def test_stop_strings_and_structures_need_a_tokenizer() -> None:
    with pytest.raises(InvalidRequest, match=r"^stop: this model has no tokenizer"):
        read_sampling(submission(sampling=pb.Sampling(stop=["x"])), None)
    structure = pb.StructuredOutputs(regex="a")
    with pytest.raises(InvalidRequest, match=r"^structured_outputs: this model has no tokenizer"):
        read_sampling(submission(sampling=pb.Sampling(structured_outputs=structure)), None)


async def test_prompts(tokenizer: Tokenizer) -> None:
    assert await prompt_of(submission(text="the quick"), tokenizer, LIMITS) == tokenizer.encode("the quick")
    assert await prompt_of(submission(token_ids=pb.TokenIds(ids=[3, 499])), None, LIMITS) == (3, 499)


def test_a_message_that_is_none_says_so() -> None:
    for data in (b"\xff\xff\xff", b"\x12\x02\xc3\x28"):  # no protobuf; `text` that is not UTF-8
        with pytest.raises(InvalidRequest, match=r"^message: it is not a GenerateRequest, or a string"):
            submission_of(data)


def test_messages_are_bounded_by_the_context(tokenizer: Tokenizer) -> None:
    assert max_message_bytes(200, tokenizer) == 2**20
    sampling = pb.Sampling(
        stop=["😀" * 1024] * 16,
        stop_token_ids=[2**32 - 1] * 1024,
        logit_bias={2**32 - 1: 1},
        structured_outputs=pb.StructuredOutputs(regex="😀" * 2**16),
    )
    for length in (10**5, 10**6):
        text = "\n" * (length * tokenizer.longest_token_bytes)
        longest = message(text=text, sampling=sampling).ByteSize()
        assert longest < max_message_bytes(length, tokenizer) < 3 * longest
        ids = message(token_ids=pb.TokenIds(ids=[2**32 - 1] * length), sampling=sampling).ByteSize()
        assert ids < max_message_bytes(length, None) < 3 * ids


def fit(prompt_tokens: int, max_tokens: int | None, limits: Limits = LIMITS) -> int:
    sampling = pb.Sampling() if max_tokens is None else pb.Sampling(max_tokens=max_tokens)
    asked = submission(sampling=sampling)
    return fit_max_tokens(asked, prompt_tokens, limits).max_tokens


def test_max_tokens_are_clipped_only_if_the_client_did_not_say() -> None:
    assert fit(10, None) == 128
    assert fit(150, None) == 50
    assert fit(150, 50) == 50
    with pytest.raises(InvalidRequest, match=r"^max_tokens: 51 after a prompt of 150 .* ask for at most 50"):
        fit(150, 51)
    with pytest.raises(InvalidRequest, match=r"^prompt: 200 tokens leave no room in the context of 200"):
        fit(200, None)


def test_a_request_that_fits_the_context_but_no_pool_exceeds_the_capacity() -> None:
    small = Limits(context_length=200, pool_tokens=64, vocab_size=500)
    assert fit(10, None, small) == 54
    assert fit(10, 54, small) == 54
    with pytest.raises(CapacityExceeded, match=r"engine\.kv_memory_mb"):
        fit(10, 55, small)
    with pytest.raises(CapacityExceeded):
        fit(100, None, small)


def test_logit_bias_leaves_a_token() -> None:
    sampling = read_sampling(submission(sampling=pb.Sampling(logit_bias=dict.fromkeys(range(4), -100.0))), None)
    check_token_options(sampling, 5)
    with pytest.raises(InvalidRequest, match=r"^logit_bias: all 4 tokens are forbidden"):
        check_token_options(sampling, 4)
