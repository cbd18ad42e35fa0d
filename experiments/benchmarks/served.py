"""pdserve and vLLM, both serving the same model as one prefill and one decode worker on the same two cores, one after
the other: pdserve, vLLM, vLLM, pdserve. vLLM (CPU build) moves the KV over NIXL, pdserve over the transport that it
chooses itself.

`python -m experiments.benchmarks.served --vllm VENV` needs a virtual environment with vLLM's CPU build, NIXL, and
nothing else that runs on the machine. Without ``--vllm`` pdserve is measured alone. For each prompt length the same
prompts are sent disaggregated and colocated in turn, one request at a time. vLLM's first token comes from its decode
instance, so its ``ttft`` contains the hand-off; pdserve's ``ttft`` is prefill's token, and ``ttft_decode`` the first
token that has waited for the hand-off. What was measured so far is printed after each phase."""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas

from experiments.benchmarks.frame import Quick, added, in_turns, note, run, service
from experiments.benchmarks.vllm_servers import (
    VLLM,
    Dtype,
    Logs,
    ask_vllm,
    check,
    native_dtype,
    saved_model,
    version,
    vllm_servers,
)
from experiments.child_process import ROOT
from experiments.workloads.conversation import random_tokens
from pdserve import Client
from pdserve.version import VERSION

Sample = dict[str, float]
"""Figures of one request, in milliseconds."""
Ask = Callable[[tuple[int, ...], str, int], Sample]
"""Sends a prompt in a mode, for so many tokens."""


def served(
    vllm: VLLM = None,
    dtype: Dtype = None,
    logs: Logs = Path("out"),
    quick: Quick = False,
) -> dict[str, Any]:
    """Measure."""
    if vllm is not None:
        check(vllm, "bench-served")
    lengths, requests, output_tokens = ((16,), 1, 4) if quick else ((128, 512, 2048), 4, 24)
    dtype = dtype or native_dtype()
    samples: list[dict[str, Any]] = []
    ready_s: list[tuple[str, float]] = []
    versions = {"pdserve": VERSION, "python": platform.python_version()}

    def measure(system: str, phase: int, ask: Ask) -> None:
        """One phase: all lengths, both modes in turn."""
        modes = ("pd", "colocated")
        for mode in modes:
            ask((1, 2, 3) * 40, mode, output_tokens)  # warm-up
        for length in lengths:
            for number, mode in in_turns(modes, requests):
                prompt = random_tokens(f"{length}/{phase}/{number}", length, 250)  # no cache knows it
                place = {"system": system, "length": str(length), "arm": mode, "repeat": phase * requests + number}
                samples.append({**place, **ask(prompt, mode, output_tokens)})
        note(json.dumps({f"{system} after phase {phase}": _figures(samples, system).T.to_dict()}))

    with tempfile.TemporaryDirectory() as folder:
        model = ROOT / "models" / "tiny" if quick else saved_model(Path(folder), dtype)
        settings = {"model.path": str(model), "model.dtype": dtype, "engine.prefix_caching": False}

        def measure_ours(phase: int) -> None:
            started_s = time.monotonic()
            with service(settings) as ours, Client(ours.target) as client:
                ready_s.append(("pdserve", time.monotonic() - started_s))
                measure("pdserve", phase, partial(_ask_pdserve, client))

        measure_ours(0)
        if vllm is None:
            note("vLLM is not measured: no --vllm was given")
        else:
            versions["vllm"] = version(vllm)
            with vllm_servers(vllm, model, dtype, logs) as servers:
                ready_s.append(("vllm", servers.start_s))
                for phase in (1, 2):
                    measure("vllm", phase, lambda *asked: ask_vllm(*asked).figures)
            measure_ours(3)
    ours, theirs = (_figures(samples, system) for system in ("pdserve", "vllm"))
    starts = pandas.DataFrame(ready_s, columns=["system", "s"])
    return {
        "benchmark": "served",
        "dtype": dtype,
        "requests": (starts.system == "pdserve").sum() * requests,
        "output_tokens": output_tokens,
        "versions": versions,
        "ready_s": starts.groupby("system").s.median(),
        "pdserve": ours,
        "vllm": theirs,
        "ratios": ours / theirs if len(theirs) else {},
    }


def _figures(samples: list[dict[str, Any]], system: str) -> pandas.DataFrame:
    """Medians by length, and the median of the paired differences of ``ttft`` and ``ttft_decode``."""
    by_length = pandas.DataFrame(samples).query("system == @system").groupby("length", sort=False)
    return pandas.DataFrame({
        length: {
            **of[of.arm == "pd"][["ttft", "ttft_decode", "itl"]].median(),
            **{f"added_{key}": added(of, key).median() for key in ("ttft", "ttft_decode")},
        }
        for length, of in by_length
    }).T  # fmt: skip


def _ask_pdserve(client: Client, prompt: tuple[int, ...], mode: str, output_tokens: int) -> Sample:
    """One request's figures."""
    done = client.generate(prompt, max_tokens=output_tokens, ignore_eos=True, mode=mode, timeout_s=300).result()
    if done.mode != mode or done.kv_bytes != done.kv_bytes_expected or done.ttft_decode_ms is None:
        raise SystemExit(f"no {mode} request: mode {done.mode}, {done.kv_bytes} of {done.kv_bytes_expected} bytes")
    return {"ttft": done.ttft_ms, "ttft_decode": done.ttft_decode_ms, "itl": statistics.median(done.itl_ms[1:])}


if __name__ == "__main__":
    run(served)
