"""The start of workers on a GPU, end to end, over a stand-in for CUDA that raises on misuse. CPU code takes the place
of kernels; all else is what runs on a GPU."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from contract.engine import KVRole
from engine.kernels.cpu_attention import CPUAttention
from engine.model.attention import Attention, AttentionStep
from engine.model.decoder import Decoder, DecoderLayer
from engine.model.draft_model import DraftModel
from engine.model.kv_pool import KVPool
from engine.process.build import BuiltEngine, build_engine
from engine.process.cuda_build import CONTEXT_BYTES, CudaParts, default_pool_bytes
from engine.scheduling.batch import ScheduledSeq
from engine.scheduling.kv_connector import KVConnector
from engine.scheduling.scheduler import Scheduler
from engine.spec import EngineSpec
from kv_transfer.factory import choose, create_transport, offered_transports
from kv_transfer.memory import DeviceMemory
from kv_transfer.pool import Pool
from kv_transfer.transports.nixl_agent import NixlAgent
from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import ConfigError
from runtime.cuda import Cuda
from tests.engine.harness import make_core, submit
from tests.kv_transfer.fake_nixl import FakeNetwork
from tests.loopback import SECRET
from tests.strict_cuda import StrictGpus
from worker.incarnation import PoolMemory

TINY = str(Path(__file__).resolve().parents[2] / "models" / "tiny")
MIB = 2**20
GPU_BYTES = 2 * CONTEXT_BYTES + 96 * MIB
STEP_BYTES = 10 * MIB


class Graphs:
    """Decode graphs that never fit a step."""

    def __init__(self) -> None:
        self.captured = False

    def capture(self, cuda: Cuda, index: int) -> None:
        """Record one."""
        cuda.record_graph(lambda: None, index).replay()
        self.captured = True

    def fits(self, seqs: object) -> bool:
        """Never."""
        return False

    def logits(self, seqs: object, before: object) -> torch.Tensor:
        """Never called."""
        raise AssertionError


class Engine:
    """An engine process on ``gpus``, and its worker process, which gives it the memory of its pool."""

    def __init__(self, gpus: StrictGpus, share: float = 0.5, **spec: object) -> None:
        self.cuda, self.worker = gpus.process(), gpus.process()
        self.memory = PoolMemory(self.worker)
        self.graphs = Graphs()
        fields: dict[str, object] = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "dtype": "float32"}
        self.spec = EngineSpec(TINY, device="cuda", device_share=share, **(fields | spec))  # type: ignore[arg-type]
        self.built: BuiltEngine = build_engine(
            self.spec, -1, self.cuda, lambda spec: self._parts(), pool_memory=self.memory.share
        )

    def open_pool(self) -> Pool:
        """What the worker opens."""
        ready = self.built.ready
        return Pool.open(ready.layout, ready.num_blocks, ready.pool_handle, -1, self.memory.allocated, self.worker)

    def _parts(self) -> CudaParts:
        cuda = self.cuda

        class Attending(CPUAttention):
            """A step over this needs memory while it is computed."""

            def plan(self, seqs: Sequence[ScheduledSeq]) -> AttentionStep:
                cuda.computed(0, STEP_BYTES if any(len(s.token_ids) > 1 for s in seqs) else STEP_BYTES // 5)
                return super().plan(seqs)

        def attention(pool: KVPool, model: Decoder) -> Attention:
            return Attending(pool, model.shape.num_heads, model.windows)

        return CudaParts(DecoderLayer, attention, lambda *_: self.graphs)


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes the number of its threads once per process, and here are several engines in one."""
    monkeypatch.setattr(torch, "set_num_interop_threads", lambda _: None)


async def test_two_workers_on_one_gpu_start_and_meet() -> None:
    gpus = StrictGpus(total_bytes=GPU_BYTES * 2)
    prefill, decode = Engine(gpus), Engine(gpus)
    assert prefill.graphs.captured
    assert prefill.cuda.calls[0] == "init"
    assert prefill.built.ready.device == "strict GPU"
    pools = [engine.open_pool() for engine in (prefill, decode)]
    assert not any(pool.memory.imported for pool in pools if isinstance(pool.memory, DeviceMemory))
    # A prompt is computed in chunks, and layers are told while the next ones are computed.
    assert _compute_prompt(prefill) > 2
    sent = _block(pools[0], 0)
    assert bool(sent.any()), "the worker does not see what the engine computed"
    # The two choose the GPU's own transport, open each other's pools, and copy a block.
    names = offered_transports("auto", device="cuda", shared_device=True)
    assert names[0] == "cuda_ipc"
    there, here = (create_transport("cuda_ipc", pool.memory, SECRET, timeout_s=5.0) for pool in pools)
    endpoint = await here.listen("127.0.0.1")
    assert choose([there], [endpoint], "decode-0")[0].name == "cuda_ipc"
    link, accepted = await asyncio.gather(there.connect(endpoint, 5.0), here.accept())
    accepted.introduced()
    await link.send(b"block 0", await link.payload(pools[0].regions([0])))
    message = await accepted.recv()
    assert message.header == b"block 0"
    fetch = accepted.fetch(pools[1].regions([5]))
    await fetch
    await fetch.commit()
    got = _block(pools[1], 5)
    assert torch.equal(sent, got)
    await link.aclose()
    await accepted.aclose()
    await there.aclose()
    await here.aclose()
    del sent, got, message, fetch, link, accepted
    for pool in pools:
        pool.close()
    del there, here, pool, pools
    gc.collect()
    memories = [prefill.memory, decode.memory]  # the worker processes outlive their engines
    del prefill, decode
    gc.collect()
    memories.clear()
    gc.collect()
    gpus.check()


def _block(pool: Pool, block_id: int) -> torch.Tensor:
    parts = [pool.memory.view(region) for region in pool.regions([block_id])]
    return torch.cat([part for part in parts if isinstance(part, torch.Tensor)])


def _compute_prompt(engine: Engine) -> int:
    """How many events its KV thread gets."""
    clock = MonotonicClock()
    connector = KVConnector(clock, engine.built.ready.layout, layer_groups=2)
    core, outbox = make_core(engine.built.runner, Scheduler(engine.built.scheduler_config, clock, connector))
    core.take(submit("r", KVRole.PUSH, list(range(70)), 8))
    while core.step():
        pass
    return len(outbox.kv_events)


def test_a_draft_model_has_a_pool_of_as_many_blocks() -> None:
    """The pools of both share what is left. The draft model's is the engine's own."""
    engine, alone = (Engine(StrictGpus(total_bytes=GPU_BYTES * 3), draft_model=name) for name in (TINY, ""))
    assert isinstance(engine.built.drafter, DraftModel)
    layout, blocks = engine.built.ready.layout, engine.built.ready.num_blocks
    graphs = alone.built.ready.num_blocks * layout.block_bytes - 2 * blocks * layout.block_bytes
    expected = STEP_BYTES // 5 + 64 * 2**20  # those of the draft model
    assert expected <= graphs < expected + 3 * layout.block_bytes
    assert engine.worker.calls.count("memory is allocated") == 1
    clock = MonotonicClock()
    scheduler = Scheduler(engine.built.scheduler_config, clock, None, engine.built.drafter)
    core, outbox = make_core(engine.built.runner, scheduler, run_ahead=True)
    core.take(submit("r", KVRole.LOCAL, list(range(70)), 30, speculation=True, ignore_eos=True))
    while core.step():
        pass
    assert len(outbox.token_ids["r"]) == 30
    assert scheduler.load().accepted_draft_tokens == scheduler.load().draft_tokens > 20


def test_the_next_engine_gets_the_memory_of_one_that_has_died() -> None:
    """CUDA would not free what a dead process had open."""
    gpus = StrictGpus(total_bytes=GPU_BYTES * 2)
    first = Engine(gpus)
    allocations = first.worker.calls.count("memory is allocated")
    pool, handle = first.open_pool(), first.built.ready.pool_handle
    pool.close()
    memory, worker = first.memory, first.worker
    second = Engine.__new__(Engine)
    second.cuda, second.worker, second.memory, second.graphs = gpus.process(), worker, memory, Graphs()
    second.built = build_engine(first.spec, -1, second.cuda, lambda spec: second._parts(), pool_memory=memory.share)
    assert second.built.ready.pool_handle == handle
    assert worker.calls.count("memory is allocated") == allocations == 1
    assert second.open_pool().num_blocks == second.built.ready.num_blocks


def test_nixl_registers_a_pool_where_it_was_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNetwork().install(monkeypatch)
    engine = Engine(StrictGpus(total_bytes=GPU_BYTES * 2))
    pool = engine.open_pool()
    NixlAgent(pool.memory).close()
    imported = DeviceMemory.open(engine.built.ready.pool_handle["share"], cuda=engine.cuda)
    with pytest.raises(ConfigError, match=r"transfer\.transport: nixl .* the engine has allocated its pool itself"):
        NixlAgent(imported)


def test_engines_that_start_together_get_equal_pools() -> None:
    """The second one starts beside the first one's pool: what is free then does not matter."""
    gpus = StrictGpus(total_bytes=GPU_BYTES * 2)
    first, second = Engine(gpus), Engine(gpus)
    alone = Engine(StrictGpus(total_bytes=GPU_BYTES * 2))
    sizes = {engine.built.ready.num_blocks for engine in (first, second, alone)}
    assert len(sizes) == 1
    layout = alone.built.ready.layout
    needed = (0, STEP_BYTES + layout.block_bytes, STEP_BYTES // 5 + layout.block_bytes)
    assert sizes == {default_pool_bytes(GPU_BYTES * 2, 0.5, *needed) // layout.block_bytes}
    assert alone.built.ready.num_blocks > 4


def test_the_pool_is_what_the_rest_leaves() -> None:
    gib = 2**30
    plain = default_pool_bytes(80 * gib, 1.0, 16 * gib, 4 * gib)
    assert 54 * gib < plain < 57 * gib
    assert default_pool_bytes(80 * gib, 1.0, 16 * gib, 4 * gib, gib) < plain - gib
    half = default_pool_bytes(80 * gib, 0.5, 16 * gib, 4 * gib)
    total = 2 * (half + 20 * gib + 2 * CONTEXT_BYTES)
    assert total < 80 * gib, "two engines with half a GPU each fit onto it"
    assert default_pool_bytes(16 * gib, 1.0, 16 * gib, gib) == 0
    limited = default_pool_bytes(80 * gib, 1.0, 16 * gib, 4 * gib, limit_bytes=40 * gib)
    assert 0 < limited < 20 * gib
    assert 9 * gib < plain - default_pool_bytes(80 * gib, 1.0, 16 * gib, 4 * gib, links_bytes=10 * gib) < 11 * gib
    assert default_pool_bytes(80 * gib, 1.0, 16 * gib, 4 * gib, limit_bytes=100 * gib) == plain


def test_a_gpu_that_is_too_small_or_missing_is_an_error_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kv_memory_mb: 0\.0 MiB are less than one block"):
        Engine(StrictGpus(total_bytes=CONTEXT_BYTES), share=1.0)
    with pytest.raises(
        ConfigError, match=r"engine\.kv_memory_mb: a KV pool of .* does not fit: the GPU has too little"
    ):
        Engine(StrictGpus(total_bytes=16 * MIB), num_blocks=10_000)
    with monkeypatch.context() as patched:

        def full(*_: object) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

        patched.setattr(Decoder, "logits", full)
        with pytest.raises(
            ConfigError, match=r"engine\.max_num_batched_tokens: the GPU lacks memory for a step of 32 "
        ):
            Engine(StrictGpus(total_bytes=GPU_BYTES))
    with pytest.raises(ConfigError, match="torch finds no GPU"):
        Engine(StrictGpus(num_gpus=0))
