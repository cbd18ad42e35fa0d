"""One sender as the receiver sees it: the link to it."""

from __future__ import annotations

import asyncio
import contextlib
import time

from kv_transfer.base import KVLink
from kv_transfer.handshake import ProbeArea, is_telling
from kv_transfer.pool import Pool
from kv_transfer.protocol import Header, Probed, Reason, Refusal, encode
from pdserve.core.errors import TransferError
from pdserve.core.kv_layout import MAX_PROBE_BYTES


class ReceiveLink:
    """The link to one sender. ``checksum`` is the setting `transfer.checksum`."""

    def __init__(self, link: KVLink, pool: Pool, checksum: bool) -> None:
        self.link = link
        self.sender_id = ""
        """The worker id of the sender, from its `Hello` on."""
        self.checksums = link.hashes(checksum)
        """Whether payloads are hashed."""
        self.confirms = link.reads_late and not self.checksums
        """Whether a transfer counts only once its sender has confirmed it (`protocol.Confirm`)."""
        self.ceiling_gbs = 0.0
        """The best rate of the link's probes, in 10^9 bytes per second."""
        self._probe_area = ProbeArea(pool)
        self._saying = asyncio.Lock()

    async def say(self, header: Header) -> None:
        """Send a header to the sender. PeerLost or TransferTimeout as from `KVLink.send`."""
        async with self._saying:
            await self.link.send(encode(header))

    async def tell(self, header: Header) -> None:
        """Send a header, and ignore a lost link, which fails its transfers anyway."""
        with contextlib.suppress(TransferError):
            await self.say(header)

    async def probe(self, size: int) -> None:
        """Fetch the payload of a `Probe`, and answer with the time that took."""
        if size > MAX_PROBE_BYTES:
            raise Refusal(Reason.MALFORMED, f"a probe of {size} bytes")
        started_s = time.perf_counter()
        fetch = self.link.fetch(self._probe_area.next(size))
        await fetch
        await fetch.commit()
        took_s = time.perf_counter() - started_s + self.link.arrival_s
        if is_telling(size, took_s):
            self.ceiling_gbs = max(self.ceiling_gbs, size / took_s / 1e9)
        await self.say(Probed(round(took_s * 1e6)))
