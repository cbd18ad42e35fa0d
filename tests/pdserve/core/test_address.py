"""Addresses as text, of both IP versions."""

from __future__ import annotations

import pytest

from pdserve.core.address import join_address, split_address, stays_on_this_host, target_of
from pdserve.core.errors import InvalidRequest


@pytest.mark.parametrize(("host", "port", "address"), [("::1", 80, "[::1]:80"), ("10.0.0.1", 8, "10.0.0.1:8")])
def test_an_address_is_host_and_port(host: str, port: int, address: str) -> None:
    assert join_address(host, port) == address
    assert split_address(address) == (host, port)


@pytest.mark.parametrize("address", ["80", ":80", "host:", "host:port"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ValueError, match=r"not host:port|invalid literal"):
        split_address(address)


@pytest.mark.parametrize(
    ("text", "address", "tls"),
    [
        ("localhost", "localhost:50051", None),
        ("head:7000", "head:7000", None),
        ("10.0.0.1:7000", "10.0.0.1:7000", None),
        ("::1", "[::1]:50051", None),
        ("[::1]", "[::1]:50051", None),
        ("[::1]:7000", "[::1]:7000", None),
        ("http://head:7000/", "head:7000", False),
        ("grpc://head", "head:50051", False),
        ("https://head:7000/", "head:7000", True),
        ("grpcs://head", "head:50051", True),
        (" head:7000\n", "head:7000", None),
        ("7000", "localhost:7000", None),
        ("unix:/tmp/socket", "unix:/tmp/socket", None),
        ("dns:///head:7000", "dns:///head:7000", None),
    ],
)
def test_targets(text: str, address: str, tls: bool | None) -> None:
    assert target_of(text) == (address, tls)


@pytest.mark.parametrize(
    ("target", "stays"),
    [
        ("localhost", True),
        ("127.1.2.3:80", True),
        ("[::1]:80", True),
        ("unix:/tmp/socket", True),
        ("0.0.0.0:80", False),
        ("10.0.0.1:80", False),
        ("head", False),
        ("localhost.example:80", False),
        ("dns:///localhost:80", False),
    ],
)
def test_what_stays_on_this_host(target: str, stays: bool) -> None:
    assert stays_on_this_host(target_of(target)[0]) == stays


@pytest.mark.parametrize(
    "text", ["", ":7000", "head:port", "head:70000", "ftp://head", "http://head/v1", "a b", "me@head:1", "http://"]
)
def test_what_is_no_target(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^target: "):
        target_of(text)
