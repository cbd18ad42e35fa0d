"""`pdserve chat`."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ops.cli.options import stderr_console, stdout_console, target_option, with_access
from pdserve.client.target import AccessOptions, Target

if TYPE_CHECKING:
    from http.client import HTTPResponse

    from pdserve.client.generation import Generation

_CONNECT_TIMEOUT_S = 10.0
_SILENCE_TIMEOUT_S = 900.0  # above `gateway.default_timeout_s`, so that the service's own deadline is what ends a wait
_WHY = re.compile(r"/why(?: +([0-9]{1,9}))?")
_HELP = (
    "/why shows where the time of the last answer went, /why N that of answer N; /new begins another conversation, "
    "/quit or Ctrl-D leaves, Ctrl-C ends an answer"
)


@with_access
def chat(
    access: AccessOptions,
    target: Annotated[
        str,
        target_option("HTTP port on this host, host:port or URL of the service's HTTP API", "PDSERVE_HTTP_TARGET"),
    ] = "localhost:8000",
    system: Annotated[str | None, typer.Option(help="a system message, which each conversation begins with")] = None,
    mode: Annotated[str, typer.Option(help="auto, pd (prefill and decode on separate workers) or colocated")] = "auto",
    max_tokens: Annotated[int | None, typer.Option(help="most tokens of an answer (default: what fits)")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy (default: 1)")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of the sampling (default: random)")] = None,
) -> None:
    """Chat with the served model in the terminal. The model's chat template makes the prompt of the whole conversation.
    /why shows where the time to first token of the last answer went, /why N that of the conversation's answer N."""
    from ops.waterfall.terminal import waterfall
    from pdserve.core.errors import PdserveError

    if sys.stdin.isatty():
        import readline  # noqa: F401 - lets `input` edit lines and recall earlier ones
    service = Target.of(target, **access)
    console, remarks = stdout_console(), stderr_console()
    with _call(service, "GET", "/v1/models") as (answer, _):
        model = json.load(answer)["data"][0]["id"]
    remarks.print(f"chatting with {model} at {service}; {_HELP}", soft_wrap=True, markup=False)
    beginning = [] if system is None else [{"role": "system", "content": system}]
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    options |= {"stream": True, "return_token_ids": True, "pdserve": {"mode": mode, "breakdown": True}}
    messages = [*beginning]
    answers: list[Generation | None] = []
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            typer.echo()
            continue
        if line == "/quit":
            return
        if line == "/new":
            messages, answers = [*beginning], []
        elif why := _WHY.fullmatch(line):
            number = int(why[1] or len(answers))
            generation = answers[number - 1] if 1 <= number <= len(answers) else None
            console.print(
                f"there is no complete answer {why[1] or 'yet'}" if generation is None else waterfall(generation)
            )
        elif line.startswith("/"):
            console.print(_HELP, markup=False)
        elif line:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                text, generation = _answer(service, {**options, "messages": asked})
            except PdserveError as error:  # the conversation stays as it was
                remarks.print(f"error: {error}", soft_wrap=True, markup=False)
                continue
            answers.append(generation)
            messages = [*asked, {"role": "assistant", "content": text}]


def _answer(service: Target, body: dict[str, Any]) -> tuple[str, Generation | None]:
    """The text of an answer, which is shown as it arrives, and its generation (None: Ctrl-C ended it, and the text is
    what had arrived)."""
    from google.protobuf.json_format import ParseDict

    from pdserve.client.generation import Assembler
    from pdserve.core.errors import PdserveError
    from pdserve.pb import inference_pb2 as pb

    text, token_ids = "", list[int]()
    try:
        with _call(service, "POST", "/v1/chat/completions", body) as (answer, started_s):
            assembler = Assembler(started_s)
            for line in answer:
                arrived_s = time.monotonic()
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise PdserveError(event["error"]["message"])
                (choice,) = event["choices"]
                piece = choice["delta"].get("content") or ""
                token = pb.Token(token_id=choice["token_ids"][0], text=piece, index=len(token_ids))
                assembler.add(pb.GenerateResponse(token=token), arrived_s)
                text += piece
                token_ids.append(token.token_id)
                typer.echo(piece, nl=False)
                sys.stdout.flush()
                if (account := event.get("pdserve")) is not None:
                    account |= {"text": text, "token_ids": token_ids, "mode": f"MODE_{account['mode'].upper()}"}
                    completion = ParseDict(account, pb.Completion(), ignore_unknown_fields=True)
                    assembler.add(pb.GenerateResponse(completion=completion), arrived_s)
            return text, assembler.result()
    except KeyboardInterrupt:  # closing the connection has cancelled the request
        return text, None
    finally:
        typer.echo()


@contextmanager
def _call(
    service: Target, method: str, path: str, body: dict[str, Any] | None = None
) -> Iterator[tuple[HTTPResponse, float]]:
    """The answer of a call of the HTTP API, and the time just before the call, after the connection was made.
    `NotReady` if there is none, `PdserveError` with the service's message for one that is no success."""
    import http.client

    from pdserve.client.channel import tls_context
    from pdserve.core.errors import NotReady, PdserveError

    if service.tls:
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            service.address, timeout=_CONNECT_TIMEOUT_S, context=tls_context(service)
        )
    else:
        connection = http.client.HTTPConnection(service.address, timeout=_CONNECT_TIMEOUT_S)
    headers = {"content-type": "application/json", **dict(service.metadata)}
    with closing(connection):
        try:
            connection.connect()
            connection.sock.settimeout(_SILENCE_TIMEOUT_S)
            started_s = time.monotonic()
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                content = answer.read()
                try:
                    raise PdserveError(json.loads(content)["error"]["message"])
                except (ValueError, LookupError, TypeError):
                    raise PdserveError(f"{service} answers with status {answer.status}; is it pdserve?") from None
            yield answer, started_s
        except http.client.HTTPException as error:
            raise NotReady(
                f"the server at {service} does not speak HTTP/1.1 or broke off ({type(error).__name__}): name the port "
                "of the HTTP API (gateway.http_port, 8000), not that of gRPC, with https:// if it uses TLS"
            ) from None
        except OSError as error:
            raise NotReady(
                f"no answer from {service} ({error}): start the service with `pdserve up`, or name the host:port of "
                "its HTTP API (gateway.http_port) as --target, with https:// if it uses TLS"
            ) from None
