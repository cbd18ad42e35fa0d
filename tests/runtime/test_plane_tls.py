"""The files for TLS of the worker plane: those that fit, and the error for those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.core.config import PdserveConfig
from pdserve.core.errors import ConfigError
from runtime.plane_tls import plane_tls
from tests.certificates import Certificates, tls_of


def test_without_files_there_is_no_tls() -> None:
    assert plane_tls(PdserveConfig().cluster) is None


def test_files_that_fit(certificates: Certificates) -> None:
    tls = tls_of(**certificates.of_plane())
    assert tls.key == certificates.worker.key.read_bytes()
    assert "PRIVATE KEY" not in repr(tls)


def test_all_three_or_none(certificates: Certificates) -> None:
    files = certificates.of_plane()
    for absent in files:
        with pytest.raises(ConfigError, match=rf"^cluster\.{absent}: it is missing"):
            tls_of(**{name: path for name, path in files.items() if name != absent})
        with pytest.raises(ConfigError, match=r"^cluster\.tls_.*: it is missing"):
            tls_of(**{absent: files[absent]})


def test_files_that_do_not_fit(certificates: Certificates, tmp_path: Path) -> None:
    """`tests.gateway.test_security` has more of what is wrong with a file."""
    mine = certificates
    cases: list[tuple[dict[str, str], str]] = [
        ({**mine.of_plane(), "tls_ca": str(tmp_path / "no")}, r"^cluster\.tls_ca: .*/no cannot be read"),
        (
            {**mine.of_plane(), "tls_key": str(mine.client.key)},
            r"^cluster\.tls_key: .* is not the key of cluster",
        ),
        (
            mine.of_plane(mine.strange_worker),
            r"^cluster\.tls_cert: .* with cluster\.tls_ca .*: unable to get local issuer",
        ),
        (mine.of_plane(mine.server), r"^cluster\.tls_cert: .*: Hostname mismatch.* pdserve-worker as subjectAltName"),
        (mine.of_plane(mine.client), r"^cluster\.tls_cert: .*: .*purpose.* servers and clients"),
        (mine.of_plane(mine.half), r"^cluster\.tls_cert: .*: .*purpose"),
    ]
    for case, message in cases:
        with pytest.raises(ConfigError, match=message):
            tls_of(**case)
