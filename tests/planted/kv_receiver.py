"""A KV receiver that is late to count a transfer's last block as verified."""

from __future__ import annotations

import asyncio
import contextlib

from kv_transfer.receive_transfer import ReceiveLink, ReceiveTransfer
from kv_transfer.receiver import KVReceiver
from pdserve.core.errors import TransferError


class DelayedReceiver(KVReceiver):
    """``delay_s`` passes between the verification of a transfer's last block and its end. Other messages of the link
    are served meanwhile."""

    delay_s = 0.0

    async def _finish(self, link: ReceiveLink, transfer: ReceiveTransfer, seq: int) -> None:
        if transfer.complete and self.delay_s:
            self._tasks.spawn(self._finish_later(link, transfer, seq))
        else:
            await super()._finish(link, transfer, seq)

    async def _finish_later(self, link: ReceiveLink, transfer: ReceiveTransfer, seq: int) -> None:
        await asyncio.sleep(self.delay_s)
        if not transfer.is_over:
            with contextlib.suppress(TransferError):
                await super()._finish(link, transfer, seq)
