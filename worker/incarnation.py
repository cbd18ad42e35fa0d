"""An incarnation of a worker: one engine process, its KV pool, the KV ends over that pool, and the epoch that
identifies them. When the engine dies, the whole incarnation ends and the worker begins another one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

from contract.engine import EnginePort, Load, Ready
from engine.process.client import EngineClient
from engine.spec import EngineSpec
from kv_transfer.factory import create_transport, offered_transports
from kv_transfer.memory import DeviceMemory
from kv_transfer.pool import Pool
from kv_transfer.transports.shaped import Shape
from pdserve.core.chance import SYSTEM
from pdserve.core.clock import Clock
from pdserve.core.config import TransferConfig
from pdserve.core.errors import LaunchError, PeerLost
from pdserve.core.handoff import KVEndpoint
from pdserve.core.prefix_digests import MAX_UPDATE_BLOCKS, SNAPSHOT, BlockUpdate, pack, unpack
from runtime.awake_clock import awake_clock
from runtime.plane_tls import PlaneTls
from runtime.secret import ServiceSecret
from runtime.threads import in_thread
from worker.addresses import resolve_interface
from worker.kv import KVThread
from worker.request_table import EngineResources
from worker.spec import WorkerSpec
from worker.watchdog import Watchdog

if TYPE_CHECKING:
    from runtime.cuda import Cuda

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
NCCL_LINK_BYTES = (2 * 2 * 32 + 2 * 8 * 4) * 2**20
"""GPU memory of a link by NCCL: two payloads of 32 MiB on their way in each direction, and the buffers of two
communicators with 8 channels (4 MiB each, an estimate)."""


class CachedBlocks:
    """The blocks in the prefix cache of one incarnation, and its last `MAX_UPDATE_BLOCKS` changes.

    Positions number the changes from the start. A gateway says up to which position it knows them, so that nothing is
    kept for each gateway.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, None] = {}  # in the order in which they came
        self._changes: list[int] = []  # a hash, or ~hash if the block was removed
        self._begins = 0  # position of the first of them

    @property
    def ends(self) -> int:
        """The position after the last change."""
        return self._begins + len(self._changes)

    def change(self, added: bytes, removed: bytes) -> None:
        """Note what the engine has reported (`contract.engine.CacheChanged`)."""
        for block in unpack(removed):
            if block in self._blocks:
                del self._blocks[block]
                self._changes.append(~block)
        for block in unpack(added):
            if block not in self._blocks:
                self._blocks[block] = None
                self._changes.append(block)
        if len(self._changes) > 2 * MAX_UPDATE_BLOCKS:
            surplus = len(self._changes) - MAX_UPDATE_BLOCKS
            self._begins += surplus
            del self._changes[:surplus]

    def since(self, position: int) -> BlockUpdate:
        """The changes from ``position`` on. A snapshot if it is `SNAPSHOT`, unknown, or too long ago: of a larger cache
        it has the blocks that came last."""
        if not self._begins <= position <= self.ends or self.ends - position > MAX_UPDATE_BLOCKS:
            newest = islice(self._blocks, max(0, len(self._blocks) - MAX_UPDATE_BLOCKS), None)
            return BlockUpdate(SNAPSHOT, self.ends, pack(newest))
        last = {max(change, ~change): change >= 0 for change in self._changes[position - self._begins :]}
        added = pack(block for block, is_cached in last.items() if is_cached)
        removed = pack(block for block, is_cached in last.items() if not is_cached)
        return BlockUpdate(position, self.ends, added, removed)


class PoolMemory:
    """The memory of a worker's KV pool on a GPU. The worker allocates it, because NIXL can register only memory of its
    own process, and keeps it for the next engine if one dies: CUDA's allocator would not free memory that a dead
    process had open. ``cuda`` allocates (default: torch)."""

    def __init__(self, cuda: Cuda | None = None) -> None:
        self._cuda = cuda
        self.allocated: DeviceMemory | None = None
        """None before the first `share`, and if it does not fit."""

    def share(self, num_bytes: int) -> list[Any]:
        """A handle of at least ``num_bytes``, which only one engine uses at a time. Empty if they do not fit."""
        if self.allocated is None or self.allocated.size < num_bytes:
            import torch  # which a worker without a GPU does without

            self.allocated = None  # first, so that there is room
            try:
                self.allocated = DeviceMemory.create(num_bytes, "cuda", self._cuda)
            except torch.OutOfMemoryError:
                return []  # the engine will say so
        return self.allocated.handle


StartEngine = Callable[[WorkerSpec, bool, PoolMemory], Awaitable[tuple[EnginePort, Ready, Callable[[], Pool]]]]
"""Starts the engine of a worker, which joins NCCL groups or not, and returns it with how to open its pool. PdserveError
if that fails; nothing is left running then."""


class Incarnation:
    """Created by `start` and ended by `stop`. ``load`` is the load that the engine reported last,
    ``cached_blocks`` what is in its prefix cache, ``steps`` how many `Step` events there were, and ``busy_s`` the
    seconds that they took."""

    def __init__(
        self,
        engine: EnginePort,
        kv: KVThread,
        ready: Ready,
        epoch: str,
        kv_endpoints: tuple[KVEndpoint, ...],
        watchdog: Watchdog,
        transfer: TransferConfig,
    ) -> None:
        self.engine = engine
        self.kv = kv
        self.ready = ready
        self.epoch = epoch
        self.kv_endpoints = kv_endpoints
        self.watchdog = watchdog
        self.resources = EngineResources(engine.send, kv, ready.layout, ready.vocab_size, transfer)
        self.load = Load(free_blocks=ready.num_blocks, running=0, waiting=0, preemptions=0)
        self.cached_blocks = CachedBlocks()
        self.steps = 0
        self.busy_s = 0.0

    @classmethod
    async def start(
        cls,
        spec: WorkerSpec,
        secret: ServiceSecret,
        clock: Clock,
        tls: PlaneTls | None = None,
        memory: PoolMemory | None = None,
        start_engine: StartEngine | None = None,
    ) -> Self:
        """Start an engine (default: pdserve's), whose pool on a GPU is in ``memory``, and KV ends for peers that know
        the service's ``secret`` and have its ``tls``. Raises PdserveError if that fails; nothing is left running
        then."""
        transfer = spec.config.transfer
        # A configured transport that cannot work is an error before the model is loaded.
        shape = Shape.of(transfer)
        names = await in_thread(
            "kv-offered",
            lambda: offered_transports(
                transfer.transport,
                device=spec.device,
                shared_device=spec.device_share < 1,
                shaped=shape is not None,
            ),
        )
        interface = await in_thread("kv-interface", lambda: resolve_interface(transfer.interface, spec.host))
        if transfer.interface is not None and interface.device:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface.device}")
        start = start_engine or _start_engine
        engine, ready, open_pool = await start(spec, "torch_dist" in names, memory or PoolMemory())
        epoch = SYSTEM.randbytes(16).hex()
        kv: KVThread | None = None
        pool: Pool | None = None
        try:
            pool = open_pool()
            kv = KVThread(
                pool,
                [create_transport(name, pool.memory, secret, tls=tls, shape=shape) for name in names],
                transfer,
                engine,
                worker_id=spec.worker_id,
                epoch=epoch,
                clock=clock,
                eos_token_ids=ready.eos_token_ids,
            )
            try:
                endpoints = await kv.start(interface.address, spec.kv_port)
            except PeerLost as error:
                raise LaunchError(
                    f"worker {spec.worker_id}: {error}; see transfer.interface and cluster.port_base"
                ) from None
            # The engine's silence counts only while this process can read its answers.
            watchdog = Watchdog(
                engine,
                spec.worker_id,
                awake_clock(),
                spec.config.engine.hang_timeout_s,
                on_gpu=spec.device.startswith("cuda"),
            )
        except BaseException:
            if kv is not None:
                await kv.aclose()
            elif pool is not None:
                pool.close()
            await engine.stop(STOP_TIMEOUT_S)
            raise
        log.info(
            "%s: engine ready on %s after %.1f s; KV at %s",
            *(spec.worker_id, ready.device, ready.load_s, ", ".join(f"{e.transport} {e.address}" for e in endpoints)),
        )
        return cls(engine, kv, ready, epoch, endpoints, watchdog, transfer)

    async def stop(self) -> None:
        """Close the KV ends, then stop the engine."""
        try:
            await self.kv.aclose()
        finally:
            await self.engine.stop(STOP_TIMEOUT_S)


async def _start_engine(
    spec: WorkerSpec, joins_groups: bool, memory: PoolMemory
) -> tuple[EnginePort, Ready, Callable[[], Pool]]:
    engine = EngineClient(spec.engine_module)
    limit_s = spec.config.cluster.start_limit_s(spec.device)
    ready = await engine.start(_engine_spec(spec, joins_groups), limit_s, memory.share)

    def open_pool() -> Pool:
        return Pool.open(ready.layout, ready.num_blocks, ready.pool_handle, engine.memory_fd, memory.allocated)

    return engine, ready, open_pool


def _engine_spec(spec: WorkerSpec, joins_groups: bool) -> EngineSpec:
    config, transfer, cluster = spec.config.engine, spec.config.transfer, spec.config.cluster
    num_peers = cluster.prefill + cluster.decode - 1 if joins_groups and spec.device != "cpu" else 0
    return EngineSpec(
        model=spec.config.model.path,
        dtype=spec.config.model.dtype,
        device=spec.device,
        cores=spec.cores,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        kv_memory_bytes=None if config.kv_memory_mb is None else config.kv_memory_mb * 2**20,
        max_num_batched_tokens=spec.token_budget,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        chunk_tokens=config.chunk_tokens,
        batching=config.batching,
        kv_dtype=config.kv_dtype,
        prefix_caching=config.prefix_caching,
        device_share=spec.device_share,
        links_bytes=num_peers * NCCL_LINK_BYTES,
        cuda_graphs=config.cuda_graphs,
        run_ahead=config.run_ahead,
        prefill_attention=config.prefill_attention,
        batch_invariant=config.batch_invariant,
        ngram_drafts=config.speculation == "ngram",
        draft_model=config.draft_model,
        tensor_parallel=config.slots[spec.role],
        layer_groups=transfer.layer_groups if transfer.overlap == "layer" else 0,
        offload_folder=None if config.offload_folder is None else str(config.offload_folder / spec.worker_id),
        offload_disk_bytes=config.offload_disk_mb * 2**20,
        offload_host_bytes=config.offload_host_mb * 2**20,
    )
