"""`pdserve chat` on a terminal of its own, against a gateway with fake workers."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from tests.certificates import Certificates
from tests.command_line import PDSERVE
from tests.gateway.conftest import PATIENT
from tests.gateway.http_api.conftest import Http, StartHttp
from tests.gateway.test_callers import entry, save
from tests.local_cluster import ROOT, free_port

ON_A_TERMINAL = (
    sys.executable,
    "-c",
    "import os, pty, sys; os._exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))",
)


class Terminal:
    """A process on a terminal."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.shown = ""

    def type(self, keys: str) -> None:
        """As from a keyboard."""
        assert self.process.stdin is not None
        self.process.stdin.write(keys.encode())

    async def until(self, text: str) -> str:
        """What is shown until ``text``, and with it."""
        assert self.process.stdout is not None
        while text not in self.shown:
            try:
                part = await asyncio.wait_for(self.process.stdout.read(65_536), 60)
            except TimeoutError:
                part = b""
            assert part, f"{text!r} is missing: {self.shown!r}"
            self.shown += part.decode()
        before, _, self.shown = self.shown.partition(text)
        return before + text


@asynccontextmanager
async def chat_with(http: Http, *arguments: str) -> AsyncIterator[Terminal]:
    command = (*ON_A_TERMINAL, *PDSERVE, "chat", "--target", http.url, "--mode", "pd", *arguments)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT,
        env={"TERM": "dumb", "COLUMNS": "120", "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    try:
        yield Terminal(process)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def prompts(http: Http) -> list[str]:
    """The prompts that the prefill worker got."""
    tokenizer = http.service.gateway._inference.tokenizer
    assert tokenizer is not None
    return [tokenizer.decode(request.prompt_token_ids) for _, request in http.service.fleet["p0"].requests]


async def test_a_conversation_with_its_breakdowns(http: Http) -> None:
    async with chat_with(http, "--system", "be brief", "--max-tokens", "3", "--temperature", "0") as terminal:
        assert "chatting with fake" in await terminal.until("> ")
        terminal.type("/why\n")
        await terminal.until("there is no complete answer yet")
        await terminal.until("> ")  # what is typed before the prompt may be lost, or shown twice
        terminal.type("the quick\n")
        await terminal.until("the quick")
        answer = (await terminal.until("> ")).removesuffix("> ").strip()
        terminal.type("and\n")
        await terminal.until("> ")
        terminal.type("/why\n")
        told = await terminal.until("clock error")
        for part in ("3 tokens · pd · p0 → d0", "network", "kv_exposed", "first_decode", "= expected"):
            assert part in told
        await terminal.until("> ")
        terminal.type("/why 1\n")
        of_the_first = await terminal.until("clock error")
        prompt_tokens = [int(re.findall(r"(\d+) \+ 3 tokens", each)[0]) for each in (of_the_first, told)]
        assert prompt_tokens[0] < prompt_tokens[1]
        await terminal.until("> ")
        for number in ("0", "3"):
            terminal.type(f"/why {number}\n")
            await terminal.until(f"there is no complete answer {number}")
            await terminal.until("> ")
        terminal.type("/new\n")
        await terminal.until("> ")
        terminal.type("again\n")
        await terminal.until("again")
        await terminal.until("> ")
        terminal.type("/quit\n")
    beginning = "[system] be brief\n[user] the quick\n[assistant] "
    first, second, third = prompts(http)
    assert first == beginning
    assert answer
    assert second == f"{beginning}{answer}\n[user] and\n[assistant] "
    assert third == "[system] be brief\n[user] again\n[assistant] "


async def test_ctrl_c_ends_the_answer_and_not_the_chat(http: Http) -> None:
    decode = http.service.fleet["d0"]
    decode.delay_s["decode_more"] = 0.2
    async with chat_with(http) as terminal:
        await terminal.until("> ")
        terminal.type("the quick\n")
        await http.service.until(lambda: decode.held)
        terminal.type("\x03")
        await terminal.until("> ")
        await http.service.until(lambda: len(decode.aborted) == 1)
        shows_prompt = False
        while not shows_prompt:  # of a signal just before it waits for keys, readline learns with the next one
            terminal.type("\x03")  # an empty line: nothing ends
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await terminal.until("> ")
                    shows_prompt = True
        decode.delay_s.clear()
        terminal.type("x" * 2000 + "\n")
        await terminal.until("error: prompt: ")
        await terminal.until("> ")
        terminal.type("more\n")
        await terminal.until("> ")
        terminal.type("\x04")
    assert "[user] more\n" in prompts(http)[-1]
    assert "the quick" in prompts(http)[-1]
    assert "xxx" not in prompts(http)[-1]


async def test_over_tls_with_a_token(start_http: StartHttp, certificates: Certificates, tmp_path: Path) -> None:
    gateway = {"tls_cert": str(certificates.server.cert), "tls_key": str(certificates.server.key)}
    gateway["tokens"] = str(save(tmp_path / "tokens.yaml", entry("a", "good")))
    http = await start_http("p0", "d0", gateway=gateway, router=PATIENT)
    (tmp_path / "token").write_text("good\n")
    target = f"https://localhost:{http.service.gateway.http_port}"

    async def said(*options: str) -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            *PDSERVE, "chat", "--target", target, "--max-tokens", "3", *options,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=ROOT,
        )  # fmt: skip
        out, _ = await asyncio.wait_for(process.communicate(b"the quick\n/why\n"), 60)
        return process.returncode, out.decode()

    ca, token = ("--ca", str(certificates.ca)), ("--token-file", str(tmp_path / "token"))
    code, out = await said(*ca, *token)
    assert (code, "chatting with fake at https://localhost" in out, "kv_exposed" in out) == (0, True, True), out
    assert "good" not in out
    code, out = await said(*ca)
    assert (code, "no bearer token" in out) == (1, True), out
    code, out = await said(*token)
    assert (code, "certificate" in out) == (1, True), out
    assert len(prompts(http)) == 1


async def test_a_port_without_the_api_is_told(http: Http) -> None:
    async def error(target: str) -> str:
        command = (*PDSERVE, "chat", "--target", target)
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, cwd=ROOT)
        assert process.stderr is not None
        said = (await process.stderr.read()).decode()
        assert await process.wait() == 1
        return said

    assert "start the service with `pdserve up`" in await error(f"127.0.0.1:{free_port()}")
    assert "not that of gRPC" in await error(f"127.0.0.1:{http.service.gateway.port}")
