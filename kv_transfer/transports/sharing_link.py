"""A link between two processes that have opened each other's memory: the receiver copies out of the sender's."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.fetch import Fetch, Payload, settled
from kv_transfer.memory import DeviceMemory, HostMemory, Memory
from kv_transfer.transports.socket_link import MAX_REFERENCES, SocketLink
from kv_transfer.transports.socket_stream import SocketStream
from pdserve.core.kv_layout import Region


class SharingLink(SocketLink):
    """``peer_memory`` is the peer's memory as this process has opened it; it is closed with the link. ``on_device``:
    both memories are on a GPU."""

    def __init__(
        self, transport: str, memory: Memory, stream: SocketStream, peer_memory: Memory, *, on_device: bool = False
    ) -> None:
        super().__init__(transport, memory, stream, peer_size=peer_memory.size)
        self.on_device = on_device
        self._peer_memory = peer_memory

    async def aclose(self) -> None:
        """Close the socket, and let go of the peer's memory."""
        try:
            await super().aclose()
        finally:
            self._peer_memory.close()

    def _refer(self, payload: Payload) -> Sequence[Region]:
        if len(payload.regions) <= MAX_REFERENCES and payload.regions:
            return payload.regions
        if self.on_device and payload.size:
            raise ValueError(f"a payload outside the pool ({self.transport})")
        return ()

    async def _fetch_references(self, references: Sequence[Region], fetch: Fetch) -> None:
        if isinstance(self._peer_memory, DeviceMemory):
            with fetch.writing():
                fetch.write_on_device(self._peer_memory.view, references)
                await settled(self.memory)
        else:
            self._copy(self._peer_memory, references, fetch)

    @staticmethod
    def _copy(memory: HostMemory, references: Sequence[Region], fetch: Fetch) -> None:
        """Without a view in the frame of a coroutine: an error's traceback would keep it, and that the memory."""
        for reference in references:
            fetch.write(memory.view(reference))
