"""`pdserve generate`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ops.cli.options import (
    JsonOption,
    TargetsOption,
    print_json,
    stderr_console,
    stdout_console,
    with_access,
    with_options,
)
from pdserve.client.target import DEFAULT_TARGET, AccessOptions, Target, Targets

if TYPE_CHECKING:
    from rich.table import Table

    from pdserve.client.generation import Generation, Token
    from pdserve.client.request import GenerateOptions, Prompt


_REQUEST_OPTIONS: Mapping[str, tuple[Any, str]] = {
    "mode": (str, "auto, pd (prefill and decode on separate workers) or colocated (default: auto)"),
    "max_tokens": (int, "most tokens to generate (default: 128)"),
    "temperature": (float, "0 is greedy (default: 0)"),
    "top_k": (int, "sample from the k likeliest tokens; 0 is off (default: 0)"),
    "top_p": (float, "sample from the likeliest share p (default: 1)"),
    "min_p": (float, "sample from tokens at least p times as likely as the likeliest (default: 0)"),
    "repetition_penalty": (float, "above 1: makes tokens of prompt and output less likely (default: 1)"),
    "presence_penalty": (float, "-2 to 2, subtracted once from tokens in the output (default: 0)"),
    "frequency_penalty": (float, "-2 to 2, subtracted for each occurrence in the output (default: 0)"),
    "logit_bias": (list[str], "ID=BIAS, added to a token's logit; -100 forbids it (repeatable)"),
    "logprobs": (int, "show log-probabilities of each token and the N likeliest ones (0 to 20)"),
    "structured_outputs": (str, 'what the output matches, as JSON: {"json": SCHEMA}, {"regex": "[0-9]+"}, …'),
    "seed": (int, "seed of the sampling (default: random)"),
    "stop": (list[str], "a string that ends the text (repeatable)"),
    "timeout": (float, "deadline in seconds"),
    "salt": (str, "share cached KV with requests of the same salt only"),
}
"""Options that become those of the request: type and help."""


@with_access
@with_options("request", _REQUEST_OPTIONS, "Sampling")
def generate(
    access: AccessOptions,
    request: dict[str, Any],
    text: Annotated[
        str | None, typer.Argument(help="the prompt; '-', or nothing in a pipe: from stdin", show_default=False)
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="the prompt is this file's text")] = None,
    token_ids: Annotated[str | None, typer.Option(help="the prompt as token ids: 1,2,3")] = None,
    target: TargetsOption = DEFAULT_TARGET,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="generate up to --max-tokens")] = False,
    speculation: Annotated[
        bool | None,
        typer.Option(
            "--speculation/--no-speculation",
            help="verify all guesses of next tokens, or none; default: as far as it pays",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
    text_only: Annotated[bool, typer.Option("--text-only", help="print the text, and no waterfall")] = False,
    png: Annotated[Path | None, typer.Option(help="also save the waterfall as a picture")] = None,
) -> None:
    """Generate text, streamed as it arrives, then show where the time to first token went. Where stdout is no terminal,
    the latter goes to stderr, so that a pipe gets the text alone."""
    prompt = _prompt(text, token_ids, file)
    service = Target.all_of(target, **access)
    if png is not None:
        from ops.waterfall.picture import check_picture

        check_picture("--png", png)
    options = cast(
        "GenerateOptions",
        {
            **{name: value for name, value in request.items() if name != "timeout"},
            "mode": request["mode"] or "auto",
            "logit_bias": _biases(request["logit_bias"] or []),
            "structured_outputs": _structure(request["structured_outputs"]),
            "timeout_s": request["timeout"],
            "ignore_eos": ignore_eos,
            "speculation": speculation,
        },
    )
    generation = _stream(service, prompt, options, show=not as_json)
    if as_json:
        print_json(generation.to_dict())
    elif not text_only:
        _explain(generation, request["logprobs"] is not None)
    if png is not None:
        from ops.waterfall.bars import longest
        from ops.waterfall.picture import save_waterfalls

        if longest(generation) is None:
            typer.echo(f"{png} was not saved: the answer has no breakdown to draw", err=True)
        else:
            save_waterfalls([generation], png)
            typer.echo(f"saved {png}", err=True)


def _explain(generation: Generation, logprobs: bool) -> None:
    from ops.waterfall.terminal import waterfall

    console = stdout_console()
    if console.is_terminal:
        console.print()
    else:
        console = stderr_console()
    if logprobs:
        console.print(_logprobs_table(generation.tokens))
    console.print(waterfall(generation))


def _stream(service: Targets, prompt: Prompt, options: GenerateOptions, show: bool) -> Generation:
    from pdserve.client.sync_client import Client

    with Client(service) as client, client.generate(prompt, **options) as stream:
        try:
            for token in stream:
                if show and token.text:
                    typer.echo(token.text, nl=False)
                    sys.stdout.flush()
        finally:
            if show:
                typer.echo()  # an error message starts on a line of its own
        return stream.result()


def _prompt(text: str | None, token_ids: str | None, file: Path | None) -> Prompt:
    from pdserve.core.errors import InvalidRequest

    if text is None and token_ids is None and file is None and not sys.stdin.isatty():
        text = "-"
    if sum(given is not None for given in (text, token_ids, file)) != 1:
        raise InvalidRequest("prompt: give one of text, --file and --token-ids")
    if token_ids is None:
        try:
            if file is not None:
                return file.read_text(encoding="utf-8")
            if text != "-":
                return str(text)
            if read := sys.stdin.buffer.read().decode():
                return read
            raise InvalidRequest("prompt: stdin is empty; give text, --file or --token-ids")
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"prompt: {file or 'stdin'} is not UTF-8 ({error.reason})") from None
    try:
        return [int(part) for part in token_ids.split(",")] if token_ids.strip() else []
    except ValueError:
        raise InvalidRequest(f"token_ids: {token_ids!r} is not a list like 1,2,3") from None


def _structure(text: str | None) -> Any:
    from pdserve.core.errors import InvalidRequest

    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"structured_outputs: it is not valid JSON: {error}") from None


def _biases(entries: list[str]) -> dict[int, float]:
    from pdserve.core.errors import InvalidRequest

    biases: dict[int, float] = {}
    for entry in entries:
        token_id, _, bias = entry.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise InvalidRequest(f"logit_bias: {entry!r} is not of the form ID=BIAS, like 42=-100") from None
    return biases


def _logprobs_table(tokens: Sequence[Token]) -> Table:
    """One row per token: its log-probability and probability, and the likeliest tokens at its position."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("token", "id", "logprob", "p"):
        table.add_column(name, justify="left" if name == "token" else "right")
    table.add_column("likeliest tokens")
    for token in tokens:
        if token.logprob is None:
            continue
        likeliest = (f"{_shown(top.text, top.token_id)} {math.exp(top.logprob):.1%}" for top in token.top_logprobs)
        table.add_row(
            Text(_shown(token.text, token.token_id)),
            str(token.token_id),
            f"{token.logprob:.3f}",
            f"{math.exp(token.logprob):.1%}",
            Text("  ".join(likeliest)),
        )
    return table


def _shown(text: str, token_id: int) -> str:
    """Text with visible spaces and line ends, or the id of a token without text."""
    return json.dumps(text, ensure_ascii=False) if text else f"#{token_id}"
