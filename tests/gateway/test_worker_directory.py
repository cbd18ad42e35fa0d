from __future__ import annotations

import functools
import logging

import grpc
import msgspec
import pytest

from contract.control import Beat, BeatAnswer
from contract.message import encode
from pdserve.core.errors import LayoutMismatch
from pdserve.core.kv_layout import KVLayout
from pdserve.core.prefix_digests import SNAPSHOT, BlockUpdate, PrefixDigests, keyed_salt, pack
from pdserve.core.worker import Role, WorkerLoad
from pdserve.pb import inference_pb2 as pb
from tests.fake_worker import fake_info
from tests.gateway.conftest import Service, StartService, call_error, settle
from tests.loopback import SECRET

OTHER_LAYOUT = KVLayout.uniform("fake", "bfloat16", block_size=4, num_layers=2, num_kv_heads=1, head_dim=8)


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
    await service.generate(max_tokens=2, mode=pb.MODE_COLOCATED)


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
    await service.generate(max_tokens=2)


async def test_announced_blocks_lead_requests_to_the_workers_that_have_them(start_service: StartService) -> None:
    service = await start_service("p0", "p1", "d0", "d1", router={"policy": "prefix_affinity"})
    await service.until(lambda: all(len(service.peers_of(name)) == 2 for name in ("p0", "p1")))
    prompt = list(range(13))
    hashes = list(PrefixDigests(keyed_salt("s", SECRET.cache_key), 4).hashes(prompt))

    async def ran_on() -> tuple[str, str]:
        _, done = await service.generate(token_ids=pb.TokenIds(ids=prompt), max_tokens=2, mode=pb.MODE_PD, salt="s")
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


async def test_a_worker_of_another_service_is_told_to_end(service: Service) -> None:
    service.make("d7", service="another")
    assert (await service.beat("d7")).superseded
    await settle()
    assert [w.worker_id for w in service.gateway.registry.workers] == ["d0", "p0"]
