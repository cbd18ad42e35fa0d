"""One receiver as the sender sees it: the link to it, and the hand-offs that share this link."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

from kv_transfer.base import BlockStore, KVLink
from kv_transfer.integrity import (
    Abort,
    Ack,
    Announce,
    Blocks,
    Header,
    Open,
    Refused,
    checksum,
    decode,
    encode,
    peer_error,
)
from kv_transfer.send_transfer import Part, SendTransfer
from kv_transfer.sink import Stretch
from kv_transfer.status import TransferStatus
from pdserve.core.clock import Clock
from pdserve.core.errors import (
    ChecksumMismatch,
    PdserveError,
    PeerLost,
    RequestAborted,
    TransferError,
    TransferRefused,
    to_wire,
)
from pdserve.core.handoff import KVEndpoint, PeerLink

_SETTLE_S = 0.5
_MESSAGE_S = 0.1  # what one message should take at most
_LEAST_MESSAGE_BYTES = 64 * 2**10
_MAX_ANNOUNCED = 4096  # a receiver announces what the router has placed: far fewer are ever ahead of their requests
_NOBODY: deque[SendTransfer] = deque()
_log = logging.getLogger(__name__)

Conclude = Callable[[SendTransfer, PdserveError | None], None]
"""Ends a hand-off: None if the receiver has all of it, else the reason why it failed."""


class SendLink:
    """Three tasks work on the link: one writes (one message of each hand-off in turn), one reads the answers, one says
    every ``heartbeat_s`` that the hand-offs still live. When the link ends, its hand-offs fail. While
    ``max_inflight_bytes`` or more are not acknowledged, nothing new is sent: only control messages, and what arrived
    changed (its bytes count already)."""

    def __init__(
        self,
        about: PeerLink,
        epoch: str,
        endpoint: KVEndpoint,
        link: KVLink,
        *,
        store: BlockStore,
        checksums: bool,
        max_inflight_bytes: int,
        clock: Clock,
        heartbeat_s: float,
        is_over: Callable[[str], bool],
        bound: Callable[[SendTransfer], None],
        heard: Callable[[SendTransfer], None],
        conclude: Conclude,
        announced: Iterable[Announce] = (),
    ) -> None:
        self.about, self.worker_id, self.epoch, self.endpoint = about, about.worker_id, epoch, endpoint
        self.alive = True
        self._link, self._store, self._checksums, self._clock = link, store, checksums, clock
        self._max_inflight_bytes = max_inflight_bytes
        self._inflight_bytes = 0
        # On a slow link messages are small: an abort has to wait for the one that is being written.
        moved_bytes = round(about.ceiling_gbs * 1e9 * _MESSAGE_S)
        self._most_message_bytes = max(_LEAST_MESSAGE_BYTES, moved_bytes) if moved_bytes else None
        self._heartbeat_s, self._bound, self._heard, self._conclude = heartbeat_s, bound, heard, conclude
        self._handoffs: dict[str, SendTransfer] = {}  # by nonce
        self._unbound: dict[str, SendTransfer] = {}  # by attempt id: the receiver has not told yet where the blocks go
        self._announced: dict[str, Announce] = {}  # by attempt id: hand-offs that have not begun here yet
        self._is_over = is_over
        self._turns: deque[SendTransfer] = deque()
        self._resending: deque[SendTransfer] = deque()  # their turns, which no bound keeps: those bytes count already
        self._controls: deque[Header] = deque()
        self._work = asyncio.Event()
        self._task = asyncio.create_task(self._run())
        for each in announced:
            self._on_announce(each)

    def add(self, handoff: SendTransfer) -> None:
        """Take on a hand-off to this receiver."""
        handoff.settle = lambda: self._settle(handoff)
        if handoff.outcome is None:
            handoff.status = TransferStatus.WAITING
        handoff.transport = self.about.transport
        if self._most_message_bytes is not None:
            handoff.message_bytes = min(handoff.message_bytes, self._most_message_bytes)
        announced = self._announced.pop(handoff.attempt_id, None)
        if handoff.nonce:
            self._begin(handoff)
        elif announced is not None:
            self._bind(handoff, announced)
        else:
            self._unbound[handoff.attempt_id] = handoff

    def _bind(self, handoff: SendTransfer, announced: Announce) -> None:
        try:
            handoff.bind(announced.nonce, announced.num_blocks, announced.num_skipped)
        except TransferRefused as error:
            self._control(Abort(announced.nonce, *to_wire(error)))
            self._conclude(handoff, error)
            return
        self._begin(handoff)

    def _begin(self, handoff: SendTransfer) -> None:
        self._handoffs[handoff.nonce] = handoff
        self._bound(handoff)
        self._control(_open(handoff, self.epoch))
        self.advance(handoff)

    def _on_announce(self, announced: Announce) -> None:
        """The receiver has room for a hand-off: one that waits for this, has not begun here yet, or is over."""
        handoff = self._unbound.pop(announced.attempt_id, None)
        if handoff is not None:
            self._bind(handoff, announced)
        elif self._is_over(announced.attempt_id):
            over = RequestAborted(f"{announced.attempt_id} has ended at its sender")
            self._control(Abort(announced.nonce, *to_wire(over)))
        else:
            self._announced[announced.attempt_id] = announced
            while len(self._announced) > _MAX_ANNOUNCED:  # the receiver's lease ends the oldest
                del self._announced[next(iter(self._announced))]

    def advance(self, handoff: SendTransfer) -> None:
        """It may have something to send now."""
        if handoff.ready and handoff not in self._turns and handoff.nonce in self._handoffs:
            self._turns.append(handoff)
            self._work.set()

    def drop(self, handoff: SendTransfer, error: PdserveError | None) -> None:
        """Forget a hand-off; with an error, the receiver is told to give it up as well."""
        self._unbound.pop(handoff.attempt_id, None)
        if self._handoffs.pop(handoff.nonce, None) is None:
            return
        self._inflight_bytes -= handoff.unacknowledged_bytes
        self._work.set()
        if error is not None:
            self._control(Abort(handoff.nonce, *to_wire(error)))

    async def aclose(self) -> None:
        """Close the link and wait until its tasks have ended; its hand-offs fail."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.alive = False  # also if the task was cancelled before it began
        await self._link.aclose()

    async def _settle(self, handoff: SendTransfer) -> None:
        """Return once nothing reads the blocks of a hand-off that failed, neither here nor at the receiver. A receiver
        that keeps them for longer than `_SETTLE_S` is given up, with all hand-offs to it."""
        if not handoff.has_sent:
            return
        if self.alive:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_S):
                    await handoff.idle.wait()
                    await self._link.drained()
                    return
            _log.warning("%s does not let go of %s: its KV link is cut", self.worker_id, handoff.attempt_id)
        self._link.cut(f"{self.worker_id} did not let go of what it was sent")
        await handoff.idle.wait()

    def _control(self, header: Header) -> None:
        self._controls.append(header)
        self._work.set()

    async def _run(self) -> None:
        tasks = [asyncio.create_task(work) for work in (self._write(), self._read(), self._beat())]
        lost = PeerLost(f"the KV link to {self.worker_id} was closed here")
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            error = done.pop().exception()
            lost = PeerLost(f"the KV link to {self.worker_id} was lost: {error}")
            if not isinstance(error, TransferError):
                _log.error("the KV link to %s failed", self.worker_id, exc_info=error)
        finally:
            self.alive = False
            handoffs = [*self._handoffs.values(), *self._unbound.values()]
            self._handoffs.clear()
            self._unbound.clear()
            for handoff in handoffs:
                self._conclude(handoff, lost)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._link.aclose()

    async def _write(self) -> None:
        while True:
            while not (turns := self._resending or self._open_turns()) and not self._controls:
                self._work.clear()
                await self._work.wait()
            if self._controls:
                await self._link.send(encode(self._controls.popleft()))
                continue
            handoff = turns.popleft()
            if handoff.ready:
                await self._send_part(handoff)
                self.advance(handoff)

    async def _send_part(self, handoff: SendTransfer) -> None:
        part = handoff.next_part(self._clock.now())
        trailer = handoff.trailer if part.last else b""
        if not part.resends:
            self._inflight_bytes += part.size
        handoff.idle.clear()
        try:
            started_s = time.perf_counter()
            payload = self._blocks(part)
            digest = checksum(payload, trailer) if self._checksums else 0
            handoff.export_s += time.perf_counter() - started_s
            header = Blocks(
                nonce=handoff.nonce,
                epoch=self.epoch,
                attempt_id=handoff.attempt_id,
                seq=part.seq,
                first_slot=part.first_slot,
                num_blocks=len(part.block_ids),
                first_layer=part.layers.start,
                num_layers=len(part.layers),
                checksum=digest,
                export_us=round(handoff.export_s * 1e6),
                last=part.last,
                trailer=trailer,
            )
            await self._link.send(encode(header), payload)
            if handoff.outcome is None:
                self._heard(handoff)  # somebody takes what is written
        except TransferError:
            raise
        except PdserveError as error:  # its blocks cannot be read: the others are not concerned
            self._conclude(handoff, error)
        finally:
            handoff.idle.set()

    def _open_turns(self) -> deque[SendTransfer]:
        """Those who may send something new; empty while enough is on its way."""
        return self._turns if self._inflight_bytes < self._max_inflight_bytes else _NOBODY

    def _blocks(self, part: Part) -> list[Stretch]:
        if not part.block_ids:
            return []
        return self._store.read_blocks(part.block_ids, part.layers, on_device=self._link.on_device)

    async def _read(self) -> None:
        while True:
            answer = decode((await self._link.recv()).header)
            if isinstance(answer, Announce):
                self._on_announce(answer)
                continue
            if not isinstance(answer, Ack | Refused | Abort):
                raise TransferRefused(f"a {type(answer).__name__} has no place here")
            if isinstance(answer, Refused) and not answer.nonce:
                raise TransferRefused(answer.message)
            handoff = self._handoffs.get(answer.nonce)
            if handoff is None:
                continue  # given up meanwhile
            self._heard(handoff)
            if isinstance(answer, Ack):
                self._inflight_bytes -= handoff.acknowledge(answer.seq)
                self._work.set()
                if handoff.complete:
                    self._conclude(handoff, None)
            elif (
                isinstance(answer, Refused) and answer.kind == ChecksumMismatch.__name__ and handoff.resend(answer.seq)
            ):
                self._resending.append(handoff)
                self._work.set()
            else:
                if isinstance(answer, Abort):
                    self.drop(handoff, None)  # it knows already
                self._conclude(handoff, peer_error(answer.kind, f"{self.worker_id}: {answer.message}"))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            for handoff in self._handoffs.values():
                self._control(_open(handoff, self.epoch))


def _open(handoff: SendTransfer, epoch: str) -> Open:
    return Open(handoff.nonce, epoch, handoff.attempt_id)
