"""Sends a load's requests to a server with OpenAI's API, and times the parts of its streams."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, Unpack

import httpx2
import msgspec

from experiments.run_folder import UNKNOWN_TOKEN
from external_engines.answers import TIMEOUT, UNREADABLE, error_of, object_of, parts_of, refusal
from pdserve.client.generation import Assembler, Generation
from pdserve.client.request import GenerateOptions, Prompt
from pdserve.client.status import ServiceStatus
from pdserve.client.target import AccessOptions, Target
from pdserve.core.address import join_address
from pdserve.core.errors import DeadlineExceeded, InvalidRequest, NotReady, WorkerLost
from pdserve.core.tls_files import read_certificates, read_key_pair
from pdserve.pb import inference_pb2 as pb

VOCABULARY = 256
"""Random prompts have token ids below this, since servers do not tell the size of their vocabulary."""
_UNKNOWN_CONTEXT = 2**31 - 1
_ANSWER_TIMEOUT_S = 10.0
_PORTS = {"http": 80, "https": 443}


class OpenAIServer:
    """The server at ``url`` (``http://host:port``, with or without ``/v1``), as a
    `experiments.workloads.conversation.LoadTarget`. The first model that the server lists is used.

    A request asks for ``ignore_eos``, ``return_token_ids`` and ``cache_salt``, which vLLM and pdserve know and others
    may ignore. A server that ignores the first may end an output early. One that ignores the second gives no token ids:
    then each part of the stream is taken for a token of id `UNKNOWN_TOKEN`, and the number of output tokens comes from
    ``usage``."""

    def __init__(self, url: str, access: AccessOptions) -> None:
        """`InvalidRequest` if ``url`` has another form, or ``access`` does not go with it; `ConfigError` names a file
        that cannot be used."""
        try:
            parsed = httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise InvalidRequest(f"openai_url: {url!r} is no URL ({error})") from None
        if parsed.scheme not in _PORTS or not parsed.host or parsed.path.rstrip("/") not in ("", "/v1") or parsed.query:
            raise InvalidRequest(f"openai_url: {url!r} is not of the form http://HOST:PORT or https://HOST:PORT")
        address = join_address(parsed.host, parsed.port or _PORTS[parsed.scheme])
        self.target = Target.of(f"{parsed.scheme}://{address}", **access)
        self._name = f"the server at {self.target}"
        token = {"Authorization": f"Bearer {self.target.token}"} if self.target.token else {}
        self._http = httpx2.AsyncClient(
            base_url=f"{parsed.scheme}://{address}",
            headers={"Content-Type": "application/json", **token},
            verify=_ssl_context(self.target),
            timeout=_ANSWER_TIMEOUT_S,
            limits=httpx2.Limits(max_connections=None),
            trust_env=False,
        )
        self._status: ServiceStatus | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def connect(self) -> None:
        """Learn which model the server has. `NotReady` if it does not answer, `PdserveError` if it refuses."""
        await self.status()

    async def status(self) -> ServiceStatus:
        """What is known of the server: its model, and the context's length if it says that. Raises as `connect`."""
        if self._status is None:
            with _http_errors(self._name):
                answer = await self._http.get("/v1/models")
            if answer.status_code != 200:
                raise refusal(self._name, answer.status_code, answer.text, answer.headers)
            with _read_errors(self._name):
                model = object_of(answer.content, self._name)["data"][0]
                self._status = _status(model["id"], model.get("max_model_len"))
        return self._status

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> _Request:
        """A request, of which ``max_tokens``, ``ignore_eos``, ``salt`` and ``timeout_s`` are sent."""
        if not isinstance(prompt, str) and UNKNOWN_TOKEN in prompt:
            raise InvalidRequest(f"turns: {self._name} returns no token ids, so only texts can be continued")
        body = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": options.get("max_tokens"),
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": options.get("ignore_eos", False),
            "return_token_ids": True,
        }
        if salt := options.get("salt"):
            body["cache_salt"] = salt
        return _Request(self, body, options.get("timeout_s"))

    async def answer(self, body: dict[str, Any], timeout_s: float | None) -> Generation:
        """The server's answer to the request ``body``."""
        body["model"] = (await self.status()).model
        started_s = time.monotonic()
        answer = _Answer(self._name, started_s)
        try:
            async with asyncio.timeout(timeout_s):
                with _http_errors(self._name):
                    async with self._http.stream(
                        "POST", "/v1/completions", content=msgspec.json.encode(body), timeout=TIMEOUT
                    ) as response:
                        async for part in parts_of(response, self._name):
                            answer.add(part, time.monotonic())
        except TimeoutError:
            raise DeadlineExceeded(f"timeout: {self._name} took longer than {timeout_s:g} s") from None
        return answer.generation(time.monotonic())


@dataclass(frozen=True, slots=True)
class _Request:
    """A request, which is sent when its result is asked for."""

    server: OpenAIServer
    body: dict[str, Any]
    timeout_s: float | None

    async def result(self) -> Generation:
        """The whole answer."""
        return await self.server.answer(self.body, self.timeout_s)


class _Answer:
    """Collects the parts of a stream."""

    def __init__(self, server: str, started_s: float) -> None:
        self._server = server
        self._collected = Assembler(started_s)
        self._completion = pb.Completion(attempts=1)
        self._usage: dict[str, Any] = {}
        self._text: list[str] = []

    def add(self, part: dict[str, Any], arrived_s: float) -> None:
        """Add a part. Raises the error that it tells of, and `WorkerLost` if it has another form."""
        if "error" in part:
            raise error_of(part["error"], self._server)
        with _read_errors(self._server):
            self._completion.request_id = part.get("id") or ""
            self._usage = part.get("usage") or self._usage
            for choice in part["choices"]:
                text, token_ids = choice.get("text") or "", choice.get("token_ids")
                if token_ids is None:
                    token_ids = [UNKNOWN_TOKEN] if text else []
                for number, token_id in enumerate(token_ids):
                    index = len(self._completion.token_ids)
                    token = pb.Token(token_id=token_id, text=text if number == 0 else "", index=index)
                    self._collected.add(pb.GenerateResponse(token=token), arrived_s)
                    self._completion.token_ids.append(token_id)
                self._text.append(text)
                self._completion.finish_reason = choice.get("finish_reason") or self._completion.finish_reason

    def generation(self, ended_s: float) -> Generation:
        """The whole answer, once its stream has ended. `WorkerLost` if its end is missing."""
        done = self._completion
        if not done.finish_reason:
            raise WorkerLost(f"{self._server} ended its answer before the last token")
        with _read_errors(self._server):
            details = self._usage.get("prompt_tokens_details") or {}
            done.prompt_tokens = self._usage["prompt_tokens"]
            done.prefill_cached_tokens = details.get("cached_tokens") or 0
            if UNKNOWN_TOKEN in done.token_ids:
                del done.token_ids[:]
                done.token_ids.extend([UNKNOWN_TOKEN] * self._usage["completion_tokens"])
        done.text = "".join(self._text)
        self._collected.add(pb.GenerateResponse(completion=done), ended_s)
        return self._collected.result()


def _status(model: str, context_length: int | None) -> ServiceStatus:
    return ServiceStatus(
        ready=True,
        version="",
        model=model,
        model_hash="",
        dtype="",
        vocab_size=VOCABULARY,
        context_length=context_length or _UNKNOWN_CONTEXT,
        block_size=0,
        kv_bytes_per_token=0,
        queued=0,
        running=0,
        pid=0,
        uptime_s=0.0,
        workers=(),
    )


def _ssl_context(target: Target) -> ssl.SSLContext | bool:
    """The certificates that ``target`` names; True: those of the system. `ConfigError` names a file that cannot be
    used."""
    if target.ca is None and target.cert is None:
        return True
    roots = None if target.ca is None else read_certificates(target.ca, "ca").decode()
    context = ssl.create_default_context(cadata=roots)
    if target.cert is not None and target.key is not None:
        read_key_pair(target.cert, target.key, "cert", "key")  # checks them
        context.load_cert_chain(target.cert, target.key)
    return context


@contextlib.contextmanager
def _http_errors(server: str) -> Iterator[None]:
    """Raise `NotReady` if the server cannot be reached, and `WorkerLost` if a connection breaks."""
    try:
        yield
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
        raise NotReady(f"{server} does not answer: {str(error) or type(error).__name__}") from None
    except httpx2.HTTPError as error:
        raise WorkerLost(f"{server} broke off: {str(error) or type(error).__name__}") from None


@contextlib.contextmanager
def _read_errors(server: str) -> Iterator[None]:
    try:
        yield
    except UNREADABLE as error:
        raise WorkerLost(f"{server} does not answer as OpenAI's API does ({type(error).__name__}: {error})") from None
