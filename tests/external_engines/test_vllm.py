"""The pure functions of `external_engines.vllm`: bodies of requests, and the reading of answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from external_engines.adapter import lacking
from external_engines.vllm import VLLM
from pdserve.core.errors import HandOffMissing, InvalidRequest, PdserveError, WorkerLost
from pdserve.core.request import Request
from pdserve.core.sampling import FinishReason, SamplingParams, StructuredOutputs, TokenLogprobs

VLLM_ = VLLM()
PARAMS = {"remote_block_ids": [[1, 2]], "remote_engine_id": "e", "remote_host": "h", "remote_port": 1}


def request(output: tuple[int, ...] = (), **sampling: Any) -> Request:
    return Request("r", (1, 2, 3), SamplingParams(max_tokens=10, seed=7, **sampling), salt="s", output_token_ids=output)


def choice(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"finish_reason": None, "logprobs": None, "token_ids": [5], **fields}]}


def test_the_legs_of_a_hand_off_differ_in_what_they_must_alone() -> None:
    alone, prefill = VLLM_.alone(request(), "m"), VLLM_.prefill(request(), "m", None)
    decode = VLLM_.decode(request(), "m", PARAMS)
    assert alone.pop("stream_options") == {"include_usage": True}
    assert {key for key in alone if alone[key] != prefill[key]} == {"stream", "max_tokens"}
    assert prefill["max_tokens"] == 1
    assert prefill["kv_transfer_params"]["do_remote_decode"] is True
    assert decode == alone | {"kv_transfer_params": PARAMS}


def test_every_parameter_is_sent_so_that_no_default_of_the_model_counts() -> None:
    body = VLLM_.alone(request(temperature=0.5, stop_token_ids=(9,), logit_bias={4: 1.0}, logprobs=2), "m")
    expected = {
        "temperature": 0.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7, "ignore_eos": False,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop_token_ids": [9],
        "logit_bias": {"4": 1.0}, "logprobs": 2, "cache_salt": "s", "max_tokens": 10, "prompt": [1, 2, 3],
    }  # fmt: skip
    assert {key: body[key] for key in expected} == expected


def test_a_retry_continues_after_the_tokens_so_far() -> None:
    body = VLLM_.alone(request(output=(8, 9)), "m")
    assert (body["prompt"], body["max_tokens"]) == ([1, 2, 3, 8, 9], 8)


@pytest.mark.parametrize(
    ("kind", "text", "sent"),
    [("json", '{"type": "object"}', {"json": {"type": "object"}}), ("regex", "a+", {"regex": "a+"})],
)
def test_structures(kind: Any, text: str, sent: dict[str, Any]) -> None:
    wanted = request(structured_outputs=StructuredOutputs(kind, text))
    assert VLLM_.alone(wanted, "m")["structured_outputs"] == sent
    assert lacking(VLLM_.abilities, wanted) == ""
    assert lacking(VLLM_.abilities, request(speculation=False)).startswith("speculation: ")
    again = msgspec.structs.replace(wanted, output_token_ids=(4,))
    assert lacking(VLLM_.abilities, again).startswith("structured_outputs: ")


def test_log_probabilities_of_prompts_are_refused_by_name() -> None:
    assert lacking(VLLM_.abilities, request(prompt_logprobs=1)).startswith("prompt_logprobs")


@pytest.mark.parametrize("missing", list(PARAMS))
def test_an_answer_without_all_of_the_hand_off_is_refused(missing: str) -> None:
    assert VLLM_.hand_off({"kv_transfer_params": PARAMS}) == PARAMS
    with pytest.raises(HandOffMissing, match=missing):
        VLLM_.hand_off({"kv_transfer_params": PARAMS | {missing: None}})


def test_a_part_of_an_answer() -> None:
    logprobs = {"token_logprobs": [-0.5], "top_logprobs": [{"token_id:6": -2.0, "token_id:5": -0.5}]}
    step = VLLM_.read(choice(finish_reason="stop", logprobs=logprobs))
    assert step.tokens == [(5, TokenLogprobs(-0.5, ((5, -0.5), (6, -2.0))))]
    assert step.finish_reason is FinishReason.STOP
    usage = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 3}}}
    assert VLLM_.read(usage).cached_tokens == 3


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ({"message": "too long", "code": 400}, InvalidRequest),
        ({"message": "engine died", "code": 500}, WorkerLost),
        ("engine died", WorkerLost),
    ],
)
def test_reported_errors(error: Any, expected: type[PdserveError]) -> None:
    with pytest.raises(expected):
        VLLM_.read({"error": error})


@pytest.mark.parametrize("part", [{}, {"choices": [{}]}, {"choices": 3}])
def test_other_answers_are_errors_that_the_worker_explains(part: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, IndexError)):
        VLLM_.read(part)


def test_an_end_that_is_no_end_of_the_output_loses_the_worker() -> None:
    with pytest.raises(WorkerLost, match="abort"):
        VLLM_.read(choice(finish_reason="abort"))
