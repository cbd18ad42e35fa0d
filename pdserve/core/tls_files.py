"""Reads certificates and keys for TLS, in PEM. Errors name the option or key of the configuration, and the file."""

from __future__ import annotations

import ssl
from pathlib import Path

from pdserve.core.errors import ConfigError


def read_certificates(path: Path, name: str) -> bytes:
    """The certificates in a file. ``name`` is the option or key that names the file."""
    data = _read(path, name)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError):
        raise ConfigError(f"{name}: {path} has no certificate in PEM") from None
    return data


def read_key_pair(cert: Path, key: Path, cert_name: str, key_name: str) -> tuple[bytes, bytes]:
    """A certificate (with those between it and its CA, if there are any) and its private key, which has no
    passphrase."""
    cert_data, key_data = read_certificates(cert, cert_name), _read(key, key_name)
    try:
        # An empty passphrase keeps OpenSSL from asking for one on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{key_name}: {key} is not the key of {cert_name} {cert}") from None
        raise ConfigError(f"{key_name}: {key} has no private key in PEM without a passphrase") from None
    return cert_data, key_data


def _read(path: Path, name: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: {path} cannot be read: {error.strerror}") from None
