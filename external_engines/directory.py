"""Registers the servers that a configuration names as workers, as long as they answer, and looks at their load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx2

from checkpoints.source import ModelSource
from external_engines.adapter import Adapter, Description, KVCounters
from external_engines.vllm import VLLM
from external_engines.worker import EngineWorker, HandOffs
from pdserve.core.clock import Clock
from pdserve.core.errors import LayoutMismatch, PdserveError
from pdserve.core.handoff import KVEndpoint, PeerLink
from pdserve.core.kv_layout import FP8, KVLayout
from pdserve.core.worker import Links, Role, WorkerInfo, WorkerLoad
from router.registry import WorkerRegistry

log = logging.getLogger(__name__)

ADAPTERS: tuple[Adapter, ...] = (VLLM(),)
"""The kinds of engines that are known."""

ANSWER_TIMEOUT_S = 5.0
"""Limit: the answer of a server that says how it is. Then: it is asked again, and lost without an answer in
`router.heartbeat_timeout_s`."""


@dataclass(slots=True, eq=False)
class _Server:
    """A server at ``url``: what it says of itself, and its worker, once it has answered."""

    worker_id: str
    role: Role
    url: str
    http: httpx2.AsyncClient
    adapter: Adapter | None = None
    description: Description | None = None
    worker: EngineWorker | None = None
    load: WorkerLoad = field(default_factory=WorkerLoad)
    problem: str = ""
    computed_itself: str = ""
    source_at_start: KVCounters = field(default_factory=KVCounters)


class EngineDirectory:
    """The servers at ``urls``, which serve the model ``source`` in ``dtype`` (auto: the checkpoint's). They are asked
    every ``pause_s`` seconds. Prefill servers are linked to those decode servers that can fetch their KV."""

    def __init__(
        self,
        registry: WorkerRegistry,
        urls: Mapping[Role, Sequence[str]],
        source: ModelSource,
        dtype: str,
        pause_s: float,
        clock: Clock,
    ) -> None:
        self._registry = registry
        self._source = source
        self._dtype = source.shape.dtype if dtype == "auto" else dtype
        self._pause_s = pause_s
        self._clock = clock
        self._hand_offs: HandOffs = {}
        self._servers = [
            _Server(f"{role}-{number}", role, url, client_of(url))
            for role in Role
            for number, url in enumerate(urls.get(role, ()))
        ]
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def expected(self) -> dict[str, Role]:
        """The role of each server, by worker id."""
        return {server.worker_id: server.role for server in self._servers}

    @property
    def notes(self) -> list[str]:
        """What operators have to know about the servers: those that cannot be used, and decode servers that computed
        prompts whose KV they should have fetched."""
        notes = [f"{server.worker_id}: {server.problem}" for server in self._servers if server.problem]
        return notes + [server.computed_itself for server in self._servers if server.computed_itself]

    def start(self) -> None:
        """Ask all servers from now on."""
        self._tasks = [asyncio.create_task(self._watch(server)) for server in self._servers]

    async def close(self) -> None:
        """Ask no more, and close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self._servers:
            if server.worker is not None:
                await server.worker.aclose()
            await server.http.aclose()

    async def _watch(self, server: _Server) -> None:
        while True:
            problem = ""
            try:
                await self._look(server)
            except httpx2.HTTPError as error:
                problem = f"does not answer ({str(error) or type(error).__name__})"
            except PdserveError as error:
                problem = str(error)
            except Exception as error:
                log.exception("unexpected error while looking at %s", server.url)
                problem = f"{type(error).__name__}: {error}"
            if problem != server.problem:
                server.problem = problem
                log.warning("%s at %s: %s", server.worker_id, server.url, problem or "answers again")
            await asyncio.sleep(self._pause_s)

    async def _look(self, server: _Server) -> None:
        """Ask a server how it is. Registers it if it is new, has restarted, or was lost."""
        if server.adapter is None or server.description is None:
            server.adapter, server.description = await describe(server.http)
        handed_off = _handed_off_tokens(server)
        load, source, life = await server.adapter.load(server.http, server.description.num_blocks)
        if life != server.description.life:  # it has restarted, perhaps with other options
            server.adapter, server.description = await describe(server.http)
            return
        server.load = load
        if handed_off is not None and handed_off == _handed_off_tokens(server):  # nothing ran meanwhile
            self._compare(server, source, handed_off)
        if not self._beat(server):
            await self._register(server, source)
            for prefill in self._servers:  # which may have a link to it now
                self._beat(prefill)

    def _compare(self, server: _Server, now: KVCounters, handed_off: int) -> None:
        """Note whether a decode server has computed prompts whose KV it should have fetched."""
        since = now.since(server.source_at_start)
        missing = handed_off - since.received - since.cached
        note = ""
        if missing > 0 and since.computed > 0:
            note = (
                f"{server.worker_id} has computed {missing} of {handed_off} prompt tokens whose KV it should have "
                "fetched; see docs/vllm.md"
            )
        if note and note != server.computed_itself:
            log.warning("%s", note)
        server.computed_itself = note

    def _beat(self, server: _Server) -> bool:
        """Give the registry the server's last load and its links. False if it is not registered as it is now."""
        worker, description = server.worker, server.description
        if worker is None or description is None or worker.info.epoch != description.life:
            return False
        return self._registry.heartbeat(server.worker_id, server.load, worker.info, self._links(server))

    async def _register(self, server: _Server, source: KVCounters) -> None:
        adapter, description = server.adapter, server.description
        assert adapter is not None
        assert description is not None
        before, info = server.worker, self._info(server, adapter, description)
        worker = EngineWorker(info, description.model, adapter, server.http, self._hand_offs, self._clock)
        server.source_at_start, server.computed_itself = source, ""
        server.worker = worker
        self._registry.add(worker, server.load, self._links(server))
        log.info("%s at %s is %s %s", server.worker_id, server.url, description.kind, description.version)
        if before is not None:
            await before.aclose()

    def _links(self, server: _Server) -> Links:
        """The links of a prefill server, as what it says of itself allows them."""
        mine, adapter = server.description, server.adapter
        if server.role is not Role.PREFILL or mine is None or adapter is None:
            return {}
        links: dict[tuple[str, str], PeerLink | PdserveError] = {}
        for other in self._servers:
            if other.role is not Role.DECODE or other.worker is None or other.description is None:
                continue
            if difference := mine.difference(other.description):
                links[other.worker.info.worker_epoch] = LayoutMismatch(
                    f"{server.worker_id} and {other.worker_id} cannot hand KV over: {difference}"
                )
            else:
                reason = f"{mine.kind} fetches KV by itself"
                links[other.worker.info.worker_epoch] = PeerLink(other.worker_id, adapter.transport, reason, 0.0)
        return links

    def _info(self, server: _Server, adapter: Adapter, description: Description) -> WorkerInfo:
        shape, host = self._source.shape, urlsplit(server.url).hostname or ""
        layout = KVLayout.uniform(
            model_hash="",
            dtype=FP8 if description.kv_dtype.startswith("fp8") else self._dtype,
            block_size=description.block_size,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
        )
        return WorkerInfo(
            worker_id=server.worker_id,
            role=server.role,
            epoch=description.life,
            control_address=server.url,
            kv_endpoints=(KVEndpoint(adapter.transport, host),),
            node=host,
            device=description.kind,
            pid=0,
            engine_pid=0,
            layout=layout,
            dtype=self._dtype,
            num_blocks=description.num_blocks,
            max_model_len=description.max_model_len,
            max_num_batched_tokens=0,
            vocab_size=shape.vocab_size,
            cuda_visible_devices="",
            cores="",
            version=description.version,
            engine_restarts=0,
            ready=True,
            life=description.life,
            eos_token_ids=shape.eos_token_ids,
            proves_transfers=False,
        )


def _handed_off_tokens(server: _Server) -> int | None:
    """Prompt tokens of the hand-offs that a server has received; None while it has requests of this gateway."""
    worker = server.worker
    return worker.handed_off_tokens if worker is not None and worker.is_idle else None


async def describe(http: httpx2.AsyncClient) -> tuple[Adapter, Description]:
    """What a server says of itself, and how it is spoken to. httpx2.HTTPError if it does not answer, PdserveError if
    its engine is not known here."""
    for adapter in ADAPTERS:
        if (description := await adapter.describe(http)) is not None:
            return adapter, description
    known = ", ".join(adapter.kind for adapter in ADAPTERS)
    raise PdserveError(f"it is no engine that is known here ({known})")


def client_of(url: str) -> httpx2.AsyncClient:
    """Calls a server, without the proxies of the environment."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx2.AsyncClient(base_url=url, timeout=ANSWER_TIMEOUT_S, limits=limits, trust_env=False)
