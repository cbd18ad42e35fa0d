"""The live page: its data, and the page in a browser."""

from __future__ import annotations

import asyncio
import hashlib
import html
import json
import re
import shutil
from pathlib import Path

import pytest

from pdserve.core.errors import TransferError
from tests.gateway.http_api.conftest import Http, StartHttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SECRET = "a prompt that nobody else may read"


async def used(http: Http) -> None:
    """One finished request, and one that goes on."""
    await http.complete(prompt=SECRET, max_tokens=3, ignore_eos=True, request_id="first")
    for worker in http.service.fleet.values():
        worker.hangs.add("decode_more")
    call = asyncio.create_task(http.post("/v1/completions", prompt=[60], max_tokens=9, request_id="second"))
    await http.service.until(lambda: http.service.gateway.router.running == 1)
    http.service.beats.add(call)  # type: ignore[arg-type]  # cancelled with them


async def test_what_it_shows(start_http: StartHttp) -> None:
    http = await start_http("d0", "d1", "p0", router={"heartbeat_timeout_s": 60})
    await http.service.until(lambda: http.service.peers_of("p0") == {"d0", "d1"})
    http.service.fleet["p0"].fail("prefill", TransferError(SECRET))
    await used(http)
    answer = await http.client.get("/live.json")
    view = answer.json()
    assert (view["ready"], view["model"], view["running"]) == (True, "fake", 1)
    assert {worker["id"]: worker["role"] for worker in view["workers"]} == {
        "p0": "prefill",
        "d0": "decode",
        "d1": "decode",
    }
    assert {(link["from"], link["to"]) for link in view["links"]} == {("p0", "d0"), ("p0", "d1")}
    (running,) = view["requests"]
    assert (running["id"], running["max_tokens"]) == ("second", 9)
    (finished,) = view["finished"]
    assert finished["id"] == "first"
    (failure,) = finished["failures"]
    assert failure.endswith("p0: TransferError")
    assert sum(finished["stages_ms"].values()) == pytest.approx(finished["total_ms"])
    assert SECRET not in answer.text
    assert "127.0.0.1" not in answer.text


async def test_it_counts_tokens_and_times_of_all_callers(http: Http) -> None:
    async def counts() -> dict[str, float]:
        return dict((await http.client.get("/live.json")).json()["counts"])

    assert await counts() == {"first_tokens": 0, "ttft_s": 0.0, "gaps": 0, "itl_s": 0.0}
    for tokens in (3, 5):
        await http.complete(prompt=[60], max_tokens=tokens, ignore_eos=True)
    after = await counts()
    assert (after["first_tokens"], after["gaps"]) == (2, 2 + 4)
    assert after["ttft_s"] > 0
    assert after["itl_s"] > 0


async def test_the_page_loads_nothing_from_elsewhere(http: Http) -> None:
    answer = await http.client.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert set(re.findall(r"(?:src|href)=.(.*?)\W", answer.text)) == {"metrics", "docs", "report"}


async def test_the_last_report_is_for_those_who_see_all(start_http: StartHttp, tmp_path: Path) -> None:
    page, tokens = tmp_path / "report.html", tmp_path / "tokens.yaml"
    entries = [{"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()} for name in ("alice", "oscar")]
    tokens.write_text(json.dumps({"tokens": [entries[0], {**entries[1], "operator": True}]}))
    tokens.chmod(0o600)
    http = await start_http("p0", "d0", gateway={"report": str(page), "tokens": str(tokens)})

    async def seen_by(name: str) -> tuple[bool, int]:
        headers = {"authorization": f"Bearer {name}"}
        view = (await http.client.get("/live.json", headers=headers)).json()
        answer = await http.client.get("/report", headers=headers)
        assert answer.status_code != 200 or answer.text == "<p>figures"
        assert answer.status_code != 200 or "default-src 'none'" in answer.headers["content-security-policy"]
        return view["report"], answer.status_code

    assert await seen_by("oscar") == (False, 404), "there is none yet"
    none_yet = await http.client.get("/report", headers={"authorization": "Bearer oscar"})
    assert "pdserve experiment added-ttft --quick" in none_yet.text
    page.write_text("<p>figures")
    assert await seen_by("oscar") == (True, 200)
    assert await seen_by("alice") == (False, 404)
    assert (await http.client.get("/report")).status_code == 401


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this host")
@pytest.mark.parametrize("width", [500, 1200], ids=["phone", "desk"])
async def test_a_browser_draws_it(start_http: StartHttp, tmp_path: Path, width: int) -> None:
    http = await start_http("p0", "d0", router={"heartbeat_timeout_s": 60})
    await used(http)
    assert CHROMIUM is not None
    browser = await asyncio.create_subprocess_exec(
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}",
        f"--window-size={width},900", "--virtual-time-budget=3000", "--dump-dom", f"{http.url}/",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(browser.communicate(), 60)
    page = html.unescape(out.decode())
    assert ">ready</span>" in page
    assert page.count("→ d0") == 2  # the link, and the way of the first request
    for shown in ("p0", "d0", "first", "second", "kv_exposed", "KV blocks in use", "output tokens/s"):
        assert shown in page, json.dumps(shown)
