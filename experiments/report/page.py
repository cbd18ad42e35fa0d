"""The report of a run: one self-contained HTML page, with its pictures inside and beside it."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

PAGE = "report.html"
_DPI = 140


@dataclass(frozen=True, slots=True)
class Picture:
    """A matplotlib figure, saved as ``stem.png``. ``alt`` says what it shows to readers who cannot see it."""

    stem: str
    title: str
    caption: str
    figure: Any
    alt: str = ""


@dataclass(frozen=True, slots=True)
class TableBlock:
    """A table. Cells are text; numbers are formatted by the experiment, with units in the header."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(slots=True)
class Report:
    """What a run found. It reads well on its own: question, set-up, the answer in a sentence, evidence, caveats."""

    title: str
    question: str
    answer: str
    setup: Sequence[tuple[str, str]] = ()
    blocks: list[Picture | TableBlock] = field(default_factory=list)
    caveats: Sequence[str] = ()
    failures: Sequence[str] = ()

    def save(self, folder: Path, footer: str = "") -> Path:
        """Write the page and its pictures into ``folder``; returns the page's path."""
        shown: list[Mapping[str, Any]] = []
        for block in self.blocks:
            if isinstance(block, Picture):
                png = _png(block.figure)
                (folder / f"{block.stem}.png").write_bytes(png)
                shown.append({"picture": block, "data": base64.b64encode(png).decode("ascii")})
            else:
                shown.append({"table": block})
        page = _templates().get_template("page.html.jinja").render(report=self, blocks=shown, footer=footer)
        path = folder / PAGE
        path.write_text(page, encoding="utf-8")
        return path


def save_index(folder: Path, title: str, entries: Sequence[Mapping[str, str]]) -> Path:
    """Write ``index.html``, which links several reports. Each entry has ``name``, ``question``, ``answer``, ``href``
    and ``state``."""
    page = _templates().get_template("index.html.jinja").render(title=title, entries=entries)
    path = folder / "index.html"
    path.write_text(page, encoding="utf-8")
    return path


def _templates() -> Environment:
    return Environment(
        loader=PackageLoader("experiments.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()
