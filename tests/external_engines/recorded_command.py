"""The command ``vllm serve`` of recorded servers: `install` puts a program into a folder that takes the arguments that
pdserve gives, and serves on a Unix socket. Servers with the same folder fetch KV from each other, by files of it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path

import uvicorn

from tests.external_engines.connected_vllm import ConnectedVLLM
from tests.external_engines.recorded_vllm import RecordedVLLM

_ROOT = Path(__file__).resolve().parents[2]


def install(folder: Path) -> str:
    """The path of the command. Its servers write their arguments and their environment to ``folder``."""
    program = folder / "vllm"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(_ROOT)!r})\n"
        f"from tests.external_engines.recorded_command import main\nmain({str(folder)!r})\n"
    )
    program.chmod(0o755)
    return str(program)


def started(folder: Path) -> list[dict[str, object]]:
    """What the servers that were started were given, in order."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.started"))]


def main(folder: str) -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("verb")
    parser.add_argument("model")
    for option in ("--uds", "--served-model-name", "--dtype", "--kv-transfer-config"):
        parser.add_argument(option, required=True)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--kv-cache-memory-bytes", type=int)
    parser.add_argument("--fails", action="store_true")
    parser.add_argument("--preempts", action="store_true")
    arguments = parser.parse_args()
    if arguments.fails:
        sys.exit(3)
    names = ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_CPU_OMP_THREADS_BIND")
    said = {
        **vars(arguments),
        "pid": os.getpid(),
        "cores": sorted(os.sched_getaffinity(0)),
        "environment": {name: os.environ.get(name) for name in names},
    }
    (Path(folder) / f"{time.time_ns()}.started").write_text(json.dumps(said))
    name = f"engine-{os.getpid()}"
    config = json.loads(arguments.kv_transfer_config)
    if config["kv_connector"] == "PdserveConnector":
        connected = ConnectedVLLM(name, block_size=arguments.block_size, start_s=time.time())
        connected.preempts = arguments.preempts
        connected.begin(config)
        uvicorn.run(connected.app(), uds=arguments.uds, log_level="error", lifespan="off")
        return
    server = RecordedVLLM(name, block_size=arguments.block_size, start_s=time.time())
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
