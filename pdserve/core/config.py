"""The configuration file as types. Each field is documented here and nowhere else; `pdserve config` prints them.

Unknown keys and invalid values raise `ConfigError` with the dotted key, the problem, and the allowed values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from pdserve.core.address import DEFAULT_PORT
from pdserve.core.errors import ConfigError

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
File = Annotated[Path, AfterValidator(Path.absolute)]
"""A path, absolute because gateway and workers have other working folders than the one who starts them."""

DEFAULT_HTTP_PORT = 8000

PlacementPolicy = Literal["pack", "spread", "strict_spread"]
"""See `ClusterConfig.placement`."""

CPU_TOKEN_BUDGET = 512
_GPU_BUDGETS = {"prefill": 8192, "decode": 2048}

KVFailurePolicy = Literal["retry", "recompute", "fail"]
"""See `TransferConfig.on_kv_failure`."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, protected_namespaces=())


class ModelConfig(_Section):
    """What is served."""

    path: str = Field("tiny", description="'tiny', 'dummy:135m', 'dummy:8b', 'dummy:PATH/config.json' or a folder")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="auto: the checkpoint's own type if the devices of all workers compute it natively, else the "
        "fastest type that they do (for bfloat16: float16 on GPUs before Ampere, float32 on CPUs without bfloat16 "
        "instructions); an explicit type is used everywhere, with a warning where it is emulated",
    )
    name: str | None = Field(None, description="the name shown to clients; default: the folder's")
    chat_template: Path | None = Field(
        None, description="a Jinja template for chats, instead of the one in the model's folder"
    )


class ClusterConfig(_Section):
    """The workers and where they run."""

    prefill: Annotated[int, Field(ge=0, le=1024)] = Field(1, description="prefill workers")
    decode: Annotated[int, Field(ge=0, le=1024)] = Field(1, description="decode workers")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where Ray sees GPUs, else cpu")
    cores_per_worker: Positive = Field(1, description="cores of a CPU device slot, and threads of its engine")
    oversubscribe: bool = Field(False, description="allow more workers than device slots, which then share slots")
    address: str = Field("local", description="'local' starts a Ray of its own; 'auto' or host:port joins one")
    placement: PlacementPolicy = Field(
        "pack",
        description="pack: as few nodes as possible, with pairs of prefill and decode on one node; spread: each role "
        "on as many nodes as possible, prefill and decode on different nodes if possible; strict_spread: a node for "
        "each worker, or an error",
    )
    worker_resources: dict[str, float] = Field(
        default_factory=dict, description="Ray resources of each worker, instead of those of its device slot"
    )
    prefill_resources: dict[str, float] = Field(
        default_factory=dict,
        description="further Ray resources of each prefill worker, such as {prefill: 1}, which restrict it to nodes "
        "that have them",
    )
    decode_resources: dict[str, float] = Field(
        default_factory=dict, description="the same for decode workers, such as {decode: 1}"
    )
    nodes: Positive | None = Field(
        None, description="nodes that a joined Ray must have before workers are placed; up waits for them"
    )
    autoscale: bool = Field(
        False, description="ask Ray for more nodes if the workers do not fit onto the present ones, instead of failing"
    )
    port_base: Annotated[int, Field(ge=1024, le=65_000)] | None = Field(
        None,
        description="first port of gateway and workers: the registry's port, followed by four ports per worker; "
        "default: 20000 on a Ray that is joined, free ports on a Ray of its own",
    )
    start_timeout_s: Seconds = Field(180.0, description="time limit of the start-up")
    tls_cert: File | None = Field(
        None,
        description="certificate for connections inside the service (mutual TLS), a file on each host, in PEM: for the "
        "name pdserve-worker, followed by those between it and its CA; with tls_key and tls_ca, or none of them",
    )
    tls_key: File | None = Field(None, description="its private key, in PEM, without a passphrase")
    tls_ca: File | None = Field(None, description="the CA of these certificates, used for nothing else; in PEM")


class EngineConfig(_Section):
    """Memory and scheduling of an engine."""

    block_size: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="tokens of a KV block; default 64 (few large blocks transfer faster than many small ones)"
    )
    num_blocks: Positive | None = Field(None, description="KV blocks of the pool; default: what kv_memory_mb holds")
    kv_memory_mb: Positive | None = Field(
        None,
        description="memory of the KV pool in MiB; default 512 on a CPU; on a GPU what weights and the "
        "largest step leave of its memory",
    )
    max_num_batched_tokens: Positive | None = Field(
        None,
        description="token budget of one step; longer prompts are chunked; default 512 on a CPU, and on a GPU 8192 for "
        "prefill and 2048 for decode workers",
    )
    max_num_seqs: Positive = Field(64, description="requests that may run in one step")
    chunk_tokens: int | Literal["off"] | None = Field(
        None,
        description="most tokens of one prompt that a step computes; default: the budget. off: prompts are never "
        "split, and one that exceeds the budget gets a step of its own",
    )
    batching: Literal["continuous", "static"] = Field(
        "continuous",
        description="continuous: requests join the running batch as soon as there is room; static: a batch is "
        "admitted when nothing is running, and no request joins until all of it has ended",
    )
    prefix_caching: bool = Field(
        True,
        description="keep KV blocks of past prompts and reuse them for prompts with the same beginning (within one "
        "salt)",
    )
    hang_timeout_s: Seconds = Field(
        6.0, description="an engine that neither answers nor computes for this long is killed and restarted"
    )
    max_model_len: Positive | None = Field(None, description="longest prompt plus output; default: the model's context")
    cuda_graphs: bool = Field(
        True, description="on a GPU, record decode steps as CUDA graphs at start-up: slower start, faster decode"
    )

    def token_budget(self, device: str, role: str) -> int:
        """``max_num_batched_tokens``, or its default for a ``prefill`` or ``decode`` worker on ``device`` (``cpu``,
        ``cuda``, ``cuda:0`` ...). A few hundred tokens saturate a CPU, thousands a GPU. A decode worker's budget is
        smaller, because its decodes wait while a step computes prompts."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return _GPU_BUDGETS[role] if device.startswith("cuda") else CPU_TOKEN_BUDGET

    @field_validator("chunk_tokens", mode="before")
    @classmethod
    def _read_chunk_tokens(cls, value: object) -> object:
        if value is False:
            return "off"  # YAML reads it as a boolean
        number = int(value) if isinstance(value, str) and value.isdecimal() else value
        if value in (None, "off") or (isinstance(number, int) and number is not True and number >= 1):
            return number
        raise PydanticCustomError("chunk_tokens", "Input should be off or a whole number of at least 1")


class TransferConfig(_Section):
    """KV transfer between workers."""

    transport: Literal["auto", "shm", "cuda_ipc", "tcp", "grpc_stream", "torch_dist", "nixl"] = Field(
        "auto",
        description="auto: for each pair the best transport that both ends share: shm on one host, cuda_ipc on one "
        "GPU, torch_dist (NCCL) between GPUs, else tcp; nixl is for RDMA and needs pip install nixl",
    )
    overlap: Literal["none", "chunk", "layer"] = Field(
        "layer",
        description="when blocks are sent. layer: each group of layers while the next one is computed; chunk: each "
        "chunk of the prompt while the next one is computed; none: all at the end",
    )
    layer_groups: Annotated[int, Field(ge=2, le=256)] = Field(
        8, description="layer groups per chunk for overlap: layer (at most one per layer)"
    )
    checksum: bool = Field(
        True,
        description="xxh3-64 checksum of every message, verified before its blocks count as received; nixl always "
        "uses checksums",
    )
    message_bytes: Annotated[int, Field(ge=4096, le=64 * 2**20)] = Field(
        4 * 2**20, description="target size of one message; blocks are coalesced up to it"
    )
    max_inflight_bytes: Annotated[int, Field(ge=4096)] = Field(
        16 * 2**20, description="most unacknowledged bytes to one worker"
    )
    on_kv_failure: KVFailurePolicy = Field(
        "retry",
        description="what to do if a request's KV transfer fails. retry: another hand-off, if possible from the same "
        "prefill worker, which sends its blocks again without computing them; recompute: one worker computes the "
        "prompt and the output so far and continues; fail: an error at once",
    )
    connect_timeout_s: Seconds = Field(10.0, description="time limit of a handshake with a peer")
    lease_s: Seconds = Field(30.0, description="how long blocks are held for a peer that does not respond")
    interface: str | None = Field(
        None,
        description="interface for KV on every host: a device (eth1), a network (10.1.0.0/16), or an address or name; "
        "default: the address by which Ray knows the host",
    )
    shape_gbps: Annotated[float, Field(gt=0, le=10_000)] | None = Field(
        None,
        description="for experiments: the rate of each KV link in each direction, in 10^9 bits per second, bounded in "
        "user space (tcp, grpc_stream, and torch_dist on CPUs; auto then means tcp); default: not bounded",
    )
    shape_round_trip_ms: Annotated[float, Field(ge=0, le=10_000)] = Field(
        0.0, description="for experiments: a round trip added to each KV link in user space, half in each direction"
    )


class RouterConfig(_Section):
    """Routing of requests to workers."""

    policy: Literal["round_robin", "least_outstanding_tokens"] = Field(
        "least_outstanding_tokens", description="how a worker is chosen among the ready ones"
    )
    first_token: Literal["prefill", "decode"] = Field(
        "prefill",
        description="when the client gets token 1 of a disaggregated request. prefill: as soon as it is sampled; "
        "decode: once the KV has arrived and decode can go on, as in services that discard prefill's token",
    )
    prefill_backlog_tokens: Positive = Field(
        1024, description="a prefill worker is free while fewer prompt tokens than this wait on it, or none"
    )
    max_queue: Positive = Field(
        1024, description="most waiting requests; further ones are refused (RESOURCE_EXHAUSTED)"
    )
    max_attempts: Positive = Field(
        5,
        description="most attempts in a row without a new token when workers or transfers fail; after a failed "
        "transfer the last attempt runs on one worker",
    )
    retry_pause_s: Annotated[float, Field(ge=0, le=60)] = Field(
        0.05,
        description="pause before the first retry of a request, with jitter; it doubles with each retry, up to 2 s",
    )
    retry_share: Annotated[float, Field(ge=0)] = Field(
        0.5,
        description="most retries as a share of the requests of the last 4 s, plus 10; further retries wait",
    )
    patience_s: Annotated[float, Field(ge=0, le=86_400)] = Field(
        30.0,
        description="in a service that was ready, how long a request waits for a worker to become ready again, within "
        "its deadline; then it is refused (UNAVAILABLE)",
    )
    max_unread_tokens: Annotated[int, Field(ge=2)] = Field(
        1024,
        description="most tokens of a request that its client has not read; beyond that the request leaves its "
        "workers, and continues once the client has read them",
    )
    heartbeat_s: Seconds = Field(0.5, description="how often workers report")
    heartbeat_timeout_s: Seconds = Field(3.0, description="a worker without a heartbeat for this long counts as dead")
    forget_s: Seconds = Field(60.0, description="how long a dead worker is shown")


class GatewayConfig(_Section):
    """The public servers."""

    host: str = Field(
        "127.0.0.1",
        description="address that the gRPC and HTTP servers listen on; 0.0.0.0 (or :: with IPv6): all of this host. "
        "One that others can reach needs TLS, and tokens or client certificates, unless insecure",
    )
    port: Annotated[int, Field(ge=0, le=65_535)] = Field(
        DEFAULT_PORT, description="port of the gRPC server; 0 picks one"
    )
    http_port: Annotated[int, Field(ge=0, le=65_535)] | None = Field(
        None,
        description="port of the OpenAI-compatible HTTP server; 0 turns it off; default: 8000 for a service on the "
        "default port, else 0, so that several services of one host do not meet",
    )
    tls_cert: File | None = Field(
        None, description="certificate of the gRPC and HTTP servers, in PEM, followed by those between it and its CA"
    )
    tls_key: File | None = Field(None, description="its private key, in PEM, without a passphrase")
    tls_client_ca: File | None = Field(
        None, description="only clients with a certificate of one of these CAs may connect (mTLS); in PEM"
    )
    tokens: File | None = Field(
        None,
        description="YAML file with the tokens of clients and their limits (see docs/security.md and `pdserve token "
        "new`), read again when it changes; default: calls need no token",
    )
    insecure: bool = Field(
        False, description="allow a host that others can reach without TLS or tokens, for networks that are trusted"
    )
    default_timeout_s: Seconds = Field(600.0, description="deadline of requests that bring none")
    otlp_endpoint: str | None = Field(
        None,
        description="OpenTelemetry collector (OTLP over gRPC) that gets a trace of every request, such as "
        "http://localhost:4317; needs the extra otel",
    )

    @property
    def served_http_port(self) -> int:
        """The port of the HTTP server; 0 without one."""
        if self.http_port is not None:
            return self.http_port
        return DEFAULT_HTTP_PORT if self.port == DEFAULT_PORT else 0


class LoggingConfig(_Section):
    """The logs of gateway, workers and engines. They contain no prompt and no output."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="the least level that is logged")
    format: Literal["text", "json"] = Field(
        "text", description="text: a line to read; json: an object per line, for a log collector"
    )


class PdserveConfig(_Section):
    """The whole file."""

    model: ModelConfig = Field(default_factory=ModelConfig, description="what is served")
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="which workers run, and where")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="memory and scheduling of each engine")
    transfer: TransferConfig = Field(default_factory=TransferConfig, description="how KV blocks travel")
    router: RouterConfig = Field(default_factory=RouterConfig, description="which workers a request gets")
    gateway: GatewayConfig = Field(default_factory=GatewayConfig, description="the front door")
    logging: LoggingConfig = Field(default_factory=LoggingConfig, description="what processes write to their logs")

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> PdserveConfig:
        """Check a mapping (a parsed YAML file); `ConfigError` names the first wrong key, dotted."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None

    @classmethod
    def load(cls, path: str | Path | None, overrides: Mapping[str, Any] | None = None) -> PdserveConfig:
        """The YAML file at ``path`` (None: defaults) with dotted ``overrides`` (None values are ignored) on top."""
        data: dict[str, Any] = {}
        if path is not None:
            try:
                loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
            except OSError as error:
                raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
            except (yaml.YAMLError, UnicodeDecodeError) as error:
                raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
            if loaded is not None and not isinstance(loaded, dict):
                raise ConfigError(f"{path}: the file must be a mapping of sections, not a {type(loaded).__name__}")
            # A section whose keys are all commented out reads as null and means its defaults.
            data = {key: {} if value is None else value for key, value in (loaded or {}).items()}
        for dotted, value in (overrides or {}).items():
            if value is None:
                continue
            *sections, key = dotted.split(".")
            place = data
            for depth, section in enumerate(sections, 1):
                if not isinstance(place.setdefault(section, {}), dict):
                    raise ConfigError(f"{'.'.join(sections[:depth])}: must be a mapping, not {place[section]!r}")
                place = place[section]
            place[key] = value
        return cls.parse(data)


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"] if part != "[key]") or "(the file)"
    if first["type"] == "extra_forbidden":
        return f"{key}: unknown key; known here: {', '.join(_known_keys(first['loc'][:-1]))}"
    return f"{key}: {first['msg']} (got {first['input']!r})"


def _known_keys(loc: tuple[int | str, ...]) -> list[str]:
    section: type[BaseModel] = PdserveConfig
    for part in loc:
        annotation = section.model_fields[str(part)].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            section = annotation
    return sorted(section.model_fields)
