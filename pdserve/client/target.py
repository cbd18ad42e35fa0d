"""The service that a client speaks to, and how: its address, TLS, and the token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, Unpack

from pdserve.core.address import stays_on_this_host, target_of
from pdserve.core.errors import InvalidRequest

DEFAULT_TARGET = "localhost:50051"


class AccessOptions(TypedDict, total=False):
    """How a client reaches a service.

    ``tls``: encrypt the connection (default: if the target begins with https:// or grpcs://, or a file is given).
    ``ca``: file with the certificates that sign the service's (default: public authorities). ``cert`` and ``key``:
    files with the client's own certificate and key, for services that ask for one. ``token``: the bearer token. It is
    not sent to another host without TLS, unless ``token_in_clear``."""

    tls: bool | None
    ca: str | Path | None
    cert: str | Path | None
    key: str | Path | None
    token: str | None
    token_in_clear: bool


@dataclass(frozen=True, slots=True)
class Target:
    """A service and how to reach it; see `AccessOptions`. Shown as its address."""

    address: str
    tls: bool = False
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    token: str = field(default="", repr=False)

    @staticmethod
    def of(target: str | Target, **options: Unpack[AccessOptions]) -> Target:
        """The service that a user means. `InvalidRequest` if the options contradict each other or the target, or would
        expose the token."""
        if isinstance(target, Target):
            if options:
                raise InvalidRequest(f"{min(options)}: the target has it already; leave it out")
            return target
        unknown = sorted(set(options) - set(AccessOptions.__annotations__))
        if unknown:
            raise InvalidRequest(f"{unknown[0]}: unknown option; known: {', '.join(AccessOptions.__annotations__)}")
        address, said = target_of(target)
        given = {"ca": options.get("ca"), "cert": options.get("cert"), "key": options.get("key")}
        files = {name: Path(path) for name, path in given.items() if path}
        asked = options.get("tls")
        if asked is not None and said is not None and asked != said:
            raise InvalidRequest(f"tls: {asked} contradicts the target {target.strip()!r}; leave one out")
        said = said if asked is None else asked
        tls = bool(files) if said is None else said
        if files and not tls:
            raise InvalidRequest(f"{min(files)}: it is for TLS, which {target.strip()!r} does not use; use https://")
        if ("cert" in files) != ("key" in files):
            absent = "key" if "cert" in files else "cert"
            raise InvalidRequest(f"{absent}: it is missing; a client's certificate and its key belong together")
        token = _checked(options.get("token") or "")
        if token and not (tls or stays_on_this_host(address) or options.get("token_in_clear")):
            raise InvalidRequest(
                f"token: it would travel to {address} unencrypted, where others can read it; use "
                f"https://{address} (the service needs gateway.tls_cert), or allow it with token_in_clear "
                "(--token-in-clear) on a network that you trust"
            )
        return Target(address, tls, files.get("ca"), files.get("cert"), files.get("key"), token)

    @staticmethod
    def all_of(targets: Targets, **options: Unpack[AccessOptions]) -> tuple[Target, ...]:
        """The gateways that a user means: one target or several, or a text with commas between them. The options are
        those of each. `InvalidRequest` if there is none."""
        given = [targets] if isinstance(targets, str | Target) else list(targets)
        texts = [part for each in given for part in (each.split(",") if isinstance(each, str) else [each])]
        if not texts:
            raise InvalidRequest("target: it is empty; give host:port, or several with commas between them")
        return tuple(Target.of(each, **options) for each in texts)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata that every call carries."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def __str__(self) -> str:
        return f"https://{self.address}" if self.tls else self.address


Targets = str | Target | Sequence[str | Target]
"""One gateway of a service, or several."""


def _checked(token: str) -> str:
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise InvalidRequest("token: it contains a blank, or a character that no token has")
    return token
