"""The repository is an application: import names equal folder names, and everything that must travel with it does."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"][
    "packages"
]


@pytest.mark.parametrize("package", PACKAGES)
def test_import_name_is_folder_name(package: str) -> None:
    assert Path(str(importlib.import_module(package).__file__)).parent == ROOT / package


def test_proto_is_no_python_package() -> None:
    """It would shadow the module of that name which Ray's dependencies install."""
    assert not list((ROOT / "proto").rglob("*.py"))


def test_only_the_public_package_has_an_init_with_content() -> None:
    filled = [
        path for package in PACKAGES for path in (ROOT / package).rglob("__init__.py") if path.read_text().strip()
    ]
    assert filled == [ROOT / "pdserve" / "__init__.py"]


@pytest.mark.timeout(600)
def test_generated_code_is_not_stale(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "gen_proto.sh"
    subprocess.run([script, tmp_path], env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}, check=True, timeout=580)
    for path in sorted((ROOT / "pdserve" / "pb").glob("*_pb2*")):
        made = tmp_path / path.relative_to(ROOT)
        assert made.read_text() == path.read_text(), f"{path.name}: run `make proto`"


def test_every_file_and_folder_that_the_docs_name_exists() -> None:
    """A rename must not leave a document behind. (Changelog and decisions are about former versions as well.)"""
    others = {ROOT / "CHANGELOG.md", *(ROOT / "docs" / "decisions").glob("*.md")}
    files, folders = set(), set()
    for document in {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - others:
        text = document.read_text()
        files |= set(re.findall(r"`((?!\S*NAME)\w+/[\w/]+\.py)(?::(\w+))?", text))
        if document.name in ("architecture.md", "CONTRIBUTING.md"):
            folders |= set(re.findall(r"`([\w/]+)/`", text))
    assert len(files) > 20
    assert len(folders) > 25
    assert {folder for folder in folders if not (ROOT / folder).is_dir()} == set()
    for name, symbol in files:
        assert (ROOT / name).is_file(), name
        assert re.search(rf"\b{symbol}\b", (ROOT / name).read_text()), f"{name}: no {symbol}"


def test_links_between_documents_lead_somewhere() -> None:
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name}: {link}"
