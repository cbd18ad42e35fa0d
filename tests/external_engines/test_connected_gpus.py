"""Workers on GPUs whose engine is a vLLM server with pdserve's connector, as in `test_connected_servers`, over a
stand-in for CUDA. The KV cache is vLLM's own memory, which workers open, and a GPU computes later than its host
launches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import kv_transfer.memory
from pdserve import AsyncClient
from pdserve.core.errors import LaunchError, LayoutMismatch
from tests.external_engines.connected_vllm import HEAD_DIM, HEADS, NUM_BLOCKS, NUM_LAYERS, FileCuda
from tests.external_engines.recorded_vllm import greedy
from tests.external_engines.served import Service
from tests.external_engines.test_connected_servers import (
    LONG,
    ask,
    ask_more_than_the_pool_holds,
    asked_when_linked,
    connected,
    end_a_server,
)
from tests.external_engines.test_started_servers import started_service
from tests.strict_cuda import StrictGpus
from worker.worker import Worker


@pytest.fixture(autouse=True)
def _gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = StrictGpus()
    monkeypatch.setattr(kv_transfer.memory, "_torch_cuda", lambda: FileCuda(gpus, [0], 132))


@asynccontextmanager
async def service(
    folder: Path, prefill: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Service[Worker]]:
    """``prefill`` are further settings of the prefill worker."""
    configs = connected(folder, **{**settings, **(prefill or {})}), connected(folder, **settings)
    async with (
        started_service(*configs, device="cuda") as (gateway, workers),
        AsyncClient(f"127.0.0.1:{gateway.port}") as client,
    ):
        served = Service(gateway, client, *workers)
        yield served
        await served.until(lambda: {worker.free_blocks for worker in served.workers().values()} == {NUM_BLOCKS})


@pytest.mark.parametrize(("transport", "overlap"), [("cuda_ipc", "layer"), ("tcp", "chunk")])
async def test_a_hand_off_from_gpu_to_gpu(tmp_path: Path, transport: str, overlap: str) -> None:
    async with service(tmp_path, None, **{"transfer.transport": transport, "transfer.overlap": overlap}) as served:
        await served.ready()
        result = await ask(served, LONG)
        assert list(result.token_ids) == greedy(LONG, 8)
        assert (result.prefill_worker, result.decode_worker) == ("prefill-0", "decode-0")
        assert result.kv_bytes == result.kv_bytes_expected == 10 * NUM_LAYERS * HEADS * 2 * HEAD_DIM * 16 * 4
        assert result.transport == transport
        for prompt in (LONG[:143], LONG[:144]):  # token 1 ends a block, the prompt does
            assert list((await ask(served, prompt)).token_ids) == greedy(prompt, 8)
        assert list((await ask(served, LONG, "colocated")).token_ids) == greedy(LONG, 8)


async def test_reused_blocks_and_the_end_of_a_server(tmp_path: Path) -> None:
    """Links are measured beside requests, in blocks that belong to no request. The prefill server ends, whose memory
    both workers use."""
    async with service(tmp_path) as served:
        await ask_more_than_the_pool_holds(served)
        await end_a_server(served, "prefill-0")


async def test_servers_whose_kernels_order_a_block_in_different_ways_are_no_pair(tmp_path: Path) -> None:
    prefill = {"worker.arguments": ["--attention-backend", "FLASHINFER"]}
    async with service(tmp_path, prefill) as served:
        await served.until(lambda: len(served.gateway.registry.workers) == 2)
        with pytest.raises(LayoutMismatch, match="FLASHINFER"):
            await asked_when_linked(served)


async def test_a_model_that_is_split_over_gpus_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError):
        async with service(tmp_path, None, **{"worker.arguments": ["--tensor-parallel-size", "2"]}):
            pass
    assert "pdserve's connector does not split models over GPUs" in capfd.readouterr().err
