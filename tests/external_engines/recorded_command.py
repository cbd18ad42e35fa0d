"""The commands ``vllm serve`` and ``sglang serve`` of recorded servers: `install` puts a program into a folder that
takes the arguments that pdserve gives, and serves. Servers of vLLM with the same folder fetch KV from each other, by
files of it, and those of SGLang by the bootstrap port of prefill."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path

import uvicorn
import yaml

from tests.external_engines.recorded_sglang import DistantRooms, RecordedSGLang
from tests.external_engines.recorded_vllm import RecordedVLLM

_ROOT = Path(__file__).resolve().parents[2]


def install(folder: Path, engine: str = "vllm") -> str:
    """The path of the command. Its servers write their arguments and their environment to ``folder``."""
    program = folder / engine
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(_ROOT)!r})\n"
        f"from tests.external_engines.recorded_command import {engine}\n{engine}({str(folder)!r})\n"
    )
    program.chmod(0o755)
    return str(program)


def started(folder: Path) -> list[dict[str, object]]:
    """What the servers that were started were given, in order."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.started"))]


def sglang(folder: str) -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("verb")
    for option in ("--model-path", "--config", "--host", "--served-model-name", "--dtype", "--device"):
        parser.add_argument(option, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--disaggregation-mode", default="null")
    parser.add_argument("--disaggregation-bootstrap-port", type=int, default=8998)
    parser.add_argument("--enable-metrics", action="store_true")
    arguments = parser.parse_args()
    secret = Path(arguments.config)
    assert secret.stat().st_mode & 0o077 == 0 or secret.parent.stat().st_mode & 0o077 == 0
    _say(folder, arguments, "SGLANG_CPU_OMP_THREADS_BIND")
    mode, port = arguments.disaggregation_mode, arguments.disaggregation_bootstrap_port
    server = RecordedSGLang(
        mode, DistantRooms() if mode == "decode" else {}, bootstrap_port=port, page_size=arguments.page_size
    )
    server.seed, server.has_metrics = random.randrange(2**30), arguments.enable_metrics
    server.key = yaml.safe_load(secret.read_text())["api-key"]
    asyncio.run(_serve_sglang(server, arguments.host, arguments.port))


async def _serve_sglang(server: RecordedSGLang, host: str, port: int) -> None:
    places = [(server.app(), port)]
    if server.mode == "prefill":
        places.append((server.bootstrap(), server.bootstrap_port))
    configs = [uvicorn.Config(app, host=host, port=at, log_level="error", lifespan="off") for app, at in places]
    await asyncio.gather(*(uvicorn.Server(config).serve() for config in configs))


def _say(folder: str, arguments: argparse.Namespace, *names: str) -> None:
    said = {
        **vars(arguments),
        "pid": os.getpid(),
        "cores": sorted(os.sched_getaffinity(0)),
        "environment": {name: os.environ.get(name) for name in names},
    }
    (Path(folder) / f"{time.time_ns()}.started").write_text(json.dumps(said))


def vllm(folder: str) -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("verb")
    parser.add_argument("model")
    for option in ("--uds", "--served-model-name", "--dtype", "--kv-transfer-config"):
        parser.add_argument(option, required=True)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--kv-cache-memory-bytes", type=int)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--fails", action="store_true")
    parser.add_argument("--preempts", action="store_true")
    parser.add_argument("--attention-backend", default="CPU_ATTN")
    parser.add_argument("--enable-prompt-tokens-details", action="store_true")
    arguments = parser.parse_args()
    if arguments.fails:
        sys.exit(3)
    names = ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_CPU_OMP_THREADS_BIND")
    _say(folder, arguments, *names)
    name = f"engine-{os.getpid()}"
    config = json.loads(arguments.kv_transfer_config)
    if config["kv_connector"] == "PdserveConnector":
        from tests.external_engines.connected_vllm import ConnectedVLLM  # torch, which other servers do not need

        connected = ConnectedVLLM(name, block_size=arguments.block_size, start_s=time.time())
        connected.preempts, connected.attention = arguments.preempts, arguments.attention_backend
        connected.begin(config, arguments.tensor_parallel_size, Path(folder))
        uvicorn.run(connected.app(), uds=arguments.uds, log_level="error", lifespan="off")
        return
    server = RecordedVLLM(name, block_size=arguments.block_size, start_s=time.time())
    server.tells_cached = arguments.enable_prompt_tokens_details
    server.kv = _FolderKV(Path(folder), name)  # type: ignore[assignment]
    server.peers = _Peers(Path(folder))  # type: ignore[assignment]
    uvicorn.run(server.app(), uds=arguments.uds, log_level="error", lifespan="off")


class _FolderKV(MutableMapping[str, list[int]]):
    """The KV that a server holds for others: a file per request."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder / name
        self._folder.mkdir(exist_ok=True)

    def _path(self, request_id: str) -> Path:
        return self._folder / request_id.replace("/", "_")

    def __getitem__(self, request_id: str) -> list[int]:
        try:
            tokens: list[int] = json.loads(self._path(request_id).read_text())
        except FileNotFoundError:
            raise KeyError(request_id) from None
        return tokens

    def __setitem__(self, request_id: str, tokens: list[int]) -> None:
        self._path(request_id).write_text(json.dumps(tokens))

    def __delitem__(self, request_id: str) -> None:
        self._path(request_id).unlink()

    def __iter__(self) -> object:  # type: ignore[override]
        return iter(path.name for path in self._folder.iterdir())

    def __len__(self) -> int:
        return len(list(self._folder.iterdir()))


class _Peers:
    """All servers of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, name: str) -> RecordedVLLM | None:
        """The server of this name, as one that fetches its KV sees it."""
        if not (self._folder / name).is_dir():
            return None
        return RecordedVLLM(name, kv=_FolderKV(self._folder, name))  # type: ignore[arg-type]
