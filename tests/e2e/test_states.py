"""Requests in every state while something happens to them: they are cancelled, their processes die or stop, their
workers take other roles, their gateway is lost. One service of two gateways, two prefill and two decode workers.

A request ends with its complete answer, equal token by token to that of a run without faults, or with a clear error by
its deadline; then every block is free, and the next request succeeds. `make soak` goes through all faults in all
states; a few are in `make test`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pdserve import AsyncClient, AsyncStream, Client, Generation
from pdserve.client.status import ServiceStatus, ServiceWorker
from pdserve.core.errors import DeadlineExceeded, NotReady, PdserveError, RequestAborted
from pdserve.core.worker import Role
from tests.local_cluster import LocalCluster, gateway_name, local_cluster
from tests.random_models import save_random
from tests.request_states import (
    BLOCKER,
    OUTPUTS,
    PROMPTS,
    SHAPE,
    Running,
    State,
    held,
    is_free,
    prompt_of,
    settings,
    until,
)  # fmt: skip

log = logging.getLogger(__name__)

P, D = Role.PREFILL, Role.DECODE
BORN = {"prefill_0": P, "prefill_1": P, "decode_0": D, "decode_1": D}
OPPOSITE = {"prefill_0": D, "prefill_1": D, "decode_0": P, "decode_1": P}
SHORT = prompt_of(40, 9)
SHORT_OUTPUTS = 12
TIMEOUT_S = 60.0
GRACE_S = 10.0  # after its deadline, for a client on a busy machine
STOPPED_S = 5.0  # longer than heartbeats may be missing, and than an engine may be silent
RECOVERED_S = 90.0
LEASE_S = 600.0
"""So long that nothing here is noticed, or given back, by a lease that ends."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("models") / "model"
    save_random(folder, SHAPE, seed=3)
    sections = settings(str(folder))
    sections["router"] = {**sections["router"], "heartbeat_s": 0.1, "heartbeat_timeout_s": 3.0}
    sections["transfer"] = {**sections["transfer"], "lease_s": LEASE_S}
    with local_cluster(sections, prefill=2, decode=2, gateways=2, may_flip=True) as cluster:
        yield cluster


@pytest.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.target) as client:
        yield client
        await until(client, is_free)


async def answer(client: AsyncClient, prompt: Sequence[int], outputs: int = SHORT_OUTPUTS) -> Generation:
    return await client.generate(prompt, max_tokens=outputs, ignore_eos=True, mode="pd").result()


_expected: dict[int, tuple[int, ...]] = {}


async def expected(client: AsyncClient, prompt: list[int], outputs: int = OUTPUTS) -> tuple[int, ...]:
    """The answer without faults."""
    if id(prompt) not in _expected:
        _expected[id(prompt)] = (await answer(client, prompt, outputs)).token_ids
    return _expected[id(prompt)]


def uses_blocks(status: ServiceStatus, role: str) -> bool:
    """Whether a worker of the role has said so."""
    return any(worker.role == role and worker.free_blocks < worker.num_blocks for worker in status.workers)


async def test_a_cancel_frees_everything_in_every_state(client: AsyncClient) -> None:
    for state in State:
        async with held(client, state) as (request, blockers):
            role = "prefill" if state is State.PREFILLING else "decode"
            if not blockers:
                await until(client, lambda status, role=role: uses_blocks(status, role))  # type: ignore[misc]
            assert not request.reading.done(), state
            request.stream.cancel()
            if blockers:
                await until(client, lambda status: status.queued == 0)
                assert not any(blocker.reading.done() for blocker in blockers), "they go on"
            else:
                await until(client, is_free)
            await request.reading
            assert isinstance(request.error, RequestAborted), state
        await until(client, is_free)


async def test_a_deadline_frees_everything(client: AsyncClient) -> None:
    for mode in ("pd", "colocated"):
        with pytest.raises(DeadlineExceeded):
            await client.generate(PROMPTS[State.PREFILLING], max_tokens=2, mode=mode, timeout_s=0.1).result()
        await until(client, is_free)


@dataclass(frozen=True)
class Fault:
    """``signum`` to the process ``victim``: a gateway, or a worker or an engine of a role."""

    victim: str
    signum: signal.Signals
    state: State

    def __str__(self) -> str:
        return f"{self.signum.name} of {self.victim} while {self.state}"

    @property
    def role(self) -> str:
        return self.victim.partition(" ")[0]


VICTIMS = ("prefill worker", "prefill engine", "decode worker", "decode engine", "gateway")
ALL = [Fault(*each) for each in itertools.product(VICTIMS, (signal.SIGKILL, signal.SIGSTOP), State)]
FEW = [
    Fault("prefill worker", signal.SIGKILL, State.PREFILLING),
    Fault("prefill worker", signal.SIGSTOP, State.TRANSFERRING),
    Fault("decode worker", signal.SIGKILL, State.DECODING),
    Fault("decode worker", signal.SIGSTOP, State.DECODING),
    Fault("decode engine", signal.SIGSTOP, State.DECODING),
    Fault("gateway", signal.SIGSTOP, State.PREFILLING),
]
"""Killed engines are in `tests.e2e.test_tokens` and `tests.e2e.test_prefix_fetch`."""


class Matrix:
    """The faults on one cluster, one after the other."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self.outcomes: dict[str, str] = {}

    async def run(self, fault: Fault) -> None:
        """One fault and what follows."""
        cluster = self._cluster
        async with AsyncClient(cluster.target) as client, AsyncClient(cluster.operator) as operator:
            prompts = [PROMPTS[fault.state]] + [BLOCKER] * (2 if fault.state is State.QUEUED else 0)
            answers = [await expected(client, prompt, 2 if prompt is BLOCKER else OUTPUTS) for prompt in prompts]
            begin_s = time.monotonic()
            async with held(client, fault.state, timeout_s=TIMEOUT_S) as (request, blockers):
                resume = await self._strike(fault, await operator.status())
                ends = [request, *blockers]
                async with asyncio.timeout(TIMEOUT_S + GRACE_S):
                    await asyncio.gather(*(each.reading for each in ends))
                await resume()
                for each, tokens in zip(ends, answers, strict=True):
                    assert tuple(each.tokens) == tokens[: len(each.tokens)], fault
                    assert each.error is not None or len(each.tokens) == len(tokens), fault
                await self._check(fault, request)
        await self._recovered(fault)
        log.info("%s: well after %.1f s", fault, time.monotonic() - begin_s)

    async def _check(self, fault: Fault, request: Running) -> None:
        self.outcomes[str(fault)] = "answer" if request.error is None else type(request.error).__name__
        if request.error is None:
            result = await request.stream.result()
            assert result.kv_bytes == result.kv_bytes_expected, fault
            assert result.attempts == 1 or fault.role != "gateway", "a gateway that was stopped loses no worker"

    async def _strike(self, fault: Fault, status: ServiceStatus) -> Callable[[], Awaitable[None]]:
        """Send the signal. Returns what brings the process back."""
        cluster, struck_s = self._cluster, time.monotonic()
        victim = max((w for w in status.workers if w.role == fault.role), key=_use, default=None)
        if victim is not None and fault.victim.endswith("engine"):
            os.kill(victim.engine_pid, fault.signum)
        else:
            await asyncio.to_thread(cluster.kill, victim.worker_id if victim else "gateway", fault.signum)

        async def resume() -> None:  # processes end with the thread that has started them: not one of a pool
            if victim is None and fault.signum == signal.SIGKILL:
                cluster.start_gateway()
            elif victim is None or fault.victim.endswith("engine"):
                pass  # it goes on already; an engine's worker has seen to it
            elif fault.signum == signal.SIGKILL:
                cluster.start_worker(Role(victim.role), int(victim.worker_id[-1]))
            else:
                await asyncio.sleep(struck_s + STOPPED_S - time.monotonic())
                cluster.kill(victim.worker_id, signal.SIGCONT)
                await asyncio.to_thread(cluster.wait_ready)
                assert cluster.engine_pid(victim.worker_id) == victim.engine_pid, "it answered, and was not read"

        if victim is None and fault.signum == signal.SIGSTOP:
            await asyncio.sleep(STOPPED_S)
            cluster.kill("gateway", signal.SIGCONT)
        return resume

    async def _recovered(self, fault: Fault) -> None:
        """All workers are ready and free, and the next request is served."""
        deadline_s = time.monotonic() + RECOVERED_S
        await asyncio.to_thread(self._cluster.wait_ready)
        async with AsyncClient(self._cluster.target) as client:
            while True:
                try:
                    status = await client.status()
                    if len(status.workers) == 4 and is_free(status) and all(w.state == "ready" for w in status.workers):
                        break
                except PdserveError:
                    status = None
                assert time.monotonic() < deadline_s, (fault, status)
                await asyncio.sleep(0.05)
            tokens = (await answer(client, PROMPTS[State.DECODING])).token_ids
            assert tokens == (await expected(client, PROMPTS[State.DECODING]))[:SHORT_OUTPUTS], fault
            await until(client, is_free)


def _use(worker: ServiceWorker) -> tuple[int, int]:
    return worker.outstanding_tokens, worker.num_blocks - worker.free_blocks


async def test_a_few_faults(cluster: LocalCluster) -> None:
    matrix = Matrix(cluster)
    for fault in FEW:
        await matrix.run(fault)
    assert set(matrix.outcomes.values()) == {"answer"}, matrix.outcomes


@pytest.mark.soak
@pytest.mark.timeout(1_800)
async def test_every_fault_in_every_state(cluster: LocalCluster) -> None:
    matrix = Matrix(cluster)
    for fault in ALL:
        await matrix.run(fault)
    for name, outcome in matrix.outcomes.items():
        lost = name.startswith("SIGKILL of gateway")
        assert outcome in (("NotReady", "WorkerLost") if lost else ("answer",)), matrix.outcomes


async def test_a_worker_that_was_replaced_while_it_was_cut_off_ends(cluster: LocalCluster, client: AsyncClient) -> None:
    """As after a partition: another has its name by then, and two of one name would take turns at being lost."""
    old = cluster.processes["decode-0"]
    cluster.kill("decode-0", signal.SIGSTOP)
    await until(client, lambda status: any((w.worker_id, w.state) == ("decode-0", "lost") for w in status.workers))
    cluster.start_worker(D, 0)
    await asyncio.to_thread(cluster.wait_ready)
    now = cluster.engine_pid("decode-0")
    old.send_signal(signal.SIGCONT)
    assert await asyncio.to_thread(old.wait, 60) == 1
    await asyncio.to_thread(cluster.wait_ready)
    assert cluster.engine_pid("decode-0") == now
    assert (await answer(client, SHORT)).token_ids == await expected(client, SHORT, SHORT_OUTPUTS)


def roles(status: ServiceStatus) -> dict[str, str]:
    return {worker.worker_id.replace("-", "_"): worker.role for worker in status.workers if worker.state == "ready"}


async def flip(cluster: LocalCluster, to: dict[str, Role]) -> None:
    """Flip, and wait until every gateway gives the workers the work of their new roles."""
    cluster.flip(**to)
    for target in cluster.targets:
        await asyncio.to_thread(cluster.wait_ready, 60.0, target)


async def test_requests_go_on_while_their_workers_take_other_roles(cluster: LocalCluster, client: AsyncClient) -> None:
    """In each state, both workers of the request get another role than when it was placed there."""
    short = await expected(client, SHORT, SHORT_OUTPUTS)
    for state in State:
        tokens = await expected(client, PROMPTS[state])
        async with held(client, state) as (request, blockers):
            await flip(cluster, OPPOSITE)
            # The others serve in their new roles meanwhile.
            after = await answer(client, SHORT)
            assert after.token_ids == short
            assert after.prefill_worker.startswith("decode-")
            assert after.decode_worker.startswith("prefill-")
            await asyncio.wait_for(asyncio.gather(request.reading, *(each.reading for each in blockers)), 60.0)
            assert request.error is None
            assert tuple(request.tokens) == tokens
            assert (await request.stream.result()).attempts == 1, "nothing was lost"
        await until(client, is_free)
        await flip(cluster, BORN)
    async with AsyncClient(cluster.targets[1]) as second:
        assert roles(await second.status()) == BORN


async def test_a_flipped_worker_comes_back_with_its_role(cluster: LocalCluster, client: AsyncClient) -> None:
    """Its process starts with the role it was born with; a gateway that starts anew is told the roles again."""
    now = {**BORN, "decode_1": P}
    await flip(cluster, now)
    await asyncio.to_thread(cluster.kill, "decode-1", signal.SIGKILL)
    cluster.start_worker(D, 1)
    await asyncio.to_thread(cluster.wait_ready)
    assert roles(await client.status()) == now
    await asyncio.to_thread(cluster.kill, "gateway-1", signal.SIGKILL)
    cluster.start_gateway(1)
    await asyncio.to_thread(cluster.wait_ready, 60.0, cluster.targets[1])
    async with AsyncClient(cluster.targets[1]) as second:
        assert roles(await second.status()) == now
        answers = await asyncio.gather(*(answer(second, SHORT) for _ in range(6)))
        assert {each.token_ids for each in answers} == {await expected(client, SHORT, SHORT_OUTPUTS)}
        assert {each.prefill_worker for each in answers} == {"prefill-0", "prefill-1", "decode-1"}
    await until(client, is_free)
    await flip(cluster, BORN)


TOKENS = 300
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7}


async def some_tokens(stream: AsyncStream) -> None:
    for _ in range(5):
        await anext(stream)


async def test_a_killed_gateway_costs_its_own_streams_alone_which_go_on_at_another(cluster: LocalCluster) -> None:
    async with AsyncClient(cluster.targets) as client, AsyncClient(cluster.targets[0]) as alone:
        greedy = (await alone.generate(SHORT, max_tokens=TOKENS).result()).token_ids
        drawn = (await alone.generate(SHORT, max_tokens=TOKENS, **SAMPLED).result()).token_ids
        streams = [
            client.generate(SHORT, max_tokens=TOKENS, mode=mode, **sampling)
            for mode in ("pd", "colocated")
            for sampling in ({}, SAMPLED)
            for _ in range(2)
        ]
        left = alone.generate(SHORT, max_tokens=TOKENS)
        await asyncio.gather(*(some_tokens(stream) for stream in (*streams, left)))
        hit = [stream for stream in streams if stream.target == cluster.targets[0]]
        assert len(hit) == 4
        cluster.kill("gateway")
        generations = await asyncio.gather(*(stream.result() for stream in streams))
        for index, (stream, generation) in enumerate(zip(streams, generations, strict=True)):
            assert generation.token_ids == (drawn if index // 2 % 2 else greedy)
            assert [token.index for token in generation.tokens] == list(range(TOKENS))
            assert generation.text == "".join(token.text for token in generation.tokens)
            assert (generation.prompt_tokens, generation.finish_reason) == (len(SHORT), "length")
            assert generation.resumes == (stream in hit), "the streams of the other one are untouched"
            assert stream.target == cluster.targets[1]
        with pytest.raises(NotReady):  # a client that knows one gateway only loses the stream
            await left.result()
        after = await asyncio.gather(*(client.generate(SHORT, max_tokens=4).result() for _ in range(4)))
        assert [generation.token_ids for generation in after] == [greedy[:4]] * 4
    cluster.wait_idle(target=cluster.targets[1])  # what the lost gateway had asked for has ended
    cluster.start_gateway()
    cluster.wait_ready()


async def test_a_gateway_that_stops_is_given_up_after_a_while(cluster: LocalCluster) -> None:
    async with AsyncClient(cluster.targets) as client:
        streams = [client.generate(SHORT, max_tokens=TOKENS) for _ in range(2)]
        await asyncio.gather(*(some_tokens(stream) for stream in streams))
        cluster.kill("gateway", signal.SIGSTOP)
        try:
            first, second = await asyncio.gather(*(stream.result() for stream in streams))
        finally:
            cluster.kill("gateway", signal.SIGCONT)
        assert first.token_ids == second.token_ids
        assert (first.resumes, second.resumes) == (1, 0)
    cluster.wait_ready()
    cluster.wait_idle()  # the gateway that had stopped ends the stream that nothing reads


def test_workers_come_before_any_gateway_and_outlive_them(cluster: LocalCluster) -> None:
    with Client(",".join(cluster.targets)) as client:
        streams = [client.generate(SHORT, max_tokens=TOKENS) for _ in range(2)]
        for stream in streams:
            next(stream)
        assert [stream.target for stream in streams] == cluster.targets
        before = {worker.worker_id: worker.engine_pid for worker in cluster.inside().workers}
        cluster.kill("gateway-1")
        first, second = (stream.result() for stream in streams)
        assert first.token_ids == second.token_ids
        assert (first.resumes, second.resumes) == (0, 1), "the blocking client resumes too"

        cluster.kill("gateway")
        cluster.kill("prefill-1")
        cluster.start_worker(P, 1)
        time.sleep(2.0)
        for number in (1, 0):
            del cluster.processes[gateway_name(number)]
            cluster.start_gateway(number)
        for target in cluster.targets:
            cluster.wait_ready(target=target)
        streams = [client.generate(SHORT, max_tokens=4, mode="pd") for _ in range(4)]
        assert [stream.result().token_ids for stream in streams] == [first.token_ids[:4]] * 4
        assert {stream.target for stream in streams} == set(cluster.targets), "clients use both again"
    after = {worker.worker_id: worker.engine_pid for worker in cluster.inside().workers}
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == {"prefill-1"}, "the others have not started anew"
    cluster.wait_idle()
