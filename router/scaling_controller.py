"""Decides when a worker takes the other role, is added, or is removed. Plain values in, an action out: it has no clock
and does no I/O."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Literal, NamedTuple

from contract.scaling import SHARES
from pdserve.core.config import ScalingConfig
from pdserve.core.worker import Role
from router.forecast import Counts, Demand, Forecast, Forecaster

MIN_REQUESTS = 6
"""First tokens within ``hold_s``, those overdue included, below which an attainment says nothing. Gaps: ten times as
many."""
BUSY = 0.5
"""A prefill role with less of its time in use cannot make first tokens earlier by another worker: the prompts
themselves take too long."""
SHORT = 0.1
"""A role is waited for if requests wait for its workers for more than this share of the time."""
SPARE = 0.7
"""A role can spare a worker if this share of the capacity of the others is enough for all that it has in use."""
REMOVE = 0.5
"""The same for removing one."""
REMOVE_HOLDS = 4
"""A worker is removed only after so many times `ScalingConfig.hold_s`: what is removed is slow to get back."""
WRONG = 0.2
"""A forecast was wrong if so many fewer of the first tokens, or gaps, met their objective."""
SAME = 1.5
"""Loads count as the same if they differ by less than this factor."""
GAIN = 0.05
"""A worker moves only if a forecast says that so many more of the first tokens, or gaps, meet their objective."""


class RoleLoad(NamedTuple):
    """The workers of a role."""

    workers: int  # ready
    coming: int = 0  # started, or waiting for a node
    load: float = 0.0  # share of their capacity in use
    running: float = 0.0  # requests in a batch
    short: float = 0.0  # share of the time during which the next request waited for one of them
    steps: int = 0  # that their engines computed
    busy_s: float = 0.0  # that these steps took


class Observation(NamedTuple):
    """What the gateways saw from ``begin_s`` to ``end_s``."""

    begin_s: float
    end_s: float
    prefill: RoleLoad
    decode: RoleLoad
    ttft: tuple[int, ...] = ()  # counts as `contract.scaling.GatewayLoad` has them
    itl: tuple[int, ...] = ()
    overdue: int = 0  # requests whose first token is later than its objective, at the end
    requests: int = 0  # those that came
    first_tokens: int = 0
    prompt_tokens: int = 0  # of the requests that got their first token
    prompts: tuple[int, ...] = ()  # the same requests, counted as `contract.scaling.GatewayLoad` does
    output_tokens: int = 0  # of all requests
    in_flight: float = 0.0  # requests in progress

    def of(self, role: Role) -> RoleLoad:
        """The load of a role."""
        return self.prefill if role is Role.PREFILL else self.decode

    @property
    def counts(self) -> Counts:
        """The workers that are ready."""
        return self.prefill.workers, self.decode.workers

    @property
    def demand(self) -> Demand | None:
        """What was asked; None if no request came, or none had a first token."""
        if not (self.requests and self.first_tokens):
            return None
        rate = self.requests / max(1e-6, self.end_s - self.begin_s)
        return Demand(rate, self.prompts, max(1.0, self.output_tokens / self.first_tokens))


class Action(NamedTuple):
    """What to do, and why."""

    # flip: workers of the other role become those of ``role``; add, remove: of ``role``
    kind: Literal["flip", "add", "remove"]
    role: Role
    reason: str
    number: int = 1
    expected: Forecast | None = None  # None: there is no forecast

    def after(self, counts: Counts) -> Counts:
        """The workers that there are then."""
        change = -self.number if self.kind == "remove" else self.number
        other = -self.number if self.kind == "flip" else 0
        prefill, decode = counts
        return (prefill + change, decode + other) if self.role is Role.PREFILL else (prefill + other, decode + change)


class ScalingController:
    """Keeps both objectives of ``config`` with the workers that there are; with ``controller: workers`` also with more
    or fewer ones.

    A role is short if its objective is missed and another worker could change that: TTFT for prefill, ITL for decode,
    and TTFT for decode if requests wait for room there. A role can spare a worker if the others have capacity for all
    that it does, and would still meet its objective. Figures are those of the last ``hold_s``, of which each third has
    to say the same: a peak that passes moves no worker.

    What keeps it from oscillating: an action needs one role to be short and the other to have capacity to spare, which
    leaves a band between; after an action nothing happens for ``hold_s``, and the figures are collected anew; and an
    action is never taken twice with the same workers under the same load: if they are there again, it did not help.

    With a ``forecaster``, a role counts as short as soon as it is so in the last third, if the requests of the last two
    thirds are alike. A worker moves only if the forecast for the workers after it is better, and as many move at once
    as it takes; else there is no other forecast for ``hold_s``. What an action was expected to achieve is compared with
    what is measured in ``hold_s``, from when the action has had ``hold_s`` to take effect, and for at most
    `REMOVE_HOLDS` times as long, since a queue has to be drained first. Meanwhile no worker moves, as long as the
    forecast for the present workers is good. A forecast that was wrong, or that does not see what is measured of the
    present workers, is not used under this load.
    """

    def __init__(self, config: ScalingConfig, forecaster: Forecaster | None = None) -> None:
        self._config, self._forecaster = config, forecaster
        self._window: deque[Observation] = deque()
        self._counts: Counts | None = None
        self._settled_s = float("-inf")
        self.verdict = ""
        """What it saw at the last `observe`, and why it did nothing; empty after an action."""
        self.outcome = ""
        """What was measured since the last action, if a forecast had said what to expect. Empty but after the `observe`
        that found it out."""
        self._expected: tuple[Counts, Forecast] | None = None
        """What is expected of the workers after the last action, until it is compared with what was measured."""
        self._next_forecast_s = float("-inf")
        self._refusal = ""  # the verdict until then
        self._wrong_under: Observation | None = None  # a load of which the forecast was wrong
        self._tried: set[tuple[Counts, str, Role]] = set()
        self._tried_under: Observation | None = None

    def observe(self, seen: Observation) -> Action | None:
        """Take in the last interval, and return what to do now. The figures of before a change of workers no longer
        count, whatever made it."""
        self.outcome = ""
        if seen.counts != self._counts:
            self._counts = seen.counts
            self._window.clear()
            self._next_forecast_s = float("-inf")
        hold_s, window = self._config.hold_s, self._window
        if seen.begin_s < self._settled_s:
            self.verdict = (
                f"the effect of the last action is awaited for {max(0.0, self._settled_s - seen.end_s):.0f} s more"
            )
            return None
        window.append(seen)
        while window[0].end_s <= seen.end_s - REMOVE_HOLDS * hold_s:
            window.popleft()
        if (collected_s := seen.end_s - window[0].begin_s) < hold_s:
            self.verdict = f"figures of these workers are collected: {collected_s:.0f} of {hold_s:g} s"
            return None
        lately = [each for each in window if each.end_s > seen.end_s - hold_s]
        self._compare(_sum(lately))
        action, self.verdict = self._decide(lately)
        if self._forecaster is not None:
            action, self.verdict = self._by_forecast(self._forecaster, lately, action, self.verdict)
        if action is None:
            return None
        load = _sum(lately[len(lately) // 2 :])  # the load may have changed before
        if self._tried_under is None or not _is_same_load(load, self._tried_under):
            self._tried.clear()
        tried = (seen.counts, action.kind, action.role)
        if tried in self._tried:
            self.verdict = f"{action.reason}; the action was taken before with these workers under this load"
            self._refusal = self.verdict
            return None
        self._tried.add(tried)
        if action.kind == "remove":  # the worker is not there again because it had not helped
            self._tried.discard((action.after(seen.counts), "add", action.role))
        self._tried_under = load
        self._expected = None if action.expected is None else (action.after(seen.counts), action.expected)
        self.acted(seen.end_s)
        return action

    def acted(self, now_s: float) -> None:
        """Note that the last action has been carried out, which may have taken a while, or has failed."""
        self._settled_s = now_s + self._config.hold_s
        self._window.clear()

    def _decide(self, lately: Sequence[Observation]) -> tuple[Action | None, str]:
        """The action, or None and why."""
        now, parts = _sum(lately), _thirds(lately)
        short_now = self._short(now, MIN_REQUESTS)
        short = {
            role: why
            for role, why in short_now.items()
            if all(role in self._short(part, 1) for part in parts if any(part.ttft) or any(part.itl) or part.overdue)
        }
        needed: dict[Role, str] = {}
        for role, why in short.items():
            needed[role] = self._cannot_spare(now, role.other, SPARE) or self._cannot_spare(
                parts[-1], role.other, SPARE
            )
            if role.other in short:
                needed[role] = f"{role.other} workers are short as well"
            if not needed[role] and self._has_room_for(now, role):
                return Action("flip", role, f"{why}; {_in_use(now, role.other)}"), ""
        for role, why in short.items():
            if self._may_add(now) and self._has_room_for(now, role):
                return Action("add", role, f"{why}; no {role.other} worker can be spared"), ""
        if short:
            role, why = next(iter(short.items()))
            bounds = "" if self._has_room_for(now, role) else f"there may be no more {role} workers"
            return None, f"{why}; {bounds or needed[role]}"
        if short_now:
            return None, f"{next(iter(short_now.values()))}, but not for all of the last {self._config.hold_s:g} s"
        action = self._to_remove() if self._config.controller == "workers" else None
        return action, "" if action else self._in_words(now)

    def _compare(self, now: Observation) -> None:
        """Beside what was expected of the last action, put what these workers did."""
        if self._expected is None:
            return
        counts, expected = self._expected
        measured, is_over = _measured(now), now.end_s >= self._settled_s + REMOVE_HOLDS * self._config.hold_s
        are_there, is_wrong = counts == now.counts, measured.worse < expected.worse - WRONG
        if is_over or (are_there and not is_wrong):  # until then workers may be coming, or a queue be drained
            self._expected = None
        if not are_there or self._expected is not None:
            return
        self.outcome = f"measured since then: {measured}"
        if is_wrong:
            self._wrong_under = now
            self.outcome += ", so there are no more forecasts under this load"

    def _by_forecast(
        self, model: Forecaster, lately: Sequence[Observation], action: Action | None, verdict: str
    ) -> tuple[Action | None, str]:
        """The action, or None and why, where ``action`` and ``verdict`` are those without a forecast."""
        now, parts = _sum(lately), _thirds(lately)
        short = self._short(now, MIN_REQUESTS)
        short = {role: why for role, why in short.items() if role in self._short(parts[-1], 1)}
        demand, wrong_under = _sum(lately[len(lately) // 3 :]).demand, self._wrong_under
        if demand is None or not (short or action) or (wrong_under and _is_same_load(now, wrong_under)):
            return action, verdict
        if short and (len(parts) < 2 or not _requests_alike(*parts[-2:])):  # what is asked may be changing
            return action, verdict
        if now.end_s < self._next_forecast_s:
            return None, self._refusal
        self._next_forecast_s = now.end_s + self._config.hold_s
        action, self._refusal = self._forecast(model, now, demand, short, action, verdict)
        return action, self._refusal

    def _forecast(
        self,
        model: Forecaster,
        now: Observation,
        demand: Demand,
        short: Mapping[Role, str],
        action: Action | None,
        verdict: str,
    ) -> tuple[Action | None, str]:
        """The same, by new forecasts under ``demand``, of roles that are ``short``."""
        target = self._config.attainment
        loads = {role: now.of(role) for role in Role}
        steps_s = {role: load.busy_s / load.steps for role, load in loads.items() if load.steps}
        model.calibrate(now.counts, demand, steps_s)
        present = model.forecast(now.counts, demand)
        if not short and action is not None:  # it removes a worker
            expected = model.forecast(action.after(now.counts), demand)
            if expected.worse < target:
                return None, f"{expected} is expected of {_split(action.after(now.counts))}"
            return action._replace(expected=expected), ""
        if present.worse >= target and self._expected is not None:
            return None, f"{next(iter(short.values()))}; {present} is expected of these workers in a while"
        if present.worse >= target:  # it does not see why a role is short
            return action, f"{verdict}; {present} is expected of these workers" if verdict else ""
        tried: list[tuple[Forecast, Action]] = []
        for choice in self._choices(now, short):
            if choice.kind == "add" and any(expected.worse >= target for expected, _ in tried):
                break
            tried.append((model.forecast(choice.after(now.counts), demand), choice))
            if tried[-1][0].worse >= (1 + target) / 2:
                break
        if not tried:
            return None, f"{next(iter(short.values()))}; the bounds allow no other numbers of workers"
        expected, best = max(tried, key=lambda each: round(each[0].worse, 2))  # of equal ones the first
        compared = f"expected of {_split(now.counts)} is {present}, of {_split(best.after(now.counts))} {expected}"
        if expected.worse < present.worse + GAIN:
            return None, f"{next(iter(short.values()))}; {compared}"
        return best._replace(reason=f"{best.reason}; {compared}", expected=expected), ""

    def _choices(self, now: Observation, short: Mapping[Role, str]) -> Iterator[Action]:
        """What could be done about roles that are short: flips of more and more workers, of many only some numbers,
        then another worker."""
        for role, why in short.items():
            most, has = self._most(role), now.of(role)
            can_leave = now.of(role.other).workers - self._least(role.other)
            can_come = can_leave if most is None else most - has.workers - has.coming
            last = min(can_leave, can_come)
            for number in range(1, last + 1):
                if number == last or _is_round(number):
                    yield Action("flip", role, why, number)
        for role, why in short.items() if self._may_add(now) else ():
            if self._has_room_for(now, role):
                yield Action("add", role, why)

    def _in_words(self, seen: Observation) -> str:
        """How the objectives are met, where no role is short."""
        count = sum(seen.ttft) + seen.overdue
        parts = []
        if count:
            parts.append(f"{sum(seen.ttft[: len(SHARES)]) / count:.0%} of first tokens met the objective of TTFT")
        if sum(seen.itl):
            parts.append(f"{_within(seen.itl, 1.0):.0%} of tokens met that of ITL")
        parts += [_in_use(seen, role) for role in Role]
        return "; ".join(parts)

    def _to_remove(self) -> Action | None:
        """A worker that has not been needed for a long time."""
        window = list(self._window)
        if window[-1].end_s - window[0].begin_s < REMOVE_HOLDS * self._config.hold_s - self._config.interval_s:
            return None
        now, parts = _sum(window), _thirds(window)
        if (
            any(self._short(part, 1) for part in (now, *parts))
            or sum(now.counts) <= self._config.min_workers
            or now.prefill.coming
            or now.decode.coming
        ):
            return None
        spares = [
            (now.of(role).load, role)
            for role in Role
            if not (self._cannot_spare(now, role, REMOVE) or self._cannot_spare(parts[-1], role, REMOVE))
        ]
        if not spares:
            return None
        _, role = min(spares)
        return Action("remove", role, _in_use(now, role))

    def _short(self, seen: Observation, least: int) -> dict[Role, str]:
        """The roles of which another worker is needed, and why. Of fewer than ``least`` requests nothing is said."""
        target, short = self._config.attainment, {}
        count, batch = sum(seen.ttft) + seen.overdue, seen.decode.running
        if count >= least and (share := sum(seen.ttft[: len(SHARES)]) / count) < target:
            why = f"{share:.0%} of first tokens met the objective of TTFT"
            if seen.decode.short > max(seen.prefill.short, SHORT):
                short[Role.DECODE] = f"{why}, and requests wait for room on decode workers"
            elif seen.prefill.load >= BUSY or seen.prefill.short > SHORT:
                short[Role.PREFILL] = f"{why}, and prefill workers are busy for {seen.prefill.load:.0%} of the time"
        if sum(seen.itl) >= 10 * least and batch > 1 and (share := _within(seen.itl, 1.0)) < target:
            why = f"{share:.0%} of tokens met the objective of ITL, with {batch:.1f} requests in a batch"
            short.setdefault(Role.DECODE, why)
        return short

    def _cannot_spare(self, seen: Observation, role: Role, capacity: float) -> str:
        """Why the role cannot spare a worker; empty if it can."""
        has = seen.of(role)
        left = has.workers - 1
        if left < self._least(role):
            return f"there have to be {self._least(role)} {role} workers or more"
        if has.short > SHORT:
            return f"requests wait for {role} workers as well"
        if has.load * has.workers > capacity * left:
            return _in_use(seen, role)
        # With fewer workers batches grow by the inverse of this share, and gaps by less.
        share = left / has.workers * (capacity / SPARE)
        if role is Role.DECODE and any(seen.itl) and _within(seen.itl, share) < self._config.attainment:
            return "with a decode worker less, gaps between tokens could miss the objective of ITL"
        return ""

    def _has_room_for(self, seen: Observation, role: Role) -> bool:
        """Whether there may be another worker of the role."""
        most = self._most(role)
        return most is None or seen.of(role).workers + seen.of(role).coming < most

    def _may_add(self, seen: Observation) -> bool:
        """Whether another worker may be started now."""
        waits, most = seen.prefill.coming + seen.decode.coming, self._config.max_workers or 0
        return self._config.controller == "workers" and not waits and sum(seen.counts) < most

    def _least(self, role: Role) -> int:
        return max(1, self._config.min_prefill if role is Role.PREFILL else self._config.min_decode)

    def _most(self, role: Role) -> int | None:
        return self._config.max_prefill if role is Role.PREFILL else self._config.max_decode


def _is_round(number: int) -> bool:
    """Whether it is one of 1, 2, 3, 4, 6, 8, 12, 16, …"""
    power = 1 << (number.bit_length() - 1)
    return 2 * (number - power) in (0, power)


def _split(counts: Counts) -> str:
    return f"{counts[0]}P{counts[1]}D"


def _measured(seen: Observation) -> Forecast:
    """The shares that met their objectives."""
    count, gaps = sum(seen.ttft) + seen.overdue, sum(seen.itl)
    ttft = sum(seen.ttft[: len(SHARES)]) / count if count else 1.0
    return Forecast(ttft, _within(seen.itl, 1.0) if gaps else 1.0)


def _in_use(seen: Observation, role: Role) -> str:
    return f"{role} workers have {seen.of(role).load:.0%} of their capacity in use"


def _thirds(observations: Sequence[Observation]) -> list[Observation]:
    """The observations in three parts, each as one."""
    count = len(observations)
    bounds = [0, count // 3, 2 * count // 3, count]
    return [_sum(observations[a:b]) for a, b in itertools.pairwise(bounds) if b > a]


def _within(counts: Sequence[int], share: float) -> float:
    """The share of all that took at most so large a share of the objective (the next lower one that is counted)."""
    met = sum(count for bound, count in zip(SHARES, counts, strict=False) if bound <= share + 1e-9)
    return met / sum(counts)


def _sum(observations: Sequence[Observation]) -> Observation:
    """All of them as one."""
    last = observations[-1]

    def role_load(role: Role) -> RoleLoad:
        each = [seen.of(role) for seen in observations]
        return RoleLoad(
            last.of(role).workers,
            last.of(role).coming,
            fmean([one.load for one in each]),
            fmean([one.running for one in each]),
            fmean([one.short for one in each]),
            sum([one.steps for one in each]),
            sum([one.busy_s for one in each]),
        )

    def total(count: Callable[[Observation], int]) -> int:
        return sum(map(count, observations))

    return Observation(
        observations[0].begin_s,
        last.end_s,
        role_load(Role.PREFILL),
        role_load(Role.DECODE),
        _columns(seen.ttft for seen in observations),
        _columns(seen.itl for seen in observations),
        last.overdue,
        total(lambda seen: seen.requests),
        total(lambda seen: seen.first_tokens),
        total(lambda seen: seen.prompt_tokens),
        _columns(seen.prompts for seen in observations),
        total(lambda seen: seen.output_tokens),
        fmean([seen.in_flight for seen in observations]),
    )


def _columns(rows: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*[row for row in rows if row], strict=True))


def _is_same_load(a: Observation, b: Observation) -> bool:
    """Whether two loads are alike as they are independent of the workers that bear them: in tokens of a prompt and of
    an output, and in requests per second or in progress. Where clients wait for answers their number stays, elsewhere
    their rate does."""

    def figures(seen: Observation) -> tuple[float, ...]:
        first, seconds = max(1, seen.first_tokens), max(1e-6, seen.end_s - seen.begin_s)
        return seen.prompt_tokens / first, seen.output_tokens / first, seen.requests / seconds, seen.in_flight

    prompts, outputs, rate, in_flight = map(_alike, figures(a), figures(b))
    return prompts and outputs and (rate or in_flight)


def _requests_alike(a: Observation, b: Observation) -> bool:
    """Whether requests of two loads are alike, in tokens of a prompt and of an output."""
    figures = [(max(1, seen.first_tokens), seen.prompt_tokens, seen.output_tokens) for seen in (a, b)]
    (first, prompts, outputs), (other, prompts_b, outputs_b) = figures
    return _alike(prompts / first, prompts_b / other) and _alike(outputs / first, outputs_b / other)


def _alike(a: float, b: float) -> bool:
    return max(a, b) <= SAME * min(a, b) or max(a, b) < 1e-6
