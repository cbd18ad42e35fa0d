"""The stand-in for CUDA raises where CUDA crashes, hangs, or corrupts memory."""

from __future__ import annotations

import gc

import pytest
import torch

from kv_transfer.memory import DeviceMemory
from pdserve.core.errors import TransferRefused
from pdserve.core.kv_layout import Region
from tests.strict_cuda import CudaMisuse, StrictGpus
from tests.strict_streams import POISON


def test_nothing_works_before_init() -> None:
    cuda = StrictGpus().process()
    assert cuda.is_available()
    for call in (lambda: cuda.zeros(8, 0), lambda: cuda.record(0), lambda: cuda.synchronize(0), lambda: cuda.memory(0)):
        with pytest.raises(CudaMisuse, match="before CUDA was initialised: a segmentation fault"):
            call()


def test_memory_is_shared_and_neither_opened_at_home_nor_freed_under_a_reader() -> None:
    gpus = StrictGpus()
    owner, reader = gpus.process(), gpus.process()
    owner.init(0)
    data = owner.zeros(16, 0)
    handle = owner.share(data)
    with pytest.raises(CudaMisuse, match="its own memory"):
        owner.open(handle)
    opened = reader.open(handle)
    data[3] = 7
    assert opened[3] == 7
    del data
    gc.collect()
    with pytest.raises(CudaMisuse, match="freed while another process had it open"):
        gpus.check()
    with pytest.raises(CudaMisuse, match="freed"):
        reader.synchronize(0)


def test_events_belong_to_a_device() -> None:
    cuda = StrictGpus(num_gpus=2).process()
    cuda.init(0)
    event = cuda.record(0)
    assert event.query()
    with pytest.raises(CudaMisuse, match="recorded on GPU 1 while GPU 0 is the current one"):
        cuda.record(1)
    cuda.init(1)
    with pytest.raises(CudaMisuse, match="queried on GPU 0 while GPU 1"):
        event.query()
    with pytest.raises(CudaMisuse, match="invalid device ordinal"):
        cuda.init(2)


def test_a_recording_must_not_be_disturbed() -> None:
    cuda = StrictGpus().process()
    cuda.init(0)
    event, data = cuda.record(0), cuda.zeros(8, 0)
    for call in (
        lambda: cuda.synchronize(0),
        event.synchronize,
        lambda: cuda.zeros(8, 0),
        lambda: cuda.share(data),
        lambda: cuda.to_host([data], 0)(),
        lambda: cuda.record_graph(lambda: None, 0),
        lambda: data[0].item(),
        data.nonzero,
        lambda: data[data > 0],
        lambda: data.__setitem__(data > 0, torch.ones(1, dtype=torch.uint8)),
    ):
        with pytest.raises(CudaMisuse, match="stream is capturing"):
            cuda.record_graph(call, 0)
    cuda.synchronize(0)


def test_a_peer_with_another_order_of_gpus_opens_by_its_own_index() -> None:
    """Handles carry the index of the process that shared them, and the doctor's probes see all GPUs of a node."""
    gpus = StrictGpus(num_gpus=2)
    memory = DeviceMemory.create(64, "cuda:1", gpus.process())
    peer = gpus.process(visible=[1])
    with pytest.raises(CudaMisuse, match="invalid device ordinal"):
        DeviceMemory.open(memory.handle, cuda=peer)
    opened = DeviceMemory.open(memory.handle, 0, peer)
    memory.view(Region(0, 4)).fill_(9)
    assert opened.view(Region(0, 5)).tolist() == [9, 9, 9, 9, 0]
    assert opened.settled()()


def test_opening_initialises_cuda_first() -> None:
    """`_new_shared_cuda` in a process without CUDA is a segmentation fault, and a worker does nothing else before."""
    gpus = StrictGpus()
    memory, worker = DeviceMemory.create(64, "cuda", gpus.process()), gpus.process()
    opened = DeviceMemory.open(memory.handle, cuda=worker)
    assert worker.calls[0] == "init"
    opened.close()
    memory.close()
    with pytest.raises(TransferRefused, match="invalid resource handle"):
        DeviceMemory.open(memory.handle, cuda=worker)


def test_work_of_a_stream_is_done_when_the_host_waits_for_it() -> None:
    """Until then its results are poison."""
    cuda = StrictGpus().process()
    cuda.init(0)
    data, target = torch.arange(8, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    first, second = cuda.stream(0), cuda.stream(0)
    with cuda.on(first):
        gathered = torch.cat([data[4:6], data[0:2]])
        event = cuda.record(0)
        target.copy_(gathered)
    assert gathered.tolist() == [POISON] * 4
    assert not event.query()
    with cuda.on(second):
        copied = gathered.clone()
    second.synchronize()
    assert copied.tolist() == [POISON] * 4, "a stream does not wait for another one"
    event.synchronize()
    assert (gathered.tolist(), target.tolist()) == ([4, 5, 0, 1], [0] * 4)
    assert event.query()
    cuda.synchronize(0)
    assert target.tolist() == [4, 5, 0, 1]


def test_a_stream_has_its_gpu_and_its_process() -> None:
    gpus = StrictGpus(num_gpus=2)
    cuda, other = gpus.process(), gpus.process()
    for each in (cuda, other):
        each.init(0)
    stream = cuda.stream(1)
    with cuda.on(stream):
        event = cuda.record(1)
        with pytest.raises(CudaMisuse, match="recorded on GPU 0 while GPU 1 is the current one"):
            cuda.record(0)
    with pytest.raises(CudaMisuse, match="waited for on GPU 1 while GPU 0"):
        event.synchronize()
    with pytest.raises(CudaMisuse, match="of another process"):
        other.on(stream)
    with pytest.raises(CudaMisuse, match="before CUDA was initialised"):
        gpus.process().stream(0)
