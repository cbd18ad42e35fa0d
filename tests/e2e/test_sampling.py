"""With a seed, tokens are the same alone, in a batch, after a hand-off, after a preemption and after a resume;
penalties and logprobs are transformers' own, whichever worker sampled the token."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaForCausalLM

from pdserve import AsyncClient, Client, Token
from pdserve.core.errors import InvalidRequest
from tests.local_cluster import LocalCluster, leaked_blocks, local_cluster
from tests.random_models import greedy_tokens, save_random_model

PROMPT = [11, 7, 200, 41, 5, 99, 3] * 8
TOKENS = 60
EVERYTHING: dict[str, Any] = {
    "max_tokens": TOKENS,
    "temperature": 1.5,
    "top_k": 100,
    "top_p": 0.98,
    "min_p": 0.001,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.7,
    "logit_bias": {17: 6.0, 18: -100.0},
    "logprobs": 3,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models"), "gqa")


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[LocalCluster]:
    """Each decode worker has room for two requests of full length."""
    engine = {"block_size": 16, "num_blocks": 20, "max_num_batched_tokens": 64}
    with local_cluster({"model": {"path": str(model), "dtype": "float32"}, "engine": engine}, decode=2) as started:
        yield started


def check_logprobs(model: Path, prompt: Sequence[int], tokens: Sequence[Token], num_top: int) -> None:
    """Each token's logprobs are those of transformers' logits after all tokens before it."""
    oracle = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = [token.token_id for token in tokens]
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    for token, wanted in zip(tokens, logits.log_softmax(dim=-1), strict=True):
        assert token.logprob == pytest.approx(float(wanted[token.token_id]), abs=1e-4)
        top = wanted.topk(num_top).values.tolist()
        assert [candidate.logprob for candidate in token.top_logprobs] == pytest.approx(top, abs=1e-4)
        for candidate in token.top_logprobs:
            assert candidate.logprob == pytest.approx(float(wanted[candidate.token_id]), abs=1e-4)


def test_neither_hand_off_nor_batch_nor_preemption_changes_a_draw(model: Path, cluster: LocalCluster) -> None:
    draw = random.Random(5)
    prompts = [[draw.randrange(307) for _ in range(40)] for _ in range(6)]
    long = {**EVERYTHING, "max_tokens": 100}
    with Client(cluster.target) as client:
        alone = [client.generate(prompt, seed=i, mode="colocated", **long).result() for i, prompt in enumerate(prompts)]
        apart = client.generate(prompts[0], seed=0, mode="pd", **long).result()
        other = client.generate(prompts[0], seed=1, mode="pd", **long).result()
    assert apart.token_ids == alone[0].token_ids != other.token_ids
    assert apart.kv_bytes == apart.kv_bytes_expected > 0
    for result in (apart, alone[0]):
        check_logprobs(model, prompts[0], result.tokens, 3)

    async def together() -> None:
        async with AsyncClient(cluster.target) as client:
            results = await asyncio.gather(
                *(client.generate(prompt, seed=i, mode="pd", **long).result() for i, prompt in enumerate(prompts))
            )
        assert [result.token_ids for result in results] == [result.token_ids for result in alone]

    asyncio.run(together())
    status, deadline_s = cluster.wait_idle(), time.monotonic() + 60
    while not any(worker.preemptions for worker in status.workers):  # until heartbeats tell of them
        assert time.monotonic() < deadline_s, status
        status = cluster.wait_idle()
    assert leaked_blocks(status) == 0


@pytest.mark.parametrize("mode", ["pd", "colocated"])
def test_greedy_with_a_repetition_penalty_is_transformers_own(model: Path, cluster: LocalCluster, mode: str) -> None:
    expected = greedy_tokens(model, PROMPT, TOKENS, repetition_penalty=1.3)
    assert expected != greedy_tokens(model, PROMPT, TOKENS)
    with Client(cluster.target) as client:
        result = client.generate(PROMPT, max_tokens=TOKENS, mode=mode, repetition_penalty=1.3, logprobs=20).result()
    assert list(result.token_ids) == expected
    check_logprobs(model, PROMPT, result.tokens, 20)


@pytest.mark.parametrize("mode", ["pd", "colocated"])
def test_a_bias_forces_and_forbids(cluster: LocalCluster, mode: str) -> None:
    with Client(cluster.target) as client:
        forced = client.generate(PROMPT, max_tokens=5, mode=mode, logit_bias={42: 100}).result()
        free = client.generate(PROMPT, max_tokens=5, mode=mode).result()
        without = client.generate(PROMPT, max_tokens=5, mode=mode, logit_bias={free.token_ids[0]: -100}).result()
        with pytest.raises(InvalidRequest, match=r"^logit_bias: token id 307 is not below"):
            client.generate(PROMPT, max_tokens=5, mode=mode, logit_bias={307: 1}).result()
    assert forced.token_ids == (42,) * 5
    assert free.token_ids[0] not in without.token_ids


def test_a_resume_changes_no_draw(cluster: LocalCluster) -> None:
    """The decode worker's engine is killed in mid-stream; penalties still tell prompt from output afterwards."""
    long = {**EVERYTHING, "max_tokens": 250}
    with Client(cluster.target) as client, Client(cluster.operator) as operator:
        whole = client.generate(PROMPT, seed=9, mode="colocated", **long).result()
        for _ in range(20):  # until it is killed before its last token
            stream = client.generate(PROMPT, seed=9, mode="pd", timeout_s=60, **long)
            for _ in range(5):
                next(stream)
            busy = next((w for w in operator.status().workers if w.role == "decode" and w.outstanding_tokens), None)
            if busy is not None:
                psutil.Process(busy.engine_pid).kill()
            resumed = stream.result()
            assert resumed.token_ids == whole.token_ids
            if resumed.attempts >= 2:
                break
            cluster.wait_ready()
        else:
            raise AssertionError("every stream was over before its engine died")
    for ours, theirs in zip(resumed.tokens, whole.tokens, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
