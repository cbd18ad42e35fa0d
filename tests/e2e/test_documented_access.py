"""The recipe for a service with TLS and tokens, typed as docs/security.md has it."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from ops.launch.leftovers import clear_leftovers
from tests.e2e.conftest import Cli
from tests.local_cluster import ROOT, free_port

pytestmark = [pytest.mark.ray, pytest.mark.cluster, pytest.mark.timeout(600)]
RECIPE = (ROOT / "docs" / "security.md").read_text().partition("### A service for others\n")[2].partition("\n### ")[0]
CHAT = re.findall(r"^pdserve (chat --target https.*)$", (ROOT / "docs" / "which-command.md").read_text(), re.MULTILINE)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl on this host")
def test_a_service_for_others(tmp_path: Path) -> None:
    cli, port, http_port = Cli.of(tmp_path), free_port(), free_port()
    certificate, config, console = re.findall(r"```\w*\n(.*?)```", RECIPE, re.DOTALL)

    def here(text: str) -> str:
        """With names and ports of this host."""
        for documented, own in {"HOST": "localhost", "10.0.0.1": "127.0.0.1", "50051": port, "8000": http_port}.items():
            text = text.replace(documented, str(own))
        return text

    subprocess.run(
        ["bash", "-eu", "-c", here(certificate)], cwd=tmp_path, stderr=subprocess.DEVNULL, check=True, timeout=60
    )
    (tmp_path / "pdserve.yaml").write_text(f"{config}  port: {port}\n  http_port: {http_port}\n")
    new, up, generate = (shlex.split(here(call)) for call in re.findall(r"^\w*\$ pdserve (.*)$", console, re.MULTILINE))
    printed = cli.done(*new).stdout
    tokens = tmp_path / "tokens.yaml"
    tokens.touch(0o600)
    tokens.write_text("tokens:\n" + printed[printed.index("  - name") :])
    (tmp_path / "token").write_text(re.findall(r"^token, .*(pdserve_\S+)$", printed, re.MULTILINE)[0])
    shutil.copy(tmp_path / "tls" / "cert.pem", tmp_path / "cert.pem")  # a client has it, and not the key
    try:
        cli.done(*up, "--oversubscribe", "--set", "engine.num_blocks=64")
        assert "first_decode" in cli.done(*generate).stderr
        assert f"chatting with tiny at https://localhost:{http_port}" in cli.done(*shlex.split(here(CHAT[0]))).stderr
        for option, refusal in (("--token-file", "no bearer token"), ("--ca", "is not trusted")):
            at = generate.index(option)
            refused = cli.run(*generate[:at], *generate[at + 2 :])
            assert refused.returncode == 1
            assert refusal in refused.stderr
    finally:
        for path in cli.notes.glob("*.json"):
            folder = cli.noted(int(path.stem)).ray_folder
            cli.run("down", "--port", path.stem)
            clear_leftovers(folder)
