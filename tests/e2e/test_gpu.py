"""A prefill and a decode worker that share one GPU (over CUDA IPC, or by way of the host), or have one each (NCCL)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdserve import Client
from pdserve.core.worker import Role
from tests.local_cluster import local_cluster
from tests.random_models import greedy_tokens, save_random_model

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="torch sees no GPU; the same on CPUs is in test_tokens.py"
    ),
    pytest.mark.timeout(600),
]

PROMPT = [11, 7, 200, 41, 5, 99, 3] * 24


TWO_GPUS = [
    pytest.mark.cuda2,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason=f"torch sees {torch.cuda.device_count()} GPUs, NCCL needs two"
    ),
]


@pytest.mark.parametrize(
    ("transport", "taken", "gpus"),
    [
        ("auto", "cuda_ipc", {}),
        ("tcp", "tcp", {}),
        ("grpc_stream", "grpc_stream", {}),
        pytest.param("auto", "torch_dist", {"prefill-0": 0, "decode-0": 1}, marks=TWO_GPUS),
    ],
)
@pytest.mark.parametrize("overlap", ["layer", "none"])
def test_tokens(tmp_path: Path, transport: str, taken: str, gpus: dict[str, int], overlap: str) -> None:
    model = save_random_model(tmp_path, "gqa")
    settings = {
        "model": {"path": str(model), "dtype": "float32"},
        "engine": {"num_blocks": 64, "max_num_batched_tokens": 64},
        "transfer": {"transport": transport, "overlap": overlap, "checksum": "device"},
    }
    with local_cluster(settings, device="cuda", gpus=gpus) as cluster, Client(cluster.target) as client:
        for _ in range(3):
            result = client.generate(PROMPT, max_tokens=8, mode="pd").result()
            assert list(result.token_ids) == greedy_tokens(model, PROMPT, 8)
            assert result.transport == taken
            assert result.kv_bytes == result.kv_bytes_expected > 0
            hashed = "device-64" if taken in ("cuda_ipc", "torch_dist") else "xxh3-64"
            assert result.transfer.checksum == f"{hashed} verified"
        assert result.transfer.ceiling_gbs > 0
        cluster.wait_idle()


@pytest.mark.parametrize("mps", ["off", "auto"])
@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
def test_a_killed_worker_costs_no_request(tmp_path: Path, name: str, mps: str) -> None:
    """The worker is started again at once, as Ray would."""
    model = save_random_model(tmp_path, "gqa")
    settings = {
        "model": {"path": str(model), "dtype": "float32"},
        "cluster": {"mps": mps},
        "transfer": {"checksum": "device"},
        "engine": {"num_blocks": 256, "max_num_batched_tokens": 64},
        "router": {"patience_s": 120.0},
    }
    prompts = [[11 + number, *PROMPT] for number in range(4)]
    with local_cluster(settings, device="cuda") as cluster, Client(cluster.target) as client:
        streams = [client.generate(prompt, max_tokens=24, mode="pd", timeout_s=300) for prompt in prompts]
        next(streams[0])
        cluster.kill(name)
        cluster.start_worker(Role(name.removesuffix("-0")), 0)
        results = [stream.result() for stream in streams]
        for prompt, result in zip(prompts, results, strict=True):
            assert list(result.token_ids) == greedy_tokens(model, prompt, 24)
        assert any(result.attempts > 1 for result in results)
        cluster.wait_ready(600)
        cluster.wait_idle()
