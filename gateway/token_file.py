"""The file with the tokens of clients. It has their hashes, so that who reads it cannot use them.

    tokens:
      - name: chat-backend
        sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
        expires: 2027-06-30T00:00:00Z
        limits: {requests_per_minute: 600, tokens_per_minute: 200000, concurrent: 32}
    shared_cache: false

Errors never quote the file, in which somebody may have written a token."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from pdserve.core.errors import ConfigError

KEY = "gateway.tokens"
_PREFIX = "pdserve_"
_RANDOM_BYTES = 32
_NAME = r"^[A-Za-z0-9._-]{1,64}$"


def new_token() -> str:
    """A random token."""
    return _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def digest_of(token: str) -> bytes:
    """What the file has of a token."""
    return hashlib.sha256(token.encode()).digest()


def _not_of_nothing(digest: str) -> str:
    if bytes.fromhex(digest) == digest_of(""):
        raise ValueError("it is the hash of an empty token")
    return digest


def _aware(time: datetime) -> datetime:
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


_Limit = Annotated[int, Field(ge=1, strict=True)]


class TokenLimits(BaseModel):
    """Limits of one token; None is unlimited."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None  # of prompts and outputs
    concurrent: _Limit | None = None
    min_priority: Annotated[int, Field(strict=True)] = 0
    """The lowest, hence earliest, priority of requests: by default that of requests without one, so that only tokens
    that name a lower value may go before others."""


class TokenEntry(BaseModel):
    """One token: the ``name`` of its bearer, which separates cached KV and may be logged, and the hash of the token.
    From ``expires`` on (UTC unless it names another zone) it is refused. The live page shows an ``operator`` the
    requests of all bearers, others their own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=_NAME)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$"), AfterValidator(_not_of_nothing)]
    expires: Annotated[datetime, AfterValidator(_aware)] | None = None
    limits: TokenLimits = TokenLimits()
    operator: bool = False

    @property
    def digest(self) -> bytes:
        """The hash."""
        return bytes.fromhex(self.sha256)


class TokenFile(BaseModel):
    """The whole file. ``shared_cache``: bearers find each other's cached KV; else each one finds only its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: list[TokenEntry]
    shared_cache: bool = False

    @model_validator(mode="after")
    def _check_distinct(self) -> Self:
        for what, values in (
            ("name", [entry.name for entry in self.tokens]),
            ("sha256", [entry.sha256.lower() for entry in self.tokens]),
        ):
            if twice := next((index for index, value in enumerate(values) if value in values[:index]), None):
                raise ValueError(f"tokens.{twice}.{what}: an entry before has the same")
        return self


def read_token_file(path: Path) -> TokenFile:
    """The file's content. `ConfigError` if it cannot be read, is not valid, or may be read or written by everybody."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read()
    except OSError as error:
        raise ConfigError(f"{KEY}: {path} cannot be read: {error.strerror}") from None
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(
            f"{KEY}: every user of this host can read or change {path} (mode {mode:o}); chmod o-rwx {path}"
        )
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{KEY}: {path}{where}: not valid YAML") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{KEY}: {path}: not valid UTF-8") from None
    try:
        return TokenFile.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{KEY}: {path}: {_explained(error)}") from None


def token_entry(content: Mapping[str, Any]) -> TokenEntry:
    """An entry of the file. `ConfigError` if it is not valid."""
    try:
        return TokenEntry.model_validate(content)
    except ValidationError as error:
        raise ConfigError(_explained(error)) from None


def _explained(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message
