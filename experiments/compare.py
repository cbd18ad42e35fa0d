"""``pdserve compare``: the figures of two runs of the same kind side by side, and whether one got worse.

A figure has a dotted key. Figures of ``rows`` are means over the successful requests of a cell, arm and kind, and their
difference has a bootstrap interval. All others come from ``summary.json``, where entries of a list are named by their
cell, system or parameters. Of those, the ones that have an interval (``lo``, ``hi``, ``n``) get one for the
difference: the widest one that both allow. `verdict` sums them up."""

from __future__ import annotations

import fnmatch
import itertools
import json
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from experiments.catalogue import run_of
from experiments.environment import version_text
from experiments.run_folder import SETTINGS, Figures, RequestRow, RunFolder
from experiments.statistics import difference_interval
from ops.machine_load import beside_cores, beside_text
from pdserve.core.errors import InvalidRequest
from pdserve.core.interval import Interval

_STRETCHES = 10
"""Parts of a load with one round that are resampled as a whole: what delays a request also delays those after it."""
_LATENCIES = ("ttft_ms", "ttft_decode_ms", "tpot_ms", "e2e_ms")
_NAMES = ("cell", "system", "name")
_PARAMETERS = ("rate_per_device", "shared_len", "context", "batch", "tokens")
"""Of an entry without a name: what tells it from the others of its list."""
_LEFT_OUT = ("n", "count", "seed", "lo", "hi", "prompt_len", "rate", "devices", "planned", *_PARAMETERS)
_MORE_IS_BETTER = re.compile(
    r"goodput|attainment|per_s\b|_rps|gbs\b|gflops|of_roof|explained|sustained|share\b|equal_pct|gain|saved|speedup"
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure of both runs. ``difference`` is b minus a; its ``interval`` is None where only the two values are
    known."""

    key: str
    a: float
    b: float
    interval: Interval | None

    @property
    def difference(self) -> float:
        """b minus a."""
        return self.b - self.a

    @property
    def percent(self) -> float | None:
        """The difference in percent of a; None if a is 0."""
        return 100 * self.difference / abs(self.a) if self.a else None

    @property
    def distinct(self) -> bool:
        """Whether there is an interval, which leaves 0 out."""
        return self.interval is not None and self.interval.sign != 0

    @property
    def more_is_better(self) -> bool:
        """Whether a larger value is a better one: a rate or a share, and not a time."""
        return _MORE_IS_BETTER.search(self.key) is not None

    @property
    def worse(self) -> bool:
        """Whether b is on the worse side of a."""
        return (self.difference < 0) == self.more_is_better

    def exceeds(self, percent: float) -> bool:
        """Whether b is worse than a by more than ``percent`` of a, with the whole interval of the difference."""
        lo, hi = (self.interval.lo, self.interval.hi) if self.interval else (self.difference, self.difference)
        return (-hi if self.more_is_better else lo) > percent / 100 * abs(self.a)

    def to_dict(self) -> Figures:
        """Plain values."""
        interval = None if self.interval is None else self.interval.to_dict()
        return {**asdict(self), "difference": self.difference, "percent": self.percent, "interval": interval}


@dataclass(frozen=True, slots=True)
class Limit:
    """``KEY=PERCENT``: how much worse the figures of a key may get. The key is a whole key, the end of one that
    follows a dot, or a pattern with ``*``."""

    key: str
    percent: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """InvalidRequest unless ``text`` is ``KEY=PERCENT``."""
        found = re.fullmatch(r"\s*(.*\S)\s*=\s*(\d+\.?\d*|\.\d+)\s*%?\s*", text)
        if found is None:
            raise InvalidRequest(f"limit: {text!r} is not KEY=PERCENT, such as ttft_ms=5")
        return cls(found[1], float(found[2]))

    def covers(self, key: str) -> bool:
        """Whether the limit is of this figure."""
        return f".{key}".endswith(f".{self.key}") or fnmatch.fnmatchcase(key, self.key)


@dataclass(frozen=True, slots=True)
class Missing:
    """A figure that only one of the runs has, such as that of a cell which the other did not measure, or in which all
    its requests failed. ``of`` is the run without it, A or B."""

    key: str
    of: str


def compare(a: RunFolder, b: RunFolder) -> tuple[list[Comparison], list[Missing]]:
    """All figures that both runs have, those of rows first, with the arms of `common_arm`; and those that only one of
    them has, those that B lacks first. InvalidRequest if this version cannot read one of them, if they are of different
    kinds, if one has no summary, or if they have nothing in common."""
    kinds = run_of(a).name, run_of(b).name
    if kinds[0] != kinds[1]:
        raise InvalidRequest(
            f"{b.path} is a run of {kinds[1]} and {a.path} one of {kinds[0]}; give two runs of the same experiment"
        )
    arm = common_arm(a, b)
    of_a, of_b = _figures(a, arm), _figures(b, arm)
    found = [_compared(key, first, of_b[key]) for key, first in of_a.items() if key in of_b]
    if not found:
        raise InvalidRequest(f"{a.path} and {b.path} have no figure in common: they measured different cells")
    lacking = (("B", of_a.keys() - of_b.keys()), ("A", of_b.keys() - of_a.keys()))
    return found, [Missing(key, name) for name, keys in lacking for key in sorted(keys)]


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that figures depend on beside the code, and that was another one in each run: of the machine, of the
    service, or (``cells``: in which of the cells that both have) a setting of the service."""

    key: str
    a: Any
    b: Any
    cells: tuple[str, ...] = ()


def differences(a: RunFolder, b: RunFolder) -> list[Difference]:
    """In what machine and service of two runs differ, as far as both recorded it."""
    of_a, of_b = _surroundings(a), _surroundings(b)
    found = [Difference(key, of_a[key], of_b[key]) for key in of_a if key in of_b and of_a[key] != of_b[key]]
    settings = [{cell.cell: _flat(cell.facts.get(SETTINGS, {})) for cell in run.load().cells} for run in (a, b)]
    places: dict[str, list[str]] = {}
    for cell in sorted(settings[0].keys() & settings[1].keys()):
        first, second = (each[cell] for each in settings)
        for key in sorted(first.keys() & second.keys()):
            if first[key] != second[key]:
                which = json.dumps({"key": key, "a": first[key], "b": second[key]})
                places.setdefault(which, []).append(cell)
    return [*found, *(Difference(**json.loads(which), cells=tuple(cells)) for which, cells in places.items())]


def _flat(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Settings by dotted key."""
    return {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}


def _surroundings(run: RunFolder) -> dict[str, Any]:
    """What ``env.json`` says of the machine and the service that figures depend on, by the words for it."""
    environment = run.environment
    machine, service = environment.get("machine") or {}, environment.get("service") or {}
    found = {f"machine: {key}": machine[key] for key in ("host", "cpu", "affinity", "python") if key in machine}
    found |= {f"machine: {package}": version for package, version in machine.get("packages", {}).items()}
    keys = ("model", "model_hash", "dtype", "context_length", "block_size")
    found |= {f"service: {key}": service[key] for key in keys if key in service}
    if service:
        workers = Counter(f"{w['role']} on {w['device']} with {w['num_blocks']} blocks" for w in service["workers"])
        links = Counter(link["transport"] for link in service["links"])
        for name, counts in (("workers", workers), ("links", links)):
            found[f"service: {name}"] = ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "none"
    return found


def arms_of(run: RunFolder) -> tuple[str, ...]:
    """The arms that have rows in a run, in alphabetical order."""
    return tuple(sorted({row.arm for row in run.load().rows}))


def common_arm(a: RunFolder, b: RunFolder) -> str | None:
    """``A→B`` where each run has one arm and their names differ, as with ``bench --mode pd`` and ``--mode colocated``:
    the two correspond, and this is their name in keys. None otherwise: arms of the same name correspond."""
    arms = arms_of(a), arms_of(b)
    return "→".join(names[0] for names in arms) if arms[0] != arms[1] and [*map(len, arms)] == [1, 1] else None


def verdict(a: RunFolder, b: RunFolder, found: Sequence[Comparison]) -> str:
    """One sentence: the versions, in what B is worse or better than A beyond the interval of the difference, with the
    largest changes, and how much of the rest did not change, or has no interval."""
    known = [each for each in found if each.interval is not None]
    changed = sorted((each for each in known if each.distinct), key=lambda each: -abs(each.percent or 0.0))
    of_known = f"{len(known)} figures that have an interval"
    text = f"none of the {of_known} changed beyond it"
    if not known:
        text = "no figure has an interval, so nothing can be told from chance"
    elif changed:
        parts = []
        for name in ("worse", "better"):
            if side := [each for each in changed if each.worse == (name == "worse")]:
                percent = "" if side[0].percent is None else f" {side[0].percent:+.0f} %"
                parts.append(f"{name} in {len(side)} (most: {side[0].key}{percent})")
        text = (
            f"of the {of_known}, B is {' and '.join(parts)}; the other {len(known) - len(changed)} did not change "
            "beyond it (by what varies within a run alone, one in twenty would)"
        )
    versions = " and ".join(
        f"{name}: {version_text(folder.environment.get('machine', {}))}" for name, folder in (("A", a), ("B", b))
    )
    loads = [max((cell.facts for cell in run.load().cells), key=beside_cores, default={}) for run in (a, b)]
    beside = {name: words for name, load in zip("AB", loads, strict=True) if (words := beside_text(load))}
    told = "".join(f" {name} was measured {words}." for name, words in beside.items())
    return f"{versions}; {text}; {len(found) - len(known)} figures have no interval.{told}"


def violations(
    figures: Sequence[Comparison | Missing], limits: Sequence[Limit]
) -> list[tuple[Comparison | Missing, Limit]]:
    """Every figure that exceeds a limit, or has one and is missing in a run. InvalidRequest names a limit that is of no
    figure."""
    broken = []
    for limit in limits:
        covered = [each for each in figures if limit.covers(each.key)]
        if not covered:
            raise InvalidRequest(f"limit: the runs have no figure {limit.key!r}; see their keys with --json")
        broken += [(each, limit) for each in covered if isinstance(each, Missing) or each.exceeds(limit.percent)]
    return broken


def flatten(value: Any, key: str = "") -> dict[str, float | Interval]:
    """The numbers and intervals of a summary by dotted key, which for a median ends with ``median``. Counts and
    parameters are left out."""
    if isinstance(value, Mapping) and {"lo", "hi", "n"} <= value.keys():
        interval = Interval.from_dict(value)
        return {f"{key}.median" if interval.estimate == "median" else key: interval}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {key: float(value)}
    named: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        named = [(str(name), each) for name, each in value.items() if name not in _LEFT_OUT]
    elif isinstance(value, list):
        named = [(_name_of(each) or str(number), each) for number, each in enumerate(value)]
    found: dict[str, float | Interval] = {}
    for name, each in named:
        found |= flatten(each, f"{key}.{name}" if key else name)
    return found


def _name_of(entry: Any) -> str:
    """The name of an entry of a list, which the same entry has in another run; empty if it has none."""
    if not isinstance(entry, Mapping):
        return ""
    if "cell" in entry and "arm" in entry:
        return f"{entry['cell']}.{entry['arm']}"
    named = next((str(entry[name]) for name in _NAMES if name in entry), "")
    return named or ",".join(f"{name}={entry[name]}" for name in _PARAMETERS if name in entry)


def _figures(run: RunFolder, arm: str | None) -> dict[str, Any]:
    """The latencies of the successful requests, each with its group (`_groups`), by cell, arm (``arm`` instead of their
    own), kind (if any) and figure; then the figures of the summary, in which ``arm`` is the name of its only arm.
    Latencies count from when a request was due, or from its sending where bench had no times."""
    rows: dict[tuple[str, ...], list[RequestRow]] = {}
    for row in run.load().rows:
        if row.error is None:
            rows.setdefault((row.cell, arm or row.arm, row.kind), []).append(row)
    found: dict[str, list[tuple[float, int]]] = {}
    scheduled = run.config[1].get("scheduled", True)
    for place, of_place in rows.items():
        of_place.sort(key=lambda row: row.sent_s)
        for row, group in zip(of_place, _groups(of_place), strict=True):
            counted = row.since_due() if scheduled else row
            for name in _LATENCIES:
                if (value := getattr(counted, name)) is not None:
                    key = ".".join(filter(None, ("rows", *place, name)))
                    found.setdefault(key, []).append((float(value), group))
    summary = run.summary
    if arm is not None and summary.get("arms"):
        summary["arms"] = {arm: next(iter(summary["arms"].values()))}
    return {**found, **flatten(summary)}


def _groups(rows: Sequence[RequestRow]) -> Sequence[int]:
    """Numbers that are equal for requests which depend on each other, of ``rows`` in the order of their sending: the
    repeat, whose requests share a queue; of a single repeat `_STRETCHES` of about the same size. Where no two requests
    overlapped, each has a number of its own."""
    repeats = [row.repeat for row in rows]
    if len(set(repeats)) > 1:
        return repeats
    if any(a.sent_s + (a.e2e_ms or 0.0) / 1e3 > b.sent_s for a, b in itertools.pairwise(rows)):
        return [number * _STRETCHES // len(rows) for number in range(len(rows))]
    return range(len(rows))


def _compared(key: str, a: Any, b: Any) -> Comparison:
    if isinstance(a, list) and isinstance(b, list):
        (of_a, groups_a), (of_b, groups_b) = zip(*a, strict=True), zip(*b, strict=True)
        interval = difference_interval(of_a, of_b, groups=(groups_a, groups_b))
        assert interval is not None
        return Comparison(key, statistics.fmean(of_a), statistics.fmean(of_b), interval if interval.known else None)
    first, second = (each.value if isinstance(each, Interval) else each for each in (a, b))
    difference = None
    if isinstance(a, Interval) and isinstance(b, Interval) and a.known and b.known:
        difference = Interval(second - first, b.lo - a.hi, b.hi - a.lo, min(a.n, b.n))
    return Comparison(key, first, second, difference)
