"""Certificates for TLS, made by the command `openssl`."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.core.config import PdserveConfig
from runtime.plane_tls import SERVER_NAME, PlaneTls, plane_tls

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key."""

    cert: Path
    key: Path


@dataclass(frozen=True)
class Certificates:
    """An authority with a certificate for a server on this host, one for a client, one for the processes of a service,
    and half of one, with which they could not dial; a stranger that signed its own, and one for processes that the
    stranger signed."""

    ca: Path
    server: Pair
    client: Pair
    stranger: Pair
    worker: Pair
    half: Pair
    strange_worker: Pair

    def of_plane(self, pair: Pair | None = None, ca: Path | None = None) -> dict[str, str]:
        """The keys of the section ``cluster`` for a certificate of the authority, or others."""
        pair = pair or self.worker
        return {"tls_cert": str(pair.cert), "tls_key": str(pair.key), "tls_ca": str(ca or self.ca)}


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


def make_certificates(folder: Path) -> Certificates:
    """New ones. Skips the test without the command."""
    if shutil.which("openssl") is None:
        pytest.skip("the command openssl, which makes certificates, is not installed")
    authority = _self_signed(folder, "authority")
    server = _signed(folder, "server", authority, "subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    client = _signed(folder, "client", authority, "extendedKeyUsage=clientAuth\n")
    stranger = _self_signed(folder, "stranger")
    name = f"subjectAltName=DNS:{SERVER_NAME}\n"
    worker, strange_worker = _signed(folder, "worker", authority, name), _signed(folder, "other", stranger, name)
    half = _signed(folder, "half", authority, f"{name}extendedKeyUsage=serverAuth\n")
    return Certificates(authority.cert, server, client, stranger, worker, half, strange_worker)


@functools.cache
def service_tls() -> PlaneTls:
    """The TLS of a service, the same in a whole test process."""
    with tempfile.TemporaryDirectory() as folder:
        return tls_of(**make_certificates(Path(folder)).of_plane())


def tls_of(**files: str) -> PlaneTls:
    """The TLS of a worker plane with these keys of the section ``cluster``."""
    tls = plane_tls(PdserveConfig.parse({"cluster": files}).cluster)
    assert tls is not None
    return tls


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))
