"""Two vLLM servers, each on one core, that hand KV over by NIXL; and a plain HTTP client of what speaks their API."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from experiments.child_process import ROOT, ChildProcess
from experiments.messages import message_of
from pdserve.core.chance import SYSTEM
from runtime.dtypes import native_dtypes

PORTS = {"prefill": 8100, "decode": 8200}
MODEL = "model"
"""The name that the servers give their model."""
_START_TIMEOUT_S, _ANSWER_TIMEOUT_S = 600.0, 600.0
_NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu",
         "kv_load_failure_policy": "fail"}  # fmt: skip
VLLM = Annotated[Path | None, typer.Option(help="virtual environment with vLLM")]
Dtype = Annotated[str | None, typer.Option(help="of the model (default: bfloat16 if the CPU has it, else float32)")]
Logs = Annotated[Path, typer.Option(help="folder of vLLM's logs")]


def check(vllm: Path, target: str) -> None:
    """typer.BadParameter if ``vllm`` is no virtual environment with vLLM; ``target`` of make takes one."""
    if not (vllm / "bin/vllm").is_file():
        raise typer.BadParameter(
            f"{str(vllm)!r} has no bin/vllm; give the virtual environment with vLLM's CPU build "
            f"(make {target} VLLM=VENV)",
            param_hint="--vllm",
        )


def native_dtype() -> str:
    """bfloat16, or float32 if the CPU has no instructions for it."""
    (cpu,) = native_dtypes("cpu")
    return "bfloat16" if "bfloat16" in cpu.dtypes else "float32"


def version(vllm: Path) -> str:
    """The version of vLLM in a virtual environment."""
    code = "import importlib.metadata as m; print(m.version('vllm'))"
    return subprocess.check_output([vllm / "bin/python", "-c", code], text=True).strip()


def saved_model(folder: Path, dtype: str) -> Path:
    """The shape of 135 million random weights, with the tokenizer of the tiny model, as a Hugging Face folder."""
    import torch

    from checkpoints.source import resolve_model
    from experiments.benchmarks.engine_sides import transformers_model

    torch.manual_seed(0)
    transformers_model(resolve_model("dummy:135m").shape, dtype).save_pretrained(folder)
    for tokenizer in (ROOT / "models" / "tiny").glob("tokenizer*"):
        shutil.copy(tokenizer, folder)
    return folder


def started_by_pdserve(vllm: Path, model: Path, dtype: str, connector: str) -> dict[str, Any]:
    """The settings of a service whose workers start servers of the virtual environment ``vllm``."""
    return {
        "model.path": str(model),
        "model.dtype": dtype,
        "worker.engine": "vllm",
        "worker.connector": connector,
        "worker.command": str(vllm.absolute() / "bin/vllm"),
        "engine.prefix_caching": False,
    }


class Servers(NamedTuple):
    """The processes of both servers, by role, and the seconds until they were ready."""

    pids: dict[str, int]
    start_s: float


@contextlib.contextmanager
def vllm_servers(
    vllm: Path, model: Path, dtype: str, logs: Path, connectors: Sequence[bool] = (True, True)
) -> Iterator[Servers]:
    """Both servers, at `PORTS`. ``connectors``: whether each has the NixlConnector."""
    started_s = time.monotonic()
    logs.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        servers = {}
        for core, (role, port) in enumerate(PORTS.items()):
            environment = {
                "PYTHONPATH": "",
                "OMP_WAIT_POLICY": "passive",  # else its threads keep the cores busy while they wait
                "KMP_BLOCKTIME": "0",
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "VLLM_CPU_OMP_THREADS_BIND": str(core),
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(5559 + core),
                "UCX_TLS": os.environ.get("UCX_TLS", "all"),
            }
            command = ["taskset", "-c", str(core), str(vllm.absolute() / "bin/vllm"), "serve", str(model),
                       "--port", str(port), "--dtype", dtype, "--no-enable-prefix-caching",
                       "--served-model-name", MODEL]  # fmt: skip
            if connectors[core]:
                command += ["--kv-transfer-config", json.dumps(_NIXL)]
            server = ChildProcess(f"vLLM ({role})", command, environment, logs / f"vllm-{role}.log", talks=False)
            servers[role] = stack.enter_context(server)
        while not all(map(healthy, PORTS.values())):
            if any(server.status is not None for server in servers.values()):
                raise SystemExit(f"vLLM has ended; see {logs}/vllm-*.log")
            if time.monotonic() - started_s > _START_TIMEOUT_S:
                raise SystemExit(f"vLLM was not ready within {_START_TIMEOUT_S:.0f} s; see {logs}/vllm-*.log")
            time.sleep(1.0)
        yield Servers({role: server.pid for role, server in servers.items()}, time.monotonic() - started_s)


def healthy(port: int, path: str = "/health") -> bool:
    """Whether a server answers."""
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", path)
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False


# --- requests --------------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """The tokens of an output, and when each came, in milliseconds from when the request was sent."""

    tokens: list[int]
    times_ms: list[float]

    @property
    def figures(self) -> dict[str, float]:
        """Those of requests, in milliseconds: ``ttft``, ``ttft_decode`` (token 2), ``last``, and ``itl``, the median of
        the gaps after token 2."""
        times = self.times_ms
        gaps = [after - before for before, after in itertools.pairwise(times[1:])]
        return {"ttft": times[0], "ttft_decode": times[1], "last": times[-1], "itl": statistics.median(gaps)}


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Part(msgspec.Struct):
    choices: list[_Choice]


class _Prefilled(msgspec.Struct):
    """What vLLM's prefill server answers that its decode server needs."""

    kv_transfer_params: dict[str, Any]


def ask(port: int, prompt: Sequence[int], output_tokens: int, **body: Any) -> Answer:
    """The greedy output of a server at ``port``: of vLLM, of a proxy, or of pdserve."""
    sent_s = time.perf_counter()
    tokens: list[int] = []
    times_ms: list[float] = []
    for line in _post(port, {**_body(prompt), **body, "max_tokens": output_tokens, "stream": True}):
        if line.startswith(b"data: {"):
            at_ms = (time.perf_counter() - sent_s) * 1e3
            for choice in message_of(line.removeprefix(b"data: "), _Part, "the server").choices:
                tokens += choice.token_ids or []
                times_ms += [at_ms] * len(choice.token_ids or [])
    if len(tokens) != output_tokens:
        raise SystemExit(f"port {port} streamed {len(tokens)} tokens instead of {output_tokens}")
    return Answer(tokens, times_ms)


def ask_vllm(prompt: Sequence[int], mode: str, output_tokens: int) -> Answer:
    """A request to the servers. Disaggregated (``pd``): prefill makes one token, then decode fetches the KV and
    streams."""
    if mode != "pd":
        return ask(PORTS["prefill"], prompt, output_tokens)
    sent_s = time.perf_counter()
    remote = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    params = {"do_remote_decode": True, "do_remote_prefill": False, **remote}
    body = {**_body(prompt), "max_tokens": 1, "stream": False, "kv_transfer_params": params}
    prefilled = message_of(_post(PORTS["prefill"], body).read(), _Prefilled, "vLLM's prefill server")
    before_ms = (time.perf_counter() - sent_s) * 1e3
    answer = ask(PORTS["decode"], prompt, output_tokens, kv_transfer_params=prefilled.kv_transfer_params)
    return answer._replace(times_ms=[before_ms + each for each in answer.times_ms])


def _body(prompt: Sequence[int]) -> dict[str, Any]:
    return {"model": MODEL, "prompt": list(prompt), "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def _post(port: int, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_TIMEOUT_S)
    headers = {"Content-Type": "application/json", "X-Request-Id": str(SYSTEM.random())}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    if answer.status != http.client.OK:
        raise SystemExit(f"port {port} answered {answer.status}: {answer.read()[:500]!r}")
    return answer
