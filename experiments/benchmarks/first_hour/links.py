"""Steps of the links between two GPUs: rates of hand-offs over NCCL beside bare sends, and peers that die or stop."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from experiments.benchmarks.first_hour.programs import run_pytest
from experiments.benchmarks.first_hour.step import Findings, Options
from experiments.benchmarks.handoff_pair import HandoffPair
from ops.launch.ports import free_port

RATE_GOAL = 0.80
_TIMEOUT_S = 120.0


def rates(options: Options) -> Findings:
    """Hand-offs of the 8b shape's blocks over torch_dist, beside send and recv of the same bytes."""
    num_bytes, turns = (2**30, 10) if options.has_goals else (2**25, 3)
    port = free_port("127.0.0.1", 0)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:
        ends = [processes.submit(_bare, rank, options.device, port, num_bytes, turns) for rank in (0, 1)]
        bare_s = statistics.median(ends[1].result(_TIMEOUT_S))
    with HandoffPair("8b", "torch_dist", probe=False, device=options.device) as pair:
        pair.start(num_bytes)
        # The first one is warm-up.
        ours_s = statistics.median([pair.unchecked(num_bytes) for _ in range(turns + 1)][1:])
    findings = Findings()
    findings.figures |= {
        "bare, GB/s": round(num_bytes / bare_s / 1e9, 2),
        "hand-offs, GB/s": round(num_bytes / ours_s / 1e9, 2),
    }
    findings.aim("hand-offs / bare", bare_s / ours_s, RATE_GOAL, judged=options.has_goals)
    return findings


def losses(options: Options) -> Findings:
    """A peer that is killed or stopped, mid-send and while the two join."""
    findings = Findings()
    files = ("tests/kv_transfer/test_torch_dist_processes.py",)
    if options.on_gpu:
        run_pytest(findings, options, *files, "tests/kv_transfer/test_two_gpus.py", "-m", "cuda2")
    else:
        run_pytest(findings, options, *files, "-k", "gloo")
    return findings


def _bare(rank: int, device: str, port: int, num_bytes: int, turns: int) -> list[float]:
    """torch.distributed's send and recv of whole messages, as many at a time as there are. Seconds of each turn."""
    import torch

    distributed: Any = torch.distributed
    where: dict[str, Any] = {}
    if device != "cpu":
        device = f"{device}:{rank}"
        torch.cuda.set_device(device)
        where["device_id"] = torch.device(device)
    store = distributed.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    backend = "gloo" if device == "cpu" else "nccl"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=2, **where)
    size = min(num_bytes, 64 * 2**20)
    messages = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(num_bytes // size)]
    times_s: list[float] = []
    for _ in range(turns + 1):
        distributed.barrier()
        started_s = time.monotonic()
        works = [distributed.isend(each, 1) if rank == 0 else distributed.irecv(each, 0) for each in messages]
        for work in works:
            if work is not None:
                work.wait()
        if device != "cpu":
            torch.cuda.synchronize()
        times_s.append(time.monotonic() - started_s)
    distributed.barrier()
    return times_s[1:]  # the first one is warm-up
