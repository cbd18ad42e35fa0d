"""`pdserve token`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ops.cli.options import JsonOption, print_json

app = typer.Typer(no_args_is_help=True, help="Tokens for the clients of a service (gateway.tokens).")


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="name of its bearer: letters, digits and . _ -")],
    expires: Annotated[str | None, typer.Option(help="when it ends, as 2027-06-30T00:00:00Z (default: never)")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="limit (default: none)")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="limit for tokens of prompts and outputs (default: none)")
    ] = None,
    concurrent: Annotated[int | None, typer.Option(min=1, help="limit for requests at the same time")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a new random token, and the entry for the file that gateway.tokens names.

    The token is shown this once: the file has its hash. Send it to its bearer by a safe way. A running service takes
    the entry as soon as the file is saved."""
    import yaml

    from gateway.token_file import digest_of, new_token, token_entry

    token = new_token()
    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent": concurrent,
    }
    entry: dict[str, Any] = {"name": name, "sha256": digest_of(token).hex()}
    if expires is not None:
        entry["expires"] = expires
    if chosen := {key: value for key, value in limits.items() if value is not None}:
        entry["limits"] = chosen
    token_entry(entry)
    if as_json:
        print_json({"token": token, "entry": entry})
        return
    typer.echo(f"token, shown this once: {token}\n\nentry for `tokens:` in the file of gateway.tokens:\n")
    typer.echo(yaml.safe_dump([entry], sort_keys=False), nl=False)
