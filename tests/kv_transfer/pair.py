"""A sender and a receiver in processes of their own, and the hand-offs between them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from tests.kv_transfer.end import End, Values, until
from tests.kv_transfer.relay import Relay

GRACE_S = 5.0
"""How long after its deadline a hand-off has ended at both ends."""
BLOCK_BYTES = 64 * 2**10
_numbers = itertools.count(1)


@dataclass
class HandOff:
    """One from the sender to the receiver; the numbers are those of the orders to wait."""

    count: int
    request: str = field(default_factory=lambda: f"r{next(_numbers)}")
    sending: int = 0
    receiving: int = 0
    content: int = 0


class Pair:
    """Both ends, over one transport; between them a `Relay`, where the transport has plain connections to relay."""

    def __init__(self, transport: str, **options: Any) -> None:
        self.transport, self.options = transport, options
        self.sender, self.receiver = End("sender", transport, **options), self._new_receiver()
        self.relay: Relay | None = None
        self.clean = False
        self._baselines: dict[End, Values] = {}

    def make_ready(self) -> None:
        """Have both ends alive and linked, and know what they hold then."""
        self.clean = False
        if not self.sender.alive:
            self.sender.close()
            self.sender = End("sender", self.transport, **self.options)
        if not self.receiver.alive:
            self.receiver.close()
            self.receiver = self._new_receiver()
        assert self.sender.about is not None  # it is up: a hand-off that waits for it is silent, and loses its lease
        self._connect_relay()
        self.check_next_request()
        for end in (self.sender, self.receiver):
            if end not in self._baselines:
                self._baselines[end] = end.call("stats")["held"]

    def close(self) -> None:
        """End both."""
        if self.relay is not None:
            self.relay.close()
        self.sender.close()
        self.receiver.close()

    def unlink(self) -> None:
        """Have no link, as before the first hand-off."""
        self.sender.call("unlink")
        assert until(lambda: not self.receiver.call("links")["links"])

    @property
    def peer(self) -> Values:
        """The receiver, as the sender is told of it."""
        address = self.receiver.about["address"]
        if self.relay is not None:
            address = self.relay.address
        endpoints = [{"transport": self.transport, "address": address}]
        return {"worker_id": "d", "epoch": self.receiver.epoch, "endpoints": endpoints}

    def announce(self, handoff: HandOff, deadline_s: float) -> None:
        """Have the receiver take blocks, tell the sender, and wait for them."""
        self.receiver.call(
            "announce",
            request=handoff.request,
            sender_id="p",
            count=handoff.count,
            deadline_s=deadline_s,
        )
        handoff.receiving = self.receiver.begin("wait", request=handoff.request)

    def order_push(self, handoff: HandOff, deadline_s: float) -> int:
        """Tell the sender to begin it, and to wait."""
        number = self.sender.begin(
            "push",
            request=handoff.request,
            peer=self.peer,
            count=handoff.count,
            deadline_s=deadline_s,
            seed=next(_numbers),
        )
        handoff.sending = self.sender.begin("wait", request=handoff.request)
        return number

    def push(self, handoff: HandOff, deadline_s: float) -> None:
        """Have the sender begin it, and wait."""
        handoff.content = self.sender.result(self.order_push(handoff, deadline_s))["content"]

    def start(self, count: int, deadline_s: float) -> HandOff:
        """A hand-off of which no block is queued yet."""
        handoff = HandOff(count)
        self.push(handoff, deadline_s)
        self.announce(handoff, deadline_s)
        return handoff

    def send(self, handoff: HandOff, first: int = 0, count: int | None = None, *, last: bool = False) -> None:
        """Queue blocks."""
        self.sender.call("send", request=handoff.request, first=first, count=count, last=last)

    def wait_status(self, handoff: HandOff, status: str) -> None:
        """Until the receiver has it so far."""
        assert until(lambda: self.receiver.call("status", request=handoff.request)["status"] == status)

    def failed(self, end: End, number: int, *kinds: str) -> Values:
        """A hand-off failed there as one of ``kinds``, in time."""
        ended = end.result(number)
        assert ended.get("error") in kinds, f"{end.role}: {ended}"
        assert ended["late_s"] < GRACE_S, f"{end.role}: {ended}"
        return ended

    def complete(self, handoff: HandOff) -> Values:
        """It is complete at both ends, with the right content and in time."""
        sent, received = self.sender.result(handoff.sending), self.receiver.result(handoff.receiving)
        assert "error" not in sent, f"{handoff}: {sent}"
        self.check_received(handoff, received)
        return received

    def check_received(self, handoff: HandOff, received: Values) -> None:
        """The receiver has all of it, and nothing else, in time."""
        assert "error" not in received, f"{handoff}: {received}"
        self.check_content(handoff, received)
        assert received["late_s"] < GRACE_S

    def check_content(self, handoff: HandOff, received: Values) -> None:
        """The receiver has it right, or failed."""
        if "error" not in received:
            assert received["content"] == handoff.content, f"{handoff} was published with other content: {received}"
            assert received["bytes"] == handoff.count * BLOCK_BYTES

    def check_next_request(self) -> None:
        """A hand-off passes."""
        handoff = self.start(3, 10.0)
        self.send(handoff, last=True)
        self.complete(handoff)

    def check_settled(self) -> None:
        """Both ends (a killed one has been replaced) work, have all their blocks, which nobody wrote to since, and hold
        no more than before."""
        self.make_ready()
        for end in (self.sender, self.receiver):
            assert end.call("stats")["free"] == end.num_blocks
            assert end.call("intact")["intact"], f"somebody wrote into blocks of the {end.role} that were given back"

            def excess(end: End = end) -> Values:
                held, before = end.call("stats")["held"], self._baselines[end]
                return {name: (before[name], count) for name, count in held.items() if count > before[name]}

            assert until(lambda: not excess()), f"the {end.role} holds more than before: {excess()}"
        self.clean = True

    def _new_receiver(self) -> End:
        return End("receiver", self.transport, epoch=f"e{next(_numbers)}", **self.options)

    def _connect_relay(self) -> None:
        if self.transport not in ("tcp", "grpc_stream"):
            return
        address = self.receiver.about["address"]
        if self.relay is not None and self.relay.target == address:
            return
        if self.relay is not None:
            self.relay.close()
        self.relay = Relay(address)
        self.receiver.call("known_as", address=self.relay.address)
