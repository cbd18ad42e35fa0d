"""A service in the world: gateways, workers and their supervisor, made of the product's own parts."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec

import decode_worker.receive
import prefill_worker.push
from checkpoints.source import resolve_model
from contract.control import Wire
from engine.scheduling.scheduler import SchedulerConfig
from gateway.admitted_call import AdmittedCall
from gateway.callers import Caller, Callers, Quota
from gateway.grpc_api.messages import completion_to_proto, submission_of, token_to_proto
from gateway.inference import Completion, Inference, Observer, OutputToken
from gateway.load_meter import LOOK_EVERY_S, LoadMeter
from gateway.status_report import StatusReport
from gateway.token_file import TokenLimits
from gateway.tokenizer import Tokenizer, load_tokenizer
from gateway.worker_directory import WorkerDirectory
from kv_transfer.memory import HostMemory
from kv_transfer.pool import Pool
from pdserve.core.clock import Clock
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import PdserveError, to_wire
from pdserve.core.kv_layout import KVLayout, probe_area
from pdserve.core.prefix_digests import keyed_salt
from pdserve.core.request import MAX_PRIORITY, Mode
from pdserve.core.worker import Role, WorkerInfo
from pdserve.pb import inference_pb2 as pb
from router.registry import WorkerRegistry
from router.router import Router
from runtime.awake_clock import RunningAwakeClock, awake_clock
from runtime.secret import ServiceSecret
from runtime.threads import LoopThread
from simulator.engine import FailingStore, Violation, WorldEngine
from simulator.kv_link import WorldTransport
from simulator.loop import WorldLoop
from simulator.model import EOS_TOKEN_ID, NUM_LAYERS, SLOT_BYTES
from simulator.network import API, Network, Process, StreamWire
from worker.client import WorkerClient
from worker.incarnation import Incarnation
from worker.kv import KVThread
from worker.server import ControlServer
from worker.spec import WorkerSpec
from worker.watchdog import Watchdog
from worker.worker import Worker

CACHE_KEY = b"key"
START_S = (0.2, 2.0)
"""How long a process takes to start."""
FAIL_S = 1.0
"""Within which the requests on an engine that has died have ended."""
PROBE_BYTES = 2**20
"""What a link is measured with, at most."""
_SECRET = ServiceSecret(bytes(32))
_HANDLERS = {**prefill_worker.push.HANDLERS, **decode_worker.receive.HANDLERS}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What workers of a world differ in."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    chunk_tokens: int | None
    prefix_caching: bool
    run_ahead: bool
    one_sided: bool
    corrupt_share: float
    """So many of the pieces of KV that cross a link arrive with a wrong byte."""
    bytes_per_s: float
    """Rate of a KV link."""
    step_s: tuple[float, float]
    """How long a step of an engine takes, at least and at most."""
    defect_share: float = 0.0
    """So many of the messages about KV are sent twice, or are wrong."""
    cold_blocks: int = 0
    """So many blocks that the prefix cache forgets are kept. An engine finds those of the one before."""
    cold_fail_share: float = 0.0
    """See `FailingStore`."""
    speculates: bool = False
    """Engines guess tokens."""
    tight_tokens: int | None = None
    """Steps of more tokens than this may run out of memory."""


class WorldWorker:
    """A worker called ``worker_id`` on ``host``, in a process of its own. It implements `worker.ports.WorkerPorts`."""

    def __init__(
        self,
        network: Network,
        spec: WorkerSpec,
        settings: WorkerSettings,
        chance: random.Random,
        tell: Callable[[str], None],
    ) -> None:
        self.spec, self.settings, self._chance, self._network = spec, settings, chance, network
        self.process = Process(network, spec.worker_id, spec.host)
        self.loop = self.process.loop("control")
        self.engines: list[WorldEngine] = []
        self.worker: Worker | None = None
        self._store: FailingStore | None = None
        self._tell = tell
        self._task: asyncio.Task[None] | None = None
        self.loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._task = self.loop.create_task(self._run())

    def stop(self) -> None:
        """End worker and engine in order, as `worker.process.WorkerThread.stop` does."""
        if self.process.alive and self._task is not None:
            self.loop.call_soon(self._task.cancel)

    @property
    def engine(self) -> WorldEngine:
        """The last one."""
        return self.engines[-1]

    async def _run(self) -> None:
        try:
            await asyncio.sleep(self._chance.uniform(*START_S))
            worker = self.worker = Worker(
                self.spec, _HANDLERS, _SECRET, self.process.clock, ports=self, chance=self._chance
            )
            worker.started.add_done_callback(lambda done: done.cancelled() or done.exception())
            await worker.run()
        except PdserveError as error:
            self._tell(f"{self.spec.worker_id} ends: {error}")
        finally:
            self.process.kill()

    def _engine_died(self, engine: WorldEngine) -> None:
        self.loop.call_soon(lambda: self.loop.create_task(self._check_failed(engine)))

    async def _check_failed(self, engine: WorldEngine) -> None:
        """Raise `Violation` unless the requests on an engine that has died end soon."""
        for _ in range(10):  # not all at once: this process may be paused
            await asyncio.sleep(FAIL_S / 10)
        requests = {} if self.worker is None else self.worker._table._requests
        for served in requests.values():
            if served.resources.command == engine.send and not served.is_over:
                raise Violation(f"{served.attempt_id} waits for an engine that has died")

    # --- WorkerPorts -------------------------------------------------------------------------------------------------

    async def listen(self, server: ControlServer) -> None:
        """See `WorkerPorts`."""
        server.address = f"{self.spec.worker_id}/control/{id_of(self._chance)}"
        self._network.servers[server.address] = self.process, self.loop, server.serve

    async def stop_listening(self, server: ControlServer) -> None:
        """See `WorkerPorts`."""
        self._network.servers.pop(server.address, None)

    def registry(self, address: str) -> Wire:
        """See `WorkerPorts`."""
        return StreamWire(self._network, self.process, address)

    async def start(self) -> Incarnation:
        """See `WorkerPorts`."""
        await asyncio.sleep(self._chance.uniform(*START_S))
        settings, config = self.settings, self.spec.config
        layout = KVLayout.uniform("simulated", "float16", settings.block_size, NUM_LAYERS, 1, SLOT_BYTES // 4)
        offset = probe_area(layout.block_bytes * settings.num_blocks).offset
        memory = HostMemory.create(offset + PROBE_BYTES)
        mapped = HostMemory(memory.fd)  # in the engine
        if settings.cold_blocks and self._store is None:
            max_bytes, chance = settings.cold_blocks * layout.block_bytes, random.Random(self._chance.getrandbits(64))
            self._store = FailingStore(max_bytes, settings.cold_fail_share, chance)
        pool = Pool(layout, settings.num_blocks, memory)
        engine = WorldEngine(
            self.process,
            self.loop,
            layout,
            SchedulerConfig(
                max_num_batched_tokens=settings.max_num_batched_tokens,
                max_num_seqs=settings.max_num_seqs,
                max_model_len=settings.num_blocks * settings.block_size,
                block_size=settings.block_size,
                num_blocks=settings.num_blocks,
                eos_token_ids=(EOS_TOKEN_ID,),
                prefix_caching=settings.prefix_caching,
                chunk_tokens=settings.chunk_tokens,
            ),
            mapped,
            self._store,
            self._chance,
            run_ahead=settings.run_ahead,
            layer_groups=config.transfer.layer_groups if config.transfer.overlap == "layer" else 0,
            step_s=settings.step_s,
            tight_tokens=settings.tight_tokens,
            speculates=settings.speculates,
        )
        self.engines.append(engine)
        engine.process.on_death += [mapped.close, lambda: self._engine_died(engine)]
        epoch = id_of(self._chance)
        transport = WorldTransport(
            self._network,
            self.process,
            memory,
            engine.check_access,
            random.Random(self._chance.getrandbits(64)),
            one_sided=settings.one_sided,
            on_device=settings.one_sided and not config.transfer.checksum,
            corrupt_share=settings.corrupt_share,
            defect_share=settings.defect_share,
            bytes_per_s=settings.bytes_per_s,
        )
        kv = KVThread(
            pool,
            [transport],
            config.transfer,
            engine,
            worker_id=self.spec.worker_id,
            epoch=epoch,
            clock=self.process.clock,
            eos_token_ids=engine.ready.eos_token_ids,
            chance=self._chance,
            thread=_WorldThread(self.process.loop("kv")),
        )
        endpoints = await kv.start(self.spec.host)
        watchdog = Watchdog(
            engine,
            self.spec.worker_id,
            awake_clock(),
            config.engine.hang_timeout_s,
            process=_Watched(engine),
        )
        return Incarnation(engine, kv, engine.ready, epoch, endpoints, watchdog, config.transfer)


class _WorldThread(LoopThread):
    """A thread of the world."""

    def __init__(self, loop: WorldLoop) -> None:
        self.loop, self._runs = loop, False

    @property
    def runs(self) -> bool:
        """See `LoopThread`."""
        return self._runs and not self.loop.is_closed()

    def start(self) -> None:
        """See `LoopThread`."""
        self._runs = True

    async def stop(self, timeout_s: float) -> None:
        """See `LoopThread`."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        await asyncio.sleep(0.001)


class _Watched:
    """Implements `worker.watchdog.Watched`: an engine that was paused computes nothing."""

    def __init__(self, engine: WorldEngine) -> None:
        self._engine = engine

    def look(self) -> tuple[float, bool, float]:
        """See `Watched`."""
        return 0.0, not self._engine.loop.paused, 0.0

    def kill(self) -> None:
        """See `Watched`."""
        self._engine.process.kill()


def id_of(chance: random.Random) -> str:
    """A new id."""
    return chance.randbytes(8).hex()


# --- gateways --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request of a client."""

    request_id: str
    tenant: str
    prompt: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool
    mode: Mode
    salt: str
    timeout_s: float
    priority: int
    stop: tuple[int, ...] = ()
    """Tokens whose texts end it, which the gateway finds."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end it, which the engine finds."""
    prompt_logprobs: bool = False
    speculation: bool | None = None

    @property
    def model_salt(self) -> str:
        """That of its tokens' KV."""
        return keyed_salt(f"{self.tenant}/{self.salt}", CACHE_KEY)

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end it."""
        return frozenset([*self.stop, *self.stop_token_ids, *(() if self.ignore_eos else (EOS_TOKEN_ID,))])


class Call(msgspec.Struct, frozen=True, array_like=True):
    """The first message of a call to a gateway's API: a serialized `GenerateRequest`, and what gRPC sends beside it. Of
    the answer no more than ``window`` messages are unread (0: there is no limit)."""

    tenant: str
    timeout_s: float
    window: int
    message: bytes


ERROR = b"\xff"
"""An answer that begins with it is an error in the form of `to_wire`, and others are serialized `GenerateResponse`."""


class CountedQuota(Quota):
    """Counts all that it is charged."""

    charged = 0

    def spend(self, tokens: int) -> None:
        """See `Quota`."""
        self.charged += tokens
        super().spend(tokens)


class CallQuota(CountedQuota):
    """That of one call, whose use counts in ``whole``, too."""

    def __init__(self, whole: CountedQuota, clock: Clock) -> None:
        super().__init__(whole.limits, clock)
        self._whole = whole

    def take(self, requests: int, held: int = 0) -> None:
        """See `Quota`."""
        self._whole.take(requests, held)

    def give_back(self, requests: int) -> None:
        """See `Quota`."""
        self._whole.give_back(requests)

    def spend(self, tokens: int) -> None:
        """See `Quota`."""
        super().spend(tokens)
        self._whole.spend(tokens)


class Charges(Observer):
    """Raises `Violation` unless a call is charged for all tokens that were computed for it."""

    def finished(self, completion: Completion, call: AdmittedCall) -> None:
        """See `Observer`."""
        quota, record = call.caller.quota, completion.record
        if isinstance(quota, CountedQuota) and quota.charged < record.num_tokens:
            name = record.request.request_id
            raise Violation(f"{name}: {record.num_tokens} tokens were computed, and {quota.charged} are charged")


class WorldGateway:
    """The gateway ``name``: router, registry, directory and `Inference`, without its two servers of public APIs.
    ``restarted``: one with its name has served before."""

    def __init__(
        self,
        network: Network,
        name: str,
        config: PdserveConfig,
        members: Mapping[str, Role],
        version: int,
        chance: random.Random,
        *,
        restarted: bool,
    ) -> None:
        self.name, self._network, self._members, self._config = name, network, dict(members), config
        self.process = Process(network, name, f"host-{name}")
        self.loop = self.process.loop("loop")
        self._chance, self._version = chance, version
        self.quotas: dict[str, CountedQuota] = {}
        """By tenant."""
        self.ready = False
        self.loop.call_soon(self._start, restarted)

    def _start(self, restarted: bool) -> None:
        """Everything that a real gateway makes in its own loop."""
        clock, config, chance = self.process.clock, self._config, self._chance
        both = {Role.PREFILL, Role.DECODE} <= set(self._members.values())
        self.registry = WorkerRegistry(RunningAwakeClock(), config.router, config.gateway.replicas)
        if restarted:
            self.registry.expect_workers(list(Mode) if both else [Mode.COLOCATED])
        auto: Mode = Mode.AUTO if both else Mode.COLOCATED
        self.router = Router(
            self.registry,
            config.router,
            clock,
            auto,
            config.transfer.on_kv_failure,
            chance,
        )
        self.directory = WorkerDirectory(self.registry, self._connect, "world", chance)
        self.directory.expect(self._members, self._version)
        self.meter = LoadMeter(config.objectives, clock, lambda: self.inference.running.values())
        report = StatusReport(self.registry, self.router, clock, "simulated", "0", lambda: True, "", {}, [], str)
        self.inference = Inference(
            self.router,
            _tokenizer(),
            report.limits,
            Callers(None, clock),
            clock,
            60.0,
            CACHE_KEY,
            [Charges(), *([self.meter] if config.scaling.controller != "off" else [])],
            chance=chance,
        )
        self._network.servers[self.name] = self.process, self.loop, self.directory.serve
        self._network.servers[f"{self.name}{API}"] = self.process, self.loop, self._serve
        self.loop.create_task(self._expire())
        if config.scaling.controller != "off":
            self.loop.create_task(self._look())
        self.ready = True

    async def _connect(self, info: WorkerInfo, epoch: str) -> WorkerClient:
        wire = StreamWire(self._network, self.process, info.control_address)
        # Its clock has no id that tells it from those of other hosts.
        return await WorkerClient.over(wire, replace(info, clock_id=""), epoch, self.process.clock)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(self._config.router.heartbeat_s)
            self.directory.expire()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.meter.look(self.registry.view().workers, self.router.short_of)

    def caller(self, tenant: str) -> Caller:
        """A tenant, with its quota at this gateway."""
        if tenant not in self.quotas:
            self.quotas[tenant] = CountedQuota(TokenLimits(min_priority=-MAX_PRIORITY), self.process.clock)
        return Caller(tenant, CallQuota(self.quotas[tenant], self.process.clock), shares_cache=False)

    async def _serve(self, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """One call of a client: the request in, tokens out, then the completion or an error."""
        first = _CALL.decode(await anext(requests))
        room = asyncio.Semaphore(first.window)
        reading = self.loop.create_task(_note_reads(requests, room)) if first.window else None
        try:
            with self.inference.admission(self.caller(first.tenant), first.timeout_s) as call:
                self.inference.was_read()
                outputs = self.inference.generate(submission_of(first.message), call)
                async with aclosing(outputs):
                    async for output in outputs:
                        if first.window:
                            await call.deadline.bound(room.acquire(), "the client was reading the answer")
                        yield _response(output)
        except PdserveError as error:
            yield ERROR + msgspec.msgpack.encode(to_wire(error))
        finally:
            if reading is not None:
                reading.cancel()


_CALL = msgspec.msgpack.Decoder(Call)


@functools.cache
def _tokenizer() -> Tokenizer | None:
    return load_tokenizer(resolve_model("tiny").folder)


async def _note_reads(requests: AsyncIterator[bytes], room: asyncio.Semaphore) -> None:
    async for _ in requests:
        room.release()


def _response(output: OutputToken | Completion) -> bytes:
    """The message for ``output``."""
    if isinstance(output, OutputToken):
        token = token_to_proto(output.token_id, output.text, output.index, output.logprobs, None)
        return pb.GenerateResponse(token=token).SerializeToString()
    return pb.GenerateResponse(completion=completion_to_proto(output, None)).SerializeToString()
