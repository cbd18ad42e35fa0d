"""torch_dist with a peer that dies or hangs in the middle of a payload, as it looks with NCCL: there no operation
ends by itself, only by an abort. Stuck groups stand in for NCCL's, which need two GPUs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kv_transfer import sender as sender_module
from kv_transfer.base import NOTHING, KVLink
from kv_transfer.fetch import Payload
from kv_transfer.memory import HostMemory
from kv_transfer.transfer import TransferEnded
from kv_transfer.transports import torch_link
from kv_transfer.transports.torch_dist import TorchDistTransport
from kv_transfer.transports.torch_groups import Groups
from kv_transfer.transports.torch_link import TorchDistLink
from pdserve.core.errors import PeerLost, TransferError, TransferTimeout
from tests.host_pool import HostPool, inline
from tests.kv_transfer.conftest import LAYOUT
from tests.kv_transfer.status import status_of
from tests.loopback import SECRET

MakeEnds = Callable[..., Awaitable[Any]]
TIMEOUT_S = 0.4


class StuckGroups:
    """Its operations begin and end only by `abort` (or `release`, at the end of a test that has none)."""

    fails_alone = False

    def __init__(self, replaced: Groups | None, *, aborts: bool = True) -> None:
        self._replaced: Groups | None = replaced  # while these live, the peer's receive waits
        self.begun, self.aborted = threading.Event(), threading.Event()
        self._aborts, self._over = aborts, threading.Event()

    def joined(self, payload: object, memory: object) -> object:
        """As it is: nothing is sent."""
        return payload

    def send(self, payload: object) -> None:
        """Stuck, whatever the payload."""
        self.begun.set()
        self._over.wait()
        raise RuntimeError("the group was aborted")

    def recv(self, size: int) -> bytes:
        """The same the other way."""
        self.send(size)
        return b""

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
    link._groups = groups  # type: ignore[assignment]
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


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """The block takes no longer: far more than it needs, and far less than the timeout that it must not wait for."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


async def announce(peer: KVLink, size: int) -> None:
    """Say that a payload comes, and send none."""
    assert isinstance(peer, TorchDistLink)
    peer._writer.write(torch_link.FRAME.pack(1, size) + b"h")
    await peer._writer.drain()


async def begun(groups: StuckGroups) -> None:
    """An operation is under way."""
    assert await asyncio.to_thread(groups.begun.wait, 30)


@pytest.mark.parametrize("doing", ["sending", "receiving"])
async def test_a_peer_that_dies_in_mid_payload_is_noticed_at_once(doing: str) -> None:
    async with linked(30.0) as (link, peer):
        groups = stick(link)
        if doing == "receiving":
            await announce(peer, 1000)
        work = asyncio.create_task(link.send(b"h", inline(bytes(1000))) if doing == "sending" else link.recv())
        await begun(groups)
        with within(8):
            await peer.aclose()
            with pytest.raises(PeerLost, match="the peer closed the link"):
                await work
        assert groups.aborted.is_set()


@pytest.mark.parametrize("doing", ["sending", "receiving"])
async def test_a_peer_that_hangs_in_mid_payload_is_given_up_after_the_timeout(doing: str) -> None:
    async with linked(TIMEOUT_S) as (link, peer):
        groups = stick(link)
        if doing == "receiving":
            await announce(peer, 1000)
        with within(TIMEOUT_S + 8), pytest.raises(TransferTimeout, match="a payload timed out"):
            await (link.send(b"h", inline(bytes(1000))) if doing == "sending" else link.recv())
        assert groups.aborted.is_set()
        with pytest.raises(TransferError):
            await link.send(b"h")
        with within(8), pytest.raises(PeerLost):
            await peer.recv()


@pytest.mark.parametrize("ending", ["timeout", "cancelled"])
async def test_a_send_ends_even_if_the_abort_does_not_end_it(
    ending: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch_link, "_GRACE_S", 0.1)
    async with linked(TIMEOUT_S) as (link, _):
        groups = stick(link, aborts=False)
        work = asyncio.create_task(link.send(b"h", inline(bytes(1000))))
        await begun(groups)
        with within(2 * TIMEOUT_S + 8):
            if ending == "cancelled":
                work.cancel()
            with pytest.raises(asyncio.CancelledError if ending == "cancelled" else TransferTimeout):
                await work
        async with asyncio.timeout(30):
            while "does not end" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        groups.release()


async def test_closing_ends_a_stuck_send() -> None:
    async with linked(30.0) as (link, _):
        groups = stick(link)
        work = asyncio.create_task(link.send(b"h", inline(bytes(1000))))
        await begun(groups)
        with within(8):
            await link.aclose()
            with pytest.raises(PeerLost):
                await work


@pytest.mark.parametrize("giving_up", ["the peer dies", "abort"])
async def test_a_stuck_hand_off_lets_go_of_its_blocks(make_ends: MakeEnds, giving_up: str) -> None:
    timeout_s = 1.0 if giving_up == "abort" else 30.0
    source = HostPool(LAYOUT, 64)
    sending = TorchDistTransport(source.memory, SECRET, timeout_s=timeout_s)
    ends = await make_ends("torch_dist", lease_s=30.0, source=source, sending=sending)
    await ends.sender.connect("d", "e1", ends.endpoints)
    groups = stick(ends.sender._peers["d"]._link)
    ends.start("r", [1, 2], for_s=30)
    ends.sender.send_blocks("r", 0, [1, 2], last=True)
    await begun(groups)
    if giving_up == "abort":  # the send goes on until the transport's timeout
        with within(timeout_s + 8):
            await ends.sender.abort("r")
    else:
        with within(8):
            await ends.receiver.aclose()
            with pytest.raises(PeerLost):
                await ends.sender.wait("r")
        assert ends.sender.links() == ()
    assert groups.aborted.is_set()


@pytest.mark.parametrize("ending", ["deadline", "abort"])
async def test_a_transport_that_never_lets_go_does_not_keep_the_blocks(
    make_ends: MakeEnds, ending: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sender_module, "_IDLE_TIMEOUT_S", 0.2)
    ends = await make_ends(lease_s=30.0)
    await ends.sender.connect("d", "e1", ends.endpoints)
    reading, over = asyncio.Event(), asyncio.Event()

    async def send(header: bytes, payload: Payload = NOTHING) -> None:
        reading.set() if payload.size else None
        while payload.size and not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await over.wait()

    monkeypatch.setattr(ends.sender._peers["d"]._link, "send", send)
    ends.start("r", [1], for_s=0.3, receiver_for_s=30)
    ends.sender.send_blocks("r", 0, [1], last=True)
    await reading.wait()
    with within(8):
        if ending == "abort":
            await ends.sender.abort("r")
        else:
            with pytest.raises(TransferTimeout, match="deadline"):
                await ends.sender.wait("r")
    assert "r: a send of its blocks has not ended for 0.2 s" in caplog.text
    with pytest.raises(TransferEnded, match="not being sent"):
        status_of(ends.sender, "r")
    over.set()


class Communicator:
    """A process group of NCCL, one of two: neither abort returns before the other has begun."""

    def __init__(self, together: threading.Barrier, kernel: threading.Event) -> None:
        self._together, self._kernel = together, kernel
        self.begun = threading.Event()

    def send(self, *_: object) -> Communicator:
        """Only enqueues, and so does waiting for it."""
        self.begun.set()
        return self

    recv = send

    def wait(self) -> None:
        """Enqueued."""

    def abort(self) -> None:
        """Ends the kernel, which to the stream is a kernel that has ended."""
        self._together.wait(5)
        self._kernel.set()


@pytest.mark.parametrize("way", ["send", "recv"])
def test_an_aborted_operation_of_nccl_is_no_complete_one(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, together = threading.Event(), threading.Barrier(2)
    groups = Groups.__new__(Groups)
    tensor: Any = SimpleNamespace()
    stream = SimpleNamespace(synchronize=lambda: kernel.wait(5))
    communicators = [Communicator(together, kernel), Communicator(together, kernel)]
    vars(groups).update(
        _rank=1,
        _peer_rank=0,
        _index=0,
        _aborted=False,
        _on_device=True,
        _by_sender=communicators,
        _streams=[stream, stream],
    )
    torch = SimpleNamespace(
        uint8=0,
        empty=lambda *_, **__: tensor,
        cuda=SimpleNamespace(stream=lambda _: contextlib.nullcontext(), device=lambda _: contextlib.nullcontext()),
    )
    monkeypatch.setattr("kv_transfer.transports.torch_groups.torch", torch)
    outcome: list[object] = []

    def operate() -> None:
        try:
            if way == "send":
                groups.send(tensor)
            else:
                groups.recv(7)
            outcome.append("complete")
        except RuntimeError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=operate)
    thread.start()
    assert communicators[way == "send"].begun.wait(5)
    with within(4):
        groups.abort()
    thread.join(5)
    assert outcome == ["the group was aborted"]
    operate()
    assert outcome == ["the group was aborted"] * 2
