"""pdserve's KV connector, which runs inside vLLM: it shares vLLM's KV cache with a pdserve worker, and tells the worker
which blocks requests have and when they are computed. The worker moves the bytes.

vLLM loads this file by ``kv_connector_module_path`` in a virtual environment without pdserve, so it imports nothing of
it. It speaks `contract.engine`'s messages over a Unix socket (`_SOCKET`). On CPUs, the cache is put into memory of the
worker, which the ranks of a model that is split by tensor parallelism share: each has its heads of a block, in the
order of the heads. On a GPU, the worker opens vLLM's memory by CUDA IPC.

A request says by ``kv_transfer_params`` what it is: ``{"pdserve": "push" | "receive" | "local", "attempt":
ATTEMPT_ID}``. With ``"goes_on": true``, the last token of a prompt that is received stands for token 1, which comes
with the KV. Tested with vLLM 0.32 on CPUs, and on GPUs over a stand-in."""

from __future__ import annotations

import mmap
import os
import queue
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.engine import FinishReason

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_SOCKET = "PDSERVE_CONNECTOR"
_LENGTH = struct.Struct("<I")
_IDLE_WAIT_S = 0.001
_FIRST_TOKEN_S = 5.0  # the worker says it to the scheduler first, and then to the runner
_LAYOUT = "BLHNC"  # vLLM's name: one block of all layers after the other, of each layer head by head
_MOST_ENDED = 10_000  # more than a server ever has at a time: an attempt may end before vLLM knows it
_STEPPED_EVERY_S = 0.25
_NAME = "pdserve's connector"


class _GpuProgress:
    """Tells the worker what is computed, once the GPU has computed it."""

    def __init__(self, worker: _Worker, device: torch.device) -> None:
        self._worker, self._device = worker, device
        self._begun: queue.SimpleQueue[tuple[torch.cuda.Event, tuple[Any, ...]]] = queue.SimpleQueue()
        threading.Thread(target=self._follow, name="pdserve-gpu", daemon=True).start()

    def tell(self, *message: Any) -> None:
        """See `_Worker.tell`: when the GPU has done what it has been given so far."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        self._begun.put((event, message))

    def _follow(self) -> None:
        torch.cuda.set_device(self._device)
        while True:
            event, message = self._begun.get()
            event.synchronize()
            self._worker.tell(*message)


class _Worker:
    """A connection to the worker, and what it has said. Each connector has one; vLLM makes one in its scheduler and one
    in each process that runs the model."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._said = threading.Condition()
        self._ended: dict[str, bool] = {}  # attempts, the latest last, and whether their blocks are right
        self._first_tokens: dict[str, int] = {}  # of those
        self._news = False

    def tell(self, *message: Any) -> None:
        """Send a message: the name of its class and its fields."""
        body = msgspec.msgpack.encode(message)
        self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def memory(self) -> int:
        """Receive the descriptor of the memory that the KV cache goes to. Then follow the worker's commands."""
        _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not descriptors:
            raise ConnectionError(f"{_NAME}: the worker has given no memory")
        self.follow()
        return descriptors[0]

    def follow(self) -> None:
        """Follow the worker's commands."""
        threading.Thread(target=self._follow, name="pdserve", daemon=True).start()

    def ended(self, attempt_id: str) -> bool | None:
        """Whether the blocks of an attempt are right; None while something accesses them."""
        return self._ended.get(attempt_id)

    def first_token(self, attempt_id: str) -> int | None:
        """Token 1 of an attempt whose KV has come; None if it was aborted. TimeoutError, which ends vLLM's engine, if
        neither was heard: it must not go on with the token that stands for token 1."""
        with self._said:
            if not self._said.wait_for(lambda: attempt_id in self._ended, _FIRST_TOKEN_S):
                raise TimeoutError(f"{_NAME}: the worker has not told token 1 of {attempt_id}")
            return self._first_tokens.get(attempt_id)

    def wait(self, timeout_s: float) -> None:
        """Wait until the worker says something."""
        with self._said:
            if not self._news:
                self._said.wait(timeout_s)
            self._news = False

    def _follow(self) -> None:
        stream = self._socket.makefile("rb")
        while len(length := stream.read(_LENGTH.size)) == _LENGTH.size:
            # KVReady, Release or Abort.
            name, attempt_id, *more = msgspec.msgpack.decode(stream.read(_LENGTH.unpack(length)[0]))
            with self._said:
                self._ended.setdefault(attempt_id, name != "Abort")
                if name == "KVReady":
                    self._first_tokens[attempt_id] = more[0]
                if len(self._ended) > _MOST_ENDED:
                    oldest = next(iter(self._ended))
                    del self._ended[oldest]
                    self._first_tokens.pop(oldest, None)
                self._news = True
                self._said.notify_all()


@dataclass
class _Push:
    """A prompt that is computed here for another worker."""

    attempt_id: str
    num_tokens: int
    block_ids: list[int]


@dataclass
class _Wait:
    """A request whose blocks the worker accesses: it sends them, or receives ``received``."""

    attempt_id: str
    received: list[int] | None = None


@dataclass
class _Step(KVConnectorMetadata):
    """What a step computes of prompts that are pushed: their attempts, the tokens that are computed after it, and their
    blocks. ``waits``: what waits for the worker from now on. ``idle``: the step computes nothing."""

    pushes: list[tuple[str, int, list[int]]] = field(default_factory=list)
    waits: dict[str, _Wait] = field(default_factory=dict)
    idle: bool = False


class _StepCount:
    """Counts vLLM's steps that compute something, and their seconds, and tells the worker (`Stepped`). A step begins
    when it is scheduled, or when the one before it ends if that is later."""

    def __init__(self, worker: _Worker) -> None:
        self._worker = worker
        self._scheduled_s: deque[float | None] = deque()  # of the steps on their way; None: it computes nothing
        self._steps, self._busy_s, self._ended_s = 0, 0.0, 0.0
        self._told_steps, self._told_s = 0, 0.0
        self.has_finished = False
        """Whether a request has ended since the worker was told."""

    def scheduled(self, is_idle: bool) -> None:
        """A step is scheduled."""
        self._scheduled_s.append(None if is_idle else time.monotonic())

    def ended(self) -> None:
        """The oldest step on its way has ended."""
        if not self._scheduled_s:
            return
        scheduled_s, now_s = self._scheduled_s.popleft(), time.monotonic()
        if scheduled_s is not None:
            self._steps += 1
            self._busy_s += now_s - max(scheduled_s, self._ended_s)
        self._ended_s = now_s
        is_due = scheduled_s is None or self.has_finished or now_s - self._told_s >= _STEPPED_EVERY_S
        if is_due and self._steps != self._told_steps:
            self.has_finished, self._told_s, self._told_steps = False, now_s, self._steps
            self._worker.tell("Stepped", self._steps, self._busy_s)


class PdserveConnector(KVConnectorBase_V1):
    """See vLLM's base class."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        self._ranks = parallel.tensor_parallel_size
        if parallel.world_size * parallel.data_parallel_size != self._ranks:
            raise ValueError(f"{_NAME} is for models that are split by tensor parallelism alone")
        self._rank_heads = vllm_config.model_config.get_num_kv_heads(parallel)
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError(f"{_NAME} is for models whose layers all cache alike")
        self._block_size = vllm_config.cache_config.block_size
        self._layers = vllm_config.compilation_config.static_forward_context
        self._groups = int(self._kv_transfer_config.get_from_extra_config("layer_groups", 0))
        self._num_spare = self._spare_blocks(kv_cache_config)
        self._worker = _Worker(os.environ[_SOCKET])
        # In the scheduler:
        self._pushes: dict[str, _Push] = {}  # by vLLM's ids, as all that follow
        self._considered: set[str] = set()  # that the worker knows to look for blocks
        self._awaited: dict[str, str] = {}  # that have not been scheduled
        self._new_waits: dict[str, _Wait] = {}  # see `_Step`
        self._is_idle = False
        self._step_count = _StepCount(self._worker)
        self._going_on: dict[str, Request] = {}  # that get token 1 with their KV
        # Where the model runs:
        self._progress: _Worker | _GpuProgress = self._worker
        self._index: dict[str, int] = {}
        self._told_layers: set[int] = set()
        self._waits: dict[str, _Wait] = {}
        self._wrong_blocks: set[int] = set()
        if role is KVConnectorRole.SCHEDULER:
            self._worker.tell("Scheduler")
            self._worker.follow()

    def _spare_blocks(self, config: KVCacheConfig) -> int:
        """How many blocks at the end of a GPU's cache no request gets: with their memory, of at least ``probe_bytes``,
        the worker measures links. On CPUs, 0: there the worker's memory has an area of its own."""
        if not (probe_bytes := int(self._kv_transfer_config.get_from_extra_config("probe_bytes", 0))):
            return 0
        if self._ranks > 1:
            raise ValueError(f"{_NAME} does not split models over GPUs; use worker.connector=nixl")
        num_spare: int = -(-probe_bytes // (config.kv_cache_tensors[0].size // config.num_blocks))
        if num_spare >= config.num_blocks:
            raise ValueError(f"{_NAME} needs {num_spare} of {config.num_blocks} KV blocks for itself; set more of them")
        return num_spare

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """See vLLM's base class. On CPUs, vLLM has one layout only, and `register_kv_caches` makes another one."""
        return None if vllm_config.device_config.device_type == "cpu" else _LAYOUT

    # --- where the model runs ----------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Share the caches with the worker: one block of all layers, with the heads of all ranks, after the other."""
        caches = {name: kv_caches[name] for name in sorted(kv_caches, key=_layer_number)}
        self._index = {name: index for index, name in enumerate(caches)}
        if self._groups:
            count = len(caches)
            self._told_layers = {count * (group + 1) // self._groups for group in range(self._groups)} - {0, count}
        first = next(iter(caches.values()))
        for name, cache in caches.items():
            if cache.shape != first.shape or not cache[0].is_contiguous():
                raise ValueError(f"{_NAME} cannot share the cache of {name}: {cache.shape}, strides {cache.stride()}")
        if self._num_spare:
            self._lend(caches)
        else:
            self._move(caches)

    def _lend(self, caches: dict[str, torch.Tensor]) -> None:
        """Let the worker open the memory of a GPU, where vLLM has put the caches as `_LAYOUT` says."""
        first = next(iter(caches.values()))
        storage, numbers = first.untyped_storage(), first[0].numel()
        for index, (name, cache) in enumerate(caches.items()):
            place = cache.untyped_storage().data_ptr(), cache.storage_offset(), cache.stride(0)
            if place != (storage.data_ptr(), index * numbers, len(caches) * numbers):
                raise ValueError(f"{_NAME} needs the KV cache layout {_LAYOUT}, and {name} lies elsewhere")
        handle = list(storage._share_cuda_())  # type: ignore[no-untyped-call]
        self._tell_caches(caches, numbers, handle)
        self._worker.follow()
        self._progress = _GpuProgress(self._worker, first.device)

    def _move(self, caches: dict[str, torch.Tensor]) -> None:
        """Put the caches into the worker's memory."""
        first, rank = next(iter(caches.values())), get_tensor_model_parallel_rank()
        if first.device.type != "cpu":
            raise ValueError(f"{_NAME} was started for CPUs, and the KV cache is on {first.device}")
        rank_numbers = first[0].numel()
        layer_numbers = rank_numbers * self._ranks
        if self._ranks > 1 and first.shape[1] != self._rank_heads:
            raise ValueError(f"{_NAME}: the ranks cannot share blocks, whose heads do not come first: {first.shape}")
        self._tell_caches(caches, layer_numbers, [])
        descriptor = self._worker.memory()
        memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        os.close(descriptor)
        storage = torch.frombuffer(memory, dtype=first.dtype).untyped_storage()
        inner = first[0].contiguous().stride()
        for index, (name, cache) in enumerate(caches.items()):
            bound = self._layers[name].kv_cache
            offset = index * layer_numbers + rank * rank_numbers
            cache.set_(storage, offset, cache.shape, (len(caches) * layer_numbers, *inner))
            if bound.shape != cache.shape:
                raise ValueError(f"{_NAME}: {name} has blocks of another size than the scheduler; set --block-size")
            self._layers[name].bind_kv_cache(cache)

    def _tell_caches(self, caches: dict[str, torch.Tensor], layer_numbers: int, handle: list[Any]) -> None:
        name, first = next(iter(caches.items()))
        layer = self._layers[name]
        # How attention orders the numbers of a layer in a block; kernels for CPUs differ by the instructions they use.
        order = f"{layer.get_attn_backend().get_name()} {getattr(layer, 'isa', '')}".strip()
        self._worker.tell(
            "Caches",
            first.shape[0],
            len(caches),
            layer_numbers * first.element_size(),
            self._block_size,
            str(first.dtype).removeprefix("torch."),
            self._ranks,
            order,
            self._num_spare,
            handle,
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: the worker writes the blocks."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Tell that the layers so far are computed."""
        done = self._index[layer_name] + 1
        if done in self._told_layers and self.has_connector_metadata():
            self._tell(done)

    def wait_for_save(self) -> None:
        """Tell that all layers are computed."""
        self._tell(0)

    def _tell(self, num_layers: int) -> None:
        step = self._get_connector_metadata()
        assert isinstance(step, _Step)
        if step.pushes:
            self._progress.tell("Computed", [[*push, num_layers] for push in step.pushes])

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The requests whose blocks the worker does not access any more. Those of an aborted one are wrong: vLLM must
        not compute with them, nor cache them, before it hears of the end of the call."""
        step = self._get_connector_metadata()
        assert isinstance(step, _Step)
        self._waits |= step.waits
        if step.idle:
            self._worker.wait(_IDLE_WAIT_S)
        sent, received = set(), set()
        for name, wait in list(self._waits.items()):
            if (right := self._worker.ended(wait.attempt_id)) is None:
                continue
            del self._waits[name]
            if wait.received is None:
                sent.add(name)
                continue
            received.add(name)
            if not right:
                self._wrong_blocks |= set(wait.received)
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Received blocks that are wrong."""
        wrong, self._wrong_blocks = self._wrong_blocks, set()
        return wrong

    # --- scheduler ---------------------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take the spare blocks."""
        if self._num_spare:
            gpu_block_pool.touch(gpu_block_pool.blocks[-self._num_spare :])

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """All of a prompt that is received comes from elsewhere. vLLM computes its last token again, or token 1."""
        kind, attempt_id, _ = _asked(request)
        if attempt_id and request.request_id not in self._considered:
            self._considered.add(request.request_id)
            self._worker.tell("Considered", attempt_id)
        if kind != "receive" or request.num_preemptions:  # a preempted one is computed again
            return 0, False
        if num_external := self._num_received(request) - num_computed_tokens:
            return num_external, True
        # All of it is cached here, and only token 1 has to come.
        if self._worker.ended(attempt_id) is not None:
            self._go_on(request)
            return 0, False
        if request.request_id not in self._going_on:
            self._going_on[request.request_id] = request
            num_blocks = num_computed_tokens // self._block_size
            self._worker.tell("Reserved", attempt_id, list(range(num_blocks)), num_blocks, time.monotonic())
        return None, False

    @staticmethod
    def _num_received(request: Request) -> int:
        """The tokens of a prompt whose KV comes from elsewhere."""
        num_tokens: int = request.num_prompt_tokens - _asked(request).goes_on
        return num_tokens

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Tell which blocks a prompt has that is received."""
        kind, attempt_id, goes_on = _asked(request)
        if attempt_id and not request.num_preemptions:
            self._awaited[request.request_id] = attempt_id
        if kind == "receive" and num_external_tokens:
            num_received = self._num_received(request)
            num_blocks = -(-num_received // self._block_size)
            cached = (num_received - num_external_tokens) // self._block_size
            block_ids = blocks.get_block_ids()[0][:num_blocks]
            self._new_waits[request.request_id] = _Wait(attempt_id, block_ids[cached:])
            if goes_on:
                self._going_on[request.request_id] = request
            self._worker.tell("Reserved", attempt_id, block_ids, cached, time.monotonic())
        elif kind == "push" and request.request_id not in self._pushes:
            self._pushes[request.request_id] = _Push(attempt_id, request.num_prompt_tokens, [])

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """See `_Step`."""
        step = _Step(waits=self._new_waits, idle=not scheduler_output.total_num_scheduled_tokens)
        self._step_count.scheduled(step.idle)
        self._new_waits = {}
        if step.idle != self._is_idle:
            self._is_idle = step.idle
            self._worker.tell("Idle", step.idle)
        for name in scheduler_output.preempted_req_ids or ():
            if (push := self._pushes.pop(name, None)) is not None:
                why = f"vLLM has preempted {push.attempt_id}, whose blocks were being sent"
                self._worker.tell("Rejected", push.attempt_id, "TransferError", why)
        for new in scheduler_output.scheduled_new_reqs:
            if (attempt_id := self._awaited.pop(new.req_id, None)) is not None:
                self._worker.tell("Scheduled", attempt_id, time.monotonic(), new.num_computed_tokens)
            if (push := self._pushes.get(new.req_id)) is not None:
                push.block_ids = list(new.block_ids[0])
                self._add(step, scheduler_output, new.req_id, push, new.num_computed_tokens)
        cached = scheduler_output.scheduled_cached_reqs
        for number, name in enumerate(cached.req_ids):
            if (push := self._pushes.get(name)) is not None:
                push.block_ids += (cached.new_block_ids[number] or ([],))[0]
                self._add(step, scheduler_output, name, push, cached.num_computed_tokens[number])
        return step

    def _add(self, step: _Step, output: SchedulerOutput, name: str, push: _Push, computed: int) -> None:
        if computed < push.num_tokens:
            computed += output.num_scheduled_tokens[name]
            step.pushes.append((push.attempt_id, min(computed, push.num_tokens), push.block_ids))

    def take_events(self) -> Iterable[KVCacheEvent]:
        """No events. It counts a step: vLLM calls this once at the end of each, in their order."""
        self._step_count.ended()
        return ()

    def update_connector_output(self, connector_output: Any) -> None:
        """Put token 1 into the prompts whose KV has come."""
        for name in connector_output.finished_recving or ():
            if (request := self._going_on.get(name)) is not None:
                self._go_on(request)

    def _go_on(self, request: Request) -> None:
        """Put token 1 into a prompt, unless the attempt was aborted."""
        self._going_on.pop(request.request_id, None)
        if (token_id := self._worker.first_token(_asked(request).attempt_id)) is None:
            return
        request.prompt_token_ids[-1] = request._all_token_ids[-1] = token_id
        del request.block_hashes[-1:]  # it may be in the last one
        request.update_block_hashes()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Tell token 1 of a prompt that is pushed, and keep its blocks until they are sent."""
        self._step_count.has_finished = True
        self._considered.discard(request.request_id)
        self._awaited.pop(request.request_id, None)
        self._going_on.pop(request.request_id, None)
        push = self._pushes.pop(request.request_id, None)
        if push is None:
            return False, None
        if request.num_output_tokens:
            first_token = [request.output_token_ids[0], request.get_finished_reason() == FinishReason.STOP]
            self._worker.tell("Computed", [[push.attempt_id, push.num_tokens, push.block_ids, 0, first_token]])
        self._new_waits[request.request_id] = _Wait(push.attempt_id)
        return True, None


class _Asked(NamedTuple):
    """What a request is for pdserve; of others all are empty."""

    kind: str
    attempt_id: str
    goes_on: bool


def _asked(request: Request) -> _Asked:
    params = request.kv_transfer_params or {}
    return _Asked(params.get("pdserve", ""), params.get("attempt", ""), params.get("goes_on", False))


def _layer_number(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdecimal())
