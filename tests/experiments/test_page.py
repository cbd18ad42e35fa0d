"""The report page: self-contained, escaped, and readable in a browser on a desk and on a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from experiments.report.drawing import Mark, Panel, Picture, Rule, TableBlock
from experiments.report.page import Report, save_index

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def report() -> Report:
    points = [
        {"tokens": tokens, "ms": {"mean": ms, "lo": ms - 1, "hi": ms + 1, "n": 9}} for tokens, ms in ((1, 3), (2, 1))
    ]
    panel = Panel([Mark(points, "tokens", "ms"), Rule("y", 2.0, "limit")], x="tokens", y="ms", title="plot")
    wide = TableBlock(
        "A wide table", [f"column {n}" for n in range(20)], [[f"value {n}" for n in range(20)]], "caption"
    )
    return Report(
        title="A <title>",
        question="Does it read well?",
        answer="It adds +1.00 ms & explains 99 %.",
        setup=[("machine", "two cores " * 30)],
        blocks=[Picture("plot", "A plot", "What it shows.", [panel]), wide],
        caveats=["One caveat."],
        failures=["cell a: tokens differ"],
    )


def test_the_page_is_one_file(tmp_path: Path) -> None:
    page = report().save(tmp_path, "footer").read_text()
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert "url(" not in page
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "A &lt;title&gt;" in page
    assert "&amp; explains" in page
    assert "cell a: tokens differ" in page


def test_the_page_is_well_formed(tmp_path: Path) -> None:
    open_tags: list[str] = []

    class Checker(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "img", "br"):
                open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag

    Checker().feed(report().save(tmp_path).read_text())
    assert not open_tags


def test_the_index_links_its_reports(tmp_path: Path) -> None:
    entry = {
        "name": "added-ttft",
        "question": "How much?",
        "answer": "1 ms",
        "href": "added/report.html",
        "state": "ok",
    }
    page = save_index(tmp_path, "All experiments", [entry, {**entry, "name": "missing", "href": ""}]).read_text()
    assert page.count('href="added/report.html"') == 1
    assert "missing" in page


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this host")
@pytest.mark.parametrize("width", [390, 1200], ids=["phone", "desk"])
def test_a_browser_shows_the_page_without_a_horizontal_scroll_bar(tmp_path: Path, width: int) -> None:
    page = report().save(tmp_path)
    # Chromium's smallest window is 500 wide, so the page is put into a frame of the wanted width.
    probe = tmp_path / "probe.html"
    probe.write_text(
        f'<iframe id="f" src="{page.name}" style="border:0;width:{width}px;height:900px"></iframe>'
        "<script>onload=()=>{const d=document.getElementById('f').contentDocument;"
        "const i=d.querySelector('img');document.title=JSON.stringify({"
        "wide:d.documentElement.scrollWidth,picture:i.naturalWidth,shown:i.clientWidth,"
        "answer:d.querySelector('.answer').innerText});"
        "document.body.innerText='RESULT'+document.title+'END'}</script>"
    )
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
         f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom", probe.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = re.search(r"<body>RESULT(\{.*\})END", done.stdout)
    assert found is not None, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads(found.group(1).replace("&amp;", "&"))
    assert result["wide"] <= width
    assert result["picture"] > 0
    assert 0 < result["shown"] <= width
    assert result["answer"] == "It adds +1.00 ms & explains 99 %."
