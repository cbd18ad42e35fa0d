"""How a worker starts an SGLang server. Written after the sources of SGLang 0.5.23."""

from __future__ import annotations

import json
import secrets

from checkpoints.source import ModelSource
from external_engines.launch import Launch, Place, environment, folder_of, free_port, given
from external_engines.sglang import SGLang
from pdserve.core.address import join_address
from pdserve.core.config import EngineConfig
from pdserve.core.worker import Role
from worker.spec import WorkerSpec

_KV_DTYPES = {"auto": None, "fp8": "fp8_e4m3"}


def launch(spec: WorkerSpec, source: ModelSource, place: Place) -> Launch:
    """See `external_engines.launch.Launcher`. SGLang listens on no Unix socket. So that other users cannot call it, it
    asks for a key, which it gets by a file that they cannot read."""
    folder, config = folder_of(spec, source), spec.config
    engine, cluster = config.engine, config.cluster
    # It listens for decode, at another port, where it listens for requests.
    host = place.host if spec.role is Role.PREFILL else "127.0.0.1"
    port = free_port(host)
    key = secrets.token_hex(16)
    secret = place.folder / "sglang.yaml"
    secret.write_text(json.dumps({"api-key": key}), encoding="utf-8")
    options: dict[str, object] = {
        "--model-path": folder,
        "--config": secret,
        "--host": host,
        "--port": port,
        "--served-model-name": config.model.name or folder.name,
        "--dtype": config.model.dtype,
        "--enable-metrics": True,
        "--device": "cpu" if spec.device == "cpu" else None,
        "--page-size": engine.block_size,
        "--context-length": engine.max_model_len,
        "--chunked-prefill-size": engine.max_num_batched_tokens,
        "--max-running-requests": None if engine.max_num_seqs == EngineConfig().max_num_seqs else engine.max_num_seqs,
        "--kv-cache-dtype": _KV_DTYPES[engine.kv_dtype],
        "--disable-radix-cache": None if engine.prefix_caching else True,
    }
    if cluster.num_prefill and cluster.num_decode:
        options["--disaggregation-mode"] = spec.role
        options["--disaggregation-bootstrap-port"] = place.kv_port if spec.role is Role.PREFILL else None
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": ",".join(map(str, spec.cores))} if spec.cores else {}
    return Launch(
        [config.worker.program, "serve", *given(options), *config.worker.arguments],
        environment(spec, cores),
        SGLang(),
        f"http://{join_address(host, port)}",
        key=key,
    )
