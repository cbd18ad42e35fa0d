"""What is launched for a step never waits for the GPU. It runs on tensors without numbers, in place of a GPU's: every
look at a number is an error, and so is every copy that waits."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model.kv_pool import KVPool
from engine.model.runner import LastTokens, ModelRunner
from engine.model.sampler import draw_tokens, likeliest_by_key, logprobs_of
from engine.model.token_draw import Key
from engine.scheduling.batch import PENDING, ScheduledSeq
from engine.scheduling.sequence import PromptLogprobs, TokenHistory
from engine.scheduling.structures import Matcher
from pdserve.core.kv_layout import KVLayout
from pdserve.core.sampling import SamplingParams, StructuredOutputs
from runtime.cuda import upload

VOCABULARY = 5000
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(temperature=0.7),
    "top_p": SamplingParams(temperature=0.7, top_p=0.9),
    "top_k": SamplingParams(temperature=0.7, top_k=20, min_p=0.1),
    "penalties": SamplingParams(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.2),
    "bias": SamplingParams(temperature=0.0, logit_bias={3: 100.0, 4: -100.0}),
    "structured": SamplingParams(temperature=0.7, structured_outputs=StructuredOutputs("regex", "[a-z]+")),
    "logprobs": SamplingParams(temperature=0.0, logprobs=5),
    "own_logprob": SamplingParams(temperature=0.0, logprobs=0),
}


class AnyToken(Matcher):
    """Matches all outputs."""

    def __init__(self) -> None:
        """Needs no structure."""

    def append(self, token_id: int) -> None:
        """Nothing."""

    def mask(self) -> bytes:
        return bytes([255]) * 1000


class WaitingCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """An error for copies between host and GPU that wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            if waits and result.device != source.device:
                raise AssertionError(f"a copy from {source.device} to {result.device} waits")
        return result


@contextmanager
def a_gpu_without_numbers(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The device of tensors whose numbers must not be read."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    with WaitingCopies():  # type: ignore[no-untyped-call]
        yield torch.device("meta")


def one_launch(
    weights: torch.Tensor, sums: torch.Tensor, wanted: torch.Tensor, keys: Sequence[Key], top_ps: Sequence[float]
) -> torch.Tensor:
    """In place of the kernel, which PyTorch does not see."""
    return torch.empty(len(keys), dtype=torch.int64, device=weights.device)


@pytest.mark.parametrize("kinds", [*([kind] for kind in KINDS), [*KINDS]], ids=[*KINDS, "all"])
def test_sampling_never_waits(kinds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    params = [KINDS[kind] for kind in kinds] * 2
    histories = [TokenHistory([1, 2, 3], 2, AnyToken()) for _ in params]
    with a_gpu_without_numbers(monkeypatch) as device:
        logits = torch.empty(len(params), VOCABULARY, dtype=torch.bfloat16, device=device)
        drawn = draw_tokens(logits, params, list(range(len(params))), histories, one_launch)
        assert drawn.tensors[0].shape == (len(params),)
        assert all(tensor.device.type == "meta" for tensor in drawn.tensors)


def test_logprobs_of_prompts_never_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_gpu_without_numbers(monkeypatch) as device:
        model: Any = SimpleNamespace(
            vocab_size=VOCABULARY,
            logits=lambda hidden: torch.empty(len(hidden), VOCABULARY, dtype=torch.bfloat16, device=device),
        )
        pool: Any = SimpleNamespace(tensor=torch.empty(0, device=device))
        attention: Any = None  # nothing is computed before
        prompt = PromptLogprobs(range(50), 5)
        seq = ScheduledSeq("a", list(range(10, 30)), 10, [1], False, KINDS["greedy"], None, prompt)
        _, tensors = ModelRunner(model, attention, pool)._prompt_logprobs([seq], torch.empty(20, 64, device=device))
        assert [tuple(tensor.shape) for tensor in tensors] == [(20,), (20, 5), (20, 5)]


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed")
def test_inputs_of_a_step_never_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.kernels.cuda_attention import CUDAAttention
    from engine.kernels.cuda_graphs import DecodeGraphs

    layout = KVLayout.uniform("m", "bfloat16", 16, 2, 2, 64)
    params = KINDS["greedy"]
    decodes = [
        ScheduledSeq("a", [PENDING], 17, [3, 4], True, params),
        ScheduledSeq("b", [7], 3, [5], True, params),
    ]
    chunk = ScheduledSeq("c", [1, 2, 3, 4], 0, [6], True, params)
    with a_gpu_without_numbers(monkeypatch) as device:
        pool = KVPool(layout, 8, torch.empty(8 * layout.block_bytes // 2, dtype=torch.bfloat16, device=device), {})
        attention = CUDAAttention(pool)
        model: Any = None  # launches are not what is looked at
        graphs = DecodeGraphs(model, attention, pool, 8, 4)
        runner = ModelRunner(model, attention, pool, graphs)
        runner.last = LastTokens(torch.empty(3, dtype=torch.int64, device=device), {"a": 2})
        graphs._load(decodes, 4, runner.last.rows)
        step, wanted = runner._step([*decodes, chunk])
        assert step.token_ids.shape == step.positions.shape == (6,)
        assert [seq.attempt_id for seq in wanted] == ["b", "c", "a"], "ordered by context"


def test_the_test_sees_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_gpu_without_numbers(monkeypatch) as device:
        logits = torch.empty(2, VOCABULARY, device=device)
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
            draw_tokens(logits, [KINDS["top_p"]] * 2, [0, 1], None)  # PyTorch's turns
        with pytest.raises(AssertionError, match="waits"):
            torch.tensor([1, 2]).to(device)
        assert upload([1, 2], torch.int64, device).device == device


def test_the_likeliest_tokens_by_key_are_those_of_the_plain_way() -> None:
    torch.manual_seed(2)
    logits = torch.randn(6, VOCABULARY).mul_(4).round_()  # many ties
    logits[5, :4990] = -torch.inf
    logprobs = logits.log_softmax(dim=1, dtype=torch.float32)
    _, plain_ids, plain_values = logprobs_of(logits, torch.zeros(6, dtype=torch.int64), 9)
    ids, values = likeliest_by_key(logprobs, 9)
    assert torch.equal(ids, plain_ids)
    assert torch.equal(values, plain_values)
