"""The live page: its data, and the page in a browser."""

from __future__ import annotations

import asyncio
import hashlib
import html
import json
import re
from pathlib import Path

import pytest

from pdserve.core.errors import TransferError
from tests.gateway.http_api.browser import CHROMIUM, opened
from tests.gateway.http_api.conftest import Http, StartHttp

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
    assert await seen_by("alice") == (False, 403)
    refused = (await http.client.get("/report", headers={"authorization": "Bearer alice"})).json()["error"]
    assert (refused["code"], refused["param"]) == ("NotAnOperator", "authorization")
    assert "token new NAME --operator" in refused["message"]
    assert (await http.client.get("/report")).status_code == 401


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this host")
@pytest.mark.parametrize("width", [390, 1200], ids=["phone", "desk"])
async def test_a_browser_draws_it_and_a_click_opens_a_waterfall(
    start_http: StartHttp, tmp_path: Path, width: int
) -> None:
    http = await start_http("p0", "d0", router={"heartbeat_timeout_s": 60})
    await used(http)
    (finished,) = (await http.client.get("/live.json")).json()["finished"]
    async with opened(f"{http.url}/", width, tmp_path) as page:
        await page.until("document.querySelector('#finished summary') !== null")
        shown = html.unescape(await page.value("document.documentElement.outerHTML"))
        assert ">ready</span>" in shown
        assert shown.count("→ d0") == 2  # the link, and the way of the first request
        for part in ("p0", "d0", "first", "second", "kv_exposed", "KV blocks in use", "output tokens/s"):
            assert part in shown, part
        assert await page.value("document.documentElement.scrollWidth <= innerWidth"), "nothing is beside the screen"

        rows = "[...document.querySelectorAll('#finished .stage')].filter(each => each.checkVisibility())"
        names = f"{rows}.map(each => each.firstChild.textContent)"
        assert await page.value(names) == []
        await page.mouse("#finished summary", "mousePressed")
        looks = await page.value("samples.length")
        await page.until(f"samples.length >= {looks + 2}")  # the page is drawn anew while the button is down
        await page.mouse("#finished summary", "mouseReleased")
        assert await page.value(names) == list(finished["stages_ms"])
        bars = await page.value(f"{rows}.map(each => each.querySelector('.bar span').getBoundingClientRect().x)")
        assert bars == sorted(bars), "each stage begins where the one above ends"
        await page.until(f"samples.length >= {looks + 4}")
        assert await page.value(names) == list(finished["stages_ms"]), "it stays open"
        await page.mouse("#finished summary", "mousePressed", "mouseReleased")
        assert await page.value(names) == []
