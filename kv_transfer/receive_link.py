"""One sender as the receiver sees it: the link to it, what comes over this link, and the answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

import xxhash

from kv_transfer.base import KVLink, Message
from kv_transfer.handshake import dismiss, greet, is_telling, parse
from kv_transfer.integrity import (
    Abort,
    Ack,
    Blocks,
    Header,
    Open,
    Probe,
    Probed,
    Reason,
    Refusal,
    Refused,
    encode,
    peer_error,
)
from kv_transfer.receive_transfer import ReceiveTransfer
from kv_transfer.sink import Sink
from kv_transfer.transports.strangers import INTRODUCTION_S
from pdserve.core.errors import PdserveError, PeerLost, TransferError, to_wire
from pdserve.core.kv_layout import MAX_PROBE_BYTES

if TYPE_CHECKING:
    from kv_transfer.receiver import KVReceiver

_log = logging.getLogger(__name__)


class ReceiveLink:
    """Serves ``link`` for ``receiver``, which keeps the hand-offs and decides on their ends."""

    def __init__(self, receiver: KVReceiver, link: KVLink) -> None:
        self._receiver, self._link = receiver, link
        self.checksums = link.hashes(receiver.checksums)
        self._answering = asyncio.Lock()
        self.ceiling_gbs = 0.0
        """What the link moved at best when its sender measured it."""

    async def serve(self) -> None:
        """Speak with the sender until the link ends, which fails its hand-offs."""
        receiver = self._receiver
        introduction_s = min(receiver.lease_s, INTRODUCTION_S)
        lost: TransferError = PeerLost("the KV link was closed here")
        try:
            async with asyncio.timeout(introduction_s):
                try:
                    hello = await greet(self._link, receiver.hello(checksums=self.checksums))
                except Refusal as refusal:
                    receiver.count(refusal.reason)
                    _log.warning("a KV link was refused: %s", refusal)
                    await dismiss(self._link, refusal)
                    return
            receiver.met(self, hello.worker_id)
            while True:
                await self._deal_with(await self._link.recv())
        except TimeoutError:
            _log.warning("a KV peer said nothing for %g s after connecting", introduction_s)
        except TransferError as error:
            # Without its traceback, whose frames would keep this link's memory until the next collection.
            lost = error.with_traceback(None)
        finally:
            receiver.lost(self, lost)
            await self._link.aclose()

    @property
    def transport(self) -> str:
        """How it sends."""
        return self._link.transport

    async def tell(self, header: Header) -> None:
        """Say something to the sender; PeerLost or TransferTimeout if it cannot be told."""
        async with self._answering:
            await self._link.send(encode(header))

    async def _deal_with(self, message: Message) -> None:
        """After this a message's blocks are in the pool and count, or only a hand-off's own blocks have changed, and
        count for nothing."""
        nonce, seq = "", 0
        try:
            header = parse(message)
            if isinstance(header, Open):
                nonce = header.nonce
                self._find(header)
                await self.tell(Ack(nonce, 0))
            elif isinstance(header, Blocks):
                nonce, seq = header.nonce, header.seq
                await self._fill(self._find(header), header, message.size)
            elif isinstance(header, Probe):
                if message.size > MAX_PROBE_BYTES:
                    raise Refusal(Reason.MALFORMED, f"a probe of {message.size} bytes")
                await self._probe(message.size)
            elif isinstance(header, Abort):
                incoming = self._receiver.expected(header.nonce)
                if incoming is not None and incoming.source in (None, self):
                    why = f"the sender of {incoming.attempt_id} gave up: {header.message}"
                    self._receiver.fail(incoming, peer_error(header.kind, why), tell=False)
            else:
                raise Refusal(Reason.MALFORMED, f"a {type(header).__name__} has no place here")
        except Refusal as refusal:
            # A heartbeat may cross the last acknowledgement: its sender is told, and nothing is wrong.
            if seq or refusal.reason is not Reason.UNKNOWN_NONCE:
                _log.warning("a KV message was refused: %s", refusal)
                self._receiver.count(refusal.reason)
            await self.tell(Refused(nonce, seq, *to_wire(refusal.error)))

    def _find(self, header: Open | Blocks) -> ReceiveTransfer:
        """The hand-off that a message is about, of which its sender has spoken now."""
        receiver, name = self._receiver, header.attempt_id
        if header.epoch != receiver.epoch:
            raise Refusal(Reason.STALE_EPOCH, f"{name}: {receiver.worker_id} has started anew")
        if (incoming := receiver.expected(header.nonce)) is None:
            raise Refusal(Reason.UNKNOWN_NONCE, f"{name} is not expected (any more)")
        if incoming.attempt_id != name:
            raise Refusal(Reason.WRONG_REQUEST, f"{name} is not what this nonce was given for")
        incoming.heard(self)
        receiver.heard(incoming)
        return incoming

    async def _fill(self, incoming: ReceiveTransfer, header: Blocks, size: int) -> None:
        """Take a message's payload straight into its blocks, verify it there."""
        receiver = self._receiver
        arrived_s = receiver.clock.now() - self._link.arrival_s
        region = incoming.check(header, size)
        incoming.begin(arrived_s)
        digest = xxhash.xxh3_64() if self.checksums else None
        started_s = time.perf_counter()
        try:
            landing = receiver.store.land(*region, on_device=self._link.on_device)
            sink = incoming.sink = Sink(landing.parts, digest, lambda: receiver.heard(incoming))
            await self._link.take(sink)
            landed_s = time.perf_counter()
            wire_s = landed_s - started_s - sink.digest_s + self._link.arrival_s
            if incoming.outcome is not None:
                return  # it ended meanwhile, and its blocks may be somebody else's by now
            incoming.sink = None
            if digest is not None:
                digest.update(header.trailer)
                if digest.intdigest() != header.checksum:
                    raise incoming.reject(header, size)
            landing.commit()
        except PdserveError as error:
            if isinstance(error, TransferError):
                raise
            receiver.fail(incoming, error)
            return
        import_s = time.perf_counter() - landed_s + sink.digest_s
        incoming.accept(header, size, wire_s, import_s)
        if incoming.complete and receiver.delay_s:
            receiver.spawn(self._finish_later(incoming, header.seq))
        else:
            await self._finish(incoming, header.seq)

    async def _finish(self, incoming: ReceiveTransfer, seq: int) -> None:
        if incoming.complete:
            self._receiver.publish(incoming)
        await self.tell(Ack(incoming.nonce, seq))

    async def _finish_later(self, incoming: ReceiveTransfer, seq: int) -> None:
        await asyncio.sleep(self._receiver.delay_s)
        if incoming.outcome is None:
            with contextlib.suppress(TransferError):
                await self._finish(incoming, seq)

    async def _probe(self, size: int) -> None:
        sink = Sink([self._receiver.store.scratch(size, on_device=self._link.on_device)])
        started_s = time.perf_counter()
        await self._link.take(sink)
        took_s = time.perf_counter() - started_s + self._link.arrival_s
        if is_telling(size, took_s):
            self.ceiling_gbs = max(self.ceiling_gbs, size / took_s / 1e9)
        await self.tell(Probed(round(took_s * 1e6)))
