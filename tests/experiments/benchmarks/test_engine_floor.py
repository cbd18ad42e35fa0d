"""Floors of GPUs over the stand-in for CUDA, and those of this machine."""

from __future__ import annotations

import torch

from checkpoints.source import resolve_model
from engine.model.runner import ModelRunner
from experiments.benchmarks.engine_sides import Floor
from experiments.engine_alone.bare_engine import BareEngine
from experiments.engine_alone.ceilings import Ceilings, Sizes
from experiments.engine_alone.steps import StepCase
from tests.strict_cuda import StrictGpus

SMALL = Sizes(2**22, 64)


def on_strict_gpu(sizes: Sizes = SMALL) -> Ceilings:
    return Ceilings(torch.device("cuda", 1), cuda=StrictGpus(num_gpus=2).process(), sizes=sizes)


def test_events_of_the_gpu_take_the_times() -> None:
    ceilings = on_strict_gpu()
    assert ceilings.product_flops() > 0
    assert ceilings.product_flops(packed=True) > 0
    assert ceilings.read_bytes_per_s() > 0


def test_a_decode_step_on_a_gpu_reads_weights_and_cache_but_no_embedding() -> None:
    """The embedding of a model with an output head of its own is read one row per token."""
    shape = resolve_model("tiny").shape
    ceilings = on_strict_gpu()
    ceilings.read_bytes_per_s = lambda repeats=1: 1.0  # type: ignore[method-assign]
    floor = Floor(shape, "cuda:1", 32, ceilings)
    matrices = shape.num_layers * shape.layer_matrices + shape.vocab_size * shape.hidden_size
    kv_bytes = 3 * 101 * shape.kv_bytes_per_token("bfloat16")
    assert floor.measure_s(StepCase(3, 1, 100)) == 2 * matrices + kv_bytes
    assert floor.measure_s(StepCase(1, 48)) > 0


def test_decode_steps_on_a_gpu_are_timed_by_it_and_nothing_waits_between_them() -> None:
    """All are launched before the first is waited for."""
    cuda = StrictGpus().process()
    cuda.init(0)
    engine = BareEngine("tiny", "cpu", num_blocks=64, dtype="float32")
    plain = engine._runner
    engine._runner = ModelRunner(plain._model, plain._attention, plain.pool, cuda=cuda)
    engine._cuda = cuda
    cuda.calls.clear()
    [seconds] = engine.steps_s(StepCase(2, 1, 8), steps=4, warm=1)
    assert seconds > 0
    waits = [number for number, call in enumerate(cuda.calls) if "waited for" in call]
    begun = cuda.calls.index("an event is recorded", waits[0])
    assert waits[1:] == [len(cuda.calls) - 2], "after the warm-up, only the last event is waited for"
    assert cuda.calls[begun:].count("results are copied to the host") == 4
