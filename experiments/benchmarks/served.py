"""pdserve and vLLM, both serving the same model as one prefill and one decode worker on the same two cores, one after
the other: pdserve, vLLM, vLLM, pdserve. vLLM (CPU build) moves the KV over NIXL, pdserve over the transport that it
chooses itself.

`python -m experiments.benchmarks.served --vllm VENV` needs a virtual environment with vLLM's CPU build, NIXL, and
nothing else that runs on the machine. Without ``--vllm`` pdserve is measured alone. For each prompt length the same
prompts are sent disaggregated and colocated in turn, one request at a time. vLLM's first token comes from its decode
instance, so its ``ttft`` contains the hand-off; pdserve's ``ttft`` is prefill's token, and ``ttft_decode`` the first
token that has waited for the hand-off. What was measured so far is printed after each phase."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pandas
import typer

from experiments.benchmarks.frame import Quick, added, in_turns, note, run, service
from experiments.child_process import ROOT, ChildProcess
from experiments.messages import message_of
from experiments.workloads.conversation import random_tokens
from pdserve import Client
from pdserve.core.chance import SYSTEM
from pdserve.version import VERSION

PORTS = {"prefill": 8100, "decode": 8200}
START_TIMEOUT_S = 600.0
KV_CONFIG = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
Sample = dict[str, float]
"""Figures of one request, in milliseconds."""
Ask = Callable[[tuple[int, ...], str, int], Sample]
"""Sends a prompt in a mode, for so many tokens."""


def served(
    vllm: Annotated[Path | None, typer.Option(help="virtual environment with vLLM")] = None,
    dtype: Annotated[str, typer.Option(help="float32 where the CPU has no bfloat16 instructions")] = "bfloat16",
    logs: Annotated[Path, typer.Option(help="folder of vLLM's logs")] = Path("out"),
    quick: Quick = False,
) -> dict[str, Any]:
    """Measure."""
    if vllm is not None and not (vllm / "bin/vllm").is_file():
        raise typer.BadParameter(
            f"{str(vllm)!r} has no bin/vllm; give the virtual environment with vLLM's CPU build "
            "(make bench-served VLLM=VENV), or leave --vllm out to measure pdserve alone",
            param_hint="--vllm",
        )
    lengths, requests, output_tokens = ((16,), 1, 4) if quick else ((128, 512, 2048), 4, 24)
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
        model = ROOT / "models" / "tiny" if quick else _saved_model(Path(folder), dtype)
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
            code = "import importlib.metadata as m; print(m.version('vllm'))"
            versions["vllm"] = subprocess.check_output([vllm / "bin/python", "-c", code], text=True).strip()
            logs.mkdir(parents=True, exist_ok=True)
            with _vllm(vllm, model, dtype, logs) as start_s:
                ready_s.append(("vllm", start_s))
                for phase in (1, 2):
                    measure("vllm", phase, partial(ask_vllm, model))
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


def _saved_model(folder: Path, dtype: str) -> Path:
    """The shape of 135 million random weights, with the tokenizer of the tiny model, as a Hugging Face folder."""
    import torch

    from checkpoints.source import resolve_model
    from experiments.benchmarks.engine_sides import transformers_model

    torch.manual_seed(0)
    transformers_model(resolve_model("dummy:135m").shape, dtype).save_pretrained(folder)
    for tokenizer in (ROOT / "models" / "tiny").glob("tokenizer*"):
        shutil.copy(tokenizer, folder)
    return folder


def _ask_pdserve(client: Client, prompt: tuple[int, ...], mode: str, output_tokens: int) -> Sample:
    """One request's figures."""
    done = client.generate(prompt, max_tokens=output_tokens, ignore_eos=True, mode=mode, timeout_s=300).result()
    if done.mode != mode or done.kv_bytes != done.kv_bytes_expected or done.ttft_decode_ms is None:
        raise SystemExit(f"no {mode} request: mode {done.mode}, {done.kv_bytes} of {done.kv_bytes_expected} bytes")
    return {"ttft": done.ttft_ms, "ttft_decode": done.ttft_decode_ms, "itl": statistics.median(done.itl_ms[1:])}


# --- vLLM ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _vllm(venv: Path, model: Path, dtype: str, logs: Path) -> Iterator[float]:
    """Both instances, each on one core; gives the seconds until both were ready."""
    started_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        instances = []
        for core, (role, port) in enumerate(PORTS.items()):
            environment = {
                "PYTHONPATH": "",
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "VLLM_CPU_OMP_THREADS_BIND": str(core),
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(5559 + core),
                "UCX_TLS": os.environ.get("UCX_TLS", "all"),
            }
            command = ["taskset", "-c", str(core), str(venv.absolute() / "bin/vllm"), "serve", str(model),
                       "--port", str(port), "--dtype", dtype, "--max-model-len", "4096", "--no-enable-prefix-caching",
                       "--kv-transfer-config", json.dumps(KV_CONFIG)]  # fmt: skip
            instance = ChildProcess(f"vLLM ({role})", command, environment, logs / f"vllm-{role}.log", talks=False)
            instances.append(stack.enter_context(instance))
        while not all(map(_healthy, PORTS.values())):
            if any(instance.status is not None for instance in instances):
                raise SystemExit(f"vLLM has ended; see {logs}/vllm-*.log")
            if time.monotonic() - started_s > START_TIMEOUT_S:
                raise SystemExit(f"vLLM was not ready within {START_TIMEOUT_S:.0f} s; see {logs}/vllm-*.log")
            time.sleep(1.0)
        yield time.monotonic() - started_s


def _healthy(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False


class Prefilled(msgspec.Struct):
    """What vLLM's prefill instance answers that its decode instance needs."""

    kv_transfer_params: dict[str, Any]


def ask_vllm(model: Path, prompt: tuple[int, ...], mode: str, output_tokens: int) -> Sample:
    """One request's figures. Disaggregated: prefill makes one token, then decode fetches the KV and streams."""
    body: dict[str, Any] = {"model": str(model), "prompt": prompt, "temperature": 0, "ignore_eos": True}
    started_s = time.perf_counter()
    port = PORTS["prefill"]
    if mode == "pd":
        remote = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        ask = {"do_remote_decode": True, "do_remote_prefill": False, **remote}
        answer = _post(port, {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": ask})
        body["kv_transfer_params"] = message_of(answer.read(), Prefilled, "vLLM's prefill instance").kv_transfer_params
        port = PORTS["decode"]
    stream = _post(port, {**body, "max_tokens": output_tokens, "stream": True})
    times_ms = [(time.perf_counter() - started_s) * 1e3 for line in stream if line.startswith(b"data: {")]
    if len(times_ms) < output_tokens:
        raise SystemExit(f"vLLM streamed {len(times_ms)} chunks instead of {output_tokens}")
    itl_ms = statistics.median(b - a for a, b in itertools.pairwise(times_ms[1:]))
    return {"ttft": times_ms[0], "ttft_decode": times_ms[1], "itl": itl_ms}


def _post(port: int, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    headers = {"Content-Type": "application/json", "X-Request-Id": str(SYSTEM.random())}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    if answer.status != http.client.OK:
        raise SystemExit(f"vLLM answered {answer.status}: {answer.read()[:500]!r}")
    return answer


if __name__ == "__main__":
    run(served)
