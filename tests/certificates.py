"""Certificates for TLS, made by the command `openssl`."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key."""

    cert: Path
    key: Path


@dataclass(frozen=True)
class Certificates:
    """An authority with a certificate for a server on this host and one for a client, and a stranger that signed its
    own."""

    ca: Path
    server: Pair
    client: Pair
    stranger: Pair


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


def _self_signed(folder: Path, name: str) -> Pair:
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    _openssl("req", "-x509", *_KEY, "-days", "2", "-subj", f"/CN={name}", "-keyout", pair.key, "-out", pair.cert)
    return pair


def _signed(folder: Path, name: str, authority: Pair, extensions: str) -> Pair:
    pair, request = Pair(folder / f"{name}.pem", folder / f"{name}.key"), folder / f"{name}.csr"
    (folder / f"{name}.ext").write_text(extensions)
    _openssl("req", "-new", *_KEY, "-subj", f"/CN={name}", "-keyout", pair.key, "-out", request)
    signed_by = ("-CA", authority.cert, "-CAkey", authority.key, "-CAcreateserial")
    _openssl(
        "x509", "-req", "-in", request, *signed_by, "-days", "2", "-extfile", folder / f"{name}.ext", "-out", pair.cert
    )
    return pair


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("the command openssl, which makes certificates, is not installed")
    folder = tmp_path_factory.mktemp("certificates")
    authority = _self_signed(folder, "authority")
    server = _signed(folder, "server", authority, "subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    client = _signed(folder, "client", authority, "extendedKeyUsage=clientAuth\n")
    return Certificates(authority.cert, server, client, _self_signed(folder, "stranger"))
