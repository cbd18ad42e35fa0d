"""The service's status, typed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from pdserve.client.generation import from_message
from pdserve.core.handoff import PeerLink
from pdserve.pb import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class ServiceWorker:
    """One worker, as reported ``heartbeat_age_s`` ago. Its prefix cache since the engine's start: prompt tokens looked
    up, prompt tokens found, and blocks cached now. ``kv_refused`` counts refused KV messages since the engine's start,
    by reason. ``failing``: why it gets no requests, or only one as a probe (empty: it does). ``engine_restarts`` are
    those of its engine, ``worker_restarts`` those of its worker process since the gateway began. ``busy_s`` are the
    seconds that all ``steps`` of the engine took. ``engine``: what one that is not pdserve's is, and can do."""

    worker_id: str
    role: str
    state: str
    node: str
    device: str
    address: str
    pid: int
    engine_pid: int
    num_blocks: int
    free_blocks: int
    running: int
    waiting: int
    outstanding_tokens: int
    transports: tuple[str, ...]
    heartbeat_age_s: float
    engine_restarts: int
    preemptions: int
    links: tuple[PeerLink, ...]
    cuda_visible_devices: str
    cores: str
    kv_refused: dict[str, int]
    prompt_tokens_looked_up: int
    prompt_tokens_cached: int
    cached_blocks: int
    kv_addresses: dict[str, str]
    failing: str
    worker_restarts: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    steps: int = 0
    busy_s: float = 0.0
    engine: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_proto(cls, worker: pb.WorkerStatus) -> ServiceWorker:
        """The worker that the message describes."""
        return from_message(cls, worker, links=tuple([from_message(PeerLink, link) for link in worker.links]))


@dataclass(frozen=True, slots=True)
class ServiceGateway:
    """One gateway: where clients reach it, its state (``ready``, ``not ready`` or ``lost``), and its requests."""

    target: str
    state: str
    pid: int
    queued: int
    running: int
    uptime_s: float


@dataclass(frozen=True, slots=True)
class ServiceScaling:
    """The controller of roles and workers: ``controller`` is ``roles`` or ``workers``. Its ``last_action`` (empty: none
    yet), the ``reason`` for it, and how long ago it was. ``actions`` counts them by kind, such as ``flip prefill``.
    ``verdict``: what it saw lately, and why it did nothing."""

    controller: str
    last_action: str
    reason: str
    last_action_age_s: float
    actions: dict[str, int]
    verdict: str = ""


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """The service: its model, its workers, and the requests that wait in the router (``queued``) or run (``running``).

    ``dtype`` is the type of the computation, ``checkpoint_dtype`` that of the stored weights. ``notes`` are what users
    have to know: a missing tokenizer, a converted dtype, cores shared with another service.
    ``costs`` say in words what prefill, hand-off and decode take here, learned from completed requests. Prompts with at
    most ``break_even_tokens`` uncached tokens are cheaper where they decode (None: not known yet; the context length:
    all are). ``gateways`` are told to operators only; then ``queued`` and ``running`` are those of all gateways.
    ``scaling`` is None without a controller. ``settings`` are the keys of the configuration that latencies depend on,
    such as ``engine.chunk_tokens``."""

    ready: bool
    version: str
    model: str
    model_hash: str
    dtype: str
    vocab_size: int
    context_length: int
    block_size: int
    kv_bytes_per_token: int
    queued: int
    running: int
    pid: int
    uptime_s: float
    workers: tuple[ServiceWorker, ...]
    checkpoint_dtype: str = ""
    notes: tuple[str, ...] = ()
    costs: tuple[str, ...] = ()
    break_even_tokens: float | None = None
    gateways: tuple[ServiceGateway, ...] = ()
    scaling: ServiceScaling | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, running, or waiting on a worker."""
        return not (self.queued or self.running or any(w.running or w.waiting for w in self.workers))

    @property
    def used_blocks(self) -> int:
        """KV blocks in use on all workers."""
        return sum(worker.num_blocks - worker.free_blocks for worker in self.workers)

    @property
    def pool_tokens(self) -> int:
        """Tokens of KV that the smallest worker holds, which limits a single request. 0 without workers."""
        known = [worker for worker in self.workers if worker.num_blocks]
        present = [worker for worker in known if worker.state != "lost"] or known
        return min((worker.num_blocks for worker in present), default=0) * self.block_size

    def to_dict(self) -> dict[str, Any]:
        """Plain values: the output of ``pdserve status --json``."""
        return asdict(self)

    @classmethod
    def from_proto(cls, status: pb.GetStatusResponse) -> ServiceStatus:
        """The status that the message describes."""
        return from_message(
            cls,
            status,
            workers=tuple([ServiceWorker.from_proto(worker) for worker in status.workers]),
            break_even_tokens=status.break_even_tokens if status.HasField("break_even_tokens") else None,
            gateways=tuple([from_message(ServiceGateway, each) for each in status.gateways]),
            scaling=from_message(ServiceScaling, status.scaling) if status.HasField("scaling") else None,
            settings={key: json.loads(value) for key, value in status.settings.items()},
        )
