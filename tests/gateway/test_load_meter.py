"""What a gateway tells the scaling controller: requests by their objectives, and what each role has to do."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from contract.scaling import PROMPT_SIZES, SHARES, GatewayLoad, ScalingReport, within_objective
from gateway.inference import OutputToken
from gateway.load_meter import LoadMeter
from gateway.validation import Submission
from pdserve.core.clock import FakeClock, MonotonicClock
from pdserve.core.config import SloConfig
from pdserve.core.request import Mode
from pdserve.core.sampling import SamplingParams
from pdserve.core.worker import Role
from pdserve.pb import inference_pb2 as pb
from router.view import WorkerView
from tests.gateway.conftest import PATIENT, Service, StartService

P, D = Role.PREFILL, Role.DECODE
OBJECTIVES = {"ttft_ms": 60_000, "itl_ms": 60_000}


def view(name: str, role: Role, **changes: object) -> WorkerView:
    values = {"block_size": 16, "num_blocks": 100, "max_tokens": 1600, "free_blocks": 100, "max_num_seqs": 8}
    return WorkerView(worker_id=name, role=role, **{**values, **changes})  # type: ignore[arg-type]


def test_gaps_are_counted_by_their_share_of_the_objective() -> None:
    meter = LoadMeter(SloConfig(itl_ms=100), FakeClock(), lambda: ())
    for seconds in (0.001, 0.025, 0.026, 0.1, 0.1001, 5.0):
        meter.gap(seconds, 2)
    meter.gap(9.0, 1)
    counts = meter.load().itl
    assert len(counts) == len(SHARES) + 1
    assert (counts[0], counts[1], counts[len(SHARES) - 1], counts[-1]) == (2, 1, 1, 2), "a bound is within its share"
    assert within_objective(counts) == (4, 2)
    assert meter.load().ttft == [], "without an objective"


def test_looks_tell_what_is_in_use_and_what_is_waited_for() -> None:
    meter = LoadMeter(SloConfig(), FakeClock(), lambda: ())
    workers = [
        view("p0", P, prompt_tokens=50),
        view("p1", P),
        view("p2", P, ready=False, prompt_tokens=50),
        view("d0", D, free_blocks=40, running=2),
        view("d1", D, outstanding_requests=10, running=4),
    ]
    meter.look(workers, D)
    meter.look(workers[:1], None)
    before = meter.load()
    assert (before.looks, before.samples[P].ready, before.samples[D].ready) == (2, 3, 2)
    assert (before.samples[P].load, before.samples[P].short) == (1.5, 0)
    assert before.samples[D].load == pytest.approx((0.6 + 0.5) / 2), "the larger of blocks and places"
    assert (before.samples[D].running, before.samples[D].short) == (3.0, 1)
    meter.look(workers, P)
    assert before.looks == 2, "what was given does not change"


async def test_what_clients_do_does_not_count(start_service: StartService, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends its request, or reads its answer, slowly makes no figure of the service worse."""
    now, passed_s = MonotonicClock.now, 0.0
    monkeypatch.setattr(MonotonicClock, "now", lambda clock: now(clock) + passed_s)
    slo = {"slo": {"ttft_ms": 50_000, "itl_ms": 50_000}}
    gateway = {"host": "127.0.0.1", "port": 0, "default_timeout_s": 3_600}
    service = await start_service("p0", "d0", gateway=gateway, router={**slo, "max_unread_tokens": 4, **PATIENT})
    inference = service.gateway._inference
    caller = inference.identify("")
    submission = Submission(prompt=[1, 2, 3], sampling=SamplingParams(max_tokens=12, temperature=0.0), mode=Mode.PD)
    with inference.admission(caller, None) as arrival:
        passed_s += 100.0  # its body comes slowly
        async with aclosing(inference.generate(submission, arrival)) as outputs:
            async for output in outputs:
                if isinstance(output, OutputToken) and output.index in (0, 6):
                    paused = len(service.fleet["d0"].aborted)
                    await service.until(lambda: len(service.fleet["d0"].aborted) > paused)  # noqa: B023
                    passed_s += 100.0
    load = service.gateway.load()
    assert within_objective(load.ttft)[1] == within_objective(load.itl)[1] == 0
    assert within_objective(load.ttft)[0] == 1


async def test_requests_are_counted_from_their_call_on(start_service: StartService) -> None:
    scaling = {"controller": "roles", **OBJECTIVES}
    service = await start_service("p0", "d0", scaling=scaling, cluster={"prefill": 1, "decode": 1})
    service.fleet["p0"].hangs = {"prefill"}
    prompt = pb.TokenIds(ids=[1, 2, 3])
    running = asyncio.create_task(service.generate(4, token_ids=prompt, mode=pb.MODE_PD))
    await service.until(lambda: service.gateway.load().waiting)
    await service.until(lambda: service.gateway.load().samples[P].load)
    load: GatewayLoad = service.gateway.load()
    assert (load.waiting, load.overdue, load.decoding, load.first_tokens) == (1, 0, 0, 0)
    assert load.samples[P].ready == load.samples[D].ready == load.looks
    running.cancel()
    await service.until(lambda: not service.gateway.load().waiting)
    service.fleet["p0"].hangs = set()
    await service.generate(4, token_ids=prompt, mode=pb.MODE_PD)
    load = service.gateway.load()
    assert (load.first_tokens, load.prompt_tokens, load.gaps) == (1, 3, 3)
    assert (within_objective(load.ttft), within_objective(load.itl)) == ((1, 0), (2, 0)), (
        "without the gap of the hand-off"
    )
    assert load.prompts == [1, *[0] * len(PROMPT_SIZES)]
    assert {worker: each.role for worker, each in load.steps.items()} == {"p0": P, "d0": D}


async def test_what_the_controller_did_is_in_the_status(service: Service) -> None:
    assert not (await service.stub.GetStatus(pb.GetStatusRequest())).HasField("scaling")
    report = ScalingReport("roles").after("d1 becomes a prefill worker", "flip prefill", "because", 1.0)
    service.gateway.expect({"p0": P, "d0": D}, version=1, scaling=report)
    scaling = (await service.stub.GetStatus(pb.GetStatusRequest())).scaling
    assert (scaling.controller, scaling.last_action, scaling.reason) == ("roles", report.last, "because")
    assert dict(scaling.actions) == {"flip prefill": 1}
    assert scaling.last_action_age_s > 1e6
