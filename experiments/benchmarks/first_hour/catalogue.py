"""The steps of the first hour, in order: each relies on what the ones before it have shown.

`python -m experiments.benchmarks.first_hour.catalogue STEP OPTIONS RESULT` runs one in a process of its own, so that a hung or
poisoned GPU ends this process and not the run. OPTIONS are JSON, and the findings go to the file RESULT."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import msgspec

from experiments.benchmarks.first_hour import engine, links, machine, service
from experiments.benchmarks.first_hour.step import Findings, Options, Step
from runtime.process import end_with_parent

_NEEDS_GPU = "needs a GPU"
_MINUTE = 60.0


def _no_tensor_parallelism(options: Options) -> Findings:
    return Findings(skipped="the engine has no tensor parallelism")


STEPS = (
    Step("environment", "versions, GPUs and modes with which the rest can work", machine.environment, 300, 120),
    Step("kernels", "every kernel computes what PyTorch does", engine.kernels, 20 * _MINUTE, 15 * _MINUTE),
    Step(
        "sanitizer", "no kernel accesses memory out of bounds", engine.sanitizer, 30 * _MINUTE, 20 * _MINUTE,
        not_on_cpu=_NEEDS_GPU,
    ),
    Step("decoder", "the decoder's tokens are those of transformers", engine.decoder, 20 * _MINUTE, 15 * _MINUTE),
    Step("handoff", "1P1D on one device: equal tokens, all bytes", service.handoff, 15 * _MINUTE, 10 * _MINUTE),
    Step("engine", "shares of the roofline", engine.benchmark, 30 * _MINUTE, 10 * _MINUTE),
    Step("bench", "what disaggregation adds, with and without MPS", service.bench, 30 * _MINUTE, 15 * _MINUTE),
    Step("budgets", "the default token budget is near the best", engine.budgets, 15 * _MINUTE, 10 * _MINUTE),
    Step("sampling", "sampling 32 rows costs little beside greedy steps", engine.sampling, 10 * _MINUTE, 10 * _MINUTE),
    Step("choices", "defaults are no slower than their alternatives", engine.choices, 20 * _MINUTE, 10 * _MINUTE),
    Step("loss", "killed workers cost no request", service.loss, 20 * _MINUTE, 10 * _MINUTE),
    Step("links", "hand-offs near a bare send and recv", links.rates, 10 * _MINUTE, 5 * _MINUTE, gpus=2),
    Step("link-loss", "peers that die or stop are given up in time", links.losses, 30 * _MINUTE, 30 * _MINUTE, gpus=2),
    Step("handoff-two", "1P1D on two GPUs: equal tokens, all bytes", service.handoff_two, 600, 600, gpus=2),
    Step("tp", "tensor parallelism", _no_tensor_parallelism, _MINUTE, _MINUTE, gpus=2),
    Step("soak", "2P2D for 30 minutes: flat memory", service.soak, 45 * _MINUTE, 10 * _MINUTE, gpus=2),
)  # fmt: skip


def main(name: str, options: str, result: str) -> None:
    """The whole process."""
    end_with_parent()
    step = next(each for each in STEPS if each.name == name)
    try:
        findings = step.run(msgspec.json.decode(options, type=Options))
    except Exception as error:  # noqa: BLE001 - whatever it was, it is the step's finding
        traceback.print_exc()
        findings = Findings(problems=[f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"])
    Path(result).write_bytes(msgspec.json.encode(findings))


if __name__ == "__main__":
    main(*sys.argv[1:])
