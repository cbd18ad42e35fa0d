"""Load generators of the field against the HTTP API, unchanged. Each is used where it is installed: its command has to
be on the PATH, from an environment of its own."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.http_api.conftest import Http

REQUESTS = 4
TIMEOUT_S = 240


def needs(command: str) -> pytest.MarkDecorator:
    reason = f"{command} is not on the PATH (pip install {command} in an environment of its own)"
    return pytest.mark.skipif(shutil.which(command) is None, reason=reason)


def report(folder: Path, pattern: str) -> Any:
    """The JSON file that a load generator wrote."""
    (file,) = folder.rglob(pattern)
    return json.loads(file.read_text())


async def run(*command: str, folder: Path) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    assert process.returncode == 0, out.decode()[-4000:]
    return out.decode()


@needs("vllm")
@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
async def test_vllm_bench_serve(http: Http, chat_folder: Path, tmp_path: Path, backend: str) -> None:
    path = "/v1/completions" if backend == "openai" else "/v1/chat/completions"
    await run(
        "vllm", "bench", "serve", "--backend", backend, "--base-url", http.url, "--endpoint", path,
        "--model", "fake",
        "--tokenizer", str(chat_folder), "--dataset-name", "random", "--random-input-len", "8",
        "--random-output-len", "5", "--num-prompts", str(REQUESTS), "--ignore-eos", "--save-result",
        "--result-dir", str(tmp_path), "--result-filename", "result.json", folder=tmp_path,
    )  # fmt: skip
    result = report(tmp_path, "result.json")
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    assert result["total_output_tokens"] == 5 * REQUESTS
    assert 0 < result["mean_ttft_ms"] < 10_000


@needs("guidellm")
@pytest.mark.timeout(TIMEOUT_S + 30)
async def test_guidellm(http: Http, chat_folder: Path, tmp_path: Path) -> None:
    await run(
        "guidellm", "run", "--backend", f"kind=openai_http,target={http.url},model=fake",
        "--tokenizer", f"kind=huggingface_auto,model={chat_folder}", "--profile", "kind=synchronous",
        "--constraint", f"kind=max_requests,count={REQUESTS}", "--disable-console",
        "--data", "kind=synthetic_text,prompt_tokens=8,output_tokens=5",
        "--output", f"kind=json,path={tmp_path / 'report.json'}", folder=tmp_path,
    )  # fmt: skip
    (benchmark,) = report(tmp_path, "*.json")["benchmarks"]
    assert benchmark["metrics"]["request_totals"]["successful"] == REQUESTS
    assert benchmark["metrics"]["request_totals"]["errored"] == 0


@needs("aiperf")
@pytest.mark.timeout(TIMEOUT_S + 30)
async def test_aiperf(http: Http, chat_folder: Path, tmp_path: Path) -> None:
    await run(
        "aiperf", "profile", "--url", http.url, "--model", "fake", "--tokenizer", str(chat_folder),
        "--endpoint-type", "completions", "--streaming", "--concurrency", "1", "--request-count", str(REQUESTS),
        "--synthetic-input-tokens-mean", "8", "--output-tokens-mean", "5", "--extra-inputs", "ignore_eos:true",
        "--artifact-dir", str(tmp_path), "--ui", "none", folder=tmp_path,
    )  # fmt: skip
    result = report(tmp_path, "profile_export_aiperf.json")
    assert result["request_count"]["avg"] == REQUESTS
