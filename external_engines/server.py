"""One server with an engine that is not pdserve's: what it says of itself and of its load, and its worker."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import urlsplit

import httpx2

from checkpoints.source import ModelSource
from external_engines.adapter import Adapter, Description, KVCounters, difference
from external_engines.sglang import SGLang
from external_engines.vllm import VLLM
from external_engines.vllm_mooncake import MooncakeVLLM
from external_engines.worker import EngineWorker
from pdserve.core.clock import Clock
from pdserve.core.errors import LayoutMismatch, PdserveError
from pdserve.core.handoff import KVEndpoint, KVPeer, PeerLink
from pdserve.core.kv_layout import FP8, KVLayout
from pdserve.core.worker import Role, WorkerInfo, WorkerLoad

log = logging.getLogger(__name__)

NOT_FETCHED = "prompt tokens whose KV it should have fetched"
"""In the note of a decode server that has computed prompts itself."""

Adapters = Sequence[Adapter]
"""The kinds of engines that a server may be of."""


def adapters_of(connector: str) -> Adapters:
    """Those that are known, where vLLM has this ``connector`` (see `pdserve.core.config.WorkerConfig.connector`)."""
    return (MooncakeVLLM() if connector == "mooncake" else VLLM(), SGLang())


ANSWER_TIMEOUT_S = 5.0
"""Limit: the answer of a server that says how it is. Then: it is asked again, and lost without an answer in
`router.heartbeat_timeout_s`."""


class Server:
    """A server, which serves the model ``source`` in ``dtype`` (auto: the checkpoint's), as the worker of this name and
    role. ``http`` reaches it. ``load`` is its last load, and ``worker`` that of its present life once `begin` was
    called."""

    def __init__(
        self,
        worker_id: str,
        role: Role,
        http: httpx2.AsyncClient,
        source: ModelSource,
        dtype: str,
        clock: Clock,
        adapters: Adapters,
    ) -> None:
        self._adapters = adapters
        self.worker_id, self.role, self.http = worker_id, role, http
        self.load = WorkerLoad()
        self.worker: EngineWorker | None = None
        self._source = source
        self._dtype = source.shape.dtype if dtype == "auto" else dtype
        self._clock = clock
        self._adapter: Adapter | None = None
        self._description: Description | None = None
        self._counters = self._counters_at_start = KVCounters()

    async def look(self) -> bool:
        """Ask it how it is. False if it has restarted, perhaps with other options: look again. httpx2.HTTPError if it
        does not answer, PdserveError if it is no server that can be used."""
        adapter, description = self._adapter, self._description
        if adapter is None or description is None:
            adapter, description = await self._describe()
        handed_off = self._handed_off_tokens()
        load, counters, life = await adapter.load(self.http, description.num_blocks)
        if life != description.life:
            await self._describe()
            return False
        note = self.load.note
        if handed_off is not None and handed_off == self._handed_off_tokens():  # nothing ran meanwhile
            note = self._computed_itself(counters, handed_off)
            if note and note != self.load.note:
                log.warning("%s", note)
        self.load, self._counters = replace(load, note=note), counters
        return True

    async def _describe(self) -> tuple[Adapter, Description]:
        self._adapter, self._description = adapter, description = await describe(self.http, self.role, self._adapters)
        return adapter, description

    def begin(self) -> EngineWorker:
        """A new worker, for the life that the last `look` has found."""
        assert self._adapter is not None, "look has returned True"
        assert self._description is not None, "look has returned True"
        self._counters_at_start = self._counters
        self.load = replace(self.load, note="")
        model = self._description.model
        self.worker = EngineWorker(self._info(), model, self._adapter, self.http, self._clock)
        return self.worker

    @property
    def is_begun(self) -> bool:
        """Whether `worker` is that of the life that the last `look` has found."""
        worker, description = self.worker, self._description
        return worker is not None and description is not None and worker.info.epoch == description.life

    def link_to(self, peer: KVPeer) -> PeerLink | LayoutMismatch:
        """Whether ``peer`` can fetch KV from it. `begin` was called."""
        assert self._adapter is not None, "begin was called"
        assert self.worker is not None, "begin was called"
        if differs := difference(dict(self.worker.info.engine), dict(peer.engine)):
            return LayoutMismatch(f"{self.worker_id} and {peer.worker_id} cannot hand KV over: {differs}")
        assert self._description is not None, "begin was called"
        if self._description.hands_off is False:
            return LayoutMismatch(f"{self.worker_id} hands no KV to {peer.worker_id}: it was not started for that")
        reason = f"{self._adapter.kind} moves KV by itself"
        return PeerLink(peer.worker_id, self._adapter.transport, reason, 0.0)

    def _handed_off_tokens(self) -> int | None:
        """Prompt tokens of the hand-offs that it has received; None while it has requests."""
        worker = self.worker
        return worker.handed_off_tokens if worker is not None and worker.is_idle else None

    def _computed_itself(self, now: KVCounters, handed_off: int) -> str:
        """A note if it has computed prompts whose KV it should have fetched."""
        since = now.since(self._counters_at_start)
        missing = handed_off - since.received - since.cached
        if missing <= 0 or since.computed <= 0:
            return ""
        return f"{self.worker_id} has computed {missing} of {handed_off} {NOT_FETCHED}; see docs/vllm.md"

    def _info(self) -> WorkerInfo:
        adapter, description, shape = self._adapter, self._description, self._source.shape
        assert adapter is not None
        assert description is not None
        host = urlsplit(str(self.http.base_url)).hostname or ""
        address = description.kv_address or host
        layout = KVLayout.uniform(
            model_hash="",
            dtype=FP8 if description.kv_dtype.startswith("fp8") else self._dtype,
            block_size=description.block_size,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
        )
        return WorkerInfo(
            worker_id=self.worker_id,
            role=self.role,
            epoch=description.life,
            control_address=str(self.http.base_url),
            kv_endpoints=() if description.hands_off is False else (KVEndpoint(adapter.transport, address),),
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
            serves_alone=description.role is None,
            engine=description.in_common,
            declares=tuple(adapter.abilities.shown.items()),
        )


async def describe(http: httpx2.AsyncClient, role: Role, adapters: Adapters) -> tuple[Adapter, Description]:
    """What the server of this role says of itself, and how it is spoken to. httpx2.HTTPError if it does not answer,
    PdserveError if its engine is not known here, or was started for the other role."""
    for adapter in adapters:
        if (description := await adapter.describe(http)) is not None:
            if description.role not in (None, role):
                raise PdserveError(f"it was started as a {description.role} server, and is named as a {role} server")
            return adapter, description
    known = ", ".join(adapter.kind for adapter in adapters)
    raise PdserveError(f"it is no engine that is known here ({known})")


def client_of(url: str, socket: str | None = None, key: str | None = None) -> httpx2.AsyncClient:
    """Calls the server at ``url``, or the one that listens on the Unix ``socket``, with the ``key`` that it asks for,
    without the proxies of the environment."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
    transport = httpx2.AsyncHTTPTransport(uds=socket, limits=limits, trust_env=False)
    headers = None if key is None else {"Authorization": f"Bearer {key}"}
    return httpx2.AsyncClient(
        base_url=url, timeout=ANSWER_TIMEOUT_S, transport=transport, trust_env=False, headers=headers
    )
