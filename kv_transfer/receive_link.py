"""One sender as the receiver sees it: the link to it."""

from __future__ import annotations

import asyncio
import contextlib

from kv_transfer.base import KVLink
from kv_transfer.link_rate import Run, SenderClock
from kv_transfer.pool import Pool
from kv_transfer.protocol import Header, Probe, Probed, Rated, Reason, Refusal, encode
from pdserve.core.clock import Clock
from pdserve.core.errors import TransferError
from pdserve.core.kv_layout import MAX_PROBE_BYTES


class ReceiveLink:
    """The link to one sender. ``checksum`` is the setting `transfer.checksum`."""

    def __init__(self, link: KVLink, pool: Pool, checksum: bool, clock: Clock) -> None:
        self.link, self._clock = link, clock
        self.sender_id = ""
        """The worker id of the sender, from its `Hello` on."""
        self.checksums = link.hashes(checksum)
        """Whether payloads are hashed."""
        self.confirms = link.reads_late and not self.checksums
        """Whether a transfer counts only once its sender has confirmed it (`protocol.Confirm`)."""
        self.ceiling_gbs = 0.0
        """The link's ceiling (`kv_transfer.link_rate`), in 10^9 bytes per second; 0: nothing was measured."""
        self.sender_clock = SenderClock()
        self._told = 0
        self._pool, self._train = pool, Run()
        self._answered_s: float | None = None  # a probe without a payload, which may be answered by another one
        self._saying = asyncio.Lock()

    async def say(self, header: Header) -> None:
        """Send a header to the sender. PeerLost or TransferTimeout as from `KVLink.send`."""
        async with self._saying:
            await self.link.send(encode(header))

    async def tell(self, header: Header) -> None:
        """Send a header, and ignore a lost link, which fails its transfers anyway."""
        with contextlib.suppress(TransferError):
            await self.say(header)

    async def probe(self, header: Probe, size: int, received_s: float) -> None:
        """Fetch the payload of a `Probe`. Answer the last one of a train with the train's time."""
        if size > MAX_PROBE_BYTES:
            raise Refusal(Reason.MALFORMED, f"a probe of {size} bytes")
        if self._answered_s is not None:
            self.sender_clock.answered(received_s - self._answered_s)
            self._answered_s = None
        if size:
            fetch = self.link.fetch(self._pool.next_probe(size))
            await fetch
            await fetch.commit()
            self._train.add(size, self.sender_clock.arrival_s(header.sent_us), self._clock.now())
        if header.left:
            return
        train, self._train = self._train, Run()
        if train.tells:
            self.raise_ceiling(train.gbs)
        if not train.num_bytes:
            self._answered_s = self._clock.now()
        self._told = self._ceiling
        await self.say(Probed(round(train.busy_s * 1e6), self._told))

    def raise_ceiling(self, gbs: float) -> None:
        """Note the rate of a run, which raises the ceiling if it is higher."""
        self.ceiling_gbs = max(self.ceiling_gbs, gbs)

    async def tell_ceiling(self) -> None:
        """Tell the sender the ceiling if it has changed."""
        if self._told != self._ceiling:
            self._told = self._ceiling
            await self.say(Rated(self._told))

    @property
    def _ceiling(self) -> int:
        return round(self.ceiling_gbs * 1e9)
