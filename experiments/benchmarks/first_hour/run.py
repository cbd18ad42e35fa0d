"""The first hour on a GPU: runs the steps in order, each in a process of its own with a time limit, and judges them.

A run goes on after a step that fails, unless ``--stop``. It leaves an archive of all results and logs. The last line is
one JSON object. Exit status: 0, 1 after a failure, 2 without a GPU, 130 after Ctrl-C.

A step runs in a process of its own, so that a hung or poisoned GPU ends this process and not the run."""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from experiments.benchmarks.first_hour import engine, service
from experiments.benchmarks.first_hour.archive import origin, pack
from experiments.benchmarks.first_hour.step import Findings, Options, Step, Verdict, run_pytest, tests
from experiments.child_process import ChildFailed, ChildProcess, call
from experiments.messages import WrongMessage, message_of

_KERNELS = "tests/engine/cuda/test_kernels.py"
_OTHER_KERNELS = "tests/engine/cuda/test_flashinfer.py", "tests/engine/cuda/test_draw.py"
_PROCESSES = "tests/kv_transfer/test_torch_dist_processes.py"
_PAIRS, _TOKENS = "tests/e2e/test_gpu.py", "tests/e2e/test_tokens.py"


def _sanitizer(options: Options) -> Findings:
    """A part of the kernels' tests under compute-sanitizer, which finds accesses out of bounds."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return Findings(skipped="compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
    before = (sanitizer, "--tool", "memcheck", "--error-exitcode", "86", "--target-processes", "all")
    selection = ("-k", "norm_and_gate or padding or decodes_and_chunks")
    allocator = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else accesses into the cache of the allocator look right
    return run_pytest(options, _KERNELS, "-m", "cuda", *selection, before=before, environment=allocator)


_NEEDS_GPU, _MINUTE = "needs a GPU", 60.0
STEPS = (
    Step("environment", "versions, GPUs and modes with which the rest can work", engine.environment, 300, 120),
    Step(
        "kernels", "every kernel computes what PyTorch does",  # on CPUs in Triton's interpreter
        tests(
            (_KERNELS, *_OTHER_KERNELS, "-m", "cuda"),
            (_KERNELS, "-k", "norm_and_gate or padding"),
            TRITON_INTERPRET="1",
        ),
        20 * _MINUTE, 15 * _MINUTE,
    ),
    Step(
        "decoder", "the decoder's tokens are those of transformers",
        tests(
            ("tests/engine/cuda/test_decoder.py", "-m", "cuda"),
            ("tests/engine/test_model_vs_transformers.py", "-k", "one_prompt and gqa"),
        ),
        20 * _MINUTE, 15 * _MINUTE,
    ),
    Step(
        "checkpoints", "log-probabilities of real checkpoints are those of transformers",
        engine.checkpoints, 30 * _MINUTE, 10 * _MINUTE,
    ),
    Step(
        "handoff", "1P1D on one device: equal tokens, all bytes",
        tests((_PAIRS, "-m", "cuda and not cuda2", "-k", "tokens"), (_TOKENS, "-k", "same_tokens and gqa")),
        15 * _MINUTE, 10 * _MINUTE,
    ),
    Step(
        "handoff-two", "1P1D on two GPUs: equal tokens, all bytes",
        tests((_PAIRS, "-m", "cuda2"), ()), 600, 600, gpus=2, not_on_cpu=_NEEDS_GPU,
    ),
    Step(
        "loss", "killed workers cost no request",
        tests((_PAIRS, "-m", "cuda and not cuda2", "-k", "killed"), (_TOKENS, "-k", "resume and gqa")),
        20 * _MINUTE, 10 * _MINUTE,
    ),
    Step(
        "handoff-model", "the tokens of a large model after a hand-off are those without one",
        service.handoff, 15 * _MINUTE, 10 * _MINUTE,
    ),
    Step("engine", "shares of the roofline", engine.benchmark, 30 * _MINUTE, 10 * _MINUTE),
    Step("bench", "what disaggregation adds, with and without MPS", service.bench, 30 * _MINUTE, 15 * _MINUTE),
    Step("links", "hand-offs near a bare send and recv", service.links, 10 * _MINUTE, 5 * _MINUTE, gpus=2),
    Step("choices", "defaults are no slower than their alternatives", engine.choices, 20 * _MINUTE, 10 * _MINUTE),
    Step("budgets", "the default token budget is near the best", engine.budgets, 15 * _MINUTE, 10 * _MINUTE),
    Step("sampling", "sampling 32 rows costs little beside greedy steps", engine.sampling, 10 * _MINUTE, 10 * _MINUTE),
    Step(
        "speculation", "guesses change no token, and a draft model computes what the model computes",
        engine.speculation, 10 * _MINUTE, 10 * _MINUTE,
    ),
    Step(
        "link-loss", "peers that die or stop are given up in time",
        tests((_PROCESSES, "tests/kv_transfer/test_two_gpus.py", "-m", "cuda2"), (_PROCESSES, "-k", "gloo")),
        30 * _MINUTE, 30 * _MINUTE, gpus=2,
    ),
    Step(
        "sanitizer", "no kernel accesses memory out of bounds", _sanitizer, 30 * _MINUTE, 20 * _MINUTE,
        not_on_cpu=_NEEDS_GPU,
    ),
    Step("soak", "2P2D for 30 minutes: flat memory", service.soak, 45 * _MINUTE, 10 * _MINUTE, gpus=2),
)  # fmt: skip
"""In order of their worth, should the machine go away: what is correct first (15 minutes), then hand-offs and losses
(10), then rates (20)."""
MOST_SOAK_S = 2400.0
"""The longest soak that ends before its step's time limit."""
_NO_GPU = 2


def main(arguments: Sequence[str] | None = None, steps: Sequence[Step] = STEPS) -> int:
    """Run the steps that ``arguments`` choose. Returns the exit status."""
    chosen = _parse(arguments, steps)
    if chosen.list:
        for step in steps:
            needs = f"{step.gpus} GPU" + ("s" if step.gpus > 1 else "")
            _print(f"{step.name:<14} {step.shows} ({needs}{'' if step.not_on_cpu else ', or CPUs'})")
        return 0
    try:
        gpu, num_gpus, gpu_bytes = _gpus() if chosen.device == "cuda" else ("", 0, 0)
    except RuntimeError as error:
        _print(json.dumps({"date": _now(), "error": str(error)}))
        return _NO_GPU
    folder = Path(chosen.folder or f"out/first-hour-{_now()[:19].replace(':', '')}").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints = tuple(str(Path(each).absolute()) for each in chosen.checkpoint)
    options = Options(chosen.device, num_gpus, gpu_bytes, chosen.quick, str(folder), chosen.soak_s, checkpoints)
    first = next(number for number, step in enumerate(steps) if chosen.first in ("", step.name))
    selected = [step for step in steps[first:] if step.name in chosen.only or not chosen.only]
    results: dict[str, dict[str, Any]] = {}
    for step in steps[:first]:  # of the run that goes on here
        if (found := folder / f"{step.name}.json").exists():
            results[step.name] = json.loads(found.read_text())
    return _run(selected, options, gpu, results, stops=chosen.stop)


def _run(steps: Sequence[Step], options: Options, gpu: str, results: dict[str, dict[str, Any]], *, stops: bool) -> int:
    """Run ``steps``, and add to ``results``."""
    stopped, status = "", 0
    for number, step in enumerate(steps, 1):
        _print(f"[{number}/{len(steps)}] {step.name}: {step.shows}")
        started_s = time.monotonic()
        try:
            findings = judge(step, options)
        except KeyboardInterrupt:
            stopped, status = f"interrupted during {step.name}", 130
            _print(f"  {stopped}")
            break
        seconds = round(time.monotonic() - started_s, 1)
        filled = {name: value for name, value in msgspec.structs.asdict(findings).items() if value}
        results[step.name] = {"shows": step.shows, "verdict": findings.verdict, "seconds": seconds, **filled}
        (Path(options.folder) / f"{step.name}.json").write_text(json.dumps(results[step.name]))
        for name, value in findings.figures.items():
            _print(f"  {name}: {json.dumps(value) if isinstance(value, dict | list) else value}")
        for text in (*findings.notes, *findings.below, *findings.problems):
            _print(f"  {text}")
        _print(f"  {findings.verdict}{f': {findings.skipped}' if findings.skipped else ''} ({seconds:.0f} s)")
        if findings.verdict is Verdict.FAILED:
            status = 1
            if stops:
                stopped = f"stopped after {step.name}: {findings.problems[0]}"
                _print(f"{stopped}\n(--from {step.name} goes on there)")
                break
    verdicts = [result["verdict"] for result in results.values()]
    counts = {str(verdict): verdicts.count(verdict) for verdict in Verdict}
    report = {"date": _now(), "device": options.device, "gpu": gpu, "quick": options.quick, **origin()}
    report |= {"counts": counts, "stopped": stopped, "steps": results}
    _print(f"all results and logs: {pack(Path(options.folder), report)}")
    _print(json.dumps(report))
    return status


def judge(step: Step, options: Options) -> Findings:
    """Run one step in a process of its own, and end everything that is left of it."""
    if obstacle := step.obstacle(options):
        return Findings(skipped=obstacle)
    log, limit_s = Path(options.folder) / f"{step.name}.log", step.quick_s if options.quick else step.limit_s
    environment = {"PYTHONUNBUFFERED": "1"}
    if options.on_gpu:
        environment |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{options.folder}/{step.name}.nccl.%h.%p.log"}
    with ChildProcess(step.name, call(run_step, step.name, options), environment, log) as child:
        try:
            findings = msgspec.convert(child.result(limit_s), Findings)
        except (ChildFailed, WrongMessage) as error:
            findings = Findings(problems=[str(error).partition(";")[0]])
        if findings.problems:
            _print(child.log_tail(25))
    return findings


def _parse(arguments: Sequence[str] | None, steps: Sequence[Step]) -> argparse.Namespace:
    names = [step.name for step in steps]
    parser = argparse.ArgumentParser(prog="gpu_check.py", description="The first hour on a GPU (docs/gpu.md).")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the same steps, small, on CPUs")
    parser.add_argument("--only", default="", help="these steps, separated by commas")
    parser.add_argument("--from", dest="first", default="", choices=names, metavar="STEP", help="from this step on")
    parser.add_argument("--quick", action="store_true", help="small sizes: does everything run?")
    parser.add_argument("--stop", action="store_true", help="end after a failure")
    parser.add_argument("--soak-s", type=float, default=0.0, help="length of the soak in seconds (at most 2,400)")
    parser.add_argument(
        "--checkpoint", action="append", default=[], metavar="FOLDER", help="compare this model with transformers, too"
    )
    parser.add_argument("--list", action="store_true", help="list the steps")
    parser.add_argument("--folder", help="of logs, results and archive (default: a new one in out/)")
    chosen = parser.parse_args(arguments)
    chosen.only = [name for name in chosen.only.split(",") if name]
    if not 0 <= chosen.soak_s <= MOST_SOAK_S:
        parser.error(f"--soak-s: at most {MOST_SOAK_S:.0f}")
    if unknown := set(chosen.only) - set(names):
        parser.error(f"--only: unknown steps {', '.join(sorted(unknown))}; known: {', '.join(names)}")
    return chosen


def _gpus() -> tuple[str, int, int]:
    """The name of the first GPU that torch sees, how many there are, and its memory; RuntimeError without one. torch is
    asked in another process: CUDA must not start in this one."""
    asking = (
        "import json, torch; n = torch.cuda.device_count(); g = n and torch.cuda.get_device_properties(0); "
        "print(json.dumps([g.name, n, g.total_memory] if n else ['', 0, 0]))"
    )
    asked = subprocess.run([sys.executable, "-c", asking], capture_output=True, text=True, timeout=120)
    if asked.returncode:
        raise RuntimeError(f"torch cannot use CUDA: {asked.stderr.strip().splitlines()[-1:]}")
    found = message_of(asked.stdout.strip().splitlines()[-1].encode(), tuple[str, int, int], "torch")
    gpu, num_gpus, gpu_bytes = found
    if not num_gpus:
        raise RuntimeError("torch sees no GPU; --device cpu runs the steps that CPUs can")
    return gpu, num_gpus, gpu_bytes


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run_step(name: str, options: Any) -> Findings:
    """Run a step, in the process that `judge` starts."""
    step = next(each for each in STEPS if each.name == name)
    try:
        return step.run(msgspec.convert(options, Options))
    except Exception as error:  # noqa: BLE001 - whatever it was, it is the step's finding
        traceback.print_exc()
        return Findings(problems=[f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"])
