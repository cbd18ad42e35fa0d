"""The report of a run: one self-contained HTML page, with its pictures inside and beside it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from experiments.report.drawing import Picture, TableBlock
from experiments.run_folder import RunData

PAGE = "report.html"


@dataclass(slots=True)
class Report:
    """What a run found. It reads well on its own: question, set-up, the answer in a sentence, evidence, caveats.
    Caveats that are false or empty
    do not hold, and are left out."""

    title: str
    question: str
    answer: str
    setup: Sequence[tuple[str, str]] = ()
    blocks: list[Picture | TableBlock] = field(default_factory=list)
    caveats: Sequence[Any] = ()
    failures: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.caveats = [each for each in self.caveats if each]

    def save(self, folder: Path, footer: str = "") -> Path:
        """Write the page and its pictures into ``folder``; returns the page's path."""
        data = {}
        for block in self.blocks:
            if isinstance(block, Picture):
                png = block.file()
                (folder / f"{block.stem}.png").write_bytes(png)
                data[block.stem] = base64.b64encode(png).decode("ascii")
        return _render(folder / PAGE, "page.html.jinja", report=self, data=data, footer=footer)


def setup_of(run: RunData, method: str, **more: str) -> list[tuple[str, str]]:
    """The rows of a report's set-up. ``method`` says in a sentence how was measured; ``more`` are further rows, unless
    they are empty."""
    machine, service = run.environment.get("machine", {}), run.environment.get("service") or {}
    rows = [("machine", f"{machine.get('cpu', '?')}, {machine.get('cores', '?')} cores, {machine.get('system', '')}")]
    if service:
        workers = service.get("workers", [])
        known = f" in {service.get('dtype', '?')}, {len(workers)} workers" if workers else ""  # of a foreign server
        rows.append(("service", f"{service.get('model', '?')}{known}"))
    packages = ", ".join(f"{name} {version}" for name, version in machine.get("packages", {}).items())
    return [*rows, ("method", method), ("versions", packages), *((name, text) for name, text in more.items() if text)]


def save_index(folder: Path, title: str, entries: Sequence[Mapping[str, str]]) -> Path:
    """Write ``index.html``, which links several reports. Each entry has ``name``, ``question``, ``answer``, ``href``
    and ``state``."""
    return _render(folder / "index.html", "index.html.jinja", title=title, entries=entries)


def _render(path: Path, template: str, **values: Any) -> Path:
    loader = PackageLoader("experiments.report", "templates")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True,
                              lstrip_blocks=True)  # fmt: skip
    path.write_text(environment.get_template(template).render(**values), encoding="utf-8")
    return path
