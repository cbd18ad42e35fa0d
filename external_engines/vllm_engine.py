"""A vLLM server with pdserve's KV connector (`external_engines.vllm_connector`), as the engine of a worker: requests
are HTTP calls, and the connector says which blocks they have. So hand-offs are those of pdserve's own engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import httpx2

from checkpoints.source import ModelSource, resolve_model
from contract.engine import (
    Abort,
    Command,
    EngineEvent,
    KVReady,
    KVRole,
    Load,
    Ping,
    PinPrefix,
    Pong,
    Ready,
    Rejected,
    Release,
    Reserved,
    Step,
    Submit,
    TokenOut,
)
from external_engines import vllm_server
from external_engines.adapter import Step as Answered
from external_engines.adapter import lacking
from external_engines.answers import asked_logprobs, steps_of
from external_engines.process import ServerProcess
from external_engines.vllm import VLLM, body_of
from external_engines.vllm_channel import Caches, Considered, Idle, Scheduled, Stepped, VLLMChannel, VLLMKVEvents
from kv_transfer.pool import Pool
from pdserve.core.errors import (
    InvalidRequest,
    LaunchError,
    PdserveError,
    TransferError,
    WorkerLost,
    to_wire,
)
from pdserve.core.kv_layout import FP8, KV_DTYPE_BYTES, CacheSpec, KVLayout
from pdserve.core.request import Request
from runtime.threads import in_thread
from worker.incarnation import PoolMemory
from worker.spec import WorkerSpec

log = logging.getLogger(__name__)
_ABILITIES = VLLM.abilities._replace(
    hand_off="pushed by layers while prefill computes; both have the request at once",
    proof="every request, checksums",
    layer_events=True,
)

T = TypeVar("T")

LOOK_EVERY_S = 0.5
END_S = 1.0
"""How long a request whose call broke waits for the end of the server, which may be the reason."""


class VLLMEngine:
    """An engine (`contract.engine.EnginePort`). Its `Step` events are the parts of vLLM's answers, at the times
    at which they come; `Load` has the steps of vLLM."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._name = f"vLLM of worker {worker_id}"
        self._adapter = VLLM()
        self._model = ""
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[EngineEvent | None] = asyncio.Queue()
        self._process: ServerProcess | None = None
        self._http: httpx2.AsyncClient | None = None
        self._channel: VLLMChannel | None = None
        self._folder = Path()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._scheduled_s: dict[str, float] = {}
        self._cached_tokens: dict[str, int] = {}
        self._first_tokens: dict[str, int] = {}
        self._waiting: set[str] = set()  # for blocks
        self._is_idle = False
        self._stepped = Stepped(0, 0.0)

    # --- EnginePort --------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """See `EnginePort`."""
        assert self._process is not None, "the engine was not started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """See `EnginePort`."""
        ended = None if self._process is None else self._process.ended
        return ended.result() if ended is not None and ended.done() else None

    async def start(self, spec: WorkerSpec, source: ModelSource, limit_s: float) -> Ready:
        """Start the server, and wait until it is ready. LaunchError or ModelError if it does not start; it has ended
        then."""
        began_s = time.monotonic()
        self._folder = Path(tempfile.mkdtemp(prefix="pdserve-server-"))  # of this user alone
        try:
            async with asyncio.timeout(limit_s):
                channel = await self._launch(spec, source)
                version, model = await self._wait_ready()
            model_hash = await in_thread("model-hash", source.model_hash)
        except TimeoutError:
            await self.stop(0.0)
            raise LaunchError(f"worker {spec.worker_id}: vLLM was not ready within {limit_s:.0f} s") from None
        except BaseException:
            await self.stop(0.0)
            raise
        caches = channel.caches
        layout = _layout(caches, f"{model_hash} of vLLM {version} ({caches.order})")
        asked = spec.config.model.dtype
        self._model = model["id"]
        num_blocks = caches.num_blocks - caches.num_spare
        self._events.put_nowait(Load(num_blocks, 0, 0, 0, steps=0))
        self._spawn(self._follow_load(spec.config.router.heartbeat_s))
        shape = source.shape
        return Ready(
            layout=layout,
            dtype=source.shape.dtype if asked == "auto" else asked,
            num_blocks=num_blocks,
            pool_handle={},
            max_model_len=int(model["max_model_len"]),
            vocab_size=shape.vocab_size,
            device=spec.device,
            cores=list(spec.cores),
            load_s=time.monotonic() - began_s,
            eos_token_ids=list(shape.eos_token_ids),
            notes=[f"vLLM {version} computes"],
            declares={"kind": self._adapter.kind, "version": version, **_ABILITIES.shown},
        )

    def send(self, command: Command) -> None:
        """See `EnginePort`."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and so is the engine
            match command:  # `SetTokenBudget` has no effect: vLLM's is set when it starts
                case Submit() | Ping() | PinPrefix():
                    self._loop.call_soon_threadsafe(self._take, command)
                case KVReady():
                    self._loop.call_soon_threadsafe(self._take, command)
                    self._tell(command)
                case Release():
                    self._tell(command)
                case Abort():
                    self._tell(command)
                    self._loop.call_soon_threadsafe(self._take, command)

    async def events(self) -> AsyncIterator[EngineEvent]:
        """See `EnginePort`."""
        while (event := await self._events.get()) is not None:
            yield event
        self._events.put_nowait(None)

    def take_kv_events(self) -> VLLMKVEvents:
        """See `EnginePort`."""
        assert self._channel is not None, "the engine was not started"

        def others(message: Idle | Stepped | Considered | Scheduled | Rejected | Reserved) -> None:
            self._loop.call_soon_threadsafe(self._heard, message)

        return self._channel.kv_events(others)

    def pool(self, ready: Ready) -> Pool:
        """The pool of its KV cache. Closing it twice is no error, and `stop` closes it, too."""
        assert self._channel is not None, "the engine was not started"
        return Pool(ready.layout, ready.num_blocks, self._channel.memory)

    async def stop(self, timeout_s: float) -> None:
        """See `EnginePort`."""
        tasks = [*self._tasks.values(), *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._http is not None:
            await self._http.aclose()
        if self._process is not None:
            await self._process.stop(timeout_s)
        if self._channel is not None:
            self._channel.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- start -------------------------------------------------------------------------------------------------------

    async def _launch(self, spec: WorkerSpec, source: ModelSource) -> VLLMChannel:
        """Start the server, and wait for its connectors."""
        shutil.copy(Path(vllm_server.__file__).with_name("vllm_connector.py"), self._folder / "pdserve_connector.py")
        path = self._folder / "connector"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen()
            listener.setblocking(False)
            launch = vllm_server.launch_connected(spec, source, self._folder, path)
            self._process = process = await ServerProcess.start(launch.command, launch.environment, spec.cores)
            process.ended.add_done_callback(lambda _: self._events.put_nowait(None))
            self._http = launch.client()
            channel = self._channel = await self._or_ended(VLLMChannel.accept(listener))
        return channel

    async def _wait_ready(self) -> tuple[str, dict[str, Any]]:
        """The server's version and model, once it answers."""
        assert self._http is not None
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                version, models = await self._http.get("/version"), await self._http.get("/v1/models")
                return version.json()["version"], models.json()["data"][0]
            await self._or_ended(asyncio.sleep(LOOK_EVERY_S))

    async def _or_ended(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the ``work``. LaunchError if the server ends before it is done."""
        assert self._process is not None
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._process.ended), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise LaunchError(
                    f"worker {self._worker_id}: vLLM ended while it started (exit status {self.returncode}); see its "
                    "log, and worker.command and worker.arguments"
                )
            return task.result()
        finally:
            task.cancel()

    # --- requests ----------------------------------------------------------------------------------------------------

    def _tell(self, command: KVReady | Release | Abort) -> None:
        """See `VLLMChannel.tell`. A server that reads no commands is killed, which ends this engine."""
        assert self._channel is not None, "the engine was not started"
        try:
            self._channel.tell(command)
        except TimeoutError as error:
            log.error("%s is killed: %s", self._name, error)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _take(self, command: Command) -> None:
        match command:
            case Submit():
                attempt_id = command.attempt_id
                task = self._tasks[attempt_id] = self._loop.create_task(self._serve(command))
                task.add_done_callback(lambda _: self._forget(attempt_id))
            case KVReady() if command.first_token_id is not None and command.attempt_id in self._tasks:
                self._first_tokens[command.attempt_id] = command.first_token_id
            case Abort() if (task := self._tasks.get(command.attempt_id)) is not None:  # type: ignore[assignment]
                task.cancel()
            case PinPrefix():
                self._reject(command.attempt_id, TransferError("vLLM sends no prefix"))
            case Ping():
                self._spawn(self._ping())

    def _heard(self, message: Idle | Stepped | Considered | Scheduled | Rejected | Reserved) -> None:
        match message:
            case Idle():
                self._is_idle = message.idle
            case Stepped():
                self._stepped = message
            case Rejected():
                self._events.put_nowait(message)
            case Considered() if message.attempt_id in self._tasks:
                self._waiting.add(message.attempt_id)
            case Scheduled() if message.attempt_id in self._tasks:
                self._scheduled_s[message.attempt_id] = message.time_s
                self._cached_tokens[message.attempt_id] = message.computed_tokens
                self._waiting.discard(message.attempt_id)
            case Reserved():
                self._waiting.discard(message.attempt_id)

    @property
    def _is_stalled(self) -> bool:
        """See `contract.engine.Load`."""
        return self._is_idle and bool(self._waiting)

    def _forget(self, attempt_id: str) -> None:
        self._tasks.pop(attempt_id, None)
        self._scheduled_s.pop(attempt_id, None)
        self._cached_tokens.pop(attempt_id, None)
        self._first_tokens.pop(attempt_id, None)
        self._waiting.discard(attempt_id)

    async def _serve(self, submit: Submit) -> None:
        request = submit.request
        try:
            if lacks := lacking(_ABILITIES, request):
                raise InvalidRequest(lacks)
            await self._stream(request, submit.kv_role)
        except WorkerLost as error:
            await self._lost(submit.attempt_id, error)
        except PdserveError as error:
            self._reject(submit.attempt_id, error)
        except httpx2.HTTPError as error:
            what = str(error) or type(error).__name__
            await self._lost(submit.attempt_id, WorkerLost(f"{self._name} is lost: {what}"))
        except Exception as error:
            log.exception("unexpected error in a call of %s", self._name)
            self._reject(submit.attempt_id, WorkerLost(f"{self._name}: {type(error).__name__}: {error}"))

    async def _lost(self, attempt_id: str, error: WorkerLost) -> None:
        """Reject a request whose call broke, unless the server has ended: then the worker fails all of its requests."""
        assert self._process is not None
        await asyncio.wait([self._process.ended], timeout=END_S)
        if not self._process.ended.done():
            self._reject(attempt_id, error)

    async def _stream(self, request: Request, role: KVRole) -> None:
        assert self._http is not None
        attempt_id = request.attempt_id
        body = body_of(request, self._model) | {"stream": True}
        body["kv_transfer_params"] = {"pdserve": role, "attempt": attempt_id}
        if role is KVRole.PUSH:
            body["max_tokens"] = 1
        repeats, began_s = role is KVRole.RECEIVE, time.monotonic()
        if repeats and self._goes_on(request):
            repeats = False
            body["prompt"] = [*request.token_ids, request.token_ids[-1]]
            body["max_tokens"] -= 1
            body["kv_transfer_params"]["goes_on"] = True
        async with aclosing(steps_of(self._http, self._adapter, body, attempt_id, self._name)) as steps:
            async for step in steps:
                now_s = time.monotonic()
                if repeats and step.tokens:
                    repeats = False
                    self._check_first(attempt_id, step.tokens[0][0])
                    step = step._replace(tokens=step.tokens[1:])
                if step.tokens:
                    cached = self._cached_tokens.pop(attempt_id, 0) if role is not KVRole.RECEIVE else 0
                    self._events.put_nowait(Step(now_s, began_s, self._tokens_of(request, step, cached)))
                began_s = now_s

    def _goes_on(self, request: Request) -> bool:
        """Whether decode can go on after token 1: as a part of the prompt it must not change what is sampled."""
        sampling = request.sampling
        return (
            sampling.temperature == 0.0
            and not (sampling.presence_penalty or sampling.frequency_penalty)
            and sampling.structured_outputs is None
            and request.max_tokens > 1
        )

    def _check_first(self, attempt_id: str, token_id: int) -> None:
        if token_id != (first := self._first_tokens.get(attempt_id)):
            raise TransferError(
                f"worker {self._worker_id} decodes another token 1 ({token_id}) than prefill ({first}): it has other "
                "KV, or another order of computing in its batch"
            )

    def _tokens_of(self, request: Request, answered: Answered, cached_tokens: int) -> list[TokenOut]:
        scheduled_s = self._scheduled_s.get(request.attempt_id, time.monotonic())
        reason, last = answered.finish_reason, len(answered.tokens) - 1
        return [
            TokenOut(
                request.attempt_id,
                token_id,
                reason.value if reason is not None and number == last else "",
                scheduled_s,
                asked_logprobs(logprobs, request),
                cached_tokens,
            )
            for number, (token_id, logprobs) in enumerate(answered.tokens)
        ]

    def _reject(self, attempt_id: str, error: PdserveError) -> None:
        self._events.put_nowait(Rejected(attempt_id, *to_wire(error)))

    # --- state -------------------------------------------------------------------------------------------------------

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _ping(self) -> None:
        assert self._http is not None
        with contextlib.suppress(httpx2.HTTPError):
            if (await self._http.get("/health")).status_code == 200:
                self._events.put_nowait(Pong())

    async def _follow_load(self, every_s: float) -> None:
        assert self._http is not None
        assert self._channel is not None
        caches = self._channel.caches
        last: Load | None = None
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                now, _, _ = await self._adapter.load(self._http, caches.num_blocks)
                load = Load(
                    now.free_blocks,
                    now.running,
                    now.waiting,
                    now.preemptions,
                    now.prompt_tokens_looked_up,
                    now.prompt_tokens_cached,
                    stalled=self._is_stalled,
                    steps=self._stepped.steps,
                    busy_s=self._stepped.busy_s,
                )
                if load != last:
                    last = load
                    self._events.put_nowait(load)
            await asyncio.sleep(every_s)


async def start_vllm(
    spec: WorkerSpec, joins_groups: bool, memory: PoolMemory
) -> tuple[VLLMEngine, Ready, Callable[[], Pool]]:
    """See `worker.incarnation.StartEngine`. On a GPU the pool is vLLM's own memory."""
    source = await in_thread("model", lambda: resolve_model(spec.config.model.path, served=False))
    engine = VLLMEngine(spec.worker_id)
    ready = await engine.start(spec, source, spec.config.cluster.start_limit_s(spec.device))

    return engine, ready, lambda: engine.pool(ready)


def _layout(caches: Caches, model_hash: str) -> KVLayout:
    """The layout of vLLM's blocks. What a layer has in a block is opaque: servers of one version agree on it."""
    dtype = caches.dtype if caches.dtype in KV_DTYPE_BYTES else FP8
    numbers = caches.layer_bytes // KV_DTYPE_BYTES[dtype] // caches.block_size
    return KVLayout(model_hash, dtype, caches.block_size, (CacheSpec(caches.num_layers, 1, numbers, planes=1),))
