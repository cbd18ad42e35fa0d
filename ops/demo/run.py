"""The demo against a running service: concurrent prompts, waterfalls, and the paired comparison.

Each request has its own salt, because a prefix cache would make later rounds incomparable with the first one."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ops.demo.prompts import CALIBRATION, demo_prompts
from ops.demo.report import DemoReport, PairedRound
from ops.machine_load import MachineLoad, beside_text
from ops.settled import leaked_blocks, settled
from ops.waterfall.bars import longest, proof
from ops.waterfall.picture import save_waterfalls
from ops.waterfall.terminal import overview
from pdserve.client.async_client import AsyncClient
from pdserve.client.generation import Generation
from pdserve.client.target import Target
from pdserve.core.errors import PdserveError
from pdserve.core.interval import CONFIDENCE
from pdserve.core.request import Mode, counted
from pdserve.core.timeline import Figure

MAX_TOKENS = 32
LATER_ROUNDS_MAX_TOKENS = 4  # enough for both figures; the first round compares the whole text
ROUNDS = 5
ROUNDS_BUDGET_S = 25.0  # unless rounds are asked for, none starts after this time


async def run_demo(target: str | Target, png: Path, console: Console, rounds: int | None = None) -> DemoReport:
    """Run the demo: print to ``console``, save the picture, and return the results. ``rounds`` of the paired comparison
    are run whatever time they take; None runs `ROUNDS` of them within `ROUNDS_BUDGET_S`. Failed requests are counted;
    `NotReady` if the service does not answer at all."""
    async with AsyncClient(target) as client:
        prompts = await _prepare(client)
        report = DemoReport(requests=len(prompts))
        before = await settled(client)
        meter = MachineLoad.begin(Target.of(target))
        await _at_once(client, prompts, report, console)
        if report.live:
            console.print()
            console.print(overview(report.live))
            for index, generation in enumerate(report.live, 1):
                console.print(f"#{index} {proof(generation)}", style="dim")
            title = f"{len(report.live)} requests at once on {before.model}: where the time to first token went"
            if any(longest(generation) for generation in report.live):
                saved = await asyncio.to_thread(save_waterfalls, report.live, png, title)
                console.print(f"picture: {saved}\n")
        await _rounds(client, prompts, report, rounds, console)
        report.load_facts = meter.facts()
        report.leaked_blocks = await leaked_blocks(client, before)
    _summarise(report, console)
    return report


async def _prepare(client: AsyncClient) -> dict[str, str]:
    """Warm up both modes, so that no first request is measured, and estimate the characters per token."""
    status = await client.status()
    for mode in (Mode.PD, Mode.COLOCATED):
        warm = await client.generate(CALIBRATION, max_tokens=2, ignore_eos=True, mode=mode).result()
    return demo_prompts(len(CALIBRATION) / warm.prompt_tokens, status.context_length, MAX_TOKENS)


async def _at_once(client: AsyncClient, prompts: Mapping[str, str], report: DemoReport, console: Console) -> None:
    async def one(number: int, name: str, prompt: str) -> Generation | None:
        try:
            done = await _generate(client, prompt, MAX_TOKENS, Mode.PD)
        except PdserveError as error:
            report.errors.append(error)
            console.print(f"#{number} {name:12} [red]failed: {escape(str(error))}[/]")
            return None
        told = f"{done.prompt_tokens} + {len(done.token_ids)}, ttft {done.ttft_ms:.0f} ms"
        text = escape(" ".join(done.text.split()))
        console.print(f"#{number} {name:12} [green]{told}[/]  {text}", no_wrap=True, overflow="ellipsis")
        return done

    texts = enumerate(prompts.items(), 1)
    generations = await asyncio.gather(*(one(number, name, text) for number, (name, text) in texts))
    report.live = [generation for generation in generations if generation is not None]


async def _generate(client: AsyncClient, prompt: str, max_tokens: int, mode: Mode) -> Generation:
    """The answer to a prompt whose KV is in no cache."""
    salt = secrets.token_hex(8)
    return await client.generate(prompt, max_tokens=max_tokens, ignore_eos=True, mode=mode, salt=salt).result()


async def _rounds(
    client: AsyncClient, prompts: Mapping[str, str], report: DemoReport, rounds: int | None, console: Console
) -> None:
    end_s = time.monotonic() + (ROUNDS_BUDGET_S if rounds is None else math.inf)
    for round_index in range(ROUNDS if rounds is None else rounds):
        if round_index and time.monotonic() > end_s:
            console.print(
                f"{round_index} of {ROUNDS} rounds were run in {ROUNDS_BUDGET_S:.0f} s; --rounds {ROUNDS} runs all of "
                "them"
            )
            break
        max_tokens = LATER_ROUNDS_MAX_TOKENS if round_index else MAX_TOKENS
        for index, prompt in enumerate(prompts.values()):
            # The first mode alternates, so that neither benefits from a warm machine.
            order = (Mode.PD, Mode.COLOCATED) if (round_index + index) % 2 else (Mode.COLOCATED, Mode.PD)
            done: dict[Mode, Generation] = {}
            for mode in order:
                try:
                    done[mode] = await _generate(client, prompt, max_tokens, mode)
                except PdserveError as error:
                    report.errors.append(error)
                    console.print(f"[red]#{index + 1} {mode}: {error}[/]")
            if len(done) == len(order):
                report.pairs.append(pair := PairedRound(index, done[Mode.PD], done[Mode.COLOCATED]))
                if not pair.tokens_equal:
                    console.print(f"[red]#{index + 1}: {await _difference(client, prompt, pair)}[/]")
        report.rounds += 1


async def _difference(client: AsyncClient, prompt: str, pair: PairedRound) -> str:
    """Where the tokens of a pair part, and how much likelier the first of the two likeliest tokens is there: in
    bfloat16, another batch may round a small margin away."""
    tokens = zip(pair.pd.token_ids, pair.colocated.token_ids, strict=False)
    place = next((number for number, (ours, theirs) in enumerate(tokens) if ours != theirs), None)
    if place is None:
        return f"{len(pair.pd.token_ids)} tokens, and {len(pair.colocated.token_ids)} colocated"
    again = client.generate(prompt, max_tokens=place + 1, ignore_eos=True, mode=Mode.COLOCATED, logprobs=2)
    first, second = (await again.result()).tokens[place].top_logprobs[:2]
    margin = first.logprob - second.logprob
    return f"token {place + 1} differs; the log-probabilities of the two likeliest are {margin:.4f} apart there"


def _summarise(report: DemoReport, console: Console) -> None:
    beside, rounds = beside_text(report.load_facts), counted(report.rounds, "round")
    console.print(
        f"disaggregated against colocated{beside and f' ({beside})'}: the same {report.requests} prompts, one request "
        f"at a time, modes interleaved, {rounds}; medians of the rounds in ms (added: the median of the pairs' "
        "differences, not the difference of the medians)"
    )
    console.print(_paired_table(report))
    unclear = False
    for figure in Figure:
        added = report.added_ms(figure)
        text = "not measured" if added is None else escape(added.text())
        if added is not None and added.known and not added.sign:
            unclear, text = True, f"{text} (no difference could be measured)"
        console.print(
            f"added {figure.value}: [bold]{text}[/], the median of the prompts' paired differences, with its "
            f"{100 * CONFIDENCE:.0f} % interval"
        )
    if unclear:
        quiet = " a quiet machine," if beside else ""
        console.print(
            f"To measure smaller differences:{quiet} more rounds (--rounds {min(100, 4 * report.rounds)}), more cores."
        )
    pairs = len(report.pairs)
    equal = sum(pair.tokens_equal for pair in report.pairs)
    console.print(f"tokens: {equal} of {pairs} pairs equal (greedy); leaked blocks: {report.leaked_blocks}")
    for error in report.errors[:5]:
        console.print(f"[red]failed: {error}[/]")


def _paired_table(report: DemoReport) -> Table:
    table = Table(box=None, padding=(0, 0, 0, 2), pad_edge=False, header_style="bold")
    table.add_column("#")
    table.add_column("tokens", justify="right")
    for figure in Figure:
        for column in (f"{figure.value} pd", "colocated", "added"):
            table.add_column(column, justify="right", style="bold" if column == "added" else "")
    added = {figure: report.added_by_prompt_ms(figure) for figure in Figure}
    tokens = {pair.prompt: pair.pd.prompt_tokens for pair in report.pairs}
    for prompt in sorted(tokens):
        cells: list[str] = []
        for figure in Figure:
            cells += [_cell(report.median_ms(prompt, mode, figure)) for mode in ("pd", "colocated")]
            cells.append(_cell(added[figure].get(prompt), sign="+"))
        table.add_row(f"#{prompt + 1}", str(tokens[prompt]), *cells)
    return table


def _cell(value: float | None, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}.2f}"
