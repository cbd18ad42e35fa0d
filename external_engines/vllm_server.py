"""How a worker starts a vLLM server: its command line and its environment, from the service's configuration."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from checkpoints.source import ModelSource
from engine.spec import DEFAULT_CPU_KV_BYTES
from pdserve.core.config import EngineConfig
from pdserve.core.errors import LaunchError, ModelError
from worker.spec import WorkerSpec

_CONNECTOR = "pdserve_connector"


def check(spec: WorkerSpec, source: ModelSource) -> None:
    """Raise ModelError for a model without files, LaunchError if there is no vLLM here."""
    if source.folder is None:
        raise ModelError(f"model.path: {spec.config.model.path} has no folder that vLLM could load")
    if shutil.which(program := spec.config.worker.command) is None:
        raise LaunchError(
            f"worker.command: there is no program {program!r} on {spec.node}; install vLLM there, or name its path"
        )


def command(spec: WorkerSpec, source: ModelSource, socket: Path) -> list[str]:
    """The command that serves the model on the Unix ``socket``. The arguments of ``worker.arguments`` come last, so
    that they prevail."""
    config, engine, folder = spec.config, spec.config.engine, source.folder
    assert folder is not None, "it was checked"
    on_cpu = spec.device == "cpu"
    hand_off: dict[str, object] = {"kv_role": "kv_both", "kv_load_failure_policy": "fail"}
    if config.worker.connector == "pdserve":
        groups = config.transfer.layer_groups if config.transfer.overlap == "layer" else 0
        hand_off |= {"kv_connector": "PdserveConnector", "kv_connector_module_path": _CONNECTOR}
        hand_off["kv_connector_extra_config"] = {"layer_groups": groups}
    else:
        hand_off["kv_connector"] = "NixlConnector"
        if on_cpu:
            hand_off["kv_buffer_device"] = "cpu"
    kv_bytes = None if engine.kv_memory_mb is None else engine.kv_memory_mb * 2**20
    if on_cpu and kv_bytes is None and engine.num_blocks is None:
        kv_bytes = DEFAULT_CPU_KV_BYTES
    options: dict[str, object] = {
        "--uds": socket,
        "--served-model-name": config.model.name or folder.name,
        "--dtype": config.model.dtype,
        "--kv-transfer-config": json.dumps(hand_off),
        "--block-size": engine.block_size,
        "--num-gpu-blocks-override": engine.num_blocks,
        "--kv-cache-memory-bytes": kv_bytes,
        "--max-num-batched-tokens": engine.max_num_batched_tokens,
        "--max-num-seqs": None if engine.max_num_seqs == EngineConfig().max_num_seqs else engine.max_num_seqs,
        "--max-model-len": engine.max_model_len,
        "--kv-cache-dtype": None if engine.kv_dtype == "auto" else engine.kv_dtype,
    }
    given = [str(part) for option, value in options.items() if value is not None for part in (option, value)]
    if not engine.prefix_caching:
        given.append("--no-enable-prefix-caching")
    return [config.worker.command, "serve", str(folder), *given, *config.worker.arguments]


def nixl_variables(host: str, port: int) -> Mapping[str, str]:
    """Variables of a server whose KV others fetch at ``host`` and ``port``."""
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}


def connector_variables(folder: Path, socket: Path) -> Mapping[str, str]:
    """Variables of a server with pdserve's connector, whose module is in ``folder``, and which finds its worker at
    ``socket``."""
    paths = filter(None, [str(folder), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": os.pathsep.join(paths), "PDSERVE_CONNECTOR": str(socket)}


def environment(spec: WorkerSpec, variables: Mapping[str, str]) -> Mapping[str, str]:
    """The environment of the server: this process's, with ``variables``. This process's prevail where they say how
    threads wait."""
    cores = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, spec.cores))} if spec.cores else {}
    # Else the threads of an idle server keep its cores busy.
    waiting = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"} if spec.device == "cpu" else {}
    return {**waiting, **os.environ, **cores, **variables}
