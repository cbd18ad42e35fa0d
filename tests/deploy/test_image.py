"""The Dockerfile: what it copies is there, reaches the build, and is all that the project is made of."""

from __future__ import annotations

import fnmatch
import shlex
import tomllib
from pathlib import PurePosixPath

import pytest

from tests.deploy.files import ROOT, text


def instructions() -> list[tuple[str, str]]:
    """Instruction and arguments, with continued lines joined."""
    lines = [line for line in text("Dockerfile").splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in joined]


def sources() -> list[str]:
    copies = [shlex.split(arguments) for instruction, arguments in instructions() if instruction == "COPY"]
    return [source for *named, _ in copies for source in named]


def excluded(path: str) -> bool:
    """As Docker reads Dockerfile.dockerignore: the last pattern that matches the path, or a folder of it, decides."""
    out = False
    pure = PurePosixPath(path)
    places = [str(pure), *(str(parent) for parent in pure.parents if str(parent) != ".")]
    for line in text("Dockerfile.dockerignore").splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        keep = pattern.startswith("!")
        pattern = pattern.removeprefix("!").rstrip("/")
        anywhere = pattern.removeprefix("**/") if pattern.startswith("**/") else None
        for place in places:
            same_depth = place.count("/") == pattern.count("/")
            if (anywhere and fnmatch.fnmatchcase(PurePosixPath(place).name, anywhere)) or (
                same_depth and fnmatch.fnmatchcase(place, pattern)
            ):
                out = not keep
    return out


@pytest.mark.parametrize("source", sources())
def test_what_is_copied_exists_and_reaches_the_build(source: str) -> None:
    assert (ROOT / source).exists()
    assert not excluded(source)


@pytest.mark.parametrize("path", [".git", ".venv", "tests", "deploy", "deploy/README.md", "ops/__pycache__", "out/x"])
def test_nothing_else_reaches_it(path: str) -> None:
    assert excluded(path)


def test_the_whole_project_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {*wheel["packages"], project["project"]["readme"], "pyproject.toml", "constraints.txt"} <= set(sources())
    assert all(PurePosixPath(path).parts[0] in sources() for path in wheel["force-include"])


def test_it_is_installed_with_the_tested_versions_and_rays_dashboard() -> None:
    installs = [arguments for instruction, arguments in instructions() if instruction == "RUN" and "pip" in arguments]
    assert len(installs) == 2
    assert "-c constraints.txt" in installs[0]
    assert "'ray[default]'" in installs[0]  # KubeRay probes and submits through the dashboard
    assert "--no-deps -e ." in installs[1]
