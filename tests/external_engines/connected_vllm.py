"""A recorded vLLM server with pdserve's real connector: its scheduler and its runner call the connector as those of
vLLM 0.32 do, here one runner for each rank. What a layer caches of a token is the token, so wrong KV gives wrong
tokens.

If it is started for a GPU, the KV cache is a file that other processes map as `FileCuda`, and what the model computes
is written to it later, by a thread (`_Gpu`)."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import importlib
import os
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from fastapi import Response
from fastapi.responses import StreamingResponse

from tests.external_engines.recorded_vllm import RecordedVLLM, next_token
from tests.external_engines.recorded_vllm import event as event_of
from tests.strict_cuda import StrictCuda

NUM_LAYERS, HEADS, HEAD_DIM, NUM_BLOCKS = 5, 2, 32, 64
STEP_TOKENS = 48
GPU_STEP_S = 0.001  # of a layer
HASH_TOKENS = 16


class FinishReason(enum.IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class Base:
    """What the connector uses of its base class."""

    def __init__(self, config: Any, role: Role, kv_cache_config: Any) -> None:
        self._kv_transfer_config, self._role = config.kv_transfer_config, role
        self._connector_metadata: Any = None

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._connector_metadata = metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def has_connector_metadata(self) -> bool:
        return self._connector_metadata is not None

    def _get_connector_metadata(self) -> Any:
        assert self._connector_metadata is not None
        return self._connector_metadata


def connector_class(name: str, module: str) -> Any:
    """The connector that vLLM would load, with a stand-in for vLLM."""
    base = ModuleType("vllm.distributed.kv_transfer.kv_connector.v1.base")
    base.__dict__.update(KVConnectorBase_V1=Base, KVConnectorRole=Role, KVConnectorMetadata=object)
    engine = ModuleType("vllm.v1.engine")
    engine.__dict__["FinishReason"] = FinishReason
    state = ModuleType("vllm.distributed.parallel_state")
    state.__dict__["get_tensor_model_parallel_rank"] = lambda: _Rank.current
    for each in (base, engine, state):
        parts = each.__name__.split(".")
        for end in range(1, len(parts)):
            sys.modules.setdefault(".".join(parts[:end]), ModuleType(parts[end - 1]))
        sys.modules[each.__name__] = each
    return getattr(importlib.import_module(module), name)


@dataclass(eq=False)
class Sequence:
    """A request of the engine, with the attributes of vLLM's that the connector reads."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    kv_transfer_params: dict[str, Any]
    on_token: Any
    stops: list[int] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    block_ids: list[int] = field(default_factory=list)
    computed: int = 0
    is_new: bool = True
    awaits_kv: bool = False
    finished: FinishReason | None = None
    block_hashes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._all_token_ids = list(self.prompt_token_ids)
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        """Hash the full blocks that are not."""
        for end in range(HASH_TOKENS * (len(self.block_hashes) + 1), len(self._all_token_ids) + 1, HASH_TOKENS):
            self.block_hashes.append(hash(tuple(self._all_token_ids[:end])))

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def tokens(self) -> list[int]:
        return self._all_token_ids

    def get_finished_reason(self) -> FinishReason | None:
        return self.finished


class FileCuda(StrictCuda):
    """The GPU of recorded servers, as a worker sees it."""

    def open(self, handle: Any, index: int | None = None) -> torch.Tensor:
        path = Path(handle[1])
        self.init(handle[0])
        return torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)


class _Gpu:
    """Does what it is given, in order, on a thread of its own. Replaces those calls of torch that the connector makes
    on a GPU."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._current = threading.local()
        threading.Thread(target=self._run, daemon=True).start()
        gpu = self

        class Event:
            def __init__(self, blocking: bool) -> None:
                assert blocking, "waiting would take a core"
                self._passed = threading.Event()

            def record(self) -> None:
                gpu.begin(self._passed.set)

            def synchronize(self) -> None:
                assert gpu._current.device == torch.device("cpu"), "CUDA would use another GPU"
                self._passed.wait()

        def set_device(device: torch.device) -> None:
            gpu._current.device = device

        torch.cuda.Event, torch.cuda.set_device = Event, set_device  # type: ignore[assignment,misc]
        torch.UntypedStorage._share_cuda_ = self._share  # type: ignore[assignment,method-assign]

    def _share(self) -> tuple[int, str]:
        return 0, str(self._path)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """The memory of a KV cache."""
        with self._path.open("wb") as file:
            file.truncate(num_bytes)
        return torch.from_file(str(self._path), shared=True, size=num_bytes // 4, dtype=torch.float32)

    def begin(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def synchronize(self) -> None:
        done = threading.Event()
        self.begin(done.set)
        done.wait()

    def _run(self) -> None:
        while True:
            self._work.get()()


class _Layer:
    def __init__(self, attention: str) -> None:
        self._attention = attention

    def bind_kv_cache(self, cache: torch.Tensor) -> None:
        self.kv_cache = cache

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: self._attention)


class _Rank:
    """A process that runs a part of the model, with its connector."""

    current = 0

    def __init__(
        self,
        kind: Any,
        everything: SimpleNamespace,
        config: SimpleNamespace,
        number: int,
        gpu: _Gpu | None,
        attention: str,
    ) -> None:
        _Rank.current = number
        self._gpu = gpu
        parallel = everything.parallel_config
        self.layers = {f"model.layers.{number}.attn": _Layer(attention) for number in range(NUM_LAYERS)}
        everything.compilation_config = SimpleNamespace(static_forward_context=self.layers)
        self.connector = kind(everything, Role.WORKER, config)
        shape = (
            config.num_blocks,
            HEADS // parallel.tensor_parallel_size,
            everything.cache_config.block_size,
            2 * HEAD_DIM,
        )
        whole = None if gpu is None else gpu.allocate(config.kv_cache_tensors[0].size).view(shape[0], NUM_LAYERS, -1)
        for index, layer in enumerate(self.layers.values()):
            if whole is None:
                layer.bind_kv_cache(torch.zeros(shape, dtype=torch.float32))
            else:
                assert kind.get_required_kvcache_layout(everything) == "BLHNC"
                layer.bind_kv_cache(whole[:, index].view(shape))
        self.connector.register_kv_caches({name: layer.kv_cache for name, layer in self.layers.items()})

    def compute(self, scheduled: Mapping[Sequence, int], block_size: int) -> None:
        """A step of so many tokens of each request."""
        for name, layer in self.layers.items():
            work = partial(_write, layer.kv_cache, _values(scheduled, block_size))
            work() if self._gpu is None else self._gpu.begin(work)
            if scheduled:
                self.connector.save_kv_layer(name, layer.kv_cache, None)
        self.connector.start_load_kv(None)
        self.connector.wait_for_save()


def _values(scheduled: Mapping[Sequence, int], block_size: int) -> list[tuple[int, int, float]]:
    """What a layer caches in a step: block, slot, number."""
    return [
        (sequence.block_ids[position // block_size], position % block_size, float(sequence.tokens[position]))
        for sequence, count in scheduled.items()
        for position in range(sequence.computed, sequence.computed + count)
    ]


def _write(cache: torch.Tensor, values: list[tuple[int, int, float]]) -> None:
    if values:
        time.sleep(GPU_STEP_S)
    for block_id, slot, value in values:
        cache[block_id, :, slot] = value


class ConnectedVLLM(RecordedVLLM):
    """See above. ``preempts``: the next prompt that is pushed loses its blocks after its first step. ``attention``
    names the kernels."""

    preempts = False
    attention = "CPU_ATTN"
    gpu: _Gpu | None = None

    def begin(self, config: dict[str, Any], ranks: int, folder: Path) -> None:
        """Start the engine, with what the option --kv-transfer-config says. The memory of a GPU is in ``folder``."""
        extra = SimpleNamespace(get_from_extra_config=config["kv_connector_extra_config"].get)
        block_bytes = NUM_LAYERS * HEADS * self.block_size * 2 * HEAD_DIM * 4
        num_blocks = NUM_BLOCKS
        if probe_bytes := config["kv_connector_extra_config"].get("probe_bytes", 0):
            num_blocks += -(-probe_bytes // block_bytes)
            self.gpu = _Gpu(folder / f"gpu-{os.getpid()}")
        everything = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=ranks, tensor_parallel_size=ranks, data_parallel_size=1),
            model_config=SimpleNamespace(get_num_kv_heads=lambda parallel: HEADS // parallel.tensor_parallel_size),
            cache_config=SimpleNamespace(block_size=self.block_size),
            compilation_config=SimpleNamespace(static_forward_context={}),
            kv_transfer_config=extra,
            device_config=SimpleNamespace(device_type="cpu" if self.gpu is None else "cuda"),
        )
        kind = connector_class(config["kv_connector"], config["kv_connector_module_path"])
        tensors = [SimpleNamespace(size=num_blocks * block_bytes)]
        caches = SimpleNamespace(kv_cache_groups=[None], num_blocks=num_blocks, kv_cache_tensors=tensors)
        self._ranks = [_Rank(kind, everything, caches, number, self.gpu, self.attention) for number in range(ranks)]
        self._layers = [layer for rank in self._ranks for layer in rank.layers.values()]
        self._scheduler = kind(everything, Role.SCHEDULER, caches)
        self._reported: dict[str, int] = {}
        self._num_blocks, self._free = num_blocks, list(range(1, num_blocks))
        self._scheduler.bind_gpu_block_pool(SimpleNamespace(blocks=list(range(num_blocks)), touch=self._touch))
        self._arrived: queue.Queue[Sequence | str] = queue.Queue()
        self._sequences: dict[str, Sequence] = {}
        self._held: dict[str, Sequence] = {}
        self._prefixes: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self._note_load()
        threading.Thread(target=self._run, daemon=True).start()

    def _touch(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self._free.remove(block_id)

    async def _answer(self, body: dict[str, Any], request_id: str) -> Response:
        loop, tokens = asyncio.get_running_loop(), asyncio.Queue[tuple[int, str | None]]()

        def on_token(token_id: int, reason: str | None) -> None:
            loop.call_soon_threadsafe(tokens.put_nowait, (token_id, reason))

        params = body["kv_transfer_params"]
        stops = body["stop_token_ids"]
        self._arrived.put(Sequence(request_id, body["prompt"], body["max_tokens"], params, on_token, stops))
        return StreamingResponse(self._stream(tokens, request_id), media_type="text/event-stream")

    async def _stream(self, tokens: asyncio.Queue[tuple[int, str | None]], request_id: str) -> AsyncIterator[str]:
        reason: str | None = None
        try:
            while reason is None:
                token_id, reason = await tokens.get()
                yield event_of({"choices": [self._choice([token_id], reason)]})
            yield "data: [DONE]\n\n"
        finally:
            if reason is None:
                self.cancelled.append(request_id)
                self._arrived.put(request_id)

    # --- the engine --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            arrived: Sequence | str | None = None
            with contextlib.suppress(queue.Empty):
                arrived = self._arrived.get(block=not (self._sequences or self._held))
            if isinstance(arrived, Sequence):
                self._sequences[arrived.request_id] = arrived
            elif arrived is not None:
                if (sequence := self._sequences.get(arrived)) is not None:
                    self._finish(sequence, FinishReason.ABORT)
            else:
                self._step()
            self._note_load()

    def _note_load(self) -> None:
        self.running, self.usage = len(self._sequences), 1.0 - (len(self._free) + 1) / self._num_blocks

    def _step(self) -> None:
        scheduled: dict[str, int] = {}
        new: list[SimpleNamespace] = []
        old: list[SimpleNamespace] = []
        preempted: set[str] = set()
        budget = STEP_TOKENS
        for sequence in list(self._sequences.values()):
            if self.preempts and sequence.kv_transfer_params["pdserve"] == "push" and sequence.computed:
                self.preempts = False
                preempted.add(sequence.request_id)
                self._free += sequence.block_ids
                sequence.block_ids, sequence.computed, sequence.is_new = [], 0, True
                sequence.num_preemptions += 1
                continue
            if not sequence.block_ids and not self._admit(sequence):
                continue
            if sequence.awaits_kv or not budget:
                continue
            count = min(budget, len(sequence.tokens) - sequence.computed)
            budget -= count
            scheduled[sequence.request_id] = count
            entry = SimpleNamespace(
                req_id=sequence.request_id, block_ids=(sequence.block_ids,), num_computed_tokens=sequence.computed
            )
            (new if sequence.is_new else old).append(entry)
            sequence.is_new = False
        output = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[entry.req_id for entry in old],
                new_block_ids=[None for _ in old],
                num_computed_tokens=[entry.num_computed_tokens for entry in old],
            ),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            preempted_req_ids=preempted or None,
        )
        metadata = self._scheduler.build_connector_meta(output)
        sent, received, wrong = set[str](), set[str](), set[int]()
        parts = {self._sequences[request_id]: count for request_id, count in scheduled.items()}
        for number, rank in enumerate(self._ranks):
            if number and parts:
                time.sleep(0.005)  # what one rank has computed, another has not
            rank.connector.bind_connector_metadata(metadata)
            rank.compute(parts, self.block_size)
            for all_done, done in zip((sent, received), rank.connector.get_finished(set()), strict=True):
                all_done |= {request_id for request_id in done if self._all_report(request_id)}
            wrong |= rank.connector.get_block_ids_with_load_errors()
            rank.connector.clear_connector_metadata()
        if self.gpu is not None:
            self.gpu.synchronize()
        for request_id, count in scheduled.items():
            self._computed(self._sequences[request_id], count)
        self._scheduler.update_connector_output(SimpleNamespace(finished_recving=received))
        for request_id in received:
            if request_id in self._held:  # aborted meanwhile
                self._free += self._held.pop(request_id).block_ids
            elif wrong & set(self._sequences[request_id].block_ids):
                self._finish(self._sequences[request_id], FinishReason.ABORT, held=False)
            else:
                sequence = self._sequences[request_id]
                sequence.awaits_kv, sequence.computed = False, sequence.num_prompt_tokens - 1
                whole = range(HASH_TOKENS, sequence.num_prompt_tokens + 1, HASH_TOKENS)
                assert sequence.block_hashes == [hash(tuple(sequence.prompt_token_ids[:end])) for end in whole]
        for request_id in sent:
            self._free += self._held.pop(request_id).block_ids
        assert list(self._scheduler.take_events()) == []

    def _all_report(self, request_id: str) -> bool:
        """Whether a rank is the last one to report the end of a transfer."""
        self._reported[request_id] = self._reported.get(request_id, 0) + 1
        if self._reported[request_id] < len(self._ranks):
            return False
        del self._reported[request_id]
        return True

    def _admit(self, sequence: Sequence) -> bool:
        known = [tuple(sequence.tokens[:end]) for end in range(HASH_TOKENS, len(sequence.tokens), HASH_TOKENS)]
        cached = [prefix for prefix in known if len(prefix) % self.block_size == 0 and prefix in self._prefixes]
        external, waits = self._scheduler.get_num_new_matched_tokens(sequence, len(cached) * self.block_size)
        count = -(-(sequence.num_prompt_tokens + sequence.max_tokens) // self.block_size)
        if external is None or count > len(self._free):
            return False
        sequence.block_ids, self._free = self._free[:count], self._free[count:]
        blocks = SimpleNamespace(get_block_ids=lambda: (sequence.block_ids,))
        self._scheduler.update_state_after_alloc(sequence, blocks, external)
        sequence.awaits_kv = bool(waits and external)
        sequence.computed = len(cached) * self.block_size
        for block_id, prefix in zip(sequence.block_ids, cached, strict=False):
            for each, values in zip(self._layers, self._prefixes[prefix], strict=True):
                each.kv_cache[block_id] = values
        return True

    def _computed(self, sequence: Sequence, count: int) -> None:
        sequence.computed += count
        if sequence.computed < len(sequence.tokens):
            return
        kv = [self._cached(sequence, position) for position in range(sequence.computed)]
        token_id = next_token(kv)
        sequence.output_token_ids.append(token_id)
        sequence._all_token_ids.append(token_id)
        sequence.update_block_hashes()
        reason = FinishReason.LENGTH if sequence.num_output_tokens == sequence.max_tokens else None
        if token_id in sequence.stops:
            reason = FinishReason.STOP
        sequence.on_token(token_id, None if reason is None else reason.name.lower())
        if reason is not None:
            self._finish(sequence, reason)

    def _cached(self, sequence: Sequence, position: int) -> int:
        """The token whose KV is cached; -1 if layers or heads differ."""
        block, slot = divmod(position, self.block_size)
        values = torch.stack([each.kv_cache[sequence.block_ids[block], :, slot] for each in self._layers])
        return int(values.flatten()[0]) if bool((values == values.flatten()[0]).all()) else -1

    def _finish(self, sequence: Sequence, reason: FinishReason, *, held: bool = True) -> None:
        del self._sequences[sequence.request_id]
        for number in range(sequence.computed // self.block_size if reason is FinishReason.LENGTH else 0):
            block_id = sequence.block_ids[number]
            values = [each.kv_cache[block_id].clone() for each in self._layers]
            self._prefixes[tuple(sequence.tokens[: (number + 1) * self.block_size])] = values
        sequence.finished = reason
        delayed, _ = self._scheduler.request_finished(sequence, sequence.block_ids)
        if held and (delayed or sequence.awaits_kv):
            self._held[sequence.request_id] = sequence
        else:
            self._free += sequence.block_ids
