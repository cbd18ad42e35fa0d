"""`transfer.interface` on the loopback device, which every host has."""

from __future__ import annotations

import pytest

from pdserve.core.errors import ConfigError
from worker.addresses import interfaces, resolve_interface


@pytest.mark.parametrize("wanted", ["lo", "127.0.0.0/8", "127.0.0.1", "localhost"])
def test_devices_networks_addresses_and_names(wanted: str) -> None:
    found = resolve_interface(wanted, "10.9.9.9")
    assert (found.address, found.device, found.is_up) == ("127.0.0.1", "lo", True)


def test_the_default_is_the_hosts_address() -> None:
    assert resolve_interface(None, "127.0.0.1").device == "lo"
    elsewhere = resolve_interface(None, "192.0.2.200")
    assert (elsewhere.address, elsewhere.device) == ("192.0.2.200", "")


@pytest.mark.parametrize("wanted", ["ib7", "192.0.2.200", "203.0.113.0/24", "no.such.host.invalid", "300.1.1.1/8"])
def test_an_unknown_interface_is_an_error_that_names_it(wanted: str) -> None:
    with pytest.raises(ConfigError, match=r"^transfer\.interface: ") as caught:
        resolve_interface(wanted, "10.9.9.9")
    assert wanted in str(caught.value)
    if not wanted.startswith("300"):
        assert "lo 127.0.0.1" in str(caught.value)


def test_loopback_is_among_the_interfaces() -> None:
    assert "127.0.0.1" in [each.address for each in interfaces() if each.device == "lo"]
