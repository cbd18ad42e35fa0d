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
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import psutil
import typer

from experiments.benchmarks.frame import Quick, in_turns, note, run, service
from experiments.child_process import ROOT
from experiments.messages import message_of
from ops.launch.leftovers import end_processes
from pdserve import Client
from pdserve.version import VERSION

PORTS = {"prefill": 8100, "decode": 8200}
START_TIMEOUT_S = 600.0
_END_S = 20.0
KV_CONFIG = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
MEASURED = ("ttft", "ttft_decode", "itl", "added_ttft", "added_ttft_decode")
MODES = ("pd", "colocated")
Sample = dict[str, float]
"""Figures of one request, in milliseconds."""
Ask = Callable[[list[int], str, int], Sample]
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
    samples: dict[str, dict[tuple[int, str], list[Sample]]] = {"pdserve": {}, "vllm": {}}
    ready_s: dict[str, list[float]] = {"pdserve": [], "vllm": []}
    versions = {"pdserve": VERSION, "python": platform.python_version()}

    def measure(system: str, phase: int, ask: Ask) -> None:
        """One phase: all lengths, both modes in turn."""
        for mode in MODES:
            ask([1, 2, 3] * 40, mode, output_tokens)  # warm-up
        for length in lengths:
            for number, mode in in_turns(MODES, requests):
                sample = ask(_prompt(length, phase, number), mode, output_tokens)
                samples[system].setdefault((length, mode), []).append(sample)
        note(json.dumps({f"{system} after phase {phase}": _figures(samples[system])}))

    with tempfile.TemporaryDirectory() as folder:
        model = ROOT / "models" / "tiny" if quick else _saved_model(Path(folder), dtype)
        settings = {"model.path": str(model), "model.dtype": dtype, "engine.prefix_caching": False}

        def measure_ours(phase: int) -> None:
            started_s = time.monotonic()
            with service(settings) as ours, Client(ours.target) as client:
                ready_s["pdserve"].append(time.monotonic() - started_s)
                measure("pdserve", phase, partial(_ask_pdserve, client))

        measure_ours(0)
        if vllm is None:
            note("vLLM is not measured: no --vllm was given")
        else:
            versions["vllm"] = _version(vllm)
            logs.mkdir(parents=True, exist_ok=True)
            with _vllm(vllm, model, dtype, logs) as start_s:
                ready_s["vllm"].append(start_s)
                for phase in (1, 2):
                    measure("vllm", phase, partial(ask_vllm, model))
            measure_ours(3)
    figures = {system: _figures(each) for system, each in samples.items()}
    return {
        "benchmark": "served",
        "dtype": dtype,
        "requests": len(ready_s["pdserve"]) * requests,
        "output_tokens": output_tokens,
        "versions": versions,
        "ready_s": {system: statistics.median(seconds) for system, seconds in ready_s.items() if seconds},
        **figures,
        "ratios": {
            length: {key: figures["pdserve"][length][key] / row[key] for key in MEASURED}
            for length, row in figures["vllm"].items()
        },
    }


def _prompt(length: int, phase: int, number: int) -> list[int]:
    """New in each phase, so that no cache knows it."""
    draw = random.Random(f"{length}/{phase}/{number}")
    return [draw.randrange(250) for _ in range(length)]


def _figures(samples: dict[tuple[int, str], list[Sample]]) -> dict[str, Sample]:
    """Medians by length, and the median of the paired differences of ``ttft`` (for pdserve of ``ttft_decode`` too)."""
    result = {}
    for length in dict.fromkeys(length for length, _ in samples):
        pd, colocated = samples[length, "pd"], samples[length, "colocated"]
        medians = {key: statistics.median(sample[key] for sample in pd) for key in ("ttft", "ttft_decode", "itl")}
        for key in ("ttft", "ttft_decode"):
            added = (a[key] - b[key] for a, b in zip(pd, colocated, strict=True))
            medians[f"added_{key}"] = statistics.median(added)
        result[str(length)] = medians
    return result


def _saved_model(folder: Path, dtype: str) -> Path:
    """135 million random weights with a tokenizer of bytes, as a Hugging Face folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    alphabet = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**alphabet, "<s>": 256, "</s>": 257}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=256,
        eos_token_id=257,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    return folder


def _ask_pdserve(client: Client, prompt: list[int], mode: str, output_tokens: int) -> Sample:
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
    processes = []
    try:
        for core, (role, port) in enumerate(PORTS.items()):
            environment = {
                **os.environ,
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "VLLM_CPU_OMP_THREADS_BIND": str(core),
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(5559 + core),
                "UCX_TLS": os.environ.get("UCX_TLS", "all"),
            }
            arguments = [str(venv / "bin/vllm"), "serve", str(model), "--port", str(port), "--dtype", dtype,
                         "--max-model-len", "4096", "--no-enable-prefix-caching",
                         "--kv-transfer-config", json.dumps(KV_CONFIG)]  # fmt: skip
            with (logs / f"vllm-{role}.log").open("wb") as log:
                processes.append(subprocess.Popen(
                    ["taskset", "-c", str(core), *arguments], env=environment, stdout=log, stderr=subprocess.STDOUT,
                    start_new_session=True,
                ))  # fmt: skip
        while not all(_healthy(port) for port in PORTS.values()):
            if any(process.poll() is not None for process in processes):
                raise SystemExit(f"vLLM has ended; see {logs}/vllm-*.log")
            if time.monotonic() - started_s > START_TIMEOUT_S:
                raise SystemExit(f"vLLM was not ready within {START_TIMEOUT_S:.0f} s; see {logs}/vllm-*.log")
            time.sleep(1.0)
        yield time.monotonic() - started_s
    finally:
        family = psutil.Process().children(recursive=True)
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.terminate()
        end_processes(family, _END_S)


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


def ask_vllm(model: Path, prompt: list[int], mode: str, output_tokens: int) -> Sample:
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
    times_s = [time.perf_counter() for line in stream if line.startswith(b"data: {")]
    if len(times_s) < output_tokens:
        raise SystemExit(f"vLLM streamed {len(times_s)} chunks instead of {output_tokens}")
    gaps_s = [b - a for a, b in itertools.pairwise(times_s)]
    return {
        "ttft": (times_s[0] - started_s) * 1e3,
        "ttft_decode": (times_s[1] - started_s) * 1e3,
        "itl": statistics.median(gaps_s[1:]) * 1e3,
    }


def _post(port: int, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    headers = {"Content-Type": "application/json", "X-Request-Id": str(random.random())}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    if answer.status != http.client.OK:
        raise SystemExit(f"vLLM answered {answer.status}: {answer.read()[:500]!r}")
    return answer


def _version(venv: Path) -> str:
    code = "import importlib.metadata as m; print(m.version('vllm'))"
    done = subprocess.run([str(venv / "bin/python"), "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    run(served)
