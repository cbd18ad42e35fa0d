"""The configuration file as types. Each field is documented here and nowhere else; `pdserve config` prints them.

Unknown keys and invalid values raise `ConfigError` with the dotted key, the problem, and the allowed values."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pdserve.core import plugins
from pdserve.core.address import DEFAULT_PORT
from pdserve.core.errors import ConfigError
from pdserve.core.worker import Role

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
File = Annotated[Path, AfterValidator(Path.absolute)]
"""A path, absolute because gateway and workers have other working folders than the one who starts them."""

Off = BeforeValidator(lambda value: "off" if value is False else value)
"""Reads what YAML reads as a boolean."""

HostName = Annotated[str, Field(pattern=r"^(\*|[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*)$")]
"""The name of a host without a port, or `ANY_HOST`."""
ANY_HOST = "*"

DEFAULT_HTTP_PORT = 8000
"""Port: HTTP, for clients: `gateway.http_port`."""

PlacementPolicy = Literal["pack", "spread", "strict_spread"]
"""See `ClusterConfig.placement`."""

CPU_TOKEN_BUDGET = 512
_GPU_BUDGETS = {"prefill": 8192, "decode": 2048}

ROUTING_POLICIES = (
    "round_robin",
    "random",
    "least_tokens",
    "power_of_two",
    "prefix_affinity",
    "kv_aware",
    "session",
    "slo",
    "nearest_link",
)
"""pdserve's own. `router.policies` has a function for each."""

NAMES: Mapping[str, Callable[[], tuple[str, ...]]] = {
    "transfer.transport": partial(
        plugins.names, plugins.TRANSPORTS, ("auto", "shm", "cuda_ipc", "tcp", "grpc_stream", "torch_dist", "nixl")
    ),
    "router.policy": partial(plugins.names, plugins.POLICIES, ROUTING_POLICIES),
}
"""The values of keys to which plug-ins add names."""


def _known(key: str, name: Any) -> Any:
    """``name``, a value of ``key`` in `NAMES`."""
    known = NAMES[key]()
    if name not in known:
        renamed = "; least_outstanding_tokens is now least_tokens" if name == "least_outstanding_tokens" else ""
        raise ValueError(f"Input should be one of {', '.join(known)}{renamed}")
    return name


Transport = Annotated[str, AfterValidator(partial(_known, "transfer.transport"))]
"""See `TransferConfig.transport`."""

CodecName = Literal["none", "lossless", "int8"]
"""See `TransferConfig.codec`."""

PrefixFetching = Literal["auto", "always", "off"]
"""See `RouterConfig.prefix_fetch`."""

KVFailurePolicy = Literal["retry", "recompute", "fail"]
"""See `TransferConfig.on_kv_failure`."""


def _server_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError("Input should be the URL of a server without a path, such as http://host:8100")
    return url.rstrip("/")


Url = Annotated[str, AfterValidator(_server_url)]
"""The URL of a server."""


_PLACES = ("engine.offload_folder", "transfer.interface")
"""Folders and interfaces of the hosts."""


_OF_SGLANG = frozenset(
    {f"transfer.{key}" for key in ("transport", "on_kv_failure", "interface")}
    | {f"engine.{key}" for key in ("block_size", "max_num_batched_tokens", "max_num_seqs", "max_model_len")}
    | {f"engine.{key}" for key in ("kv_dtype", "prefix_caching")}
)
_OF_ENGINES = {"sglang": _OF_SGLANG, "vllm": _OF_SGLANG | {"engine.num_blocks", "engine.kv_memory_mb"}}
"""The keys of these sections that also count for workers with other engines."""
OTHER_ENGINES = frozenset(_OF_ENGINES)
"""Which a worker may have, instead of pdserve's own."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelConfig(_Section):
    """What is served."""

    path: str = "tiny"
    """a folder, 'org/name' or 'org/name@revision' on the Hugging Face Hub, 'tiny', 'dummy:135m', 'dummy:8b' or
    'dummy:PATH/config.json'"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: the checkpoint's own type if the devices of all workers compute it natively, else the fastest type that
    they do (for bfloat16: float16 on GPUs before Ampere, float32 on CPUs without bfloat16 instructions); an explicit
    type is used everywhere, with a warning where it is emulated"""
    name: str | None = None
    """the name shown to clients; default: the folder's, or org/name"""
    chat_template: Path | None = None
    """a Jinja template for chats, instead of the one in the model's folder"""


class ClusterConfig(_Section):
    """The workers and where they run."""

    prefill: int = Field(1, ge=0, le=1024)
    """prefill workers"""
    decode: int = Field(1, ge=0, le=1024)
    """decode workers"""
    prefill_urls: Annotated[tuple[Url, ...], Field(max_length=1024)] = ()
    """servers of another engine that prefill, such as http://host:8100, instead of workers that are started; see
    docs/vllm.md"""
    decode_urls: Annotated[tuple[Url, ...], Field(max_length=1024)] = ()
    """servers of another engine that decode"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where Ray sees GPUs, else cpu"""
    cores_per_worker: Positive = 1
    """cores of a CPU device slot, and threads of its engine"""
    oversubscribe: bool = False
    """allow more workers than device slots, which then share slots"""
    address: str = "local"
    """'local' starts a Ray of its own; 'auto' or host:port joins one"""
    placement: PlacementPolicy = "pack"
    """pack: as few nodes as possible, with pairs of prefill and decode on one node; spread: each role on as many nodes
    as possible, prefill and decode on different nodes if possible; strict_spread: a node for each worker, or an
    error"""
    worker_resources: dict[str, float] = {}
    """Ray resources of each worker, instead of those of its device slot"""
    prefill_resources: dict[str, float] = {}
    """further Ray resources of each prefill worker, such as {prefill: 1}, which restrict it to nodes that have them"""
    decode_resources: dict[str, float] = {}
    """the same for decode workers, such as {decode: 1}"""
    nodes: Positive | None = None
    """nodes that a joined Ray must have before workers are placed; up waits for them"""
    autoscale: bool = False
    """ask Ray for more nodes if the workers do not fit onto the present ones, instead of failing"""
    port_base: int | None = Field(None, ge=1024, le=65_000)
    """first port of gateway and workers: the registry's port, followed by four ports per worker; default: 20000 on a
    Ray that is joined, free ports on a Ray of its own"""
    mps: Annotated[Literal["auto", "off"], Off] = "off"
    """on GPUs, CUDA's Multi-Process Service, with which transfers and steps run on a GPU at the same time. auto: a
    daemon per node if nvidia-cuda-mps-control is there, or the one that runs already; off: they take turns, unless a
    daemon runs already (docs/gpu.md)"""
    mps_transfer_threads: int = Field(25, ge=1, le=100)
    """with MPS, the percentage of a GPU's multiprocessors that transfers may use"""
    mps_memory_mb: Positive | None = None
    """with MPS, the most GPU memory that each of the two processes of a worker may allocate, in MiB; KV pools are sized
    by it; default: no limit"""
    start_timeout_s: Seconds | None = None
    """time limit of the start-up; default: 180 s on CPUs, 900 s on GPUs, where kernels may have to be compiled"""
    tls_cert: File | None = None
    """certificate for connections inside the service (mutual TLS), a file on each host, in PEM: for the name
    pdserve-worker, followed by those between it and its CA; with tls_key and tls_ca, or none of them"""
    tls_key: File | None = None
    """its private key, in PEM, without a passphrase"""
    tls_ca: File | None = None
    """the CA of these certificates, used for nothing else; in PEM"""

    @model_validator(mode="before")
    @classmethod
    def _servers_instead_of_workers(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not (data.get("prefill_urls") or data.get("decode_urls")):
            return data
        if data.get("prefill") or data.get("decode"):
            raise ValueError("prefill_urls and decode_urls name all workers; leave out prefill and decode")
        return {**data, "prefill": 0, "decode": 0}

    @property
    def urls(self) -> Mapping[Role, tuple[str, ...]]:
        """The workers that are servers of another engine, which pdserve does not start."""
        return {Role.PREFILL: self.prefill_urls, Role.DECODE: self.decode_urls}

    @property
    def servers(self) -> tuple[str, ...]:
        """`urls` of both roles."""
        return self.prefill_urls + self.decode_urls

    @property
    def num_prefill(self) -> int:
        """Prefill workers, whatever their engine."""
        return self.prefill + len(self.prefill_urls)

    @property
    def num_decode(self) -> int:
        """Decode workers, whatever their engine."""
        return self.decode + len(self.decode_urls)

    def start_limit_s(self, device: str) -> float:
        """`start_timeout_s`, or its default for ``device`` (``auto``: the longest)."""
        return self.start_timeout_s or (180.0 if device == "cpu" else 900.0)


class WorkerConfig(_Section):
    """What computes on each worker."""

    engine: Literal["pdserve", "vllm", "sglang"] = "pdserve"
    """pdserve: its own engine; vllm, sglang: each worker starts a server of that engine, and gives it the requests
    (docs/vllm.md)"""
    connector: Literal["nixl", "mooncake", "pdserve"] = "nixl"
    """what moves the KV of vLLM servers. nixl, mooncake: vLLM's NixlConnector or MooncakeConnector; pdserve: these
    workers, as with their own engine (docs/vllm.md)"""
    command: str | None = None
    """the program that starts such a server, on each host; default: vllm or sglang"""
    arguments: tuple[str, ...] = ()
    """further arguments of that program, such as --tensor-parallel-size and 2"""

    @property
    def program(self) -> str:
        """The program that starts a server of another engine."""
        return self.command or self.engine


class RoleNumbers(_Section):
    """A number for each role."""

    prefill: int = Field(1, ge=1, le=64)
    decode: int = Field(1, ge=1, le=64)


class EngineConfig(_Section):
    """Memory and scheduling of an engine."""

    block_size: int | None = Field(None, ge=1, le=1024)
    """tokens of a KV block; default 64 (few large blocks transfer faster than many small ones)"""
    num_blocks: Positive | None = None
    """KV blocks of the pool; default: what kv_memory_mb holds"""
    kv_memory_mb: Positive | None = None
    """memory of the KV pool in MiB; default 512 on a CPU; on a GPU what weights and the largest step leave of its
    memory"""
    max_num_batched_tokens: Positive | None = None
    """token budget of one step; longer prompts are chunked; default 512 on a CPU, and on a GPU 8192 for prefill and
    2048 for decode workers"""
    max_num_seqs: Positive = 64
    """requests that may run in one step"""
    chunk_tokens: int | Literal["off"] | None = None
    """most tokens of one prompt that a step computes; default: the budget. off: prompts are never split, and one that
    exceeds the budget gets a step of its own"""
    batching: Literal["continuous", "static"] = "continuous"
    """continuous: requests join the running batch as soon as there is room; static: a batch is admitted when nothing is
    running, and no request joins until all of it has ended"""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """type of the KV cache. auto: that of the model; fp8: half the memory and half the bytes on the wire of bfloat16,
    and less exact logits; GPUs need compute capability 8.9"""
    prefix_caching: bool = True
    """keep KV blocks of past prompts and reuse them for prompts with the same beginning (within one salt)"""
    offload_folder: File | None = None
    """a folder for KV blocks that the pool has no room for any more, on each host; a worker uses a subfolder with its
    name, finds its blocks there again after a restart, and reads what a prompt begins with"""
    offload_disk_mb: Positive = 4096
    """most MiB of each worker in offload_folder"""
    offload_host_mb: int = Field(0, ge=0)
    """memory of the host in MiB for such blocks of a GPU, before they go to offload_folder"""
    hang_timeout_s: Seconds = 6.0
    """an engine that neither answers nor computes for this long is killed and restarted"""
    max_model_len: Positive | None = None
    """longest prompt plus output; default: the model's context"""
    cuda_graphs: bool = True
    """on a GPU, record decode steps as CUDA graphs at start-up: slower start, faster decode"""
    prefill_attention: Literal["auto", "flashinfer", "triton"] = "auto"
    """on a GPU, what computes the attention of prompts; auto: FlashInfer where it is installed (extra cuda) and
    supports model and GPU, else Triton kernels; status tells which"""
    batch_invariant: bool = False
    """compute a request in the same order whatever else is in its steps, so that its tokens do not depend on the batch,
    also after a retry; slower"""
    tensor_parallel: int | RoleNumbers = 1
    """device slots of a worker, over which its model is split (on CPUs; docs/engine.md): one number for both roles, or
    {prefill: N, decode: M}"""
    speculation: Annotated[str, Field(min_length=1), Off] = "off"
    """guess the next tokens of a request, and verify them in one step, as far as that pays. ngram: what followed the
    last three tokens the last time, in prompt or output; else a draft model with the same tokens, named as in
    model.path; off: never"""
    run_ahead: bool | None = None
    """prepare and launch the next step while the device computes the current one; default: on GPUs"""

    @model_validator(mode="after")
    def _invariant_kernels_are_our_own(self) -> Self:
        if self.batch_invariant and self.prefill_attention == "flashinfer":
            raise ValueError("batch_invariant needs the Triton kernels: set prefill_attention to auto or triton")
        return self

    @model_validator(mode="after")
    def _offload_needs_the_cache(self) -> Self:
        if (self.offload_folder or self.offload_host_mb) and not self.prefix_caching:
            raise ValueError("offload_folder and offload_host_mb need prefix_caching: blocks are found by its digests")
        return self

    @property
    def draft_model(self) -> str:
        """The draft model that ``speculation`` names; empty if it names none."""
        return "" if self.speculation in ("off", "ngram") else self.speculation

    @property
    def slots(self) -> Mapping[Role, int]:
        """The device slots of a worker, by the role that it starts with."""
        wanted = self.tensor_parallel
        if isinstance(wanted, RoleNumbers):
            return {Role.PREFILL: wanted.prefill, Role.DECODE: wanted.decode}
        return dict.fromkeys(Role, wanted)

    @field_validator("tensor_parallel", mode="before")
    @classmethod
    def _check_tensor_parallel(cls, value: object) -> object:
        """Check a number as one for both roles; pydantic's error for a union would name its parts."""
        if isinstance(value, Mapping):
            return RoleNumbers.model_validate(value)
        if not isinstance(value, RoleNumbers):
            RoleNumbers.model_validate({"prefill": value})
        return value

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        if max(self.slots.values()) > 1 and self.kv_dtype == "fp8":
            raise ValueError("tensor_parallel: not with kv_dtype: fp8, whose scales need all heads; use auto")
        return self

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
        raise ValueError("Input should be off or a whole number of at least 1")


class TransferConfig(_Section):
    """KV transfer between workers."""

    transport: Transport = "auto"
    """auto: for each pair the best transport that both ends share: shm on one host, cuda_ipc on one GPU, torch_dist
    (NCCL) between GPUs, else tcp; nixl is for RDMA and needs pip install nixl"""
    overlap: Literal["none", "chunk", "layer"] = "layer"
    """when blocks are sent. layer: each group of layers while the next one is computed; chunk: each chunk of the prompt
    while the next one is computed; none: all at the end"""
    layer_groups: int = Field(8, ge=2, le=256)
    """layer groups per chunk for overlap: layer (at most one per layer)"""
    checksum: bool | Literal["device"] = True
    """checksum of every message, verified before its blocks count as received: xxh3-64 of bytes in host memory, where
    nixl always uses one; device: between GPUs, too, by a hash that these compute"""
    codec: CodecName = "none"
    """how KV is coded on links over tcp, grpc_stream, and nixl between hosts' memory, for networks that are slower than
    the coding. lossless: bfloat16 in three quarters of the bytes, bit for bit; int8: numbers of a head as integers with
    one scale, in half the bytes, which changes answers a little"""
    message_bytes: int = Field(4 * 2**20, ge=4096, le=64 * 2**20)
    """target size of one message; blocks are coalesced up to it; between GPUs at least 32 MiB"""
    max_inflight_bytes: int = Field(16 * 2**20, ge=4096)
    """most unacknowledged bytes to one worker; between GPUs at least 128 MiB"""
    on_kv_failure: KVFailurePolicy = "retry"
    """what to do if a request's KV transfer fails. retry: another hand-off, if possible from the same prefill worker,
    which sends its blocks again without computing them; recompute: one worker computes the prompt and the output so far
    and continues; fail: an error at once"""
    connect_timeout_s: Seconds = 10.0
    """time limit of a handshake with a peer"""
    lease_s: Seconds = 30.0
    """how long blocks are held for a peer that does not respond"""
    interface: str | None = None
    """interface for KV on every host: a device (eth1), a network (10.1.0.0/16), or an address or name; default: the
    address by which Ray knows the host"""
    shape_gbps: float | None = Field(None, gt=0, le=10_000)
    """for experiments: the rate of each KV link in each direction, in 10^9 bits per second, bounded in user space (tcp,
    grpc_stream, and torch_dist on CPUs; auto then means tcp); default: not bounded"""
    shape_round_trip_ms: float = Field(0.0, ge=0, le=10_000)
    """for experiments: a round trip added to each KV link in user space, half in each direction"""


class RolePolicies(_Section):
    """How the workers of each role are chosen."""

    prefill: str = "kv_aware"
    decode: str = "kv_aware"


class SloConfig(_Section):
    """Objectives of a service, in milliseconds."""

    ttft_ms: float | None = Field(None, gt=0)
    """time to the first token"""
    itl_ms: float | None = Field(None, gt=0)
    """time between tokens"""


class RouterConfig(_Section):
    """Routing of requests to workers."""

    policy: str | RolePolicies = "kv_aware"
    """how a worker is chosen among the ready ones (docs/routing.md): one name for both roles, or {prefill: NAME,
    decode: NAME}; requests of mode colocated are placed by that of prefill"""
    prefix_fetch: Annotated[PrefixFetching, Off] = "auto"
    """KV of a prompt's beginning that another worker has cached. auto: it is fetched if, by the costs measured here,
    that is clearly quicker than to compute it; always: it is fetched, for experiments; off"""
    slo: SloConfig = Field(default_factory=SloConfig, validate_default=True)
    """objectives, which policy slo needs: ttft_ms for prefill, itl_ms for decode"""
    first_token: Literal["prefill", "decode"] = "prefill"
    """when the client gets token 1 of a disaggregated request. prefill: as soon as it is sampled; decode: once the KV
    has arrived and decode can go on, as in services that discard prefill's token"""
    prefill_backlog_tokens: Positive = 1024
    """a prefill worker is free while fewer prompt tokens than this wait on it, or none"""
    max_queue: Positive = 1024
    """most waiting requests; further ones are refused (RESOURCE_EXHAUSTED)"""
    max_queue_tokens: Positive = 4_194_304
    """most tokens of waiting requests, prompts and max_tokens together; further requests are refused
    (RESOURCE_EXHAUSTED). A prompt token takes about 40 bytes of the gateway's memory"""
    max_attempts: Positive = 5
    """most attempts in a row without a new token when workers or transfers fail; after a failed transfer the last
    attempt runs on one worker"""
    patience_s: float | None = Field(None, ge=0, le=86_400)
    """in a service that was ready, how long a request waits for a worker to become ready again; then it is refused
    (UNAVAILABLE). None: until its deadline"""
    max_unread_tokens: int = Field(1024, ge=2)
    """most tokens of a request that its client has not read; beyond that the request leaves its workers, and continues
    once the client has read them"""
    heartbeat_s: Seconds = 0.5
    """how often workers report"""
    heartbeat_timeout_s: Seconds = 3.0
    """a worker without a heartbeat for this long counts as dead"""
    forget_s: Seconds = 60.0
    """how long a dead worker is shown"""

    def policy_of(self, role: str) -> str:
        """``policy`` for ``prefill`` or ``decode``."""
        if isinstance(self.policy, RolePolicies):
            return self.policy.prefill if role == "prefill" else self.policy.decode
        return self.policy

    @field_validator("policy", mode="before")
    @classmethod
    def _check_policy(cls, value: object) -> object:
        """Refuse unknown names and roles with the allowed ones; pydantic's error for a union would name its parts."""
        if isinstance(value, RolePolicies):
            return value
        roles = RolePolicies.model_fields
        if isinstance(value, Mapping) and (unknown := [str(role) for role in value if role not in roles]):
            raise ValueError(f"{unknown[0]} is no role; give policies for prefill and decode")
        for name in value.values() if isinstance(value, Mapping) else [value]:
            _known("router.policy", name)
        return value

    @field_validator("slo")
    @classmethod
    def _check_slo(cls, value: SloConfig, info: ValidationInfo) -> SloConfig:
        policy = info.data.get("policy")
        roles = policy if isinstance(policy, RolePolicies) else RolePolicies(prefill=policy, decode=policy)
        for role, name in (("prefill", "ttft_ms"), ("decode", "itl_ms")):
            if policy is not None and getattr(roles, role) == "slo" and getattr(value, name) is None:
                raise ValueError(f"policy slo for {role} needs {name}, its objective")
        return value


class GatewayConfig(_Section):
    """The public servers."""

    host: str = "127.0.0.1"
    """address that the gRPC and HTTP servers listen on; 0.0.0.0 (or :: with IPv6): all of this host. One that others
    can reach needs TLS, and tokens or client certificates, unless insecure"""
    port: int = Field(DEFAULT_PORT, ge=0, le=65_535)
    """port of the gRPC server; 0 picks one"""
    replicas: int = Field(1, ge=1, le=64)
    """gateways, each a process of its own with the same workers; the others use the ports after port (and http_port)"""
    http_port: int | None = Field(None, ge=0, le=65_535)
    """port of the OpenAI-compatible HTTP server; 0 turns it off; default: 8000 for a service on the default port, else
    0, so that several services of one host do not meet"""
    tls_cert: File | None = None
    """certificate of the gRPC and HTTP servers, in PEM, followed by those between it and its CA"""
    tls_key: File | None = None
    """its private key, in PEM, without a passphrase"""
    tls_client_ca: File | None = None
    """only clients with a certificate of one of these CAs may connect (mTLS); in PEM"""
    tokens: File | None = None
    """YAML file with the tokens of clients and their limits (see docs/security.md and `pdserve token new`), read again
    when it changes; default: calls need no token"""
    insecure: bool = False
    """allow a host that others can reach without TLS or tokens, for networks that are trusted"""
    allowed_hosts: tuple[HostName, ...] = ()
    """names by which clients reach the HTTP server, besides its addresses, localhost, host and the name of its machine;
    '*' allows all. Checked without tokens and TLS, against web pages that use DNS rebinding"""
    report: File | None = None
    """report.html that the live page links for operators; default: that of the last run of bench or an experiment by
    this user on the gateway's host"""
    default_timeout_s: Seconds = 600.0
    """deadline of requests that bring none"""
    otlp_endpoint: str | None = None
    """OpenTelemetry collector (OTLP over gRPC) that gets a trace of every request, such as http://localhost:4317; needs
    the extra otel"""

    def replica(self, number: int) -> GatewayConfig:
        """The section as one of the ``replicas`` uses it."""
        http_port = self.served_http_port
        ports = {"port": self.port + number, "http_port": http_port + number if http_port else 0}
        return self.model_copy(update=ports)

    @property
    def served_http_port(self) -> int:
        """The port of the HTTP server; 0 without one."""
        if self.http_port is not None:
            return self.http_port
        return DEFAULT_HTTP_PORT if self.port == DEFAULT_PORT else 0


class ScalingConfig(_Section):
    """The controller that moves workers between the roles, toward objectives."""

    controller: Annotated[Literal["off", "roles", "workers"], Off] = "off"
    """roles: while one role misses its objective and the other has capacity to spare, a worker of the other takes its
    role; workers: also adds workers, for which Ray is asked, and removes them (docs/routing.md)"""
    profile: str | None = None
    """folder of a run of `pdserve experiment profile` with this model: workers move only if a simulation says that it
    helps, and as many at once as it takes (docs/routing.md)"""
    ttft_ms: float | None = Field(None, gt=0)
    """objective of the time to the first token; default: router.slo.ttft_ms"""
    itl_ms: float | None = Field(None, gt=0)
    """objective of the time between tokens; default: router.slo.itl_ms"""
    attainment: float = Field(0.9, gt=0, lt=1)
    """share of first tokens, and of gaps between tokens, that have to meet their objective"""
    interval_s: float = Field(2.0, ge=0.1, le=3600)
    """how often the gateways are asked"""
    hold_s: Seconds = 15.0
    """how long an objective has to be missed before a worker moves; after that none moves for twice as long, and none
    is removed before four times as long without need of it"""
    min_prefill: Positive = 1
    """fewest prefill workers"""
    min_decode: Positive = 1
    """fewest decode workers"""
    max_prefill: Positive | None = None
    """most prefill workers; default: not bounded"""
    max_decode: Positive | None = None
    """most decode workers; default: not bounded"""
    min_workers: Positive = 2
    """fewest workers in all"""
    max_workers: Positive | None = None
    """most workers in all; controller workers needs it"""
    drain_s: float = Field(30.0, ge=0, le=86_400)
    """how long a worker that is removed may finish its requests"""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        for least, most in (
            ("min_prefill", "max_prefill"),
            ("min_decode", "max_decode"),
            ("min_workers", "max_workers"),
        ):
            bound = getattr(self, most)
            if bound is not None and getattr(self, least) > bound:
                raise ValueError(f"{least} is more than {most}")
        if self.controller == "workers" and self.max_workers is None:
            raise ValueError("controller workers needs max_workers, a bound of what it may ask for")
        if self.max_workers is not None and self.min_prefill + self.min_decode > self.max_workers:
            raise ValueError("min_prefill and min_decode are together more than max_workers")
        if 3 * self.interval_s > self.hold_s:
            raise ValueError("interval_s is more than a third of hold_s")
        return self


class LoggingConfig(_Section):
    """The logs of gateway, workers and engines. They contain no prompt and no output."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """the least level that is logged"""
    format: Literal["text", "json"] = "text"
    """text: a line to read; json: an object per line, for a log collector"""


class PdserveConfig(_Section):
    """The whole file."""

    model: ModelConfig = ModelConfig()
    """what is served"""
    cluster: ClusterConfig = ClusterConfig()
    """which workers run, and where"""
    worker: WorkerConfig = WorkerConfig()
    """which engine computes"""
    engine: EngineConfig = EngineConfig()
    """memory and scheduling of each engine"""
    transfer: TransferConfig = TransferConfig()
    """how KV blocks travel"""
    router: RouterConfig = RouterConfig()
    """which workers a request gets"""
    gateway: GatewayConfig = GatewayConfig()
    """the front door"""
    scaling: ScalingConfig = ScalingConfig()
    """a controller of roles and workers, off by default"""
    logging: LoggingConfig = LoggingConfig()
    """what processes write to their logs"""

    @property
    def public_settings(self) -> dict[str, Any]:
        """What latencies depend on, by dotted key: the sections ``engine``, ``transfer`` and ``router``, without places
        on the hosts, which clients are not told."""
        sections = self.model_dump(mode="json", include={"engine", "transfer", "router"})
        settings = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
        return {key: value for key, value in settings.items() if key not in _PLACES}

    @property
    def has_own_engines(self) -> bool:
        """Whether pdserve's engine computes, and no other one."""
        return self.worker.engine == "pdserve" and not self.cluster.servers

    @property
    def moves_kv(self) -> bool:
        """Whether pdserve moves the KV, and no other engine."""
        return self.has_own_engines or self.worker.connector == "pdserve"

    @property
    def objectives(self) -> SloConfig:
        """The objectives of the service: those of ``scaling``, else of ``router.slo``."""
        own, slo = self.scaling, self.router.slo
        return SloConfig(ttft_ms=own.ttft_ms or slo.ttft_ms, itl_ms=own.itl_ms or slo.itl_ms)

    @model_validator(mode="after")
    def _check_other_engines(self) -> Self:
        if self.worker.engine == "pdserve":
            if self.worker.connector == "pdserve" or (self.worker.connector != "nixl" and not self.cluster.servers):
                raise ValueError("worker.connector: pdserve's own engine needs none; set worker.engine: vllm")
            return self
        if self.cluster.servers:
            raise ValueError("worker.engine: prefill_urls and decode_urls name servers that run; leave it out")
        name = self.worker.engine
        sections: dict[str, BaseModel] = {"engine": self.engine}
        if self.worker.connector != "nixl" and name != "vllm":
            raise ValueError(
                f"worker.connector: {self.worker.connector} is a connector of vLLM; {name} moves KV by itself"
            )
        if self.worker.connector != "pdserve":
            if self.transfer.transport not in ("auto", "nixl"):
                raise ValueError(
                    "transfer.transport: servers of other engines move KV by themselves; leave it out, or set "
                    "worker.connector: pdserve, which vLLM has"
                )
            sections["transfer"] = self.transfer
        if name == "sglang" and self.scaling.controller == "roles":
            raise ValueError("scaling.controller: SGLang servers keep their roles; set it to off, or to workers")
        for title, section in sections.items():
            for key, field in type(section).model_fields.items():
                if getattr(section, key) != field.default and f"{title}.{key}" not in _OF_ENGINES[name]:
                    raise ValueError(
                        f"{title}.{key}: not an option of workers with {name}; leave it out, or use worker.arguments"
                    )
        return self

    @model_validator(mode="after")
    def _check_scaling(self) -> Self:
        if self.scaling.controller == "off":
            return self
        for name in ("ttft_ms", "itl_ms"):
            if getattr(self.objectives, name) is None:
                raise ValueError(
                    f"scaling.controller {self.scaling.controller} needs {name}, an objective; set scaling.{name} or "
                    f"router.slo.{name}"
                )
        cluster = self.cluster
        if not (cluster.prefill and cluster.decode):
            raise ValueError("scaling.controller needs workers of both roles")
        if self.scaling.controller == "roles" and cluster.prefill_resources != cluster.decode_resources:
            raise ValueError(
                "scaling.controller: roles needs equal cluster.prefill_resources and cluster.decode_resources, because "
                "workers keep their nodes",
            )
        return self

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
    what = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" and not first["loc"]:  # about several sections
        return what
    key = ".".join(str(part) for part in first["loc"] if part != "[key]") or "(the file)"
    if first["type"] == "extra_forbidden":
        return f"{key}: unknown key; known here: {', '.join(_known_keys(first['loc'][:-1]))}"
    return f"{key}: {what} (got {first['input']!r})"


def _known_keys(loc: tuple[int | str, ...]) -> list[str]:
    section: type[BaseModel] = PdserveConfig
    for part in loc:
        annotation = section.model_fields[str(part)].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            section = annotation
    return sorted(section.model_fields)


def descriptions(section: type[BaseModel]) -> dict[str, str]:
    """What the keys of ``section`` are for: their docstrings. They are read from the source when they are asked for,
    because pydantic's own way to do so takes 0.1 s of every start."""
    (definition,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for key, docstring in pairwise(definition.body):
        match key, docstring:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str() as text)):
                found[name] = " ".join(text.split())
    return found
