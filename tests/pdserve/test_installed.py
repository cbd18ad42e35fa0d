"""`pip install pdserve` as its users have it: a wheel in an environment of its own, beside folders named like ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

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
    """An environment with the client in it, and a folder of a user's in which scripts are run."""

    python: Path
    folder: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": os.environ["PATH"], "HOME": str(self.folder)}
        return subprocess.run(
            [self.python, *arguments], cwd=self.folder, env=env, capture_output=True, text=True, timeout=200
        )


@pytest.fixture(scope="module")
def client_only(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, ROOT], check=True, timeout=200)
    (wheel,) = folder.glob("pdserve-*.whl")
    python = folder / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=100)
    install = [*pip, "--python", str(python), "install", "--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*install, wheel, "mypy"], check=True, timeout=250)
    user = folder / "user"
    for name in OF_USERS:
        (user / name).mkdir(parents=True)
        (user / name / "__init__.py").write_text(f"raise ImportError('imported the folder {name} of the user')")
    return Installation(python, user)


def readme_snippet() -> str:
    """The Python script of README.md."""
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return str(snippet)


pytestmark = pytest.mark.timeout(600)


def test_all_of_pdserve_is_imported_without_torch_ray_or_any_other_of_our_folders(client_only: Installation) -> None:
    names = ("torch", "ray", "numpy", *OF_USERS)
    (client_only.folder / "import_all.py").write_text(IMPORT_ALL)
    answer = client_only.run("import_all.py", *names)
    assert answer.returncode == 0, answer.stderr
    count, loaded = answer.stdout.split(maxsplit=1)
    assert int(count) > 25
    assert loaded.strip() == "[]"


def test_the_readme_script_runs(client_only: Installation, service: ScriptedService) -> None:
    (client_only.folder / "script.py").write_text(readme_snippet().replace("localhost:50051", service.target))
    answer = client_only.run("script.py")
    assert answer.returncode == 0, answer.stderr
    assert " True\n" in answer.stdout, "bytes moved are bytes expected"
    assert "'ttft_decode': {" in answer.stdout


def test_the_readme_script_has_types(client_only: Installation) -> None:
    (client_only.folder / "typed.py").write_text(readme_snippet() + "\nreveal_type(result.ttft_decode_ms)\n")
    answer = client_only.run("-m", "mypy", "--strict", "typed.py")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert 'Revealed type is "float | None"' in answer.stdout
    wrong = readme_snippet().replace("max_tokens=40", 'max_tokens="many"')
    (client_only.folder / "wrong.py").write_text(wrong)
    answer = client_only.run("-m", "mypy", "--strict", "wrong.py")
    assert answer.returncode == 1
    assert "max_tokens" in answer.stdout


def test_the_command_says_what_to_install(client_only: Installation) -> None:
    answer = client_only.run(str(client_only.python.with_name("pdserve")), "--help")
    assert answer.returncode == 1
    assert "pip install 'pdserve[service]'" in answer.stderr
    assert "Traceback" not in answer.stderr
