"""What the documents tell readers to type exists: commands and options, keys of the configuration, Python."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest
import typer.main
import yaml
from typer.core import TyperGroup

from ops.cli.main import app
from pdserve import Client
from pdserve.core.config import PdserveConfig
from tests.certificates import Certificates
from tests.pdserve.scripted_service import ScriptedService

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (
    *(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),
    *(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "decisions"),
    ROOT / "deploy" / "README.md",
)
"""Changelog and decisions are about former versions as well."""
COMMENTED = (ROOT / "cluster.yaml", *(ROOT / "deploy").glob("*.yaml"))
"""Files whose comments tell commands."""
CALL = re.compile(r"(?:^|[$|/`] ?|#  +|&& |: )pdserve (-?-?[a-z][^`\n]*)", re.MULTILINE)
SECTIONS = set(PdserveConfig.model_fields)
PLACEHOLDERS = {"N": "1", "NAME": "added-ttft"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of a document in a language; those without one have the language ""."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def code_of(path: Path) -> Iterator[str]:
    """Code blocks and code in sentences of a document; a file in another language as it is."""
    if path.suffix != ".md":
        yield path.read_text()
        return
    yield from blocks(path, "[a-z]*")
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"`([^`]+)`", prose.replace("\\|", "|"))


def calls() -> list[tuple[str, str]]:
    """Document and arguments of each call of `pdserve`."""
    found = {
        (name_of(path), arguments)
        for path in (*DOCUMENTS, *COMMENTED)
        for code in code_of(path)
        for arguments in CALL.findall(code)
    }
    return sorted(found)


def parse(call: str) -> None:
    """Read a call as the command line does, without making it. A usage error or AssertionError if it cannot be read."""
    text = re.sub(r"\$\(.*?\)", "HOST", call)
    text = text.removesuffix("'") if text.count("'") % 2 else text
    arguments = [PLACEHOLDERS.get(each, each) for each in shlex.split(text, comments=True)]
    command: Any = typer.main.get_command(app)
    name = "pdserve"
    if arguments[0].startswith("-"):
        assert arguments[0] in {option for each in command.params for option in each.opts}
        return
    while isinstance(command, TyperGroup) and arguments and not arguments[0].startswith("-"):
        name, *arguments = arguments
        context = command.make_context(name, [], resilient_parsing=True)
        command = command.get_command(context, name)
        assert command is not None, f"there is no {name}"
    if arguments and "--help" not in arguments:  # a name alone is a mention of the command
        command.make_context(name, arguments)


@pytest.mark.parametrize(("document", "call"), calls())
def test_the_command_line_knows_every_call(document: str, call: str) -> None:
    parse(call)


def test_the_documents_have_calls_to_check() -> None:
    named = {name for name, _ in calls()}
    assert named >= {
        "README.md",
        "docs/which-command.md",
        "docs/cluster.md",
        "deploy/aws.yaml",
        "deploy/kuberay-job.yaml",
    }


@pytest.mark.parametrize(
    ("document", "block"),
    [(name_of(path), block) for path in DOCUMENTS if path.name != "api.md" for block in blocks(path, "python")],
)
def test_python_runs(
    document: str, block: str, certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against scripted services, with what the sentences around a block have before it. (`tests.gateway` runs those of
    docs/api.md, against a gateway.)"""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ca.pem").write_bytes(certificates.ca.read_bytes())
    (tmp_path / "requests.jsonl").write_text('{"cell": "512", "arm": "pd", "ttft_ms": 1.5}\n')
    with ScriptedService() as plain, ScriptedService(certificates.server) as secure:
        for documented, target in {
            "localhost:50051": plain.target,
            "gpu-1:50051,gpu-1:50052": f"{plain.target},{plain.target}",
            "https://gpu.example:50051": secure.target,
        }.items():
            block = block.replace(documented, target)
        with Client(plain.target) as client:
            exec(compile(block, document, "exec"), {"Client": Client, "client": client, "token": "t", "pandas": pandas})
        expected = {"docs/experiments.md": 0, "docs/python.md": 1 + block.count("class A")}
        assert len(plain.servicer.requests + secure.servicer.requests) == expected.get(document, 1)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_the_configuration_has_the_keys_that_are_told(document: Path) -> None:
    """Blocks of YAML with sections of the service's configuration, and such sections on one line elsewhere."""
    lines = re.findall(rf"^(?:{'|'.join(SECTIONS)}): \{{.*$", document.read_text(), re.MULTILINE)
    for text in (*blocks(document, "yaml"), *(line for line in lines if "…" not in line)):
        sections = yaml.safe_load(text)
        if set(sections) <= SECTIONS:
            PdserveConfig.parse(sections)


def test_keys_of_the_configuration_that_sentences_name_exist() -> None:
    keys = {f"{name}.{key}" for name, section in PdserveConfig() for key in type(section).model_fields}
    named = {
        (name_of(document), key)
        for document in DOCUMENTS
        if document.parent == ROOT / "docs"
        for key in re.findall(rf"`((?:{'|'.join(SECTIONS)})\.[a-z_0-9]+)(?=[`:])", document.read_text())
    }
    assert len(named) > 100
    assert {(document, key) for document, key in named if key not in keys} == set()


def test_the_table_beside_vllm_has_the_figures_of_a_run() -> None:
    (run,) = re.findall(r"figures as JSON\]\((results/.*-served.json)\)", (ROOT / "docs" / "results.md").read_text())
    measured = json.loads((ROOT / "docs" / run).read_text())
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [length for length, _ in rows] == list(measured["pdserve"])
    for length, cells in rows:
        figures = [measured[of][length][key] for key in ("ttft", "itl", "added_ttft") for of in ("pdserve", "vllm")]
        for cell, figure in zip(cells.replace("−", "-").split(" | "), figures, strict=True):
            assert float(cell) == round(figure, len(cell.partition(".")[2])), f"{length}: {cell} is not {figure}"


def test_the_site_is_built_without_a_broken_link_or_an_outside_script() -> None:
    site = ROOT / "out" / "site"
    built = subprocess.run(
        [sys.executable, "-m", "scripts.docs_site"], cwd=ROOT, capture_output=True, text=True, timeout=250, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    listed = re.findall(r"^- \[.+\]\((.+)\): .+$", (site / "llms.txt").read_text(), re.MULTILINE)
    pages = {name_of(path) for path in DOCUMENTS} | {"CHANGELOG.md", "docs/decisions/README.md"}
    assert set(listed) == pages, "mkdocs.yml: the navigation has all documents"
    assert all((site / name).is_file() for name in listed)
    assert 'id="pdserve.Client.generate"' in (site / "docs" / "reference.html").read_text()
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    found = {entry["location"]: entry["text"] for entry in index}
    assert {"docs/cluster.html#two-hosts-of-eight-gpus", "docs/reference.html#pdserve.Client.generate"} <= set(found)
    configuration = found["docs/reference.html#configuration"]
    keys = [key for section in PdserveConfig().__dict__.values() for key in type(section).model_fields]
    assert [key for key in keys if f"{key}:" not in configuration] == []
    for page in site.rglob("*.html"):
        elements = re.findall(r"<(?:script|img|iframe|link)\b[^>]*>", page.read_text())
        fetched = [each for each in elements if re.search(r"(?:src|href)=\"?(?:https?:)?//", each)]
        assert not fetched, f"{page.name} fetches from other hosts"
