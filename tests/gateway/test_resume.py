"""A request whose client already has some tokens: it goes on after them, and ends as if nothing had happened."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from gateway.tokenizer import Tokenizer
from pdserve.pb import inference_pb2 as pb
from tests.gateway.conftest import PROMPT, Service, StartService
from tests.gateway.test_generate import refused, speaks


def asked(service: Service) -> int:
    """How many requests the workers got."""
    return sum(len(worker.requests) for worker in service.fleet.values())


@pytest.mark.parametrize("mode", [pb.MODE_PD, pb.MODE_COLOCATED])
async def test_it_goes_on_after_any_token(service: Service, tokenizer: Tokenizer, mode: pb.Mode.ValueType) -> None:
    """Texts of several bytes per character and a stop string cross the break."""
    answer = tokenizer.encode("größer 日本語 the lazy dog jumps over")
    speaks(service, answer, 5)
    fields: dict[str, Any] = {
        "token_ids": PROMPT, "mode": mode, "request_id": "same",
        "sampling": pb.Sampling(max_tokens=len(answer), stop=["g jum"]),
    }  # fmt: skip
    whole, expected = await service.generate(**fields)
    assert expected.finish_reason == "stop"
    ids = [token.token_id for token in whole]
    for count in range(1, len(whole) + 1):
        before = asked(service)
        tokens, completion = await service.generate(**fields, resume_token_ids=ids[:count])
        assert tokens == whole[count:], "ids, texts and indices"
        assert (completion.text, completion.token_ids) == (expected.text, expected.token_ids)
        assert (completion.finish_reason, completion.request_id) == ("stop", "same")
        assert (completion.prompt_tokens, completion.output_tokens) == (5, len(whole))
        assert not completion.gateway_ttft_ms
        assert (asked(service) == before) == (count == len(whole)), "one that had ended is not computed"
    service.check_idle()


async def test_one_that_had_ended_by_its_length_or_by_a_token(start_service: StartService) -> None:
    service = await start_service()
    for worker_id in ("p0", "d0"):
        service.make(worker_id, eos_token_ids=(9,))
    await service.bring_up("p0", "d0")
    for sampling, reason in (
        (pb.Sampling(max_tokens=4), "stop"),
        (pb.Sampling(max_tokens=4, ignore_eos=True), "length"),
        (pb.Sampling(max_tokens=8, ignore_eos=True, stop_token_ids=[9]), "stop"),
    ):
        tokens, completion = await service.generate(sampling=sampling, resume_token_ids=[6, 7, 8, 9], mode=pb.MODE_PD)
        assert (tokens, completion.finish_reason) == ([], reason)
        assert (completion.output_tokens, list(completion.token_ids)) == (4, [6, 7, 8, 9])
    assert asked(service) == 0
    sampling = pb.Sampling(max_tokens=6, ignore_eos=True)
    tokens, completion = await service.generate(sampling=sampling, resume_token_ids=[6, 7, 8, 9], mode=pb.MODE_PD)
    assert [(token.token_id, token.index) for token in tokens] == [(10, 4), (11, 5)]


async def test_what_cannot_be_resumed_is_refused(service: Service) -> None:

    async def refusal(sampling: pb.Sampling, ids: list[int]) -> str:
        message, _ = await refused(service, grpc.StatusCode.INVALID_ARGUMENT, sampling=sampling, resume_token_ids=ids)
        return message

    assert (await refusal(pb.Sampling(max_tokens=2), [6, 7, 8])).startswith(
        "resume_token_ids: 3 tokens are more than max_tokens (2)"
    )
    assert (await refusal(pb.Sampling(max_tokens=2), [2**31])).startswith("resume_token_ids: token id 2147483648")
    assert (await refusal(pb.Sampling(max_tokens=2, temperature=1), [6])).startswith("seed: a sampled request can be")
    tokens, _ = await service.generate(sampling=pb.Sampling(max_tokens=2, temperature=1, seed=1), resume_token_ids=[6])
    assert len(tokens) == 1
