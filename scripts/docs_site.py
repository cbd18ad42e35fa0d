"""Build the documentation site from the Markdown files of the repository, for `make docs`. Broken links and anchors are
errors.

The pages keep their places in the repository, so that links between them lead to the same files in both. Files that
pages link to go to the site as they are. ``llms.txt`` lists all pages of the navigation, and beside each page lies its
Markdown."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from scripts.reference import CONFIGURATION, configuration

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


def pages() -> list[Path]:
    """All Markdown files that are pages of the site."""
    return [*sorted(ROOT.glob("*.md")), ROOT / "deploy" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def assemble(target: Path) -> None:
    """Put all pages, and the files they link to, into ``target``, in the places that they have in the repository."""
    shutil.rmtree(target, ignore_errors=True)
    linked = {(page.parent / link).resolve() for page in pages() for link in LINK.findall(page.read_text())}
    for path in {*pages(), *(each for each in linked if each.is_file())}:
        copy = target / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.parent.name == "decisions":  # the search shows them after pages that answer a question
            copy.write_text("---\nsearch:\n  boost: 0.1\n---\n\n" + path.read_text())
        elif path == CONFIGURATION:
            copy.write_text(path.read_text() + configuration())
        else:
            copy.symlink_to(path)
    index = target / "docs" / "decisions" / "README.md"
    records = [path for path in sorted(index.parent.glob("*.md")) if path != index]
    text = index.read_text() + "\n" + "".join(f"- [{title_of(path)}]({path.name})\n" for path in records)
    index.unlink()
    index.write_text(text)


def title_of(page: Path) -> str:
    """A page's heading."""
    return page.read_text().partition("\n")[0].removeprefix("# ")


def summary_of(page: Path) -> str:
    """The first sentence of a page's text, without its links and emphasis."""
    paragraphs = re.split(r"\n\s*\n", page.read_text())
    text = next(" ".join(each.split()) for each in paragraphs if not each.startswith(("#", "|", "```")))
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)|\*+([^*]+)\*+", r"\1\2", text)
    return re.split(r"(?<=[.?!]) ", plain, maxsplit=1)[0]


def llms_txt(config: dict[str, Any]) -> str:
    """The pages of the navigation in the format of llmstxt.org."""

    def lines() -> Iterator[str]:
        yield f"# {config['site_name']}\n\n> {config['site_description']}\n"
        for section in config["nav"]:
            for heading, names in section.items():
                yield f"\n## {heading}\n\n"
                for name in names:
                    yield f"- [{title_of(ROOT / name)}]({name}): {summary_of(ROOT / name)}\n"

    return "".join(lines())


def main() -> int:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    source, site = ROOT / config["docs_dir"], ROOT / config["site_dir"]
    assemble(source)
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean"]
    quiet = {"NO_MKDOCS_2_WARNING": "1"}  # Material's advertisement on each build; mkdocs.yml tells of its future
    code = subprocess.run(build, cwd=ROOT, env={**os.environ, **quiet}, check=False).returncode
    if code == 0:
        (site / "llms.txt").write_text(llms_txt(config))
        for page in source.rglob("*.md"):
            shutil.copyfile(page, site / page.relative_to(source))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
