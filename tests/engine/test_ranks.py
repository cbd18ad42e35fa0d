"""The processes of a tensor-parallel engine. `tests.engine.test_model_vs_transformers` has the tokens of every family,
and `tests.e2e.test_tensor_parallel` hand-offs and deaths."""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from checkpoints.source import resolve_model
from contract.engine import KVRole, TokenOut
from engine.model.loader import load_weights
from engine.model.share import Share
from engine.model.weights import ModelWeights, named_tensors
from engine.process.client import EngineClient
from engine.process.ranks import SharedSums
from engine.spec import EngineSpec
from pdserve.core.errors import ConfigError, ModelError
from tests.engine.harness import submit
from tests.engine.test_loader import flip
from tests.engine.test_process import Engine
from tests.random_models import save_random, save_random_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_of_processes(ranks: int) -> None:
    """Each draws the same numbers, and sees what all have added and shown, of any size and type."""
    fd = SharedSums.create(ranks)
    children = []
    for rank in range(1, ranks):
        if not (child := os.fork()):
            status = 1
            try:
                _take_part(SharedSums(fd, rank, ranks), rank, ranks)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    _take_part(SharedSums(fd, 0, ranks), 0, ranks)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * len(children)
    os.close(fd)


def _take_part(sums: SharedSums, rank: int, ranks: int) -> None:
    draw, generator = random.Random(1), torch.Generator().manual_seed(1)
    for turn in range(300):
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
        rows, columns = draw.choice([(1, 1), (3, 7), (1, 576), (40, 64), (0, 8), (700, 1000 if turn % 50 == 0 else 2)])
        sizes = [columns + draw.randrange(3) for _ in range(ranks)]
        numbers = [torch.randint(-8, 8, (rows, size), generator=generator).to(dtype) for size in sizes]
        if draw.random() < 0.1:
            sums.meet()
        if draw.random() < 0.5:
            mine = numbers[rank][:, :columns].clone()
            assert torch.equal(
                sums.sum(mine), sum((each[:, :columns] for each in numbers[1:]), numbers[0][:, :columns])
            )
        else:
            shown = sums.gather(numbers[rank], sizes)
            assert torch.equal(shown, numbers[rank] if rank or not rows else torch.cat(numbers, dim=1))


@pytest.mark.parametrize("model", ["dummy", "gqa", "phi3", "mixtral", "olmo2"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_shares_are_parts_of_the_model(tmp_path: Path, model: str, ranks: int) -> None:
    """What the ranks have of a matrix is all of it, once. That it is in its place, the tokens of all families show."""
    base = {"vocab_size": 131, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": False}
    kinds = {"dummy": "llama", "gqa": "llama"}
    config = base | heads | {"model_type": kinds.get(model, model), "num_local_experts": 3, "head_dim": 16}
    save_random(tmp_path, config, seed=1)
    path = f"dummy:{tmp_path / 'config.json'}" if model == "dummy" else str(tmp_path)
    source = resolve_model(path)
    whole = named_tensors(load_weights(source, torch.float32, CPU))
    shares = [Share(source.shape, rank, ranks) for rank in range(ranks)]
    parts = [named_tensors(load_weights(source, torch.float32, CPU, share=share)) for share in shares]
    for name, tensor in whole.items():
        assert isinstance(tensor, torch.Tensor)
        of_ranks = [part[name] for part in parts]
        if all(each.shape == tensor.shape for each in of_ranks):
            assert all(isinstance(each, torch.Tensor) and torch.equal(each, tensor) for each in of_ranks), name
            continue
        put_together = torch.cat([each.flatten() for each in of_ranks if isinstance(each, torch.Tensor)])
        assert torch.equal(put_together.sort()[0], tensor.flatten().sort()[0]), name


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_what_a_rank_of_a_large_model_holds(ranks: int) -> None:
    """A model of 70 billion parameters: what its tensors have is what `pdserve model-info` tells."""
    shape = replace(
        resolve_model("dummy:8b").shape, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64
    )
    shares = [Share(shape, rank, ranks).shape for rank in range(ranks)]
    for share in (shares[0], shares[-1]):
        tensors = named_tensors(ModelWeights(share, torch.bfloat16, torch.device("meta")))
        assert sum(tensor.shape.numel() for tensor in tensors.values()) == share.num_parameters
    copies = 2 * shape.num_layers * max(0, ranks - 8) * 128 * 8192  # of KV heads that two ranks have
    norms = (ranks - 1) * (2 * shape.num_layers + 1) * 8192
    assert sum(share.num_parameters for share in shares) == shape.num_parameters + copies + norms


async def test_logprobs_of_a_prompt(tmp_path: Path) -> None:
    folder = save_random_model(tmp_path, "gqa")
    prompt = [(i * 37 + 11) % 300 for i in range(45)]
    told: list[list[TokenOut]] = []
    for ranks in (1, 2):
        spec = EngineSpec(
            str(folder), "float32", block_size=8, num_blocks=64, max_num_batched_tokens=16, tensor_parallel=ranks
        )
        client = EngineClient()
        engine = Engine(client, await client.start(spec, 60.0))
        client.send(submit("a", KVRole.LOCAL, prompt, 4, ignore_eos=True, prompt_logprobs=2, logprobs=2))
        await engine.finished("a")
        told.append(engine.tokens("a"))
        await client.stop(5.0)
        await engine.aclose()
    one, two = told
    assert [each.token_id for each in one] == [each.token_id for each in two]
    assert len(one[0].prompt_logprobs) == len(prompt) - 1
    for mine, theirs in zip(one[0].prompt_logprobs, two[0].prompt_logprobs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


async def test_who_waits_for_a_rank_that_hangs_looks_hung(tmp_path: Path) -> None:
    """It uses hardly any processor time, by which `worker.watchdog` sees it."""
    folder = save_random_model(tmp_path, "gqa")
    client = EngineClient()
    engine = Engine(
        client, await client.start(EngineSpec(str(folder), "float32", num_blocks=9, tensor_parallel=2), 60.0)
    )
    process = psutil.Process(client.pid)
    (rank,) = process.children()
    rank.suspend()
    client.send(submit("a", KVRole.LOCAL, range(40), 4))
    await asyncio.sleep(1.5)
    before = process.cpu_times()
    await asyncio.sleep(2.0)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system <= 0.05
    await client.stop(0.0)
    await engine.aclose()
    rank.wait(10.0)


async def test_what_cannot_start(tmp_path: Path) -> None:
    """The error is that of one process, and no process is left."""
    folder = save_random_model(tmp_path, "gqa")
    for changes, error, message in (
        ({"tensor_parallel": 16}, ConfigError, "engine.tensor_parallel: 16 devices are more than the 8 heads"),
        ({"tensor_parallel": 2, "num_blocks": 10**9}, ConfigError, "engine.kv_memory_mb"),
    ):
        client = EngineClient()
        with pytest.raises(error, match=message):
            await client.start(EngineSpec(str(folder), "float32", **{"num_blocks": 64, **changes}), 60.0)  # type: ignore[arg-type]
    flip(next(folder.glob("*.safetensors")), 8)
    client = EngineClient()
    with pytest.raises(ModelError, match="safetensors"):
        await client.start(EngineSpec(str(folder), "float32", num_blocks=64, tensor_parallel=2), 60.0)
