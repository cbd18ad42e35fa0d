"""No process of a service logs a prompt, a token, or the secret of another request at INFO and above."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.token_file import digest_of
from pdserve import Client
from pdserve.core.errors import PdserveError
from tests.gateway.test_callers import entry, save
from tests.local_cluster import free_port, local_cluster

PROMPT, SALT, TOKEN, WRONG = "the rarest of prompts", "the-rarest-salt", "the-rarest-token", "another-rare-token"
PROMPT_IDS = [3001, 3002, 3003, 3004, 3005]


def ask(target: str, token: str, **options: Any) -> None:
    with Client(target, token=token) as client, contextlib.suppress(PdserveError):
        client.generate(
            options.pop("prompt", PROMPT), **{"max_tokens": 4, "salt": SALT, "timeout_s": 60, **options}
        ).result()


def test_logs_have_neither_prompts_nor_tokens(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Requests that are answered, refused, cancelled, too late, and whose worker dies: all that is worth a line."""
    tokens = save(tmp_path / "tokens", entry("a", TOKEN))
    http_port = free_port()
    settings = {
        "model": {"path": "tiny", "dtype": "float32"},
        "engine": {"block_size": 16, "num_blocks": 256},
        "gateway": {"tokens": str(tokens), "http_port": http_port},
    }
    with local_cluster(settings, token=TOKEN) as cluster:
        ask(cluster.target, TOKEN)
        ask(cluster.target, TOKEN, prompt=PROMPT_IDS, mode="pd")
        ask(cluster.target, WRONG)
        ask(cluster.target, TOKEN, temperature=-1.0)
        ask(cluster.target, TOKEN, prompt=[*PROMPT_IDS, 10**6])
        ask(cluster.target, TOKEN, max_tokens=10**5)
        ask(cluster.target, TOKEN, structured_outputs={"regex": f"{PROMPT} (("})
        ask(cluster.target, TOKEN, max_tokens=500, ignore_eos=True, timeout_s=0.05)
        with Client(cluster.target, token=TOKEN) as client:
            with client.generate(PROMPT, max_tokens=500, ignore_eos=True, salt=SALT) as stream:
                next(stream)
            stream = client.generate(PROMPT, max_tokens=200, ignore_eos=True, salt=SALT, timeout_s=60)
            next(stream)
            cluster.kill("decode-0")
            with contextlib.suppress(PdserveError):
                stream.result()
        url = f"http://127.0.0.1:{http_port}/v1"
        with httpx2.Client(timeout=60) as http:
            for token in (TOKEN, WRONG):
                headers = {"authorization": f"Bearer {token}"}
                for body in (
                    {"prompt": PROMPT, "max_tokens": 4, "cache_salt": SALT},
                    {"prompt": PROMPT, "max_tokens": 4, "no such field": PROMPT},
                    {"prompt": PROMPT, "max_tokens": PROMPT},
                    {"messages": [{"role": "user", "content": PROMPT}]},
                ):
                    path = "chat/completions" if "messages" in body else "completions"
                    http.post(f"{url}/{path}", json=body, headers=headers)
                http.post(f"{url}/completions", content=f"{{{PROMPT}", headers=headers)
        tokens.write_text(f"{TOKEN}: [")
        with Client(cluster.operator) as operator, Client(cluster.target, token=TOKEN) as client:
            (note,) = [note for note in operator.status().notes if "tokens" in note]
            assert note == f"gateway.tokens: {tokens}, line 1: not valid YAML; the tokens of before stay valid"
            assert note not in client.status().notes, "clients are not told"
    out, err = capfd.readouterr()
    logged = out + err
    assert "attempt 1 failed" in logged, "there was something to log"
    assert "worker decode-0 is lost" in logged
    assert "the tokens of before stay valid" in logged
    for secret in (PROMPT, SALT, TOKEN, WRONG, "Bearer", "3002, 3003", digest_of(TOKEN).hex()):
        assert secret not in logged
