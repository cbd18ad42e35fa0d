"""What one client's abuse costs others, and which bounds hold: `python -m benchmarks.abuse`.

Abuse: four clients stream answers while a fifth, in a process of its own, misbehaves: with a token by gRPC and HTTP, or
as a stranger with frames of HTTP/2 that no library sends. Windows without it, with the same abuse of another server
beside (what the load alone costs this machine), and with it alternate; the figure is the longest gap between two tokens
of a window, as a median over the windows. Each kind is held against `BOUNDS`. Then the fairness between two clients
(`benchmarks.fairness`), and a burst of streams (`benchmarks.burst`). Tables, then one JSON line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import psutil
import typer
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.abuse_client import GRPC_KINDS, HTTP_KINDS
from benchmarks.bare_server import started
from benchmarks.burst import BURST, PROMPT, QUICK_BURST, REFUSING, bursts
from benchmarks.fairness import fairness
from benchmarks.http2_attacks import ATTACKS
from benchmarks.quick import Quick
from gateway.token_file import digest_of
from ops.launch.detach import start_detached, stop_detached
from ops.launch.ports import free_ports
from ops.launch.state import ServiceState
from pdserve import AsyncClient, Client
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import PdserveError

INNOCENTS = 4
PAUSE_S = 0.1
DRAWN: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "temperature": 1.0, "seed": 7}
STRANGER_KINDS = tuple(f"h2-{kind}" for kind in ATTACKS)
AGAIN = "h2-resets-again"
"""Resets over a new connection whenever one was closed."""
KINDS = (*GRPC_KINDS, *HTTP_KINDS, *STRANGER_KINDS, AGAIN)
QUICK_KINDS = ("resets", "beyond-limits", "http-lists", "h2-resets")
BOUNDS = {"gap": 3.0, "memory_mb": 200.0, "memory_after_mb": 50.0, "cpu_after_s": 5.0}
"""How many times as long the longest gap may be (as without the abuse, or as beside it); how much the gateway's memory
may grow, and how much of that may be left after 30 s; and how soon its CPU is idle again."""
SETTLE_S = 30.0
IDLE_CPU = 0.2


def main(
    rounds: Annotated[int, typer.Option(min=1, help="windows of each kind")] = 3,
    window_s: Annotated[float, typer.Option(min=1.0, help="length of a window")] = 5.0,
    kind: Annotated[list[str] | None, typer.Option(help="kinds of abuse, and nothing else")] = None,
    quick: Quick = False,
) -> None:
    """Measure all of it."""
    console, burst, kinds = Console(), BURST, KINDS
    if kind is not None:
        if unknown := set(kind) - set(KINDS):
            raise typer.BadParameter(f"{', '.join(unknown)}: use {', '.join(KINDS)}", param_hint="--kind")
        print(json.dumps({"abuse": _abuse(console, tuple(kind), rounds, window_s)}))  # noqa: T201
        return
    if quick:
        rounds, window_s, burst, kinds = 1, 1.0, QUICK_BURST, QUICK_KINDS
    result = {
        "abuse": _abuse(console, kinds, rounds, window_s),
        "fairness": fairness(console, rounds, window_s),
        "burst": bursts(console, burst),
    }
    print(json.dumps(result))  # noqa: T201 - the last line is for programs


def _abuse(console: Console, kinds: tuple[str, ...], rounds: int, window_s: float) -> dict[str, Any]:
    columns = (
        "without, ms",
        "beside, ms",
        "answers",
        "first attempt",
        "wrong",
        "errors",
        "memory, MB",
        "after",
        "CPU after, s",
    )
    table = Table("abuse", "longest gap with it, ms", *columns, "not held", box=None)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder, started(REFUSING) as (port_elsewhere, _):
        tiny = {"model.path": "tiny", "model.dtype": "float32", "gateway.port": 0, "router.max_unread_tokens": 64}
        http_port, tokens = free_ports("127.0.0.1", 0, 1), str(_tokens(Path(folder)))
        settings = PdserveConfig.load(None, {**tiny, "gateway.tokens": tokens, "gateway.http_port": http_port})
        port = start_detached(settings, lambda stage: None)
        try:
            service = _Service(port, http_port, f"localhost:{port_elsewhere}")
            for kind in kinds:
                figures = result[kind] = service.measure(kind, rounds, window_s)
                table.add_row(kind, *(_shown(figures[name]) for name in figures))
        finally:
            stop_detached(port)
    console.print(table)
    return result


def _tokens(folder: Path) -> Path:
    """A file with the tokens ``innocent``, ``abuser``, and ``limited``, which allows one request at a time."""
    path = folder / "tokens.yaml"
    path.touch(mode=0o600)
    entries: list[dict[str, Any]] = [{"name": name, "sha256": digest_of(name).hex()} for name in ("innocent", "abuser")]
    entries.append({"name": "limited", "sha256": digest_of("limited").hex(), "limits": {"concurrent": 1}})
    path.write_text(yaml.safe_dump({"tokens": entries}))
    return path


def _shown(figure: object) -> str:
    if isinstance(figure, list):
        return ", ".join(figure) or "–"
    if isinstance(figure, dict):
        return str(sum(figure.values()))
    return "–" if figure is None else str(figure)


class Answer(NamedTuple):
    """What an innocent client got. ``error``: why it got nothing."""

    token_ids: tuple[int, ...] = ()
    attempts: int = 0
    error: str = ""


class _Service:
    """A service under abuse. ``elsewhere``: the address of another gRPC server, for the same abuse."""

    def __init__(self, port: int, http_port: int, elsewhere: str) -> None:
        self._target = f"127.0.0.1:{port}"
        self._elsewhere = elsewhere
        state = ServiceState.read(port)
        with Client(state.operator) as operator:
            self._gateway = psutil.Process(operator.status().pid)
        self._http = f"127.0.0.1:{http_port}"
        with Client(self._target, token="innocent") as client:
            self._expected = client.generate(PROMPT, **DRAWN).result().token_ids

    def measure(self, kind: str, rounds: int, window_s: float) -> dict[str, Any]:
        """The figures of a kind of abuse."""
        gaps_s: dict[str, list[float]] = {"with": [], "without": [], "beside": []}
        answers: list[Answer] = []
        cpu_after_s = 0.0
        memory = _Memory(self._gateway)
        for _ in range(rounds):
            for name in gaps_s:
                address = {"with": self._address(kind), "without": None, "beside": self._elsewhere}[name]
                if name == "beside" and kind in HTTP_KINDS:
                    continue  # that server speaks no HTTP/1.1
                with memory.sampled() if name == "with" else contextlib.nullcontext(), _abusing(kind, address):
                    gap_s, found = asyncio.run(_window(self._target, window_s))
                gaps_s[name].append(gap_s)
                answers += found if name == "with" else []
                if name == "with":
                    cpu_after_s = max(cpu_after_s, _idle_after_s(self._gateway))
        middle_ms = {name: round(statistics.median(each) * 1e3, 1) for name, each in gaps_s.items() if each}
        figures = {
            "longest_gap_ms": middle_ms["with"],
            "without_ms": middle_ms["without"],
            "beside_ms": middle_ms.get("beside"),
            "answers": len(answers),
            "first_attempt": sum(answer.attempts == 1 for answer in answers),
            "wrong": sum(answer.token_ids != self._expected for answer in answers),
            "errors": dict(Counter(answer.error for answer in answers if answer.error)),
            "memory_mb": memory.peak_mb,
            "memory_after_mb": memory.settled_mb(),
            "cpu_after_s": round(cpu_after_s, 1),
        }
        return {**figures, "not_held": _not_held(figures)}

    def _address(self, kind: str) -> str:
        return self._http if kind in HTTP_KINDS else self._target


def _not_held(figures: dict[str, Any]) -> list[str]:
    """The bounds that did not hold."""
    usual_ms = max(figures["without_ms"], figures["beside_ms"] or 0.0)
    held = {
        "gap": figures["longest_gap_ms"] <= BOUNDS["gap"] * usual_ms,
        **{name: figures[name] <= BOUNDS[name] for name in ("memory_mb", "memory_after_mb", "cpu_after_s")},
        "first attempt": figures["first_attempt"] == figures["answers"],
        "answers": figures["wrong"] == 0,
    }
    return [name for name, holds in held.items() if not holds]


class _Memory:
    """How much the memory of a process grows while it is sampled."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._before = self._peak = process.memory_info().rss

    @contextlib.contextmanager
    def sampled(self) -> Iterator[None]:
        """A context in which its peak is looked for."""
        over = threading.Event()

        def sample() -> None:
            while not over.wait(0.05):
                self._peak = max(self._peak, self._process.memory_info().rss)

        sampling = threading.Thread(target=sample)
        sampling.start()
        try:
            yield
        finally:
            over.set()
            sampling.join()

    @property
    def peak_mb(self) -> float:
        """The growth at the peak."""
        return round((self._peak - self._before) / 2**20, 1)

    def settled_mb(self) -> float:
        """What is left of it, after `SETTLE_S` at the latest."""
        until_s = time.monotonic() + SETTLE_S
        while (left := (self._process.memory_info().rss - self._before) / 2**20) > BOUNDS["memory_after_mb"]:
            if time.monotonic() > until_s:
                break
            time.sleep(0.5)
        return round(left, 1)


def _idle_after_s(process: psutil.Process) -> float:
    """Seconds until a process, which has nothing to do, uses less than `IDLE_CPU` of a core; 30 if it goes on."""
    begin_s = time.monotonic()
    while (waited_s := time.monotonic() - begin_s) < SETTLE_S:
        if process.cpu_percent(0.25) < 100 * IDLE_CPU:
            return waited_s
    return SETTLE_S


@contextlib.contextmanager
def _abusing(kind: str, address: str | None) -> Iterator[None]:
    """A context in which a client abuses the server at ``address`` (None: no such client)."""
    if address is None:
        yield
        return
    if kind == AGAIN:
        command = ["benchmarks.http2_attacks", "resets", address, "again"]
    elif kind in STRANGER_KINDS:
        command = ["benchmarks.http2_attacks", kind.removeprefix("h2-"), address]
    else:
        command = ["benchmarks.abuse_client", kind, address, "limited" if kind == "beyond-limits" else "abuser"]
    abuser = subprocess.Popen([sys.executable, "-m", *command])
    try:
        yield
        ended = abuser.poll()
    finally:
        abuser.terminate()
        abuser.wait(30)
    # An attack ends when its connection is closed; the others go on until they are ended.
    if ended or (ended == 0 and kind not in STRANGER_KINDS):
        raise RuntimeError(f"the client of kind {kind} ended by itself, with status {ended}")


async def _window(target: str, window_s: float) -> tuple[float, list[Answer]]:
    """The longest gap between tokens in a window, and the answers."""
    answers: list[Answer] = []
    longest_s = 0.0
    until_s = time.monotonic() + window_s

    async def innocent() -> None:
        nonlocal longest_s
        async with AsyncClient(target, token="innocent") as client:
            while time.monotonic() < until_s:
                stream = client.generate(PROMPT, **DRAWN)
                last_s = 0.0
                try:
                    async for _ in stream:
                        now_s = time.monotonic()
                        if last_s:
                            longest_s = max(longest_s, now_s - last_s)
                        last_s = now_s
                    result = await stream.result()
                except PdserveError as error:
                    answers.append(Answer(error=f"{type(error).__name__}: {error}"))
                    await asyncio.sleep(PAUSE_S)
                else:
                    answers.append(Answer(result.token_ids, result.attempts))

    await asyncio.gather(*(innocent() for _ in range(INNOCENTS)))
    return longest_s, answers


if __name__ == "__main__":
    typer.run(main)
