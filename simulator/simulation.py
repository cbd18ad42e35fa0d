"""Runs the plan of a seed: clients, faults, the supervisor that starts again what has died, and the checks."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import random
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from contract.kv import Reason
from kv_transfer.sender import Early
from pdserve.client.async_client import AsyncStream
from pdserve.client.generation import Generation
from pdserve.client.request import Ask, GenerateOptions
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import DeadlineExceeded, NotReady, PdserveError, TransferError, from_wire
from pdserve.core.handoff import prefix_transfer_id
from pdserve.core.request import Mode
from pdserve.core.timeline import UNATTRIBUTED
from pdserve.core.worker import Role
from router.breaker import BreakerState
from router.registered_worker import RegisteredWorker
from router.router import MAX_PLACEMENTS
from simulator.client import DEADLINE_GRACE_S, UNANSWERED, WorldGatewayApi
from simulator.engine import Violation
from simulator.log import WorldLog, logged
from simulator.loop import BEGIN_S, Stuck, World
from simulator.model import answer, text_of
from simulator.network import Network, Process
from simulator.plan import ClientRequest, Fault, Plan
from simulator.scaling import EPSILON_S, DrawnForecasts, WorldScaling
from simulator.service import Asked, WorldGateway, WorldWorker
from worker.spec import WorkerSpec

RESTART_S = (0.5, 2.0)
READY_S = 60.0
"""Within which a service is ready."""
HEAL_S = 60.0
"""Within which it is again after the faults."""
END_S = 120.0
"""Within which all requests have ended, after the last one came."""
REST_S = 60.0
"""Within which everything is released after that."""
ABORT_S = 1.0
"""Within which a request is gone whose client has left."""
PEER_S = 2.0
"""How long a fault waits for its moment."""
ENDS = frozenset(["stop", "length", "left", "CapacityExceeded", "DeadlineExceeded", "NotReady", "WorkerLost"])
"""How requests end."""
SERVED_S = 30.0
"""A request with so much time is served, or refused because of faults or load: all faults end long before."""
DRAIN_S, LEAVE_S = 2.0, 8.0
"""Within which a worker that leaves is drained, and has ended."""
LAST_REQUESTS = 40
"""Sent at most, four at a time, until all breakers are closed."""
RETRY_S = (0.001, 0.1)
"""After one of these a client asks again that was told that the service is not ready."""


@dataclass(slots=True)
class Outcome:
    """How a client's request ended."""

    request: ClientRequest
    tokens: list[int] = field(default_factory=list)
    end: str = ""
    """``stop``, ``length``, ``left``, or the name of an error."""
    why: str = ""
    resumes: int = 0
    sent_s: float = 0.0
    first_s: float | None = None
    """When the first token came."""
    ended_s: float = 0.0


@dataclass(slots=True)
class Result:
    """What a run has shown."""

    plan: Plan
    outcomes: list[Outcome]
    violations: list[str]
    trace: list[str]
    virtual_s: float
    turns: int


def simulate(plan: Plan, *, trace: bool = False) -> Result:
    """Run ``plan``. With ``trace``, what the service's parts log is in the result."""
    gc_was_on = gc.isenabled()
    gc.disable()  # it would close what nothing refers to at times that depend on the machine
    gc.freeze()  # `_forget_tasks` need not look at what was there before
    try:
        with logged(trace) as log:
            return _run(plan, log)
    finally:
        _forget_tasks()
        gc.unfreeze()
        asyncio._set_running_loop(None)
        if gc_was_on:
            gc.enable()


def _run(plan: Plan, log: WorldLog) -> Result:
    simulation = _Simulation(plan, log.lines)
    log.on_error = simulation.violate
    simulation.run()
    log.on_error = log.lines.append
    world, violations = simulation.world, list(simulation.violations)  # what comes later is about the end of the world
    return Result(plan, simulation.outcomes, violations, list(log.lines), world.now_s - BEGIN_S, world.turns)


class _Simulation:
    def __init__(self, plan: Plan, lines: list[str]) -> None:
        self.plan, self.lines = plan, lines
        self._draw = random.Random(f"world/{plan.seed}")
        self.violations: list[str] = []
        self.world = World(self._chance(), self._on_error, plan.turn_s)
        self.network = Network(self.world, self._chance(), plan.latency_s, plan.break_share)
        self.host = Process(self.network, "clients", "host-clients")
        self.loop = self.host.loop("loop")
        self.config = PdserveConfig.parse(plan.config)
        self.roles = dict(plan.roles)
        self.version = 1
        self.gateways: dict[str, WorldGateway] = {}
        self.workers: dict[str, WorldWorker] = {}
        self.outcomes = [Outcome(request) for request in plan.requests]
        self._turns = 0
        self._pool_tokens = plan.settings.num_blocks * plan.settings.block_size
        self._served = Counter[str]()  # tokens that were computed for a tenant, at least
        self._started: list[WorldGateway] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """What clients do, by the ids of their requests."""
        self._running = 0
        self._healed_s = 0.0
        self._steps_until_s = 0.0
        self._ready_s = 0.0
        self._leaving: set[str] = set()
        self._added = 0
        self._scales = False
        forecaster = DrawnForecasts(random.Random(f"forecasts/{plan.seed}")) if plan.forecasts else None
        self._scaling = WorldScaling(self, self.world, self.config.scaling, self.violate, forecaster)

    def _chance(self) -> random.Random:
        return random.Random(self._draw.getrandbits(64))

    def _on_error(self, context: Mapping[str, Any]) -> None:
        error = context.get("exception")
        self.violate(f"{context.get('thread')}: {context.get('message')}: {error!r}")

    def violate(self, what: str) -> None:
        """Note what must not be."""
        self.tell(f"VIOLATION {what}")
        self.violations.append(what)

    def tell(self, text: str) -> None:
        """Write a line of the trace."""
        self.lines.append(f"{self.world.now_s - BEGIN_S:10.6f} {text}")

    # --- life --------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All of it, up to the first violation."""
        for number in range(self.plan.gateways):
            self._start_gateway(f"gateway-{number}", restarted=False)
        for worker_id in self.plan.roles:
            self._start_worker(worker_id)
        try:
            if not self._until(self._is_ready, READY_S):
                self.violate("the service is not ready")
                return
            self._ready_s = self.world.now_s
            self.loop.call_soon(self._begin)
            if self.config.scaling.controller != "off":
                self.loop.call_soon(self._scale)
            if not self._until(lambda: self._running == 0, END_S + 10.0, least_s=0.001):
                left = [outcome.request.asked.request_id for outcome in self.outcomes if not outcome.end]
                self.violate(f"requests {left} have not ended")
                return
            if not self._until(self._is_healed, HEAL_S):
                self.violate("the service is not as it was before the faults")
                return
            self.loop.call_soon(self._say_farewell)
            if not self._until(lambda: self._running == 0, END_S, least_s=0.001):
                self.violate("the last requests have not ended")
                return
            if not self._until(lambda: self._at_rest() == "", REST_S, least_s=1.0):
                self.violate(f"not at rest: {self._at_rest()}")
        except Stuck as stuck:
            self.violate(str(stuck))
        except Violation as violation:
            self.violate(str(violation))
        if not self.violations:
            self._check_outcomes()
            if not self.plan.faults:
                self._check_quiet()

    def _until(self, condition: Any, for_s: float, least_s: float = 0.0) -> bool:
        least, limit = self.world.now_s + least_s, self.world.now_s + for_s

        def done() -> bool:
            return bool(self.violations) or (self.world.now_s >= least and condition())

        self.loop.call_later(for_s + 1.0, lambda: None)
        return self.world.run(done, limit)

    def _is_ready(self) -> bool:
        wanted = self.roles.keys()
        return all(
            gateway.ready
            and {worker.worker_id for worker in gateway.registry.workers if worker.is_ready} >= wanted
            and all(
                len(worker.linked) == sum(role is Role.DECODE for role in self.roles.values())
                for worker in gateway.registry.workers
                if worker.role is Role.PREFILL and not worker.lost
            )
            for gateway in self.gateways.values()
        )

    def _begin(self) -> None:
        self._scales = True
        for outcome in self.outcomes:
            self._running += 1
            self.loop.call_later(outcome.request.at_s, self._send, outcome)
        for fault in self.plan.faults:
            self.loop.call_later(fault.at_s, self._strike, fault)
            self._healed_s = max(self._healed_s, self.world.now_s + fault.at_s + fault.for_s)
            if fault.kind == "step":
                self._steps_until_s = max(self._steps_until_s, self.world.now_s + fault.at_s + fault.for_s)

    def _scale(self) -> None:
        """Have the controller look, until the last requests."""
        if self._scales:
            self._scaling.look()
            self.loop.call_later(self.config.scaling.interval_s, self._scale)

    def _is_healed(self) -> bool:
        """Whether all faults are over, and everything has started again."""
        return (
            self.world.now_s >= self._healed_s
            and all(each.ready and each.process.alive for each in self.gateways.values())
            and not any(engine.loop.paused for each in self.workers.values() for engine in each.engines[-1:])
            and self._is_ready()
            and all(self._knows_engines(each) for each in self.gateways.values())
        )

    def _knows_engines(self, gateway: WorldGateway) -> bool:
        """Whether it has heard which engines run: while it was paused, some may have started again."""
        running = {
            each.worker._incarnation.epoch
            for each in self.workers.values()
            if each.worker is not None and each.worker._incarnation is not None
        }
        return all(worker.lost or worker.info.epoch in running for worker in gateway.registry.workers)

    def _say_farewell(self) -> None:
        """Send a few requests more, four at a time: the service must be as it was before the faults."""
        self._running += 1
        self._scales = False
        self.loop.create_task(self._farewell()).add_done_callback(self._farewell_ended)

    def _farewell_ended(self, _task: object) -> None:
        self._running -= 1

    async def _farewell(self) -> None:
        for number in range(0, LAST_REQUESTS, 4):
            used = {worker: worker.last_used for _, worker in self._open_breakers()}
            asked = await asyncio.gather(*(self._ask_last(number + each) for each in range(4)))
            # One that is not chosen may wait for its probe. So may the decode worker of a request that was resumed for
            # its last token, which prefill gives.
            resumed = any(outcome.resumes for outcome in asked)
            for gateway, worker in self._open_breakers():
                was_used = worker.last_used > used.get(worker, math.inf)
                if worker.breaker.state is BreakerState.HALF_OPEN and was_used and not resumed:
                    self.violate(f"{gateway.name}: {worker.worker_id} served a request, and its breaker is half open")
            if not self._open_breakers():
                return

    async def _ask_last(self, number: int) -> Outcome:
        asked = Asked(
            request_id=f"last{number}",
            tenant="z",
            prompt=tuple(1 + (number * 7 + place) % 60 for place in range(5)),
            max_tokens=3,
            ignore_eos=True,
            mode=(Mode.PD, Mode.COLOCATED)[number % 2],
            salt=str(number),
            timeout_s=30.0,
            priority=0,
        )
        outcome = Outcome(ClientRequest(0.0, asked))
        await self._ask(outcome)
        if outcome.end != "length":
            self.violate(f"{asked.request_id}: {outcome.end} after all faults: {outcome.why}")
        return outcome

    def _open_breakers(self) -> list[tuple[WorldGateway, RegisteredWorker]]:
        return [
            (gateway, worker)
            for gateway in self.gateways.values()
            for worker in gateway.registry.workers
            if not worker.lost and worker.breaker.state is not BreakerState.CLOSED
        ]

    # --- processes ---------------------------------------------------------------------------------------------------

    def _start_gateway(self, name: str, *, restarted: bool) -> None:
        gateway = WorldGateway(
            self.network, name, self.config, self.roles, self.version, self._chance(), restarted=restarted
        )
        self.gateways[name] = gateway
        self._started.append(gateway)
        gateway.process.on_death.append(lambda: self._later(self._start_gateway_again, name))

    def _start_gateway_again(self, name: str) -> None:
        self._start_gateway(name, restarted=True)

    def _start_worker(self, worker_id: str) -> None:
        spec = WorkerSpec(
            worker_id=worker_id,
            role=self.roles[worker_id],
            host=f"host-{worker_id}",
            node=f"host-{worker_id}",
            device="cpu",
            registry_addresses=tuple(f"gateway-{number}" for number in range(self.plan.gateways)),
            version="0",
            service="world",
            config=self.config,
        )
        worker = WorldWorker(self.network, spec, self.plan.settings, self._chance(), self.tell)
        self.workers[worker_id] = worker
        worker.process.on_death.append(lambda: self._later(self._start_worker_again, worker_id))

    def _start_worker_again(self, worker_id: str) -> None:
        if worker_id in self.roles:
            self._start_worker(worker_id)

    def _later(self, start: Any, name: str) -> None:
        self.tell(f"{name} has died")
        self.loop.call_later(self._draw.uniform(*RESTART_S), start, name)

    def _strike(self, fault: Fault) -> None:
        self.tell(f"FAULT {fault}")
        worker = self.workers.get(fault.target)
        match fault.kind:
            case "kill_gateway":
                self._kill_gateway(fault.target, self.world.now_s + PEER_S)
            case "pause_gateway":
                gateway = self.gateways[fault.target].process
                gateway.pause()
                for connection in list(self.network.open.values()):
                    if connection.processes == (self.host, gateway):
                        connection.close("a proxy gives up")
                self.loop.call_later(fault.for_s, gateway.resume)
            case "drain_gateway":
                self._drain_gateway(self.gateways[fault.target], self.world.now_s + fault.for_s)
            case "partition":
                self.network.block(fault.target, fault.other)
                self.loop.call_later(fault.for_s, self.network.unblock, fault.target, fault.other)
            case "flip":
                self.flip(fault.target, Role(fault.other))
            case "replace" if fault.target in self.roles:
                self.add(self.roles[fault.target])
                self.remove(fault.target)
            case "step":
                # A smaller jump is within the errors of two measurements, and may not be noticed for a minute.
                jump_s = max(float(fault.other), 4 * self.plan.latency_s[1])
                self.network.clock(fault.target).offset_s += jump_s
            case "reset" if self.network.open:
                self._draw.choice(list(self.network.open.values())).close("connection reset")
            case "kill_peer":
                self._kill_peer(self.world.now_s + PEER_S)
            case "leave_reading":
                self._leave_reading(self.world.now_s + PEER_S)
            case "kill" if worker is not None:
                worker.process.kill()
            case "stop" if worker is not None:
                worker.stop()
                self.loop.call_later(fault.for_s, worker.stop)
            case "pause_kv" if worker is not None:
                for loop in worker.process.loops:
                    if loop.name.endswith("/kv"):
                        loop.pause()
                        self.loop.call_later(fault.for_s, loop.resume)
            case "pause" if worker is not None:
                worker.process.pause()
                self.loop.call_later(fault.for_s, worker.process.resume)
            case "kill_engine" if worker is not None and worker.engines:
                worker.engine.process.kill()
            case "pause_engine" if worker is not None and worker.engines:
                engine = worker.engine
                engine.process.pause()
                self.loop.call_later(fault.for_s, engine.process.resume)
            case "hang_engine" if worker is not None and worker.engines:
                worker.engine.process.pause()
            case _:
                self.tell("it has no target")

    def _kill_gateway(self, name: str, until_s: float) -> None:
        """Kill a gateway as soon as a stream that runs there has tokens, or at ``until_s``."""
        gateway = self.gateways[name]
        running = gateway.inference.running.values() if gateway.ready else ()
        if self.world.now_s >= until_s or any(record.output_token_ids for record in running):
            gateway.process.kill()
        else:
            self.loop.call_later(0.001, self._kill_gateway, name, until_s)

    def _drain_gateway(self, gateway: WorldGateway, until_s: float) -> None:
        """Have a gateway refuse new calls, and end it when it has no more, or at ``until_s``."""
        if gateway.ready:
            gateway.inference.draining = NotReady("the service is stopping")
            if gateway.inference.in_progress and self.world.now_s < until_s:
                self.loop.call_later(0.01, self._drain_gateway, gateway, until_s)
                return
        gateway.process.kill()

    def _kill_peer(self, until_s: float) -> None:
        """Kill the decode worker of a prompt whose prefix is being fetched. Looks for one until ``until_s``."""
        for each in self.workers.values():
            incarnation = None if each.worker is None else each.worker._incarnation
            if each.worker is None or incarnation is None:
                continue
            for served in each.worker._table._requests.values():
                if served.prefix_source is None or served._peer is None:
                    continue
                name, transfers = prefix_transfer_id(served.attempt_id), incarnation.kv._receiver._transfers.values()
                fetches = [each.fetch for each in transfers if each.attempt_id == name and each.fetch is not None]
                peer = self.workers.get(served.peer.worker_id)
                if any(fetch.left for fetch in fetches) and peer is not None:
                    self.tell(f"{served.peer.worker_id} is killed while {served.attempt_id} fetches its prefix")
                    peer.process.kill()
                    return
        if self.world.now_s < until_s:
            self.loop.call_later(0.001, self._kill_peer, until_s)

    def _leave_reading(self, until_s: float) -> None:
        """Have the client leave whose request's cold blocks are being read. Looks for one until ``until_s``."""
        for worker in self.workers.values():
            for attempt_id in worker.engine.reading if worker.engines else ():
                task = self._tasks.get(attempt_id.partition("#")[0])
                if task is not None and not task.done():
                    self.tell(f"the client of {attempt_id} leaves while its cold blocks are read")
                    task.cancel()
                    return
        if self.world.now_s < until_s:
            self.loop.call_later(0.001, self._leave_reading, until_s)

    def flip(self, worker_id: str, role: Role) -> None:
        """See `simulator.scaling.Supervisor`."""
        if worker_id not in self.roles:
            return
        roles = {**self.roles, worker_id: role}
        if len(set(roles.values())) < len(set(self.roles.values())):
            return  # a service keeps both roles
        self.tell(f"{worker_id} becomes a {role} worker")
        self._set_roles(roles)

    def _set_roles(self, roles: dict[str, Role]) -> None:
        self.roles, self.version = roles, self.version + 1
        for gateway in self.gateways.values():
            if gateway.ready and gateway.process.alive:
                gateway.loop.call_soon(gateway.directory.expect, roles, self.version)

    def add(self, role: Role) -> None:
        """See `simulator.scaling.Supervisor`."""
        self._added += 1
        new = f"{role}+{self._added}"
        self.tell(f"{new} joins")
        self._set_roles({**self.roles, new: role})
        self._start_worker(new)

    def remove(self, worker_id: str) -> None:
        """Have a worker leave, as ``pdserve scale`` does."""
        self.tell(f"{worker_id} leaves")
        self.roles = {each: role for each, role in self.roles.items() if each != worker_id}
        self.version += 1
        self._leaving.add(worker_id)
        for gateway in self.gateways.values():
            if gateway.ready and gateway.process.alive:
                gateway.loop.call_soon(lambda each: each.loop.create_task(self._let_go(each, worker_id)), gateway)
        self.loop.call_later(LEAVE_S, self._gone, worker_id)

    @property
    def is_changing(self) -> bool:
        """See `simulator.scaling.Supervisor`."""
        return bool(self._leaving)

    async def _let_go(self, gateway: WorldGateway, worker_id: str) -> None:
        gateway.directory.expect(self.roles, self.version)
        await gateway.directory.retire([worker_id], DRAIN_S)
        await gateway.directory.dismiss([worker_id])

    def _gone(self, worker_id: str) -> None:
        """End a worker that has left, if it has not ended by itself (the supervisor does)."""
        self._leaving.discard(worker_id)
        worker = self.workers.pop(worker_id, None)
        if worker is not None:
            worker.process.kill()

    # --- clients -----------------------------------------------------------------------------------------------------

    def _send(self, outcome: Outcome) -> None:
        task = self.loop.create_task(self._ask(outcome))
        self._tasks[outcome.request.asked.request_id] = task
        task.add_done_callback(lambda _: self._ended(outcome))
        if outcome.request.leaves_s is not None:
            self.loop.call_later(outcome.request.leaves_s, task.cancel)

    def _ended(self, outcome: Outcome) -> None:
        self._running -= 1
        outcome.ended_s = self.world.now_s
        if not outcome.end:
            outcome.end = "left"
            if not self.plan.faults:
                self.loop.call_later(ABORT_S, self._check_aborted, outcome.request.asked.request_id)
        self.tell(f"CLIENT {outcome.request.asked.request_id}: {outcome.end} {outcome.why}")

    async def _ask(self, outcome: Outcome) -> None:
        """Send a request, and read its answer. While the service is not ready, ask again."""
        asked = outcome.request.asked
        expected = answer(asked.model_salt, asked.prompt, asked.max_tokens, asked.ends)
        outcome.sent_s = self.world.now_s
        deadline_s = outcome.sent_s + asked.timeout_s
        while (left_s := deadline_s - self.world.now_s) > 0:
            apis = self._apis(outcome)
            options: GenerateOptions = {
                "request_id": asked.request_id,
                "max_tokens": asked.max_tokens,
                "temperature": 0.0,
                "ignore_eos": asked.ignore_eos,
                "stop": [text_of([token_id]) for token_id in asked.stop],
                "stop_token_ids": asked.stop_token_ids,
                "mode": asked.mode,
                "salt": asked.salt,
                "timeout_s": left_s,
                "priority": asked.priority,
                "speculation": asked.speculation,
            }
            stream = AsyncStream(Ask(asked.prompt, options, len(apis) > 1, self.host.clock.now), apis)
            outcome.tokens.clear()
            try:
                await self._read(outcome, stream, apis, expected)
                return
            except NotReady as error:
                outcome.why = str(error)
                if not self.plan.faults or not all(api.failed for api in apis):
                    self.violate(f"{asked.request_id}: it was given up at {stream.target}: {error}")
            except PdserveError as error:
                outcome.end, outcome.why = error.kind, str(error)
                return
            await asyncio.sleep(self._draw.choice(RETRY_S))
        outcome.end = DeadlineExceeded.__name__

    def _apis(self, outcome: Outcome) -> list[WorldGatewayApi]:
        """The gateways in the order in which a request asks them."""
        asked = outcome.request.asked

        def begun(tokens: int) -> None:
            self._served[asked.tenant] += tokens

        self._turns += 1
        return [
            WorldGatewayApi(
                self.network,
                self.host,
                f"gateway-{(self._turns + number) % self.plan.gateways}",
                asked,
                outcome.request.read_s,
                begun,
            )
            for number in range(self.plan.gateways)
        ]

    async def _read(
        self, outcome: Outcome, stream: AsyncStream, apis: Sequence[WorldGatewayApi], expected: list[int]
    ) -> None:
        """Read a stream, and compare what comes with what is ``expected``."""
        request, name, tokens = outcome.request, outcome.request.asked.request_id, outcome.tokens
        self.tell(f"CLIENT {name} asks {stream.target}")
        async for token in stream:
            index = token.index
            if index != len(tokens) or index >= len(expected) or token.token_id != expected[index]:
                self.violate(f"{name}: token {index} is {token.token_id}; {tokens} of {expected} came before")
            tokens.append(token.token_id)
            outcome.first_s = outcome.first_s or self.world.now_s
            self._served[request.asked.tenant] += 1
            for api in apis:
                api.failed = False
            if request.leaves_after is not None and len(tokens) >= request.leaves_after:
                return
        generation = await stream.result()
        self._check_generation(outcome, generation, expected)
        if self._steps_until_s <= outcome.sent_s:
            self._check_times(generation, stream.target)

    def _check_generation(self, outcome: Outcome, generation: Generation, expected: list[int]) -> None:
        name, outcome.end, outcome.resumes = generation.request_id, generation.finish_reason, generation.resumes
        asked = outcome.request.asked
        end, shown = "stop" if expected[-1] in asked.ends else "length", list(expected)
        if expected[-1] in asked.stop:
            del shown[-1]
            while shown and not text_of(shown[-1:]):  # it does not begin before the stop string
                del shown[-1]
        if (outcome.end, outcome.tokens) != (end, expected):
            self.violate(f"{name}: ended by {outcome.end} with {outcome.tokens} instead of {expected}")
        if (list(generation.token_ids), generation.text) != (shown, text_of(shown)):
            self.violate(f"{name}: the answer is {generation.token_ids}, {generation.text!r}, and should be {shown}")
        # A deadline, or a fault, may end the wait for the proof after the last token.
        proven = generation.kv_bytes > 0 or not (self.plan.faults or asked.timeout_s < SERVED_S)
        if proven and generation.kv_bytes != generation.kv_bytes_expected:
            self.violate(f"{name}: {generation.kv_bytes} bytes of KV moved, and {generation.kv_bytes_expected} were to")
        pair = generation.prefill_worker, generation.decode_worker
        if generation.kv_bytes and not pair[0] != pair[1] != "":
            self.violate(f"{name}: its KV was moved, and its workers are {pair}")
        if outcome.request.read_s or self.config.router.max_unread_tokens < asked.max_tokens:
            return  # it may have been paused and continued
        attempts, failures = generation.attempts, generation.failures
        known, most = (len(generation.placements), len(failures)), MAX_PLACEMENTS
        if known != (min(attempts, most), max(0, min(attempts - 1, most))):
            self.violate(f"{name}: of {attempts} attempts it knows {generation.placements} and {failures}")
        if any(failed.worker for failed in failures) and not self.plan.faults:  # others: `router.attempt.Standstill`
            self.violate(f"{name}: it was retried without any fault: {failures}")

    def _check_times(self, generation: Generation, gateway: str) -> None:
        """The offsets of the workers' clocks are within the error that is stated, and so are the stages, which leave no
        gap."""
        name, here = generation.request_id, self.network.clock(f"host-{gateway}").offset_s
        for worker_id, measured in generation.clocks.items():
            offset_s = self.network.clock(f"host-{worker_id}").offset_s - here
            if abs(measured.offset_s - offset_s) > measured.error_s + EPSILON_S:
                self.violate(f"{name}: the clock of {worker_id} is {offset_s} s ahead, and not {measured}")
        for figure, breakdown in generation.breakdowns.items():
            error_ms = breakdown.clock_error_ms + EPSILON_S * 1e3
            for stage, took_ms in breakdown.stages_ms.items():
                if took_ms < -error_ms or (stage == UNATTRIBUTED and took_ms > error_ms):
                    self.violate(f"{name}: {stage} of {figure} took {took_ms} ms: {breakdown}")

    def _check_aborted(self, request_id: str) -> None:
        """Without faults, no worker has a request whose client has left a while ago."""
        for worker_id, each in self.workers.items():
            if each.worker is not None:
                for attempt_id in each.worker._table._requests:
                    if attempt_id.startswith(f"{request_id}#"):
                        self.violate(f"{worker_id} still serves {attempt_id}, which its client left {ABORT_S} s ago")

    # --- checks ------------------------------------------------------------------------------------------------------

    def _check_outcomes(self) -> None:
        for tenant, tokens in self._served.items():
            charged = sum(gateway.quotas[tenant].charged for gateway in self._started if tenant in gateway.quotas)
            if charged < tokens:
                self.violate(f"tenant {tenant} was charged {charged} tokens, and {tokens} were computed for it")
        on_time = all(fault.kind != "step" for fault in self.plan.faults)  # clocks jump past deadlines
        for outcome in self.outcomes:
            asked, name = outcome.request.asked, outcome.request.asked.request_id
            late_s = outcome.ended_s - (self._ready_s + outcome.request.at_s + asked.timeout_s)
            if outcome.end == UNANSWERED or late_s > DEADLINE_GRACE_S:
                self.violate(f"{name}: it ended {late_s:.3f} s after its deadline")
            if outcome.end in ("stop", "length", "left"):
                continue
            if outcome.end == DeadlineExceeded.__name__ and asked.timeout_s >= SERVED_S and on_time:
                self.violate(f"{name}: it was not served within {asked.timeout_s} s: {outcome.why}")
            if outcome.end == "InvalidRequest" and len(asked.prompt) >= self._pool_tokens:
                continue
            if outcome.end not in ENDS and not issubclass(type(from_wire(outcome.end, "")), TransferError):
                self.violate(f"{name}: {outcome.end}: {outcome.why}")
            if not self.plan.faults and outcome.end not in ("CapacityExceeded", "DeadlineExceeded"):
                self.violate(f"{name}: {outcome.end} without any fault: {outcome.why}")

    def _check_quiet(self) -> None:
        """Without faults, no worker has failed a request, and none has refused a message about KV."""
        for gateway in self.gateways.values():
            for worker in gateway.registry.workers:
                if worker.breaker.total:
                    self.violate(f"{worker.worker_id} has failed requests without any fault: {worker.breaker.total}")
        for worker_id, each in self.workers.items():
            if each.worker is None:
                continue
            refused = dict(each.worker.incarnation.kv.refused)
            refused.pop(Reason.UNKNOWN_NONCE, None)  # what crosses the end of a request whose client has left
            if refused:
                self.violate(f"{worker_id} has refused messages without any fault: {refused}")

    def _at_rest(self) -> str:
        """What is still held; empty if nothing is."""
        if self.world.now_s < self._healed_s:
            return "faults"
        for gateway in self.gateways.values():
            if not gateway.ready:
                return f"{gateway.name} starts"
            inference = gateway.inference
            if inference.running or inference._claims or inference.in_progress:
                return f"{gateway.name} has requests {sorted(inference.running)}"
            if gateway.router.queued or gateway.router._active:
                return f"{gateway.name} has {gateway.router.queued} waiting, {dict(gateway.router._active)}"
            for tenant, quota in gateway.quotas.items():
                if quota.running:
                    return f"{gateway.name} counts {quota.running} requests of {tenant}"
            for registered in gateway.registry.workers:
                if registered.lost:
                    continue
                if registered.outstanding_requests or registered.outstanding_tokens or registered.held_blocks:
                    return (
                        f"{gateway.name} counts {registered.outstanding_requests} requests, "
                        f"{registered.outstanding_tokens} tokens, {registered.held_blocks} blocks "
                        f"on {registered.worker_id}"
                    )
        for worker_id, each in self.workers.items():
            if worker_id not in self.roles:
                return f"{worker_id} has not left"
            if each.worker is None or not each.engines or not each.engine.process.alive:
                return f"{worker_id} starts"
            table = each.worker._table
            if table._requests:
                return f"{worker_id} serves {sorted(table._requests)}"
            blocks = each.engine.scheduler.blocks
            if blocks.free_blocks != blocks.num_blocks:
                return f"{worker_id} has {blocks.num_blocks - blocks.free_blocks} blocks in use"
            incarnation = each.worker._incarnation
            if incarnation is not None:
                kv = incarnation.kv
                held = [kv._handoffs, kv._sender._transfers(), kv._receiver._transfers]
                if any(held):
                    return f"{worker_id} has KV transfers {held}"
                early = {name for name, known in kv._sender._attempts.items() if isinstance(known, Early)}
                if over := early & each.engine.runner._known.keys():
                    return f"{worker_id} keeps announcements of what has ended: {sorted(over)}"
        return ""


def _forget_tasks() -> None:
    """Free what a world leaves behind. Its tasks are not at their end, and how they end now does not matter."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):  # of tasks that had not begun
            gc.collect()  # what a stream that ended with an error refers to is let go
            gc.collect()  # closes coroutines, which keep what they refer to until the next time
            gc.collect()
    finally:
        sys.unraisablehook = hook
        logging.disable(disabled)
