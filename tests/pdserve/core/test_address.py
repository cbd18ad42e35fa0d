"""Addresses as text, of both IP versions."""

from __future__ import annotations

import pytest

from pdserve.core.address import join_address, split_address


@pytest.mark.parametrize(("host", "port", "address"), [("::1", 80, "[::1]:80"), ("10.0.0.1", 8, "10.0.0.1:8")])
def test_an_address_is_host_and_port(host: str, port: int, address: str) -> None:
    assert join_address(host, port) == address
    assert split_address(address) == (host, port)


@pytest.mark.parametrize("address", ["80", ":80", "host:", "host:port"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ValueError, match=r"not host:port|invalid literal"):
        split_address(address)
