"""What a seed decides: the service, its load, and its faults."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self, get_args

from pdserve.core.request import Mode
from pdserve.core.worker import Role
from simulator.loop import TURN_S
from simulator.model import VOCAB_SIZE
from simulator.service import Asked, WorkerSettings

WINDOW_S = 3.0
"""Requests come, and faults happen, within so many seconds after the service is ready."""
SLOW_BYTES_PER_S = 2.4e5
FAST_BYTES_PER_S = 2e7
"""At which a handshake sends trains of several probes."""
QUIET_SHARE = 0.25
"""So many seeds have no faults: in these every request is served."""
SPECULATING = 3
"""The remainder by five of seeds whose engines guess tokens. It is no draw, so that no other plan changes."""
FORECASTING = 1
"""The same of seeds whose controller of roles has forecasts."""
MEASURED_S = 4.5
"""Within which all offsets to a clock are measured anew."""
HUNG_S = 4.0
"""Within which an engine that hangs is killed."""
TINY_TOKENS, LARGE_TOKENS = 192, 1024
"""Of a KV pool: a tiny one holds two or three requests."""
TENANTS = ("a", "b", "c")

FaultKind = Literal[
    "kill", "kill_engine", "pause", "pause_engine", "hang_engine", "partition", "reset", "kill_gateway",
    "pause_gateway", "flip", "replace", "kill_peer", "step", "leave_reading", "drain_gateway", "stop",
    "pause_kv",
]  # fmt: skip
_LATER_KINDS: tuple[FaultKind, ...] = ("stop", "pause_kv")
"""Drawn last, because they were added later."""
_KINDS: tuple[FaultKind, ...] = tuple(kind for kind in get_args(FaultKind) if kind not in _LATER_KINDS)
MAX_KINDS = 4
"""A seed has faults of so many kinds at most: what happens rarely among all of them is frequent in some seeds."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens ``at_s`` seconds after the service is ready, to ``target``, for ``for_s`` seconds.
    ``other``: of a partition, the host that ``target`` no longer reaches; of a flip, the new role. ``reset``: some
    connection breaks. ``pause_gateway`` breaks those of its clients, too. ``replace``: the worker is drained and
    leaves, and another one joins. ``kill_peer``: as soon as a worker fetches a prefix for a prompt that it is to hand
    off, the decode worker that waits for it is killed. ``kill_gateway``: as soon as a stream that runs there has
    tokens. ``drain_gateway``: it serves no new calls, and ends when it has no others, or after ``for_s``. ``step``: the
    clock of a host jumps ahead by ``other`` seconds; so long it may take until everybody knows.
    ``leave_reading``: the client leaves whose request's cold blocks are being read. ``stop``: the worker is stopped in
    order, and after ``for_s`` once more. ``pause_kv``: a transport's library blocks the worker's KV thread."""

    at_s: float
    kind: FaultKind
    target: str
    for_s: float = 0.0
    other: str = ""

    def __str__(self) -> str:
        other = f" {self.other}" if self.other else ""
        lasting = f" for {self.for_s:.2f} s" if self.for_s else ""
        return f"{self.at_s:.3f} s: {self.kind} {self.target}{other}{lasting}"


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request that a client sends ``at_s`` seconds after the service is ready. It leaves after ``leaves_after``
    tokens or ``leaves_s`` seconds (None: it stays), and waits ``read_s`` before it reads each token."""

    at_s: float
    asked: Asked
    leaves_after: int | None = None
    leaves_s: float | None = None
    read_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """All of it."""

    seed: int
    roles: dict[str, Role]
    gateways: int
    latency_s: tuple[float, float]
    """Of a message between two processes, at least and at most."""
    settings: WorkerSettings
    config: dict[str, Any]
    requests: tuple[ClientRequest, ...]
    faults: tuple[Fault, ...]
    turn_s: float = TURN_S
    """How long a turn of a thread takes."""
    break_share: float = 0.0
    """See `simulator.network.Network`."""
    forecasts: bool = False
    """Whether a controller of roles has forecasts, which are wrong."""

    @classmethod
    def draw(cls, seed: int, num_requests: int = 50) -> Self:
        """The plan of a seed."""
        draw = random.Random(f"plan/{seed}")
        quiet = draw.random() < QUIET_SHARE
        kinds = () if quiet else draw.sample(_KINDS, draw.randint(1, MAX_KINDS))
        fetches = "kill_peer" in kinds  # prefixes, often and slowly
        prefill, decode = draw.choice([(2, 1), (2, 2), (3, 1), (3, 2), *([] if fetches else [(1, 1), (1, 2)])])
        roles = {f"prefill-{i}": Role.PREFILL for i in range(prefill)}
        roles |= {f"decode-{i}": Role.DECODE for i in range(decode)}
        gateways = draw.choice([1, 2])
        block_size = draw.choice([4, 8, 16])
        reads = "leave_reading" in kinds  # cold blocks
        prefix_caching = fetches or reads or draw.random() < 0.9
        cold_blocks = draw.choice([6, 1000] if reads else [0, 0, 6, 1000]) if prefix_caching else 0
        tiny, checksum = draw.random() < (0.6 if cold_blocks else 0.3), draw.random() < 0.8
        settings = WorkerSettings(
            num_blocks=(TINY_TOKENS if tiny else LARGE_TOKENS) // block_size,
            block_size=block_size,
            max_num_seqs=draw.choice([2, 4, 16]),
            max_num_batched_tokens=draw.choice([8, 32, 128]),
            chunk_tokens=draw.choice([None, None, 8]),
            prefix_caching=prefix_caching,
            run_ahead=draw.random() < 0.5,
            one_sided=draw.random() < 0.5,
            bytes_per_s=SLOW_BYTES_PER_S if fetches else draw.choice([SLOW_BYTES_PER_S, 1e6, 2e6]),
            step_s=draw.choice([(0.002, 0.010), (0.002, 0.010), (0.01, 0.04)]),
            corrupt_share=draw.choice([0.0, 0.0, 0.0, 0.05]) if checksum and not quiet else 0.0,
            cold_blocks=cold_blocks,
            cold_fail_share=draw.choice([0.0, 0.1]),
        )
        config: dict[str, Any] = {
            "router": {
                "policy": draw.choice(["round_robin", "power_of_two", *([] if fetches else _POLICIES)]),
                "prefix_fetch": "always" if fetches else draw.choice(["off", "auto", "always", "always"]),
                "first_token": draw.choice(["prefill", "prefill", "decode"]),
                "max_unread_tokens": draw.choice([4, 1024]),
                "max_queue": draw.choice([8, 256]),
                "max_queue_tokens": draw.choice([500, 4_194_304]),
                "prefill_backlog_tokens": draw.choice([16, 512]),
                "patience_s": 30.0,
            },
            "transfer": {
                "overlap": draw.choice(["none", "chunk", "layer"]),
                "layer_groups": 2,
                "lease_s": draw.choice([0.5, 3.0, 30.0]),
                "on_kv_failure": draw.choice(
                    ["retry", "retry", "recompute", "retry" if settings.corrupt_share else "fail"]
                ),
                "checksum": checksum,
                "message_bytes": draw.choice([2**12, 2**20]),
                "max_inflight_bytes": draw.choice([2**12, 2**24]),
            },
            "engine": {"hang_timeout_s": draw.choice([1.5, 3.0])},
            "gateway": {"replicas": gateways},
            "scaling": _scaling(draw, prefill + decode),
        }
        habits = _Habits.draw(draw)
        if fetches:
            habits = habits._replace(modes=(Mode.PD,), heads=(48,))
        requests = tuple(_request(draw, number, settings, habits) for number in range(num_requests))
        faults: tuple[Fault, ...] = ()
        if not quiet:
            number = draw.choice([1, 3, 6, 12])
            faults = tuple(sorted((_fault(draw, kinds, roles, gateways) for _ in range(number)), key=_when))
        latency_s = draw.choice([(0.0001, 0.002), (0.0001, 0.002), (0.001, 0.03)])
        turn_s, break_share = draw.choice([TURN_S, TURN_S, 2e-5, 2e-4]), 0.0 if quiet else draw.choice([0.0, 0.0, 0.3])
        # What was added later is drawn last: all other plans stay as they were. Defects go on after the faults, when
        # every request has to be served.
        if not quiet and config["transfer"]["on_kv_failure"] != "fail" and draw.random() < 0.1:
            settings = replace(settings, defect_share=0.02)
        if not quiet and draw.random() < 0.1:
            more = (_fault(draw, _LATER_KINDS, roles, gateways) for _ in range(4))
            faults = tuple(sorted((*faults, *more), key=_when))
        if draw.random() < 0.1:
            settings = replace(settings, bytes_per_s=FAST_BYTES_PER_S)
        if draw.random() < 0.5:
            config["transfer"]["connect_timeout_s"] = 1.0
        if draw.random() < 0.1:
            settings = replace(settings, tight_tokens=draw.choice([8, 16]))
        if seed % 5 == SPECULATING:
            each = random.Random(f"speculation/{seed}")
            settings = replace(settings, speculates=True)
            requests = tuple(
                replace(request, asked=replace(request.asked, speculation=each.choice([None, None, True, False])))
                for request in requests
            )
        if quiet:  # heartbeats wait for what is in flight on a slow link
            config["transfer"]["lease_s"] = max(3.0, config["transfer"]["lease_s"])
        forecasts = bool(config["scaling"]) and seed % 5 == FORECASTING
        return cls(seed, roles, gateways, latency_s, settings, config, requests, faults, turn_s, break_share, forecasts)

    def with_faults(self, faults: tuple[Fault, ...]) -> Plan:
        """The same with other faults."""
        return replace(self, faults=faults)


def _scaling(draw: random.Random, workers: int) -> dict[str, Any]:
    """A controller that acts within the few seconds of a world, or none."""
    if draw.random() < 0.7:
        return {}
    return {
        "controller": draw.choice(["roles", "workers"]),
        "ttft_ms": draw.choice([10.0, 30.0, 1000.0]),
        "itl_ms": draw.choice([5.0, 15.0, 1000.0]),
        "interval_s": 0.1,
        "hold_s": 0.4,
        "max_workers": workers + 3,
    }


def _when(fault: Fault) -> float:
    return fault.at_s


_POLICIES = ("least_tokens", "prefix_affinity", "kv_aware", "round_robin")


class _Habits(NamedTuple):
    """What the clients of a seed have in common: so many leave, read slowly, have short deadlines, name tokens or texts
    that end the answer, and want the log-probabilities of their prompts; and so many prompts fit no pool."""

    leave: float
    dawdle: float
    hurry: float
    stop: float
    score: float
    exceed: float
    modes: tuple[Mode, ...]
    heads: tuple[int, ...]
    """So many tokens of a prompt are those of others."""
    window_s: float
    """They come within so many seconds."""

    @classmethod
    def draw(cls, draw: random.Random) -> Self:
        """Those of a seed."""
        return cls(
            draw.choice([0.0, 0.15, 0.5]),
            draw.choice([0.0, 0.25, 0.6]),
            draw.choice([0.0, 0.25]),
            draw.choice([0.0, 0.0, 0.5]),
            draw.choice([0.0, 0.0, 0.3]),
            draw.choice([0.0, 0.0, 0.1]),
            draw.choice([(Mode.PD,), (Mode.PD, Mode.PD, Mode.COLOCATED, Mode.AUTO), (Mode.COLOCATED, Mode.AUTO)]),
            draw.choice([(0, 24, 48), (48,)]),
            draw.choice([WINDOW_S, WINDOW_S, WINDOW_S, 0.05]),
        )


def _request(draw: random.Random, number: int, settings: WorkerSettings, habits: _Habits) -> ClientRequest:
    room = settings.num_blocks * settings.block_size
    tenant = draw.choice(TENANTS)
    shared = random.Random(f"{tenant}/{draw.randrange(2)}")  # some prompts of a tenant begin alike
    head = [shared.randrange(1, VOCAB_SIZE) for _ in range(draw.choice(habits.heads))]
    tail = [draw.randrange(1, VOCAB_SIZE) for _ in range(draw.randint(1, 24))]
    prompt = (*head, *tail)[: room // 2] if draw.random() >= habits.exceed else (1,) * room
    stop = tuple(draw.sample(range(1, VOCAB_SIZE), 8)) if draw.random() < habits.stop else ()
    by_text = draw.random() < 0.6
    leaves_after = draw.randint(1, 6) if draw.random() < habits.leave / 2 else None
    leaves_s = draw.uniform(0.0, 0.6) if draw.random() < habits.leave / 2 else None
    leaves = leaves_after is not None or leaves_s is not None
    return ClientRequest(
        draw.uniform(0.0, habits.window_s),
        Asked(
            request_id=f"r{number}",
            tenant=tenant,
            prompt=prompt,
            max_tokens=min(100, room // 2) if leaves else draw.choice([1, 2, 3, 8, 16]),
            ignore_eos=draw.random() < 0.7,
            mode=draw.choice(habits.modes),
            salt=draw.choice(["", "", "s"]),
            timeout_s=draw.choice([0.3, 2.0]) if draw.random() < habits.hurry else 30.0,
            priority=draw.choice([0, 0, 0, 1]),
            stop=stop if by_text else (),
            stop_token_ids=() if by_text else stop,
            prompt_logprobs=draw.random() < habits.score,
        ),
        leaves_after,
        leaves_s,
        0.05 if draw.random() < habits.dawdle else 0.0,
    )


def _fault(draw: random.Random, kinds: Sequence[FaultKind], roles: dict[str, Role], gateways: int) -> Fault:
    at_s, kind = draw.uniform(0.0, WINDOW_S), draw.choice(kinds)
    worker = draw.choice(sorted(roles))
    lasting = draw.choice([0.05, 0.5, 2.0, 6.0])
    hosts = [f"host-{name}" for name in (*sorted(roles), *(f"gateway-{i}" for i in range(gateways)), "clients")]
    match kind:
        case "partition":
            here = draw.choice(hosts)
            return Fault(at_s, kind, here, lasting, draw.choice([each for each in hosts if each != here]))
        case "step":
            return Fault(at_s, kind, draw.choice(hosts), MEASURED_S, str(draw.choice([0.03, 1.0, 100.0])))
        case "kill_peer" | "leave_reading" | "reset":
            return Fault(at_s, kind, "")
        case "hang_engine":
            return Fault(at_s, kind, worker, HUNG_S)
        case "kill_gateway":
            return Fault(at_s, kind, f"gateway-{draw.randrange(gateways)}")
        case "pause_gateway" | "drain_gateway":
            return Fault(at_s, kind, f"gateway-{draw.randrange(gateways)}", lasting)
        case "flip":
            return Fault(at_s, kind, worker, other=draw.choice(["prefill", "decode"]))
        case "pause" | "pause_engine" | "pause_kv":
            return Fault(at_s, kind, worker, lasting)
        case "stop":
            return Fault(at_s, kind, worker, lasting / 100)
        case _:
            return Fault(at_s, kind, worker)
