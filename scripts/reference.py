"""Write the tables of limits, ports, keys, metrics and GPU results in the documents, for `make reference`.

A table lies between ``<!--reference: KIND ARGUMENT...-->`` and ``<!--end-->``; KIND is one of `KINDS`. Limits and
ports are constants whose docstrings begin with ``Limit:`` or ``Port:``. The first paragraph is shown; ``Then:``
begins what happens beyond the limit. A test compares the documents with the code."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from contract.scaling import GatewayLoad, ScalingReport
from experiments.benchmarks.first_hour.archive import results_rows
from gateway.metrics import Metrics, scaling_metrics, service_metrics
from ops.cli.config import documented_defaults
from ops.launch.ports import DEFAULT_BASE, PORTS_PER_WORKER, first_port
from pdserve.core.config import PdserveConfig, descriptions

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = tuple(ROOT / "docs" / name for name in ("gpu-results.md", "limits.md", "operations.md", "security.md"))
CONFIGURATION = ROOT / "docs" / "reference.md"
"""Lists the keys of the configuration on the site alone; in the repository `pdserve config` does."""
_REGION = re.compile(r"(<!--reference: (\w+)((?: \S+)*)-->\n).*?(?=<!--end-->)", re.DOTALL)


class Described(NamedTuple):
    """A constant, its value, what its docstring says it is, and what happens then."""

    name: str
    value: Any
    what: str
    then: str


def described(mark: str, *paths: str) -> Iterator[Described]:
    """The constants in these files and folders whose docstrings begin with ``mark`` and a colon."""
    for path in paths:
        place = ROOT / path
        for file in [place] if place.suffix else sorted(place.rglob("*.py")):
            body = ast.parse(file.read_text(encoding="utf-8")).body
            for statement, docstring in pairwise(body):
                match statement, docstring:
                    case (
                        ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str() as text)),
                    ) if text.startswith(f"{mark}: "):
                        module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
                        paragraph = " ".join(text.partition("\n\n")[0].removeprefix(f"{mark}: ").split())
                        what, _, then = paragraph.removesuffix(".").partition(". Then: ")
                        yield Described(name, getattr(module, name), what, then)


def limits(*paths: str) -> Iterator[tuple[str, ...]]:
    """The limits in these files and folders."""
    yield "what", "limit", "then"
    for each in described("Limit", *paths):
        yield each.what, _shown(each.name, each.value), each.then


def ports(*paths: str) -> Iterator[tuple[str, ...]]:
    """The ports in these files and folders, and those of workers."""
    yield "port", "what"
    for each in described("Port", *paths):
        yield str(each.value), each.what
    yield f"{first_port(DEFAULT_BASE, 0)} + {PORTS_PER_WORKER} *i*", "control of worker *i*, dialled by gateways"
    yield f"the {PORTS_PER_WORKER - 1} after it", "KV of worker *i*, one port for each transport, dialled by workers"


def keys(pattern: str) -> Iterator[tuple[str, ...]]:
    """The keys of the configuration that match ``pattern``."""
    yield "key", "default", "what"
    for section, part in PdserveConfig():
        for name, what in descriptions(type(part)).items():
            if re.match(pattern, key := f"{section}.{name}"):
                default = getattr(part, name)
                yield f"`{key}`", "–" if default is None else _shown(name, default), what


def metrics(pattern: str) -> Iterator[tuple[str, ...]]:
    """The metrics whose names match ``pattern``, with the labels that not all of them have."""
    about = {"version": "", "model": ""}
    exported = Metrics(
        lambda: chain(service_metrics([], {}, 0, 0, True, about), scaling_metrics(GatewayLoad(), ScalingReport()))
    )
    collectors: list[Any] = list(exported._registry._collector_to_names)
    found: dict[str, tuple[list[str], str]] = {}
    for collector in collectors:
        for metric in collector.collect():
            name = f"{metric.name}_info" if metric.type == "info" else metric.name
            labels = metric.samples[0].labels if metric.type == "info" else getattr(metric, "_labelnames", ())
            if re.match(pattern, name):
                found[name] = [*(labels or getattr(collector, "_labelnames", ()))], metric.documentation
    first, *_ = found.values()
    common = [label for label in first[0] if all(label in labels for labels, _ in found.values())]
    yield "metric", "what"
    for name, (labels, what) in found.items():
        own = ",".join(label for label in labels if label not in common)
        yield f"`{name}{{{own}}}`" if own else f"`{name}`", what


def gpu(report: str) -> Iterator[tuple[str, ...]]:
    """The results of the first hour whose report is this file (`experiments.benchmarks.first_hour.archive`), if there
    is one."""
    yield "what", "found"
    path = ROOT / report
    yield from results_rows(json.loads(path.read_text())) if path.exists() else [("any GPU", "nothing has run")]


def _shown(name: str, value: Any) -> str:
    name = name.lower()
    if "bytes" in name:
        unit, size = ("MiB", 2**20) if value % 2**20 == 0 else ("KiB", 2**10)
        return f"{value // size:,} {unit}"
    if name.endswith("_s") and not name.endswith("_per_s"):
        return f"{value:g} s"
    return f"{value:,.10g}" if isinstance(value, int | float) else str(value)


KINDS: dict[str, Callable[..., Iterator[tuple[str, ...]]]] = {
    each.__name__: each for each in (limits, ports, keys, metrics, gpu)
}


def filled(document: str) -> str:
    """The text of a document with its tables as the code has them now."""

    def table(region: re.Match[str]) -> str:
        header, *rows = KINDS[region[2]](*region[3].split())
        lines = [" | ".join(header), "|".join("---" for _ in header), *(" | ".join(row).strip() for row in rows)]
        return "\n".join((region[1], *lines, "", ""))

    return _REGION.sub(table, document)


def configuration() -> str:
    """The keys of the configuration as a chapter of the site."""
    return f"\n## Configuration\n\n```yaml\n{documented_defaults()}```\n"


if __name__ == "__main__":
    for path in DOCUMENTS:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
