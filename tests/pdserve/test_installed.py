"""What would be published, as its users have it: the source distribution, and the wheel that is made from it, installed
in environments of their own. The client runs beside folders named like ours, the service far from the repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path

import pytest

from tests.local_cluster import free_ports
from tests.pdserve.scripted_service import ScriptedService

ROOT = Path(__file__).resolve().parents[2]
OURS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
OF_USERS = (*(name for name in OURS if name != "pdserve"), "core", "pb", "client", "proto")

IMPORT_ALL = """
import importlib, pkgutil, sys
import pdserve
for module in pkgutil.walk_packages(pdserve.__path__, "pdserve."):
    importlib.import_module(module.name)
loaded = {name.partition(".")[0] for name in sys.modules}
print(len([name for name in sys.modules if name.startswith("pdserve.")]), sorted(loaded & set(sys.argv[1:])))
"""


@dataclass(frozen=True)
class Installation:
    """An environment with the wheel in it, and a folder of a user's in which commands are run."""

    python: Path
    folder: Path

    @classmethod
    def of(cls, folder: Path, *packages: str) -> Installation:
        """Install ``packages`` into a new environment below ``folder``."""
        python = folder / "venv" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=100)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", str(python)]
        constraint = ("--constraint", str(ROOT / "constraints.txt"))
        subprocess.run([*pip, "install", *constraint, *packages], check=True, timeout=800)
        (folder / "user").mkdir()
        return cls(python, folder / "user")

    def run(self, *command: str, timeout_s: float = 200) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment, which sees nothing of ours but ``PATH``."""
        env = {"PATH": f"{self.python.parent}:{os.environ['PATH']}", "HOME": str(self.folder)}
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=timeout_s)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, with the source distribution that it was made from beside it."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True, timeout=300)
    (wheel,) = folder.glob("pdserve-*.whl")
    return wheel


@pytest.fixture(scope="module")
def client_only(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    installation = Installation.of(tmp_path_factory.mktemp("client"), str(wheel))
    for name in OF_USERS:
        (installation.folder / name).mkdir()
        message = f"raise ImportError('imported the folder {name} of the user')"
        (installation.folder / name / "__init__.py").write_text(message)
    return installation


def readme_block(language: str) -> str:
    """The one block of README.md in this language."""
    (block,) = re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return str(block)


pytestmark = pytest.mark.timeout(600)


def test_the_distributions_can_be_published(wheel: Path) -> None:
    (source,) = wheel.parent.glob("pdserve-*.tar.gz")
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "Makefile", "constraints.txt", "tests/pdserve/test_installed.py", "docs/api.md"} <= inside
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (message_from_bytes(archive.read(name)) for name in names if name.endswith("/METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert not [each for each in metadata.get_all("Classifier", []) if each.startswith("Private")]


def test_all_of_pdserve_is_imported_without_torch_ray_or_any_other_of_our_folders(client_only: Installation) -> None:
    names = ("torch", "ray", "numpy", *OF_USERS)
    (client_only.folder / "import_all.py").write_text(IMPORT_ALL)
    answer = client_only.run("python", "import_all.py", *names)
    assert answer.returncode == 0, answer.stderr
    count, loaded = answer.stdout.split(maxsplit=1)
    assert int(count) > 25
    assert loaded.strip() == "[]"


def test_the_readme_script_runs(client_only: Installation, service: ScriptedService) -> None:
    (client_only.folder / "script.py").write_text(readme_block("python").replace("localhost:50051", service.target))
    answer = client_only.run("python", "script.py")
    assert answer.returncode == 0, answer.stderr
    assert " True\n" in answer.stdout, "bytes moved are bytes expected"
    assert "'ttft_decode': {" in answer.stdout


def test_the_readme_script_has_types(client_only: Installation) -> None:
    (client_only.folder / "typed.py").write_text(readme_block("python") + "\nreveal_type(result.ttft_decode_ms)\n")
    (client_only.folder / "wrong.py").write_text(readme_block("python").replace("max_tokens=40", 'max_tokens="many"'))
    mypy = (sys.executable, "-m", "mypy", "--strict", "--python-executable", str(client_only.python))
    told = client_only.run(*mypy, "typed.py", "wrong.py").stdout
    assert 'Revealed type is "float | None"' in told
    assert set(re.findall(r"^(\w+\.py):\d+: error: ", told, re.MULTILINE)) == {"wrong.py"}, told
    assert "max_tokens" in told


def test_the_command_says_what_to_install(client_only: Installation) -> None:
    answer = client_only.run("pdserve", "--help")
    assert answer.returncode == 1
    assert "pip install 'pdserve[service]'" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_the_demo_and_first_use_run_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """Both start a Ray of their own. The commands of README.md run as they stand, but for their ports."""
    everything = Installation.of(tmp_path, f"{wheel}[service]")
    demo = everything.run("pdserve", "demo", "--rounds", "1", timeout_s=300)
    assert demo.returncode == 0, demo.stderr
    assert (everything.folder / "out" / "demo" / "waterfall.png").is_file()
    port = free_ports(2)
    commands = re.sub(r" +#.*", "", readme_block("sh")).replace("localhost:8000", f"localhost:{port + 1}")
    for command, options in {
        "up": f"--port {port} --set gateway.http_port={port + 1}",
        "generate|bench|down": f"--target localhost:{port}",
    }.items():
        commands = re.sub(rf"^pdserve (?:{command})\b.*", rf"\g<0> {options}", commands, flags=re.M)
    try:
        first_use = everything.run("bash", "-eux", "-c", commands, timeout_s=300)
    finally:
        everything.run("pdserve", "down", "--all", "--now")
    assert first_use.returncode == 0, first_use.stdout + first_use.stderr
    assert '"choices"' in first_use.stdout
