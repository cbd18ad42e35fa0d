"""`pdserve config` and `pdserve token`, which prepare a service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from ops.cli.options import JsonOption, print_json


def config() -> None:
    """Print the default configuration as YAML, every field with its description."""
    typer.echo(documented_defaults(), nl=False)


def documented_defaults() -> str:
    """The default configuration as a commented file; `PdserveConfig.parse` reads it back."""
    from pdserve.core.config import NAMES, PdserveConfig, descriptions

    lines = [
        "# The configuration of `pdserve up -c FILE`: all keys with their defaults. Omit the ones you do not change."
    ]
    about = descriptions(PdserveConfig)
    for name, section in PdserveConfig():
        lines += ["", f"# {about[name]}", f"{name}:"]
        for key, text in descriptions(type(section)).items():
            named = NAMES.get(f"{name}.{key}")
            choices = _choices(type(section).model_fields[key].annotation) if named is None else named()
            suffix = " | ".join(choices)
            lines.append(f"  # {text}{suffix and f' [{suffix}]'}")
            lines.append(f"  {key}: {_yaml(getattr(section, key))}")
    return "\n".join(lines) + "\n"


def _choices(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from (str(choice) for choice in get_args(annotation))
    elif get_origin(annotation) is not dict:
        for part in get_args(annotation):
            yield from _choices(part)


def _yaml(value: Any) -> str:
    import yaml
    from pydantic import BaseModel

    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    return (
        str(yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)).removesuffix("...\n").strip()
    )


token_app = typer.Typer(no_args_is_help=True, help="Tokens for the clients of a service (gateway.tokens).")


@token_app.command("new")
def new_token(
    name: Annotated[str, typer.Argument(help="name of its bearer: letters, digits and . _ -")],
    expires: Annotated[str | None, typer.Option(help="when it ends, as 2027-06-30T00:00:00Z (default: never)")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="limit (default: none)")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="limit for tokens of prompts and outputs (default: none)")
    ] = None,
    concurrent: Annotated[int | None, typer.Option(min=1, help="limit for requests at the same time")] = None,
    min_priority: Annotated[int | None, typer.Option(help="lowest, hence earliest, priority (default: 0)")] = None,
    operator: Annotated[bool, typer.Option("--operator", help="may see the requests of all on the live page")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print a new random token, and the entry for the file that gateway.tokens names.

    The token is shown this once: the file has its hash. Send it to its bearer by a safe way. A running service takes
    the entry as soon as the file is saved."""
    from gateway.token_file import digest_of, token_entry
    from gateway.token_file import new_token as draw_token

    token = draw_token()
    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent": concurrent,
        "min_priority": min_priority,
    }
    fields = {
        "name": name,
        "sha256": digest_of(token).hex(),
        "expires": expires,
        "limits": {key: value for key, value in limits.items() if value is not None} or None,
        "operator": operator or None,
    }
    entry = {key: value for key, value in fields.items() if value is not None}
    token_entry(entry)
    if as_json:
        print_json({"token": token, "entry": entry})
        return
    typer.echo(f"token, shown this once: {token}\n\nentry below `tokens:` in the file of gateway.tokens:\n")
    lines = [f"{key}: {value if key == 'expires' else _yaml(value)}" for key, value in entry.items()]
    typer.echo("  - " + "\n    ".join(lines))
