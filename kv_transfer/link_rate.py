"""How fast a link is: one definition, for the handshake, the doctor, and hand-offs. The receiver takes all times.

Messages that belong together are a *run*: the blocks of a hand-off, or a train of probes. Each message occupies the
link from the moment its sender begins to send it until the receiver has its last byte in place. Time that two messages
of a run share counts once. So the time of a back-to-back message lasts from the completion of the message before to
its own. The rate of a run is its bytes over this time.

- Nothing is hidden: bytes that wait in a socket or a library until the receiver looks have been on their way since the
  sender began to send them. Headers tell when that was, on the sender's clock (`SenderClock`).
- A wait for the sender, which has no blocks ready yet or hashes them, does not count.
- A hand-off is complete when it is verified, so its rate includes hashing at the receiver. It pays the latency of the
  link whenever nothing of it is on its way. Probes are not hashed, and a train does not pay the latency.

The *ceiling* of a link is the best rate of its runs so far: of the trains of the handshake that tell enough
(`Run.tells`), and of all hand-offs. A hand-off that is faster raises it, so no hand-off exceeds 100 % of its link."""

from __future__ import annotations

import math

_TELLING_BYTES = 2**20
_LEAST_BYTES, _TELLING_S = 2**16, 0.005
_DRIFT = 1e-4  # two clocks drift apart by less than this


class Run:
    """The messages of a run, in order, and the time they took. ``busy_s`` is in seconds."""

    __slots__ = ("_ended_s", "busy_s", "num_bytes")

    def __init__(self) -> None:
        self.num_bytes, self.busy_s, self._ended_s = 0, 0.0, -math.inf

    def add(self, size: int, begun_s: float, ended_s: float) -> float:
        """Count a message that was on its way from ``begun_s`` to ``ended_s``. Returns the seconds by which the run's
        time grows."""
        took_s = max(0.0, ended_s - max(begun_s, self._ended_s))
        self.num_bytes += size
        self.busy_s += took_s
        self._ended_s = ended_s
        return took_s

    @property
    def gbs(self) -> float:
        """The rate, in 10^9 bytes per second; 0 without bytes."""
        return self.num_bytes / self.busy_s / 1e9 if self.busy_s else 0.0

    @property
    def tells(self) -> bool:
        """Whether a train of probes is large or slow enough to measure a link by: a smaller one may fit into a token
        bucket, or end before the receiver is awake."""
        slow = self.num_bytes >= _LEAST_BYTES and self.busy_s >= _TELLING_S
        return slow or self.num_bytes >= _TELLING_BYTES


class SenderClock:
    """Maps times of the sender's clock to the receiver's, for one link.

    The shortest time between the sending and the receipt of a header is the difference of the clocks plus the latency.
    It is forgotten as fast as clocks may drift apart. Half of the shortest round trip is the latency."""

    def __init__(self) -> None:
        self._shift_s, self._at_s = math.inf, 0.0
        self._round_trip_s = math.inf

    def heard(self, sent_us: int, now_s: float) -> None:
        """Note a header: sent at ``sent_us`` (microseconds of the sender's clock), received at ``now_s``."""
        forgotten_s = self._shift_s + _DRIFT * (now_s - self._at_s)
        self._shift_s, self._at_s = min(now_s - sent_us / 1e6, forgotten_s), now_s

    def answered(self, round_trip_s: float) -> None:
        """Note the time between a message to the sender and its answer."""
        self._round_trip_s = min(self._round_trip_s, round_trip_s)

    def arrival_s(self, sent_us: int) -> float:
        """When what was sent at ``sent_us`` could begin to arrive, on the receiver's clock. `heard` comes first."""
        return sent_us / 1e6 + self._shift_s

    def departure_s(self, sent_us: int) -> float:
        """``sent_us`` on the receiver's clock."""
        latency_s = self._round_trip_s / 2 if math.isfinite(self._round_trip_s) else 0.0
        return self.arrival_s(sent_us) - latency_s
