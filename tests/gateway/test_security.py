"""What the gateway refuses to start with: files for TLS that do not fit, and addresses that others could reach."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gateway.gateway import Gateway
from gateway.security import Security, security_of
from pdserve.core.clock import FakeClock
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import ConfigError
from tests.certificates import Certificates
from tests.fake_worker import FakeWorker
from tests.gateway.conftest import fake_model
from tests.gateway.test_callers import entry, save
from tests.loopback import SECRET


def security(**gateway: Any) -> Security:
    return security_of(PdserveConfig.parse({"gateway": gateway}).gateway, FakeClock())


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return save(tmp_path / "tokens", entry("a", "x"))


def test_the_default_is_for_this_host_alone() -> None:
    assert PdserveConfig().gateway.host == "127.0.0.1"
    for host in ("127.0.0.1", "localhost", "::1", "127.3.2.1"):
        assert security(host=host).tls is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "gateway.example"])
def test_others_need_tls_and_tokens(host: str, tokens: Path, certificates: Certificates) -> None:
    tls = {"tls_cert": certificates.server.cert, "tls_key": certificates.server.key}
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, r"has no TLS .* and no authentication .*gateway\.insecure \(--insecure\)"),
        ({"tokens": tokens}, r"has no TLS \("),
        (tls, r"has no authentication \("),
    ]
    for settings, message in refused:
        with pytest.raises(ConfigError, match=rf"^gateway\.host: others can reach .*{message}"):
            security(host=host, **settings)
    assert security(host=host, **tls, tokens=tokens).tls is not None
    assert security(host=host, **tls, tls_client_ca=certificates.ca).tls is not None


def test_insecure_allows_it_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert security(host="0.0.0.0", insecure=True).tls is None
    assert "gateway.insecure: others can reach 0.0.0.0, and the service has no TLS" in caplog.text
    caplog.clear()
    security(host="127.0.0.1", insecure=True)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_gateway_does_not_begin_to_listen() -> None:
    async def never(*_: object) -> FakeWorker:
        raise AssertionError

    config = PdserveConfig.parse({"gateway": {"host": "0.0.0.0", "port": 0}})
    with pytest.raises(ConfigError, match=r"^gateway\.host: "):
        Gateway(config, model=fake_model(), connect=never, secret=SECRET)


def test_files_that_do_not_fit(tmp_path: Path, certificates: Certificates) -> None:
    server, client = certificates.server, certificates.client
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\xffno certificate")
    cases: list[tuple[dict[str, Path], str]] = [
        ({"tls_cert": server.cert}, r"^gateway\.tls_key: it is missing"),
        ({"tls_key": server.key}, r"^gateway\.tls_cert: it is missing"),
        ({"tls_client_ca": certificates.ca}, r"^gateway\.tls_cert: it is missing"),
        (
            {"tls_cert": tmp_path / "no", "tls_key": server.key},
            r"^gateway\.tls_cert: .*/no cannot be read: No such file",
        ),
        ({"tls_cert": server.cert, "tls_key": tmp_path}, r"^gateway\.tls_key: .* cannot be read: Is a directory"),
        ({"tls_cert": garbage, "tls_key": server.key}, r"^gateway\.tls_cert: .* has no certificate in PEM"),
        ({"tls_cert": server.key, "tls_key": server.key}, r"^gateway\.tls_cert: .* has no certificate in PEM"),
        ({"tls_cert": server.cert, "tls_key": garbage}, r"^gateway\.tls_key: .* has no private key in PEM"),
        (
            {"tls_cert": server.cert, "tls_key": client.key},
            r"^gateway\.tls_key: .* is not the key of gateway\.tls_cert",
        ),
        (
            {"tls_cert": server.cert, "tls_key": server.key, "tls_client_ca": garbage},
            r"^gateway\.tls_client_ca: .* has no certificate in PEM",
        ),
    ]
    for files, message in cases:
        with pytest.raises(ConfigError, match=message):
            security(**files)


def test_a_key_with_a_passphrase_is_refused_without_a_question(tmp_path: Path, certificates: Certificates) -> None:
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "ec", "-aes256", "-passout", "pass:word", "-in", certificates.server.key, "-out", locked],
        check=True,
        capture_output=True,
    )
    with pytest.raises(ConfigError, match="without a passphrase"):
        security(tls_cert=certificates.server.cert, tls_key=locked)


def test_paths_are_those_of_the_one_who_starts_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = PdserveConfig.parse({"gateway": {"tokens": "tokens", "tls_cert": "tls/cert.pem"}})
    assert config.gateway.tokens == tmp_path / "tokens"
    assert config.gateway.tls_cert == tmp_path / "tls" / "cert.pem"
    assert PdserveConfig.parse(config.model_dump(mode="json")) == config
