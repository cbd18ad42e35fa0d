"""The prompts' texts while they stream: a live panel on a terminal, otherwise a line for each finished request."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ops.demo.prompts import DemoPrompt
from pdserve.client.generation import Generation, Token
from pdserve.core.errors import PdserveError

_TAIL = 400


class LiveTexts:
    """Rows of streaming text, as a context manager around the requests."""

    def __init__(self, console: Console, prompts: Sequence[DemoPrompt]) -> None:
        self._console = console
        self._prompts = prompts
        self._texts = [""] * len(prompts)
        self._counts = [0] * len(prompts)
        self._ends: list[Generation | PdserveError | None] = [None] * len(prompts)
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=10)

    def token(self, index: int, token: Token) -> None:
        """Add a token of request ``index``."""
        self._texts[index] = (self._texts[index] + token.text)[-_TAIL:]
        self._counts[index] += 1

    def end(self, index: int, end: Generation | PdserveError) -> None:
        """Mark request ``index`` as finished or failed."""
        self._ends[index] = end
        if not self._console.is_terminal:
            name = f"#{index + 1} {self._prompts[index].name:12} "
            line = Text.assemble(name, self._state(index), "  ", self._tail(index))
            self._console.print(line, no_wrap=True, overflow="ellipsis")

    def _render(self) -> Panel:
        table = Table(box=None, padding=(0, 1), show_header=False, expand=True)
        table.add_column(width=2)
        table.add_column(width=11, no_wrap=True)
        table.add_column(width=24, no_wrap=True)
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for index, prompt in enumerate(self._prompts):
            table.add_row(f"#{index + 1}", prompt.name, self._state(index), self._tail(index))
        return Panel(table, title=f"{len(self._prompts)} requests at once", title_align="left", border_style="dim")

    def _state(self, index: int) -> Text:
        match self._ends[index]:
            case Generation() as done:
                return Text(f"{done.prompt_tokens} + {len(done.token_ids)}, ttft {done.ttft_ms:.0f} ms", style="green")
            case PdserveError() as error:
                return Text(f"failed: {error}", style="red")
        return Text(f"{self._counts[index]} tokens" if self._counts[index] else "waiting", style="dim")

    def _tail(self, index: int) -> Text:
        width = max(20, self._console.width - 54)
        return Text(" ".join(self._texts[index].split())[-width:])

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
