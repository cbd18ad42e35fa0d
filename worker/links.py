"""Opens the KV links that the gateways want a worker to have, and reports their states."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from contract.control import Failure, LinkState
from pdserve.core.errors import PdserveError
from pdserve.core.handoff import KVPeer, PeerLink
from pdserve.core.worker import WorkerEpoch

log = logging.getLogger(__name__)


class LinkKeeper:
    """The links of one incarnation of a worker. `want` sets the links that a gateway desires, `states` gives the actual
    ones. What any gateway desires is opened, because each may hand requests over.

    ``connect`` opens a link (no effect if it is open), and ``open_links`` gives the open links. ``changed`` is called
    when the outcome of an attempt to open a link differs from that of the previous attempt.
    """

    def __init__(
        self,
        connect: Callable[[KVPeer], Awaitable[None]],
        open_links: Callable[[], Iterable[PeerLink]],
        changed: Callable[[], None],
    ) -> None:
        self._connect = connect
        self._open_links = open_links
        self._changed = changed
        self._wanted: dict[str, tuple[KVPeer, ...]] = {}  # by registry, the latest answer last
        self._outcomes: dict[WorkerEpoch, Failure | None] = {}  # None: the link was opened
        self._connecting: dict[WorkerEpoch, asyncio.Task[None]] = {}

    def want(self, registry_address: str, peers: Sequence[KVPeer]) -> None:
        """Set the links that the gateway with this registry desires to ``peers``. Opens missing, failed, and broken
        ones, and forgets links to workers that no gateway names. If gateways name different incarnations of a worker,
        the latest answer counts."""
        self._wanted.pop(registry_address, None)
        self._wanted[registry_address] = tuple(peers)
        self._reconcile()

    def forget(self, registry_address: str) -> None:
        """Forget what a gateway that does not answer desires, unless no other one has answered."""
        if self._wanted.keys() - {registry_address} and self._wanted.pop(registry_address, ()):
            self._reconcile()

    def _reconcile(self) -> None:
        by_id = {peer.worker_id: peer for peers in self._wanted.values() for peer in peers}
        wanted = {(peer.worker_id, peer.epoch): peer for peer in by_id.values()}
        for key in self._outcomes.keys() - wanted.keys():
            del self._outcomes[key]
        for key in self._connecting.keys() - wanted.keys():
            self._connecting.pop(key).cancel()
        linked = {(state.worker_id, state.epoch) for state in self.states() if isinstance(state.outcome, PeerLink)}
        for key in sorted(wanted.keys() - linked - self._connecting.keys()):
            self._connecting[key] = asyncio.create_task(self._open(key, wanted[key]))

    def states(self) -> list[LinkState]:
        """The states of the desired links, without those that are being opened for the first time or after a break."""
        links = {link.worker_id: link for link in self._open_links()}
        return [
            LinkState(worker_id, epoch, failure or links[worker_id])
            for (worker_id, epoch), failure in sorted(self._outcomes.items(), key=lambda each: each[0])
            if failure is not None or worker_id in links
        ]

    async def aclose(self) -> None:
        """Stop opening links. Open links stay open."""
        tasks = list(self._connecting.values())
        self._connecting.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _open(self, key: WorkerEpoch, peer: KVPeer) -> None:
        failure: Failure | None = None
        try:
            await self._connect(peer)
        except Exception as error:
            if not isinstance(error, PdserveError):
                log.exception("unexpected error while a KV link is opened")
            failure = Failure.of(error)
        if self._connecting.get(key) is not asyncio.current_task():
            return  # the link is no longer wanted
        del self._connecting[key]
        is_new = key not in self._outcomes or (self._outcomes[key] is None) != (failure is None)
        self._outcomes[key] = failure
        if is_new:
            self._changed()
