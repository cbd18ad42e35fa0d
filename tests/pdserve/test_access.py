"""Tokens and TLS of the clients: what they refuse before they connect."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve import AsyncClient, Client, ConfigError, InvalidRequest
from tests.certificates import Certificates

GOOD = "good-token"


@pytest.mark.parametrize("host", ["10.0.0.1:7000", "head", "http://head", "dns:///localhost:7000"])
def test_a_token_does_not_leave_this_host_unencrypted(host: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(
            InvalidRequest, match=r"^token: it would travel .* unencrypted.*https://.*token_in_clear"
        ) as caught:
            kind(host, token=GOOD)
        assert GOOD not in str(caught.value)
    with Client(host, token=GOOD, token_in_clear=True) as client:
        assert GOOD not in repr(client)


@pytest.mark.parametrize("token", ["a b", "a\n", "ü", "a\tb"])
def test_what_is_no_token(token: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^token: ") as caught:
        Client("localhost:1", token=token)
    assert token not in str(caught.value).removeprefix("token: it contains a blank")


def test_options_that_contradict_each_other(certificates: Certificates) -> None:
    pair = certificates.client
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("http://head", {"tls": True}, r"^tls: True contradicts the target 'http://head'"),
        ("https://head", {"tls": False}, r"^tls: False contradicts"),
        ("http://head", {"ca": certificates.ca}, r"^ca: it is for TLS, which 'http://head' does not use"),
        ("https://head", {"cert": pair.cert}, r"^key: it is missing"),
        ("https://head", {"key": pair.key}, r"^cert: it is missing"),
        ("https://head", {"password": "x"}, r"^password: unknown option; known: tls, ca, cert"),
    ]
    for where, access, message in refused:
        for kind in (Client, AsyncClient):
            with pytest.raises(InvalidRequest, match=message):
                kind(where, **access)
    for kind in (Client, AsyncClient):  # tests.gateway.test_security has more of what is wrong with a file
        with pytest.raises(ConfigError, match=r"^key: .* is not the key of cert"):
            kind("https://head", cert=pair.cert, key=certificates.server.key)
