"""The functions of the live page's script, run by Node.js on a document that only holds elements."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gateway.http_api import app

NODE = shutil.which("node")
PAGE = Path(app.__file__).with_name("live.html")
HARNESS = Path(__file__).with_name("live_page.js")
LONG = "a-request-id-of-many-letters"
pytestmark = pytest.mark.skipif(NODE is None, reason="no Node.js (node) on this host")


def value_of(expression: str) -> Any:
    """The value of an expression of JavaScript beside the page's own functions."""
    assert NODE is not None
    ran = subprocess.run(
        [NODE, str(HARNESS), str(PAGE), expression], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def worker(name: str, role: str, **more: Any) -> dict[str, Any]:
    of_all = {"state": "ready", "device": "cpu", "blocks": 40, "free": 30, "running": 2, "waiting": 1}
    return {"id": name, "role": role, **of_all, **more}


def view(first_tokens: int = 0, ttft_s: float = 0.0, gaps: int = 0, itl_s: float = 0.0, **more: Any) -> dict[str, Any]:
    counts = {"first_tokens": first_tokens, "ttft_s": ttft_s, "gaps": gaps, "itl_s": itl_s}
    workers = [worker("p0", "prefill"), worker("d0", "decode", free=20), worker("d1", "decode", state="lost")]
    link = {"from": "p0", "to": LONG, "transport": "shm", "gbs": 3.14159}
    shown = {"workers": workers, "links": [link], "requests": [], "finished": [], "queued": 3, "running": 5}
    return {**shown, "counts": counts, **more}


def sampled(*views: tuple[float, dict[str, Any]]) -> str:
    """Statements: each view is sampled at its time."""
    return "".join(f"clock.ms = {ms}; sample({json.dumps(each)});" for ms, each in views)


def test_a_sample_is_the_growth_between_two_looks() -> None:
    views = (1000, view(10, 5.0, 100, 2.0)), (3000, view(12, 5.5, 198, 2.49)), (4000, view(12, 5.5, 198, 2.49))
    first, second = value_of(f"{sampled(*views)} samples")
    assert first == pytest.approx({"tokens": 50, "ttft_ms": 250, "itl_ms": 5, "queued": 3, "running": 5, "kv": 100 / 3})
    assert (second["tokens"], second["ttft_ms"], second["itl_ms"]) == (0, None, None), "no token, no time"


def test_another_gateways_counts_are_no_sample() -> None:
    views = (0, view(10)), (1000, view(3)), (2000, view(5))
    assert [each["tokens"] for each in value_of(f"{sampled(*views)} samples")] == [2]


def test_the_history_has_an_end() -> None:
    count, oldest = value_of(
        f"for (let at = 0; at < 400; at++) {{ clock.ms += 1000; sample({{...{json.dumps(view())}, queued: at}}); }}"
        "[samples.length, samples[0].queued]"
    )
    assert (count, oldest) == (300, 100)


def test_charts_go_on_over_seconds_without_a_value() -> None:
    points = [{"tokens": 0, "ttft_ms": None}, {"tokens": 5, "ttft_ms": 10}, {"tokens": 10, "ttft_ms": None}]
    charts = value_of(
        f"samples.push(...{json.dumps(points)}.map(each => ({{itl_ms: null, queued: 0, running: 1, kv: 7, ...each}})));"
        "drawCharts();"
        "byId('charts').children.map(each => [each.textContent, each.querySelectorAll('path')[0].attributes.d])"
    )
    tokens, ttft, itl, queued, running, kv = charts
    assert tokens == ["10output tokens/s0 to 10", "M57 39 L58 20 L59 1 "]
    assert ttft == ["10.0 msTTFT0 to 10.0 ms", "M58 1 "]
    assert itl == ["–ITL0 to 0.0 ms", ""]
    assert [each[0] for each in (queued, running, kv)] == [
        "0queued requests0 to 0",
        "1running requests0 to 1",
        "7.0 %KV in use0 to 7.0 %",
    ]


def test_long_ids_are_shortened_and_told_whole() -> None:
    assert value_of("['p0', 'chatcmpl-1234', 'chatcmpl-12345'].map(short)") == ["p0", "chatcmpl-1234", "chatcmpl…"]
    assert value_of(f"(each => [each.textContent, each.title])(named('{LONG}'))") == ["a-reques…", LONG]


def test_workers_are_stacked_by_role() -> None:
    roles = value_of(
        f"drawWorkers({json.dumps(view())}); byId('workers').children.map(role => role.children.map(each => "
        "[each.className, each.textContent, each.querySelectorAll('span').at(-1).style.width]))"
    )
    (prefill,), decode = roles
    assert prefill[0] == "worker ready"
    assert "10 of 40 KV blocks in use · 2 running · 1 waiting→ a-reques… shm 3.14 GB/s" in prefill[1]
    assert [(each[0], each[2]) for each in decode] == [("worker ready", "50%"), ("worker lost", "25%")]


def test_running_requests_tell_their_failures() -> None:
    request = {"id": LONG, "status": "running", "prompt_tokens": 7, "output_tokens": 2, "max_tokens": 9}
    running = {**request, "failures": ["p0: PeerLost"], "placement": "p1 is free"}
    rows = "drawRequests({}); byId('requests').children.map(row => row.children.map(each => each.textContent))".format
    assert value_of(rows(json.dumps(view()))) == [["none"]]
    _, row = value_of(rows(json.dumps(view(requests=[running]))))
    assert row == ["a-reques…", "running", "7", "2 of 9", "failed: p0: PeerLost · p1 is free"]


def test_an_opened_waterfall_stays_open_while_others_finish() -> None:
    request = {"mode": "pd", "prefill": "p0", "decode": "d0", "figure": "ttft_decode", "total_ms": 20.0}
    cost = {"stages_ms": {"gateway": 5.0, "prefill": 10.0, "kv_exposed": 5.0}, "kv_bytes": 2e6, "transport": "shm"}
    first = {"id": "first", **request, **cost, "prompt_tokens": 4, "output_tokens": 2, "failures": []}
    views = [json.dumps(view(finished=each)) for each in ([first], [{**first, "id": "second", "total_ms": 40}, first])]
    drawn = value_of(
        f"drawFinished({views[0]}); byId('finished').children[0].open = true; drawFinished({views[1]});"
        "byId('finished').children.map(each => [each.dataset.id, each.open, each.textContent, each.all"
        ".filter(part => part.title && part.style.width).map(part => [part.style.marginLeft ?? '', part.style.width])])"
    )
    (second, *_), (opened, is_open, text, parts) = drawn
    assert (second, drawn[0][1], opened, is_open) == ("second", False, "first", True)
    assert "p0 → d0" in text
    assert "2.00 MB of KV over shm" in text
    assert parts[:3] == [["", "12.5%"], ["", "25%"], ["", "12.5%"]], "of the longest request"
    assert parts[3:] == [["0%", "25%"], ["25%", "50%"], ["75%", "25%"]], "each where the last one ended"
