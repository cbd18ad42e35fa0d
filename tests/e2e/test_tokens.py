"""A request's tokens are the same whichever way it takes: disaggregated or colocated, in a batch, with its KV in a
cache or on disk, after a preemption and after a lost engine. Greedy tokens and logprobs are those of transformers, and
bytes moved are bytes predicted."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from pdserve import AsyncClient, Client, InvalidRequest, Token
from pdserve.client.status import ServiceStatus
from pdserve.core.prefix_digests import PrefixDigests, keyed_salt
from pdserve.pb import inference_pb2 as pb
from pdserve.pb import inference_pb2_grpc
from tests.e2e.conftest import wait_for
from tests.local_cluster import LocalCluster, local_cluster
from tests.random_models import SHAPES, greedy_tokens, save_random_model

BLOCK = 16
NUM_BLOCKS = 32
"""Room for a prompt of four chunks, and too few for what the tests of preemption ask for at once."""
TOKENS = 12
LENGTHS = (1, BLOCK, BLOCK + 1, 230)  # the last has four chunks, each of which travels layer by layer
PROMPT = [11, 7, 200, 41, 5, 99, 3] * 8
EVERYTHING: dict[str, Any] = {
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
OTHER_SHAPES = [pytest.param(shape, marks=pytest.mark.soak) for shape in SHAPES if shape != "gqa"]
"""`tests.engine` compares every shape with transformers, `tests.kv_transfer` hands over every layout."""


@pytest.fixture(scope="module", params=["gqa", *OTHER_SHAPES])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of cold blocks."""
    return tmp_path_factory.mktemp("offload") / "cold"


@pytest.fixture(scope="module")
def cluster(model: Path, folder: Path) -> Iterator[LocalCluster]:
    engine = {"block_size": BLOCK, "num_blocks": NUM_BLOCKS, "max_num_batched_tokens": 64, "speculation": "ngram"}
    offload = {"offload_folder": str(folder), "offload_disk_mb": 64}
    settings = {"model": {"path": str(model), "dtype": "float32"}, "engine": {**engine, **offload}}
    with local_cluster({**settings, "router": {"heartbeat_s": 0.2}}) as started:
        yield started


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster.target) as client:
        yield client
    cluster.wait_idle()


def prompt_of(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(307) for _ in range(length)]


def test_same_tokens_whichever_way(model: Path, client: Client) -> None:
    shape = SHAPES[model.name]
    head_dim = shape.get("head_dim", 64 // shape["num_attention_heads"])
    layout_bytes = 2 * 3 * shape["num_key_value_heads"] * head_dim * 4
    for length in LENGTHS:
        prompt = prompt_of(length, length)
        apart = client.generate(prompt, max_tokens=TOKENS, mode="pd").result()
        together = client.generate(prompt, max_tokens=TOKENS, mode="colocated").result()
        assert apart.token_ids == together.token_ids == tuple(greedy_tokens(model, prompt, TOKENS)), length
        assert (apart.mode, together.mode) == ("pd", "colocated")
        assert (apart.prefill_worker, apart.decode_worker) == ("prefill-0", "decode-0")
        assert apart.kv_bytes == apart.kv_bytes_expected == -(-length // BLOCK) * BLOCK * layout_bytes
        assert together.kv_bytes == together.kv_bytes_expected == 0
    one = client.generate(PROMPT, max_tokens=1, mode="pd").result()
    assert one.token_ids == tuple(greedy_tokens(model, PROMPT, 1))
    assert (one.kv_bytes, one.kv_bytes_expected, one.ttft_decode_ms) == (0, 0, None)


@pytest.mark.parametrize("mode", ["pd", "colocated"])
def test_guesses_change_no_token(model: Path, cluster: LocalCluster, client: Client, mode: str) -> None:
    drawn: dict[str, Any] = {"temperature": 0.9, "seed": 5, "logprobs": 2}
    penalised = {**drawn, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    two_words: dict[str, Any] = {**drawn, "logit_bias": {5: 100, 9: 100}}  # three of them repeat soon
    drafts = 0
    for sampling in ({}, drawn, penalised, two_words):
        plain, guessed = (
            client.generate(PROMPT, max_tokens=60, mode=mode, speculation=wanted, **sampling).result()
            for wanted in (False, True)
        )
        assert guessed.token_ids == plain.token_ids
        assert [token.logprob is None for token in guessed.tokens] == [not sampling] * 60
        assert plain.draft_tokens == 0
        assert 0 <= guessed.accepted_draft_tokens <= guessed.draft_tokens
        if not sampling:
            assert guessed.token_ids == tuple(greedy_tokens(model, PROMPT, 60))
        drafts = guessed.draft_tokens
    assert drafts > 20
    wait_for(
        cluster.target,
        "the drafts are counted",
        lambda status: drafts <= sum(each.draft_tokens for each in status.workers),
    )


def test_a_draft_model(model: Path) -> None:
    """Half of a pool's bytes is that of the draft model, which is the model itself here; no token changes."""
    layout_bytes = 2 * 3 * SHAPES[model.name]["num_key_value_heads"] * (64 // SHAPES[model.name]["num_attention_heads"])
    engine = {"block_size": BLOCK, "kv_memory_mb": 1, "speculation": str(model)}
    with local_cluster({"model": {"path": str(model), "dtype": "float32"}, "engine": engine}) as cluster:
        with Client(cluster.target) as client:
            for mode in ("pd", "colocated"):
                prompt = prompt_of(5 * BLOCK + 3, 7)
                plain, guessed = (
                    client.generate(prompt, max_tokens=40, mode=mode, speculation=wanted).result()
                    for wanted in (False, True)
                )
                assert guessed.token_ids == plain.token_ids == tuple(greedy_tokens(model, prompt, 40))
                assert guessed.accepted_draft_tokens == guessed.draft_tokens > 30
                assert (
                    plain.kv_bytes == plain.kv_bytes_expected == (6 * BLOCK * 4 * layout_bytes if mode == "pd" else 0)
                )
            workers = client.status().workers
        cluster.wait_idle()
    assert {worker.num_blocks for worker in workers} == {2**20 // (2 * 4 * layout_bytes * BLOCK)}


def test_coded_kv(model: Path) -> None:
    """Fewer bytes on the link, and the same tokens whichever way."""
    settings = {
        "model": {"path": str(model), "dtype": "bfloat16"},
        "engine": {"block_size": BLOCK, "num_blocks": NUM_BLOCKS},
        "transfer": {"transport": "tcp", "codec": "lossless"},
    }
    with local_cluster(settings) as cluster:
        with Client(cluster.target) as client:
            prompt = prompt_of(5 * BLOCK + 3, 1)
            apart, together = (
                client.generate(prompt, max_tokens=TOKENS, mode=mode).result() for mode in ("pd", "colocated")
            )
            (link,) = next(worker.links for worker in client.status().workers if worker.links)
        cluster.wait_idle()
    assert apart.token_ids == together.token_ids
    assert apart.kv_bytes == apart.kv_bytes_expected > apart.transfer.wire_bytes > 0.6 * apart.kv_bytes
    assert link.reason.endswith(", lossless coding")


def test_a_kv_cache_in_fp8(model: Path) -> None:
    """A quarter of the bytes of float32, and the same tokens whichever way."""
    shape = SHAPES[model.name]
    head_dim = shape.get("head_dim", 64 // shape["num_attention_heads"])
    token_bytes = 2 * 3 * shape["num_key_value_heads"] * head_dim
    engine = {"block_size": BLOCK, "num_blocks": NUM_BLOCKS, "kv_dtype": "fp8"}
    with local_cluster({"model": {"path": str(model), "dtype": "float32"}, "engine": engine}) as cluster:
        with Client(cluster.target) as client:
            assert client.status().kv_bytes_per_token == token_bytes
            with pytest.raises(InvalidRequest, match=r"^speculation: this service has none"):
                client.generate(PROMPT, speculation=True).result()
            prompt = prompt_of(5 * BLOCK + 3, 1)
            apart, together = (
                client.generate(prompt, max_tokens=TOKENS, mode=mode).result() for mode in ("pd", "colocated")
            )
        cluster.wait_idle()
    assert apart.token_ids == together.token_ids
    assert apart.kv_bytes == apart.kv_bytes_expected == 6 * BLOCK * token_bytes


def counts(status: ServiceStatus) -> dict[str, tuple[int, int]]:
    return {w.worker_id: (w.prompt_tokens_looked_up, w.prompt_tokens_cached) for w in status.workers}


@pytest.mark.parametrize("length", [5 * BLOCK + 3, 5 * BLOCK])
def test_a_prompt_comes_again(model: Path, cluster: LocalCluster, client: Client, length: int) -> None:
    """Its KV is found on both sides, the rest is computed, and the rest moves."""
    prompt = prompt_of(length, length)
    before = counts(cluster.up_to_date())
    first, second = (client.generate(prompt, max_tokens=TOKENS, mode="pd").result() for _ in range(2))
    other = client.generate(prompt, max_tokens=TOKENS, mode="pd", salt="another tenant").result()
    together = client.generate(prompt, max_tokens=TOKENS, mode="colocated").result()
    assert first.token_ids == second.token_ids == other.token_ids == together.token_ids
    assert first.token_ids == tuple(greedy_tokens(model, prompt, TOKENS))

    for cold in (first, other):
        assert (cold.prefill_cached_tokens, cold.kv_blocks_skipped) == (0, 0)
        assert cold.kv_bytes == cold.kv_bytes_expected > 0
    block_bytes = first.kv_bytes // first.kv_blocks_sent
    total = -(-length // BLOCK)
    assert second.prefill_cached_tokens == (length - 1) // BLOCK * BLOCK  # one token at least is computed
    assert second.kv_blocks_skipped == length // BLOCK == 5  # decode needs none of it computed
    assert second.kv_blocks_sent == total - 5
    assert second.kv_bytes == second.kv_bytes_expected == (total - 5) * block_bytes
    assert together.prefill_cached_tokens == second.prefill_cached_tokens

    # Three prompts on both workers, and the colocated one on either.
    status = cluster.up_to_date()
    for worker, (tokens, cached) in counts(status).items():
        assert tokens - before[worker][0] in (3 * length, 4 * length)
        assert cached - before[worker][1] >= second.prefill_cached_tokens
    assert all(worker.cached_blocks > 0 for worker in status.workers)


def test_what_a_request_received_is_kept_even_if_nothing_was_left_to_decode(model: Path, client: Client) -> None:
    prompt = prompt_of(3 * BLOCK + 2, 7)
    (stop,) = greedy_tokens(model, prompt, 1)
    first, second = (
        client.generate(prompt, max_tokens=4, stop_token_ids=[stop], mode="pd", salt="stop").result() for _ in range(2)
    )
    assert first.token_ids == second.token_ids == (stop,)
    assert (first.kv_blocks_skipped, second.kv_blocks_skipped) == (0, 3)
    assert second.kv_bytes == second.kv_bytes_expected == first.kv_bytes // 4


def test_a_prompt_that_the_pools_forgot_is_read_from_disk(
    model: Path, folder: Path, cluster: LocalCluster, client: Client
) -> None:
    """Also by an engine that starts after the one that wrote it was killed."""
    prompt = prompt_of(6 * BLOCK + 3, 11)
    expected = tuple(greedy_tokens(model, prompt, TOKENS))
    digests = PrefixDigests(keyed_salt("", cluster.secret.cache_key), BLOCK).first(6, prompt)
    for turn, cached in enumerate((0, 6 * BLOCK, 6 * BLOCK)):
        result = client.generate(prompt, max_tokens=TOKENS, mode="pd").result()
        assert result.token_ids == expected
        assert result.kv_bytes == result.kv_bytes_expected
        assert result.prefill_cached_tokens == cached
        if turn == 0:
            for other in range(6):
                client.generate(prompt_of(len(prompt), 100 + other), max_tokens=2, mode="pd").result()
            deadline_s = time.monotonic() + 60
            while not all((folder / "prefill-0" / digest.hex()).exists() for digest in digests):
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
        elif turn == 1:
            engine = cluster.engine_pid("prefill-0")
            psutil.Process(engine).kill()
            cluster.wait_restarted("prefill-0", engine)
    assert sorted(path.name for path in folder.iterdir()) == ["decode-0", "prefill-0"]


def check_logprobs(model: Path, prompt: Sequence[int], tokens: Sequence[Token | pb.Token], num_top: int) -> None:
    """Each token's logprobs are those of transformers' logits after all tokens before it."""
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = [token.token_id for token in tokens]
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    for token, wanted in zip(tokens, logits.log_softmax(dim=-1), strict=True):
        assert token.logprob == pytest.approx(float(wanted[token.token_id]), abs=1e-4)
        top = wanted.topk(num_top).values.tolist()
        assert [candidate.logprob for candidate in token.top_logprobs] == pytest.approx(top, abs=1e-4)
        for candidate in token.top_logprobs:
            assert candidate.logprob == pytest.approx(float(wanted[candidate.token_id]), abs=1e-4)


def test_a_prompts_logprobs(model: Path, cluster: LocalCluster, client: Client) -> None:
    """Those of every token but the first, over several chunks, though the workers have its KV."""
    prompt = prompt_of(230, 230)
    client.generate(prompt, max_tokens=1).result()
    expected = greedy_tokens(model, prompt, TOKENS)
    with grpc.insecure_channel(cluster.target) as channel:
        generate = inference_pb2_grpc.InferenceStub(channel).Generate
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt), sampling=pb.Sampling(max_tokens=TOKENS, prompt_logprobs=3)
        )
        for mode, resumed in ((pb.MODE_PD, 0), (pb.MODE_COLOCATED, 0), (pb.MODE_PD, 5), (pb.MODE_PD, TOKENS)):
            request.mode, request.resume_token_ids[:] = mode, expected[:resumed]
            *tokens, last = generate(request, timeout=60)
            assert len(tokens) == TOKENS - resumed
            assert list(last.completion.token_ids) == expected
            assert last.completion.prefill_cached_tokens == 0
            first, *others = last.completion.prompt_logprobs
            assert (first.token_id, first.HasField("logprob")) == (prompt[0], False)
            assert [token.token_id for token in others] == prompt[1:]
            check_logprobs(model, prompt[:1], others, 3)


def test_neither_hand_off_nor_batch_nor_preemption_changes_a_draw(
    model: Path, cluster: LocalCluster, client: Client
) -> None:
    prompts = [prompt_of(40, seed) for seed in range(5)]
    long = {**EVERYTHING, "max_tokens": 100}
    alone = [client.generate(prompt, seed=i, mode="colocated", **long).result() for i, prompt in enumerate(prompts)]
    apart = client.generate(prompts[0], seed=0, mode="pd", **long).result()
    other = client.generate(prompts[0], seed=1, mode="pd", **long).result()
    assert apart.token_ids == alone[0].token_ids != other.token_ids
    assert apart.kv_bytes == apart.kv_bytes_expected
    for result in (apart, alone[0]):
        check_logprobs(model, prompts[0], result.tokens, 3)

    async def together() -> None:
        async with AsyncClient(cluster.target) as client:
            results = await asyncio.gather(
                *(client.generate(prompt, seed=i, mode="pd", **long).result() for i, prompt in enumerate(prompts))
            )
        assert [result.token_ids for result in results] == [result.token_ids for result in alone]

    asyncio.run(together())
    assert any(worker.preemptions for worker in cluster.up_to_date().workers)


def test_a_resume_changes_no_draw(cluster: LocalCluster, client: Client) -> None:
    """The decode worker's engine is killed in mid-stream; penalties still tell prompt from output afterwards."""
    long = {**EVERYTHING, "max_tokens": 250, "seed": 9}
    whole = client.generate(PROMPT, mode="colocated", **long).result()
    resumed = cluster.resumed(client, PROMPT, **long)
    assert resumed.token_ids == whole.token_ids
    for ours, theirs in zip(resumed.tokens, whole.tokens, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
