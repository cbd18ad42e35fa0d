"""A real browser for tests of pages: Chromium without a window, by its DevTools protocol over two pipes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_MOST_BYTES = 2**24
_TIMEOUT_S = 60.0


class Page:
    """An open page. Messages are JSON and end with a zero byte."""

    def __init__(self, commands: int, answers: asyncio.StreamReader) -> None:
        self._commands, self._answers = commands, answers
        self._ids = itertools.count(1)
        self.session = ""

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command."""
        number = next(self._ids)
        session = {"sessionId": self.session} if self.session else {}
        message = json.dumps({"id": number, "method": method, "params": parameters, **session})
        os.write(self._commands, message.encode() + b"\0")
        while True:
            answer = json.loads((await asyncio.wait_for(self._answers.readuntil(b"\0"), _TIMEOUT_S))[:-1])
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    async def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON has it."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        """Return once the expression is true."""
        end_s = time.monotonic() + _TIMEOUT_S
        while not await self.value(expression):
            assert time.monotonic() < end_s, expression
            await asyncio.sleep(0.05)

    async def mouse(self, selector: str, *events: str) -> None:
        """Mouse events (``mousePressed``, ``mouseReleased``) in the middle of the first element of ``selector``."""
        element = f"document.querySelector({json.dumps(selector)})"
        place = await self.value(
            f"{element}.scrollIntoView(), (({{x, y, width, height}}) => ({{x: x + width / 2, y: y + height / 2}}))"
            f"({element}.getBoundingClientRect())"
        )
        for event in events:
            await self.call("Input.dispatchMouseEvent", type=event, button="left", clickCount=1, **place)


@contextlib.asynccontextmanager
async def opened(url: str, width: int, folder: Path) -> AsyncIterator[Page]:
    """The page at ``url`` in a window of this width. ``folder`` is the browser's own."""
    assert CHROMIUM is not None
    (commands_here, commands), (answers, answers_here) = os.pipe(), os.pipe()
    command = (CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
    browser = await asyncio.create_subprocess_exec(
        "bash", "-c", f'exec "$@" 3<&{commands_here} 4>&{answers_here}', "bash", *command, f"--user-data-dir={folder}",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, pass_fds=(commands_here, answers_here),
    )  # fmt: skip
    os.close(commands_here)
    os.close(answers_here)
    reader = asyncio.StreamReader(_MOST_BYTES)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(answers, "rb", buffering=0)
    )
    page = Page(commands, reader)
    try:
        target = await page.call("Target.createTarget", url="about:blank")
        page.session = (await page.call("Target.attachToTarget", flatten=True, **target))["sessionId"]
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        await page.call("Emulation.setDeviceMetricsOverride", **size)
        await page.call("Page.navigate", url=url)
        yield page
        page.session = ""
        await page.call("Browser.close")
        await asyncio.wait_for(browser.wait(), _TIMEOUT_S)
    finally:
        if browser.returncode is None:
            browser.kill()
            await browser.wait()
        transport.close()
        os.close(commands)
