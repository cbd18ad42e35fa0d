"""Addresses as text, of both IP versions."""

from __future__ import annotations

import pytest

from pdserve.core.address import join_address, split_address, target_of
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
    ("text", "address"),
    [
        ("localhost", "localhost:50051"),
        ("head:7000", "head:7000"),
        ("10.0.0.1:7000", "10.0.0.1:7000"),
        ("::1", "[::1]:50051"),
        ("[::1]", "[::1]:50051"),
        ("[::1]:7000", "[::1]:7000"),
        ("http://head:7000/", "head:7000"),
        ("grpc://head", "head:50051"),
        (" head:7000\n", "head:7000"),
        ("unix:/tmp/socket", "unix:/tmp/socket"),
        ("dns:///head:7000", "dns:///head:7000"),
    ],
)
def test_targets(text: str, address: str) -> None:
    assert target_of(text) == address


@pytest.mark.parametrize(
    "text", ["", ":7000", "head:port", "head:70000", "ftp://head", "http://head/v1", "a b", "me@head:1", "http://"]
)
def test_what_is_no_target(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^target: "):
        target_of(text)
