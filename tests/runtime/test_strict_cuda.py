"""The stand-in for CUDA raises where CUDA crashes, hangs, or corrupts memory."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.strict_cuda import CudaMisuse, StrictGpus
from tests.strict_streams import POISON


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


def test_copies_to_a_gpu_come_from_pinned_memory_that_stays_as_it_is_until_they_are_done() -> None:
    cuda = StrictGpus().process()
    cuda.init(0)
    staged, target = cuda.pinned(4), torch.zeros(4, dtype=torch.uint8)
    staged.fill_(1)
    wait = cuda.to_device(staged, target, 0)
    assert target.tolist() == [POISON] * 4
    staged.fill_(2)
    wait()
    assert target.tolist() == [2] * 4
    with pytest.raises(CudaMisuse, match="not pinned"):
        cuda.to_device(torch.ones(4, dtype=torch.uint8), target, 0)
