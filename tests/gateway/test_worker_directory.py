from __future__ import annotations

import asyncio
import functools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
import msgspec
import pytest

from contract.control import Beat, BeatAnswer, encode
from pdserve.core.block_update import SNAPSHOT, BlockUpdate, pack
from pdserve.core.errors import LayoutMismatch, TransferTimeout
from pdserve.core.kv_layout import KVLayout
from pdserve.core.prefix_digests import PrefixDigests, keyed_salt
from pdserve.core.worker import Role, WorkerInfo, WorkerLoad
from pdserve.pb import inference_pb2 as pb
from tests.fake_worker import FakeWorker, fake_info
from tests.gateway.conftest import PROMPT, call_error, settle
from tests.loopback import SECRET

if TYPE_CHECKING:
    from tests.gateway.conftest import Service, StartService

OTHER_LAYOUT = KVLayout.uniform("fake", "bfloat16", block_size=4, num_layers=2, num_kv_heads=1, head_dim=8)


async def retire(service: Service, worker_ids: list[str], drain_s: float) -> None:
    """What a service does with workers that it no longer wants."""
    await service.gateway.directory.retire(worker_ids, drain_s)
    await service.gateway.dismiss(worker_ids)


async def test_a_worker_that_cannot_be_reached_is_tried_with_every_heartbeat(
    start_service: StartService, caplog: pytest.LogCaptureFixture
) -> None:
    service = await start_service()
    fake = service.make("p0")
    del service.fleet["p0"]
    for _ in range(3):
        await service.beat("p0")
        await settle()
    assert service.connects == ["p0/1"] * 3
    assert caplog.text.count("worker p0: cannot connect: worker p0 does not answer") == 1
    service.fleet["p0"] = fake
    await service.beat("p0")
    await settle()
    assert [worker.worker_id for worker in service.gateway.registry.ready()] == ["p0"]


async def test_a_new_incarnation_replaces_the_old_and_is_paired_again(service: Service) -> None:
    old = service.fleet["d0"]
    service.make("d0", epoch="2")
    await service.beat("d0")
    await settle()
    assert service.connects[-1] == "d0/2"
    assert old.is_dead
    await service.generate(token_ids=PROMPT, sampling=pb.Sampling(max_tokens=2))
    assert [point for point, _ in service.fleet["d0"].requests] == ["receive"]


async def test_a_broken_connection_is_opened_again(service: Service) -> None:
    service.fleet["p0"].crash()
    await settle()
    status = await service.stub.GetStatus(pb.GetStatusRequest())
    assert [worker.state for worker in status.workers] == ["ready", "lost"]
    assert status.ready, "mode auto needs any ready worker"
    service.make("p0")
    await service.bring_up("p0")
    await service.generate(token_ids=PROMPT, sampling=pb.Sampling(max_tokens=2))


async def test_a_silent_worker_fails_its_requests(start_service: StartService) -> None:
    service = await start_service(
        "p0", "d0", router={"heartbeat_s": 0.05, "heartbeat_timeout_s": 1.0, "max_attempts": 1}
    )
    service.fleet["d0"].hangs = {"decode"}
    running = asyncio.create_task(service.generate(token_ids=PROMPT))
    while not running.done():
        await asyncio.sleep(0.05)
        await service.beat("p0")
    with pytest.raises(grpc.aio.AioRpcError, match="worker d0 is lost"):
        await asyncio.wait_for(running, 30.0)


async def test_different_layouts_are_logged_before_any_request(
    start_service: StartService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    service = await start_service()
    service.make("p0")
    service.make("d0", layout=OTHER_LAYOUT)
    for _ in range(3):
        for worker_id in ("p0", "d0"):
            await service.beat(worker_id)
            await settle()
    assert caplog.text.count("workers p0 and d0 cannot be paired: KV layout differs in dtype") == 1
    error = await call_error(service)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "KV layout differs in dtype: 'float32' here, 'bfloat16' at the peer" in (error.details() or "")
    with pytest.raises(LayoutMismatch):
        await service.gateway.wait_serving(0.01)
    await service.generate(token_ids=PROMPT, sampling=pb.Sampling(max_tokens=2), mode=pb.MODE_COLOCATED)


async def test_a_failed_handshake_is_tried_again(start_service: StartService) -> None:
    service = await start_service()
    service.make("p0").fail("connect_peer", *[TransferTimeout("no answer")] * 2)  # the second as its report is answered
    service.make("d0")
    await service.beat("p0")
    await service.beat("d0")
    await settle()
    assert "no answer" in ((await call_error(service)).details() or "")
    await service.bring_up("p0")
    await service.generate(token_ids=PROMPT, sampling=pb.Sampling(max_tokens=2))


async def test_all_pairs_are_connected(start_service: StartService) -> None:
    service = await start_service("p0", "d0", "p1", "d1")
    await settle()
    assert service.fleet["p0"].connected == service.fleet["p1"].connected == {"d0", "d1"}
    first, second = await service.beat("p0"), await service.beat("d0")
    assert first.gateway_epoch == second.gateway_epoch != ""
    assert (first.peers, second.peers) == ([service.infos[name].peer for name in ("d0", "d1")], [])
    status = await service.stub.GetStatus(pb.GetStatusRequest())
    links = {worker.worker_id: [link.worker_id for link in worker.links] for worker in status.workers}
    assert links == {"p0": ["d0", "d1"], "p1": ["d0", "d1"], "d0": [], "d1": []}
    service.fleet["d1"].crash()
    await settle()
    assert [peer.worker_id for peer in (await service.beat("p0")).peers] == ["d0"]
    await service.beat("p0")
    status = await service.stub.GetStatus(pb.GetStatusRequest())
    assert [link.worker_id for worker in status.workers for link in worker.links if worker.worker_id == "p0"] == ["d0"]


async def test_a_link_that_opens_while_its_worker_is_being_connected_counts(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a further heartbeat that would report it again."""
    service = await start_service()
    service.make("d0")
    await service.beat("d0")
    await settle()
    prefill, opened, connect = service.make("p0"), asyncio.Event(), service.connect

    async def slow(info: WorkerInfo) -> FakeWorker:
        await opened.wait()
        return await connect(info)

    monkeypatch.setattr(service, "connect", slow)
    await service.beat("p0")
    await service.until(lambda: prefill.connected)
    await settle()
    prefill.on_request_heartbeat = lambda: None
    opened.set()
    await service.gateway.wait_serving(30.0)


def beat_with(field: str, value: object) -> bytes:
    """A heartbeat of a worker of another version."""
    kind, info, *rest = msgspec.msgpack.decode(encode(Beat(fake_info("x", Role.PREFILL), WorkerLoad())))
    return msgspec.msgpack.encode([kind, {**info, field: value}, *rest])


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (beat_with("role", "cook"), "cook"),
        (beat_with("num_blocks", "many"), "num_blocks"),
        (beat_with("layout", {}), "layout"),
        (b"", "truncated"),
        (b"\xff\xff\xff", "unreadable"),
        (encode(BeatAnswer("x", superseded=False)), "BeatAnswer"),
    ],
    ids=["role", "type", "missing", "empty", "bytes", "another"],
)
async def test_nonsense_on_the_registry_is_refused(start_service: StartService, data: bytes, problem: str) -> None:
    service = await start_service()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.report(data)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert problem in (caught.value.details() or "")
    assert service.gateway.registry.workers == ()


async def test_a_superseded_incarnation_is_told_to_end(service: Service) -> None:
    assert not (await service.beat("d0")).superseded
    service.make("d0", epoch="2", life="d0/2")
    await service.beat("d0")
    await settle()
    assert (await service.beat("d0", epoch="1", life="d0/1")).superseded
    assert not (await service.beat("d0")).superseded
    await settle()
    assert service.connects[-1] == "d0/2"
    await service.generate(token_ids=PROMPT, sampling=pb.Sampling(max_tokens=2))


async def test_announced_blocks_lead_requests_to_the_workers_that_have_them(start_service: StartService) -> None:
    service = await start_service("p0", "p1", "d0", "d1", router={"policy": "prefix_affinity"})
    await service.until(lambda: all(len(service.peers_of(name)) == 2 for name in ("p0", "p1")))
    prompt = list(range(13))
    hashes = list(PrefixDigests(keyed_salt("s", SECRET.cache_key), 4).hashes(prompt))

    async def ran_on() -> tuple[str, str]:
        _, done = await service.generate(
            token_ids=pb.TokenIds(ids=prompt), sampling=pb.Sampling(max_tokens=2), mode=pb.MODE_PD, salt="s"
        )
        return done.prefill_worker, done.decode_worker

    for prefill, decode in (("p0", "d1"), ("p1", "d0")):
        for name in (prefill, decode):
            assert (await service.beat(name)).blocks_after == SNAPSHOT
            answer = await service.beat(name, BlockUpdate(SNAPSHOT, 5, pack(hashes[:2])))
            assert answer.blocks_after == 5
        assert [await ran_on() for _ in range(3)] == [(prefill, decode)] * 3
        for name in (prefill, decode):
            assert (await service.beat(name, BlockUpdate(5, 7, b"", pack(hashes[:2])))).blocks_after == 7
            service.make(name, epoch="2", life=f"{name}/2")
            await service.beat(name)
            await service.until(functools.partial(service.connects.__contains__, f"{name}/2"))
            assert (await service.beat(name)).blocks_after == SNAPSHOT, "another incarnation, another cache"
    index = service.gateway.registry.prefixes
    assert index is not None
    assert len(index) == 0


async def test_no_worker_announces_blocks_that_nothing_reads(start_service: StartService) -> None:
    policies = {"prefill": "session", "decode": "least_tokens"}
    service = await start_service("p0", "d0", router={"policy": policies, "prefix_fetch": "off"})
    assert (await service.beat("p0")).blocks_after is None
    assert (await service.beat("p0", BlockUpdate(SNAPSHOT, 1, pack([7])))).blocks_after is None
    assert service.gateway.registry.prefixes is None


async def test_a_retiring_worker_finishes_first(start_service: StartService) -> None:
    service = await start_service("p0", "d0", "d1", router={"policy": "round_robin"})
    await settle()
    service.gateway.expect({"p0": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE, "d2": Role.DECODE})
    status = await service.stub.GetStatus(pb.GetStatusRequest())
    assert {w.worker_id: w.state for w in status.workers} == {
        "p0": "ready", "d0": "ready", "d1": "ready", "d2": "awaited",
    }  # fmt: skip
    gate = service.fleet["d0"].hangs = {"decode"}
    running = asyncio.create_task(service.generate(token_ids=PROMPT, sampling=pb.Sampling(max_tokens=3)))
    await service.until(lambda: service.fleet["d0"].stuck)
    retiring = asyncio.create_task(retire(service, ["d0"], 5.0))
    await service.until(lambda: next(w for w in service.gateway.registry.workers if w.worker_id == "d0").retiring)
    await service.generate(token_ids=PROMPT, sampling=pb.Sampling(max_tokens=2))
    assert [point for point, _ in service.fleet["d1"].requests] == ["receive"], "nothing more goes to d0"
    assert not retiring.done()
    gate.clear()
    running.cancel()
    await service.until(lambda: not service.fleet["d0"].held)
    await settle()
    assert not retiring.done(), "it may hold blocks of the last request"
    await service.beat("d0")
    await asyncio.wait_for(retiring, 3.0)
    assert [w.worker_id for w in service.gateway.registry.workers] == ["d1", "p0"]
    assert (await service.beat("d0")).superseded


async def test_requests_of_a_worker_that_retires_too_slowly_continue_elsewhere(service: Service) -> None:
    service.fleet["d0"].hangs = {"decode_more"}
    running = asyncio.create_task(service.generate(token_ids=PROMPT, sampling=pb.Sampling(max_tokens=4)))
    await service.until(lambda: service.fleet["d0"].held)
    await service.bring_up("d1")
    await settle()
    await asyncio.wait_for(retire(service, ["d0", "nobody"], 0.05), 3.0)
    tokens, completion = await asyncio.wait_for(running, 30.0)
    assert len(tokens) == 4
    assert completion.decode_worker == "d1"


async def test_workers_get_the_role_that_the_service_wants(start_service: StartService) -> None:
    """With the version of the members, by the answers to heartbeats, which are requested; links follow the roles."""
    service = await start_service("p0", "d0", "d1")
    await settle()
    answer = await service.beat("d1")
    assert (answer.role, answer.version) == (None, 0), "it has not been told"
    members = {"p0": Role.PREFILL, "d0": Role.DECODE, "d1": Role.PREFILL}
    asked: list[str] = []
    for name in members:
        service.fleet[name].on_request_heartbeat = functools.partial(asked.append, name)
    service.gateway.expect(members, version=2)
    assert asked == ["d1"]
    service.gateway.expect({name: Role.DECODE for name in members}, version=1)  # it was overtaken
    answer = await service.beat("d1")
    assert (answer.role, answer.version, answer.peers) == (Role.PREFILL, 2, [])
    assert await service.gateway.directory.wait_roles(["d1"], 0.05) == ["d1"]

    service.infos["d1"] = replace(service.infos["d1"], role=Role.PREFILL)
    waiting = asyncio.create_task(service.gateway.directory.wait_roles(["d1", "p0"], 30.0))
    assert [peer.worker_id for peer in (await service.beat("d1")).peers] == ["d0"]
    assert await waiting == [], "with the link that it opens then"
    assert service.peers_of("d1") == {"d0"}
    _, done = await service.generate(token_ids=PROMPT, sampling=pb.Sampling(max_tokens=2), mode=pb.MODE_PD)
    assert done.decode_worker == "d0"

    # The other way: the prefill workers are asked for a heartbeat, whose answer names it.
    asked.clear()
    service.infos["p0"] = replace(service.infos["p0"], role=Role.DECODE)
    service.fleet["d1"].on_request_heartbeat = functools.partial(asked.append, "d1")
    service.gateway.expect({**members, "p0": Role.DECODE}, version=3)
    await service.beat("p0")
    assert asked == ["p0", "d1"]
    assert {peer.worker_id for peer in (await service.beat("d1")).peers} == {"d0", "p0"}
    await settle()
    await service.beat("d1")
    assert await service.gateway.directory.wait_roles(["p0"], 30.0) == []
    status = await service.stub.GetStatus(pb.GetStatusRequest())
    assert {w.worker_id: w.role for w in status.workers} == {"p0": "decode", "d0": "decode", "d1": "prefill"}


async def test_a_worker_of_another_service_is_told_to_end(service: Service) -> None:
    service.make("d7", service="another")
    assert (await service.beat("d7")).superseded
    await settle()
    assert [w.worker_id for w in service.gateway.registry.workers] == ["d0", "p0"]
