"""How NCCL's communicators are made, with a stand-in for torch's process groups: this machine has no GPU."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kv_transfer.factory import offered_transports
from kv_transfer.memory import DeviceMemory
from kv_transfer.transports import nccl, torch_dist, torch_groups
from kv_transfer.transports.nccl import Communicators
from kv_transfer.transports.torch_dist import TorchDistTransport
from pdserve.core.errors import ConfigError, TransferTimeout
from tests.loopback import SECRET


class FakeGroup:
    """A `ProcessGroupNCCL` that notes its calls."""

    made: list[FakeGroup]
    current = -1  # GPU

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.prefix, self.rank, self.options = store, rank, options
        self.calls: list[tuple[Any, ...]] = []
        FakeGroup.made.append(self)

    Options = SimpleNamespace

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Noted, with the current GPU."""
        self.calls.append(("connect", str(device), FakeGroup.current))

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> FakeGroup:
        """Noted."""
        self.calls.append(("send", tensors[0].numel(), peer, FakeGroup.current))
        return self

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> FakeGroup:
        """Noted."""
        self.calls.append(("recv", tensors[0].numel(), peer, FakeGroup.current))
        return self

    def wait(self) -> None:
        """At once."""


@pytest.fixture
def fake_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGroup.made = []

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        FakeGroup.current, before = index, FakeGroup.current
        yield
        FakeGroup.current = before

    class Options(SimpleNamespace):
        def __init__(self) -> None:
            super().__init__(config=SimpleNamespace())

    monkeypatch.setattr(FakeGroup, "Options", Options)
    stream = SimpleNamespace(synchronize=lambda: None)
    cuda = SimpleNamespace(
        device=device, Stream=lambda _: stream, stream=lambda _: contextlib.nullcontext(), current_stream=lambda: stream
    )
    fake = SimpleNamespace(
        cuda=cuda,
        device=torch.device,
        uint8=torch.uint8,
        zeros=lambda n, **_: torch.zeros(n),
        distributed=SimpleNamespace(ProcessGroupNCCL=FakeGroup, PrefixStore=lambda prefix, store: prefix),
    )
    monkeypatch.setattr(nccl, "torch", fake)


@pytest.mark.parametrize("rank", [0, 1])
def test_communicators_are_connected_before_any_payload_on_the_pools_gpu(fake_nccl: None, rank: int) -> None:
    """Otherwise the first probe pays for the connection, and the link is rated by it for good."""
    communicators = Communicators(None, rank, 3, 10.0)
    assert [group.calls for group in FakeGroup.made] == [[], []]
    communicators.connect()
    ours, theirs = communicators.by_sender[rank], communicators.by_sender[1 - rank]
    assert ours.calls == [("connect", "cuda:3", 3), ("send", 1, 1 - rank, 3)]
    assert theirs.calls == [("connect", "cuda:3", 3), ("recv", 1, 1 - rank, 3)]
    for group in FakeGroup.made:
        assert group.options.config.blocking == 0, "a blocking connection cannot be aborted"
        assert group.options._timeout.total_seconds() == 10.0


def test_ncclss_defaults_are_ours_unless_the_user_has_set_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in nccl._DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    nccl.set_defaults()
    assert os.environ["NCCL_CUMEM_ENABLE"] == "1"
    assert os.environ["TORCH_NCCL_USE_COMM_NONBLOCKING"] == "1"
    monkeypatch.delenv("NCCL_CUMEM_ENABLE")
    nccl.set_defaults()
    assert os.environ["NCCL_CUMEM_ENABLE"] == "0"


def test_the_limits_of_a_join_agree() -> None:
    assert nccl.JOIN_S == torch_dist._NCCL_JOIN_S >= 60.0


class JoiningGroups:
    """Groups whose peer has died: `connect` ends only when they are aborted."""

    made: list[JoiningGroups]

    def __init__(self, *_: object, **named: object) -> None:
        self.index, self.aborted, self.ended = named["index"], threading.Event(), threading.Event()
        JoiningGroups.made.append(self)

    def connect(self) -> None:
        """Wait for the abort."""
        assert self.aborted.wait(20)
        self.ended.set()
        raise RuntimeError("the group was aborted")

    def abort(self) -> None:
        """End `connect`."""
        self.aborted.set()


async def test_a_join_whose_peer_died_ends_at_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the limit of connecting, and by an abort: else its thread stays for ever."""
    JoiningGroups.made = []
    monkeypatch.setattr(torch_groups, "Groups", JoiningGroups)
    monkeypatch.setattr(torch_dist, "_NCCL_JOIN_S", 0.6)
    memory = DeviceMemory([], torch.zeros(64, dtype=torch.uint8), index=2)
    here, there = (TorchDistTransport(memory, SECRET, backend="nccl", timeout_s=5.0) for _ in range(2))
    endpoint = await there.listen("127.0.0.1")
    started_s = time.monotonic()
    with pytest.raises(TransferTimeout, match=r"did not answer within 0\.6 s"):
        await here.connect(endpoint, 0.2)
    assert 0.5 < time.monotonic() - started_s < 5
    assert JoiningGroups.made[0].index == 2
    await here.aclose()
    await there.aclose()
    for groups in JoiningGroups.made:
        assert await asyncio.to_thread(groups.ended.wait, 5)


def test_nccl_on_one_shared_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "a-lead-that-nccl-does-not-support")
    with pytest.raises(ConfigError, match="share one GPU, which NCCL does not support"):
        offered_transports("torch_dist", device="cuda", shared_device=True)
    assert "torch_dist" not in offered_transports("auto", device="cuda", shared_device=True)
