"""torch_dist with a peer that dies or hangs in the middle of a payload, as it looks with NCCL: there no operation
ends by itself, only by an abort. Stuck groups stand in for NCCL's, which need two GPUs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from kv_transfer import send_transfer
from kv_transfer.base import NOTHING, KVLink
from kv_transfer.fetch import Payload
from kv_transfer.memory import HostMemory
from kv_transfer.transports import torch_dist
from kv_transfer.transports.torch_dist import IN_FLIGHT, TorchDistLink, TorchDistTransport
from kv_transfer.transports.torch_groups import Groups
from pdserve.core.errors import PeerLost, TransferError, TransferTimeout
from tests.host_pool import inline
from tests.kv_transfer.conftest import MakeEnds
from tests.kv_transfer.strict_nccl import StrictGroup, StrictNccl, communicators
from tests.loopback import SECRET
from tests.strict_cuda import StrictGpus

TIMEOUT_S = 0.4


class StuckGroups:
    """Its operations begin and end only by `abort` (or `release`, at the end of a test that has none)."""

    fails_alone = False

    def __init__(self, replaced: Groups | None, *, aborts: bool = True) -> None:
        self._replaced: Groups | None = replaced  # while these live, the peer's receive waits
        self.begun, self.aborted = threading.Event(), threading.Event()
        self._aborts, self._over = aborts, threading.Event()

    def connect(self) -> None:
        """Connected already."""

    def gather(self, payload: object, memory: object) -> Any:
        """As it is: nothing is sent."""
        return payload

    def send(self, gathered: object) -> Callable[[], bytes]:
        """Begun."""
        self.begun.set()
        return self.wait

    def recv(self, size: int) -> Callable[[], bytes]:
        """The same the other way."""
        return self.send(size)

    def wait(self) -> bytes:
        """Stuck."""
        self._over.wait()
        raise RuntimeError("the group was aborted")

    def abort(self) -> None:
        """End them, if that works here."""
        self.aborted.set()
        self._replaced = None
        if self._aborts:
            self._over.set()

    def release(self) -> None:
        """End them after all."""
        self._over.set()


def stick(link: KVLink, *, aborts: bool = True) -> StuckGroups:
    """Give a link groups that are stuck."""
    assert isinstance(link, TorchDistLink)
    groups = StuckGroups(link._groups, aborts=aborts)
    link._groups = groups
    return groups


@contextlib.asynccontextmanager
async def linked(timeout_s: float) -> AsyncIterator[tuple[KVLink, KVLink]]:
    """Both ends of a link; ``timeout_s`` is that of the first."""
    client, listener = (
        TorchDistTransport(HostMemory.create(4096), SECRET, timeout_s=each) for each in (timeout_s, 10.0)
    )
    try:
        endpoint = await listener.listen("127.0.0.1")
        connected, accepted = await client.connect(endpoint, 10.0), await listener.accept()
        accepted.introduced()
        yield connected, accepted
    finally:
        await client.aclose()
        await listener.aclose()


async def announce(peer: KVLink, size: int) -> None:
    """Say that a payload comes, and send none."""
    assert isinstance(peer, TorchDistLink)
    peer._writer.write(torch_dist.FRAME.pack(1, size) + b"h")
    await peer._writer.drain()


async def begun(groups: StuckGroups) -> None:
    """An operation is under way."""
    assert await asyncio.to_thread(groups.begun.wait, 30)


async def flood(link: KVLink, size: int = 1000) -> None:
    """Send until it fails. The first payloads are on their way when this waits."""
    for _ in range(4 * IN_FLIGHT):
        await link.send(b"h", inline(bytes(size)))
    raise AssertionError("more payloads than may be on their way")


async def busy(link: KVLink, peer: KVLink, doing: str) -> asyncio.Task[Any]:
    """A task that sends or receives a payload, and is stuck."""
    if doing == "receiving":
        await announce(peer, 1000)
        return asyncio.create_task(link.recv())
    return asyncio.create_task(flood(link))


@pytest.mark.parametrize("doing", ["sending", "receiving"])
async def test_a_peer_that_dies_in_mid_payload_is_noticed_at_once(doing: str) -> None:
    async with linked(30.0) as (link, peer):
        groups = stick(link)
        work = await busy(link, peer, doing)
        await begun(groups)
        async with asyncio.timeout(8):
            await peer.aclose()
            with pytest.raises(PeerLost, match="the peer closed the link"):
                await work
        assert groups.aborted.is_set()


@pytest.mark.parametrize("doing", ["sending", "receiving"])
async def test_a_peer_that_hangs_in_mid_payload_is_given_up_after_the_timeout(doing: str) -> None:
    async with linked(TIMEOUT_S) as (link, peer):
        groups = stick(link)
        work = await busy(link, peer, doing)
        async with asyncio.timeout(TIMEOUT_S + 8):
            with pytest.raises(TransferTimeout, match="a payload timed out"):
                await work
        assert groups.aborted.is_set()
        with pytest.raises(TransferError):
            await link.send(b"h")
        async with asyncio.timeout(8):
            with pytest.raises(PeerLost):
                await peer.recv()


async def test_a_link_ends_even_if_the_abort_does_not_end_its_send(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch_dist, "_GRACE_S", 0.1)
    async with linked(TIMEOUT_S) as (link, _):
        groups = stick(link, aborts=False)
        with pytest.raises(TransferTimeout):
            await flood(link)
        async with asyncio.timeout(30):
            while "does not end" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        groups.release()


@pytest.mark.parametrize("waits", ["for room", "for its copy"])
async def test_a_send_may_be_cancelled(waits: str) -> None:
    """The link goes on, and the payload is read no more once it is drained."""
    async with linked(30.0) as (link, _):
        groups = stick(link)
        copying, copied = threading.Event(), threading.Event()

        def gather(payload: object, memory: object) -> Any:
            copying.set()
            assert copied.wait(10)
            return payload

        if waits == "for its copy":
            groups.gather = gather  # type: ignore[method-assign]
        work = asyncio.create_task(flood(link))
        reached = copying if waits == "for its copy" else groups.begun
        assert await asyncio.to_thread(reached.wait, 10)
        await asyncio.sleep(0.05)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        draining = asyncio.create_task(link.drained())
        await asyncio.sleep(0.05)
        assert draining.done() == (waits == "for room")
        copied.set()
        async with asyncio.timeout(8):
            await draining
            await link.send(b"h")


def held() -> tuple[int, int]:
    """Threads (of Gloo as well) and descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("ending", ["sender cuts", "receiver closes", "announced only"])
async def test_a_link_that_ends_in_mid_payload_keeps_no_thread_and_no_socket(ending: str) -> None:
    """Over Gloo, with payloads on their way in both directions, which the other end does not take."""
    size = 8 * 2**20
    client, listener = (TorchDistTransport(HostMemory.create(size), SECRET, timeout_s=10.0) for _ in range(2))
    endpoint = await listener.listen("127.0.0.1")

    async def end() -> None:
        sender, receiver = await client.connect(endpoint, 10.0), await listener.accept()
        receiver.introduced()
        flooding = [asyncio.create_task(flood(link, size)) for link in (sender, receiver)]
        assert (await receiver.recv()).size == size
        if ending == "announced only":
            await announce(sender, size)
            sender.cut("the payload does not come")
        elif "cuts" in ending:
            (sender if "sender" in ending else receiver).cut("in mid-payload")
        await (sender if "sender" in ending else receiver).aclose()
        outcomes = await asyncio.gather(*flooding, return_exceptions=True)
        assert all(isinstance(each, PeerLost) for each in outcomes), outcomes
        await asyncio.gather(sender.aclose(), receiver.aclose())

    await end()
    await asyncio.sleep(0.5)
    before = held()
    for _ in range(3):
        await end()
    try:
        async with asyncio.timeout(30):  # at once as a rule, by Gloo's own timeout of 10 s at the latest
            while any(now > then for now, then in zip(held(), before, strict=True)):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"threads and descriptors: {held()}, before {before}") from None
    finally:
        await client.aclose()
        await listener.aclose()


@pytest.mark.parametrize("ending", ["deadline", "abort"])
async def test_a_transport_that_never_lets_go_does_not_keep_the_blocks(
    make_ends: MakeEnds, ending: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(send_transfer, "_IDLE_TIMEOUT_S", 0.2)
    ends = await make_ends(lease_s=30.0)
    await ends.connect()
    reading, over = asyncio.Event(), asyncio.Event()

    async def send(header: bytes, payload: Payload = NOTHING) -> None:
        reading.set() if payload.size else None
        while payload.size and not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await over.wait()

    monkeypatch.setattr(ends.sender._links["d"]._link, "send", send)
    ends.start("r", [1], for_s=0.3, receiver_for_s=30, send=[1])
    await reading.wait()
    async with asyncio.timeout(8):
        if ending == "abort":
            await ends.sending["r"].abort()
        else:
            with pytest.raises(TransferTimeout, match="deadline"):
                await ends.sending["r"].wait()
    assert "r: a send of its blocks has not ended for 0.2 s" in caplog.text
    assert not ends.sender._transfers()
    over.set()


@pytest.mark.parametrize("way", ["send", "recv"])
def test_an_aborted_operation_of_nccl_is_no_complete_one(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the stream it looks complete. Neither abort of a link returns before the other has begun."""
    nccl, together = StrictNccl(), threading.Barrier(2)
    nccl.install(monkeypatch)
    whole = StrictGroup.abort

    def abort(group: StrictGroup) -> None:
        together.wait(5)
        whole(group)

    monkeypatch.setattr(StrictGroup, "abort", abort)
    cudas = [StrictGpus().process() for _ in range(2)]
    ours, theirs = (communicators(rank, 0, cuda) for rank, cuda in enumerate(cudas))
    joining = threading.Thread(target=theirs.connect)
    joining.start()
    ours.connect()
    joining.join(10)
    outcome: list[object] = []
    begun = threading.Event()

    def operate() -> None:
        try:
            operation = ours.send(torch.zeros(7, dtype=torch.uint8)) if way == "send" else ours.recv(7)
            begun.set()
            operation()
            outcome.append("complete")
        except RuntimeError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=operate)
    thread.start()
    assert begun.wait(5)
    ours.abort()
    thread.join(5)
    assert outcome == ["the group was aborted"]
    operate()
    assert outcome == ["the group was aborted"] * 2
