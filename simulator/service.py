"""A service in the world: gateways, workers and their supervisor, made of the product's own parts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

import decode_worker.receive
import prefill_worker.push
from contract.control import Wire
from engine.scheduling.scheduler import SchedulerConfig
from gateway.arrival import AdmittedCall
from gateway.callers import Caller, Callers, Quota
from gateway.inference import Completion, Inference, Observer
from gateway.status_report import StatusReport
from gateway.token_file import TokenLimits
from gateway.validation import Submission
from gateway.worker_directory import WorkerDirectory
from kv_transfer.memory import HostMemory
from kv_transfer.pool import Pool
from pdserve.core.clock import Clock
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import PdserveError, to_wire
from pdserve.core.kv_layout import KVLayout, probe_area
from pdserve.core.request import MAX_PRIORITY, Mode
from pdserve.core.sampling import SamplingParams
from pdserve.core.worker import Role, WorkerInfo
from router.registry import WorkerRegistry
from router.router import Router
from runtime.awake_clock import RunningAwakeClock, awake_clock
from runtime.loop_thread import LoopThread
from runtime.secret import ServiceSecret
from simulator.engine import Violation, WorldEngine
from simulator.kv_link import WorldTransport
from simulator.loop import World, WorldLoop
from simulator.model import EOS_TOKEN_ID, NUM_LAYERS, SLOT_BYTES
from simulator.network import API, Network, Process, StreamWire
from worker.client import WorkerClient
from worker.incarnation import Incarnation
from worker.kv import KVThread
from worker.server import ControlServer
from worker.spec import WorkerSpec
from worker.watchdog import Watchdog
from worker.worker import Worker

START_S = (0.2, 2.0)
"""How long a process takes to start."""
FAIL_S = 1.0
"""Within which the requests on an engine that has died have ended."""
PROBE_BYTES = 64 * 2**10
"""What a link is measured with."""
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


class WorldWorker:
    """A worker called ``worker_id`` on ``host``, in a process of its own. It implements `worker.ports.WorkerPorts`."""

    def __init__(
        self,
        world: World,
        network: Network,
        spec: WorkerSpec,
        settings: WorkerSettings,
        chance: random.Random,
        tell: Callable[[str], None],
    ) -> None:
        self.spec, self.settings, self._chance, self._network = spec, settings, chance, network
        self.process = Process(world, spec.worker_id, spec.host)
        self.loop = self.process.loop("control")
        self.engines: list[WorldEngine] = []
        self.worker: Worker | None = None
        self._tell = tell
        self.loop.call_soon(lambda: self.loop.create_task(self._run()))

    @property
    def engine(self) -> WorldEngine:
        """The last one."""
        return self.engines[-1]

    async def _run(self) -> None:
        await asyncio.sleep(self._chance.uniform(*START_S))
        worker = self.worker = Worker(
            self.spec, _HANDLERS, _SECRET, self.process.world, ports=self, chance=self._chance
        )
        worker.started.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await worker.run()
        except PdserveError as error:
            self._tell(f"{self.spec.worker_id} ends: {error}")
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
            memory,
            self._chance,
            run_ahead=settings.run_ahead,
            layer_groups=config.transfer.layer_groups if config.transfer.overlap == "layer" else 0,
            step_s=settings.step_s,
        )
        self.engines.append(engine)
        engine.process.on_death.append(lambda: self._engine_died(engine))
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
            bytes_per_s=settings.bytes_per_s,
        )
        kv = KVThread(
            pool,
            [transport],
            config.transfer,
            engine,
            worker_id=self.spec.worker_id,
            epoch=epoch,
            clock=self.process.world,
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
    """A request of a client, in the form in which it crosses the network. ``resume``: the tokens that it has."""

    request_id: str
    tenant: str
    prompt: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool
    mode: Mode
    salt: str
    timeout_s: float
    priority: int
    resume: tuple[int, ...] = ()


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

    def finished(self, completion: Completion, arrival: AdmittedCall) -> None:
        """See `Observer`."""
        quota, record = arrival.caller.quota, completion.record
        if isinstance(quota, CountedQuota) and quota.charged < record.num_tokens:
            name = record.request.request_id
            raise Violation(f"{name}: {record.num_tokens} tokens were computed, and {quota.charged} are charged")


class WorldGateway:
    """The gateway ``name``: router, registry, directory and `Inference`, without its two servers of public APIs.
    ``restarted``: one with its name has served before."""

    def __init__(
        self,
        world: World,
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
        self.process = Process(world, name, f"host-{name}")
        self.loop = self.process.loop("loop")
        self._chance, self._version = chance, version
        self.quotas: dict[str, CountedQuota] = {}
        """By tenant."""
        self.ready = False
        self.loop.call_soon(self._start, restarted)

    def _start(self, restarted: bool) -> None:
        """Everything that a real gateway makes in its own loop."""
        world, config, chance = self.process.world, self._config, self._chance
        both = {Role.PREFILL, Role.DECODE} <= set(self._members.values())
        self.registry = WorkerRegistry(RunningAwakeClock(), config.router, config.gateway.replicas)
        if restarted:
            self.registry.expect_workers(list(Mode) if both else [Mode.COLOCATED])
        auto: Mode = Mode.AUTO if both else Mode.COLOCATED
        self.router = Router(
            self.registry,
            config.router,
            world,
            auto,
            config.transfer.on_kv_failure,
            chance,
        )
        self.directory = WorkerDirectory(self.registry, self._connect, "world", chance)
        self.directory.expect(self._members, self._version)
        report = StatusReport(self.registry, self.router, world, "simulated", "0", lambda: True, "", [], str)
        self.inference = Inference(
            self.router,
            None,
            report.limits,
            Callers(None, world),
            world,
            60.0,
            b"key",
            [Charges()],
            chance=chance,
        )
        self._network.servers[self.name] = self.process, self.loop, self.directory.serve
        self._network.servers[f"{self.name}{API}"] = self.process, self.loop, self._serve
        self.loop.create_task(self._expire())
        self.ready = True

    async def _connect(self, info: WorkerInfo) -> WorkerClient:
        wire = StreamWire(self._network, self.process, info.control_address)
        return await WorkerClient.over(wire, info, self.process.world)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(self._config.router.heartbeat_s)
            self.directory.expire()

    def caller(self, tenant: str) -> Caller:
        """A tenant, with its quota at this gateway."""
        if tenant not in self.quotas:
            self.quotas[tenant] = CountedQuota(TokenLimits(min_priority=-MAX_PRIORITY), self.process.world)
        return Caller(tenant, CallQuota(self.quotas[tenant], self.process.world), shares_cache=False)

    async def _serve(self, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """One call of a client: the request in, tokens out, then the completion or an error."""
        async for data in requests:
            asked = _ASKED.decode(data)
            submission = Submission(
                prompt=asked.prompt,
                sampling=_sampling(asked),
                request_id=asked.request_id,
                mode=asked.mode,
                salt=asked.salt,
                priority=asked.priority,
                resume=asked.resume,
            )
            try:
                with self.inference.admission(self.caller(asked.tenant), asked.timeout_s) as arrival:
                    self.inference.was_read()
                    outputs = self.inference.generate(submission, arrival)
                    async with aclosing(outputs):
                        async for output in outputs:
                            if isinstance(output, Completion):
                                proof = output.result.proof
                                kv_bytes = 0 if proof is None else proof.kv_bytes
                                expected, attempts = output.result.kv_bytes_expected, output.record.attempts
                                yield _encode(("end", str(output.finish_reason), kv_bytes, expected, attempts))
                            else:
                                yield _encode(("token", output.token_id, output.index))
            except PdserveError as error:
                yield _encode(("error", *to_wire(error)))
            return


_ASKED = msgspec.msgpack.Decoder(Asked)
_encode = msgspec.msgpack.encode


def _sampling(asked: Asked) -> SamplingParams:
    return SamplingParams(max_tokens=asked.max_tokens, ignore_eos=asked.ignore_eos, temperature=0.0)
