"""How a worker starts a vLLM server: its command line and its environment, from the service's configuration."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path

from checkpoints.source import ModelSource
from engine.spec import DEFAULT_CPU_KV_BYTES
from external_engines.launch import Launch, Place, environment, folder_of, given
from external_engines.vllm import VLLM
from external_engines.vllm_mooncake import MooncakeVLLM
from pdserve.core.config import EngineConfig
from pdserve.core.kv_layout import MAX_PROBE_AREA_BYTES
from worker.spec import WorkerSpec

_CONNECTOR = "pdserve_connector"


def launch(spec: WorkerSpec, source: ModelSource, place: Place) -> Launch:
    """See `external_engines.launch.Launcher`. Decode finds the KV of its connector at the place's port."""
    variables = {"VLLM_NIXL_SIDE_CHANNEL_HOST": place.host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(place.kv_port)}
    adapter = VLLM(place.kv_address)
    if spec.config.worker.connector == "mooncake":
        variables = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(place.kv_port)}
        adapter = MooncakeVLLM(place.kv_address)
    socket = place.folder / "api"
    return Launch(command(spec, source, socket), environment_of(spec, variables), adapter, socket=str(socket))


def launch_connected(spec: WorkerSpec, source: ModelSource, folder: Path, connector: Path) -> Launch:
    """A server with pdserve's connector, whose module is in ``folder``, and which finds its worker at the socket
    ``connector``."""
    socket = folder / "api"
    paths = filter(None, [str(folder), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": os.pathsep.join(paths), "PDSERVE_CONNECTOR": str(connector)}
    return Launch(command(spec, source, socket), environment_of(spec, variables), VLLM(), socket=str(socket))


def command(spec: WorkerSpec, source: ModelSource, socket: Path) -> list[str]:
    """The command that serves the model on the Unix ``socket``. The arguments of ``worker.arguments`` come last, so
    that they prevail."""
    folder, config, engine = folder_of(spec, source), spec.config, spec.config.engine
    on_cpu = spec.device == "cpu"
    hand_off: dict[str, object] = {"kv_role": "kv_both", "kv_load_failure_policy": "fail"}
    if config.worker.connector == "pdserve":
        groups = config.transfer.layer_groups if config.transfer.overlap == "layer" else 0
        hand_off |= {"kv_connector": "PdserveConnector", "kv_connector_module_path": _CONNECTOR}
        extra = {"layer_groups": groups}
        if not on_cpu:
            extra["probe_bytes"] = MAX_PROBE_AREA_BYTES
        hand_off["kv_connector_extra_config"] = extra
    elif config.worker.connector == "mooncake":
        hand_off["kv_connector"] = "MooncakeConnector"
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
        "--no-enable-prefix-caching": None if engine.prefix_caching else True,
        "--enable-prompt-tokens-details": True,  # prefill tells how many tokens of a prompt were cached
    }
    return [config.worker.program, "serve", str(folder), *given(options), *config.worker.arguments]


def environment_of(spec: WorkerSpec, variables: Mapping[str, str]) -> Mapping[str, str]:
    """The environment of the server, with ``variables``."""
    cores = {"VLLM_CPU_OMP_THREADS_BIND": _cores_of_ranks(spec)} if spec.cores else {}
    return environment(spec, {**cores, **variables})


def _cores_of_ranks(spec: WorkerSpec) -> str:
    """The worker's cores, divided among the ranks of ``--tensor-parallel-size``; each rank has all if there are too
    few."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-tp", "--tensor-parallel-size", type=int, default=1)
    try:
        ranks = parser.parse_known_args(list(spec.config.worker.arguments))[0].tensor_parallel_size
    except argparse.ArgumentError:  # vLLM says what is wrong
        ranks = 1
    each = len(spec.cores) // max(1, ranks)
    parts = [spec.cores[rank * each : (rank + 1) * each] or spec.cores for rank in range(ranks)]
    return "|".join(",".join(map(str, part)) for part in parts)
