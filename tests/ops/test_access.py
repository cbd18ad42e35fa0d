"""Commands that are clients of a service with TLS and tokens, and those that prepare one."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from gateway.callers import Callers
from pdserve.core.clock import FakeClock
from tests.certificates import Certificates
from tests.pdserve.scripted_service import ScriptedService
from tests.pdserve.test_client import free_target

COMMANDS = [
    ("status",),
    ("top", "--count", "1"),
    ("generate", "hello"),
    ("bench", "--requests", "2", "--input-len", "20", "--output-len", "3"),
    ("demo", "--rounds", "1"),
]


@pytest.fixture
def secure(certificates: Certificates) -> Iterator[ScriptedService]:
    with ScriptedService(certificates.server) as service:
        yield service


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("the-token\n")
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_client_has_the_options(
    secure: ScriptedService,
    certificates: Certificates,
    token_file: Path,
    pdserve: Any,
    command: tuple[str, ...],
    tmp_path: Path,
) -> None:
    png = ("--png", str(tmp_path / "w.png")) if command[0] == "demo" else ()
    access = ("--ca", str(certificates.ca), "--token-file", str(token_file))
    ran = pdserve(*command, *png, "--target", secure.target, *access)
    assert ran.code == 0, ran.err
    assert secure.servicer.authorizations
    assert set(secure.servicer.authorizations) == {"Bearer the-token"}
    assert "the-token" not in ran.out + ran.err
    without = pdserve(*command, *png, "--target", secure.target)
    assert without.code == 1
    assert f"the certificate of the server at {secure.target} is not trusted (unable to get local issuer" in without.err


def test_an_experiment_has_them_and_keeps_no_token(
    secure: ScriptedService, certificates: Certificates, pdserve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_TOKEN", "the-token")
    options = ("--prompt-lens", "16", "--pairs", "1", "--rates", "4", "--duration-s", "1", "--rounds", "2")
    where = ("--output", str(tmp_path), "--target", secure.target, "--ca", str(certificates.ca))
    ran = pdserve("experiment", "added-ttft", *options, *where)
    assert "Bearer the-token" in secure.servicer.authorizations, ran.err
    assert set(secure.servicer.authorizations) == {"Bearer the-token"}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if b"the-token" in path.read_bytes()]


def test_the_token_comes_from_the_file_or_the_environment(
    service: ScriptedService, pdserve: Any, token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pdserve("status", "--target", service.target).code == 0
    monkeypatch.setenv("PDSERVE_TOKEN", "of-the-environment")
    assert pdserve("status", "--target", service.target).code == 0
    assert pdserve("status", "--target", service.target, "--token-file", str(token_file)).code == 0
    assert service.servicer.authorizations == ["", "Bearer of-the-environment", "Bearer the-token"]
    (tmp_path / "empty").touch()
    for path, message in (("no", "cannot be read: No such file"), ("empty", "has no token")):
        ran = pdserve("status", "--target", service.target, "--token-file", str(tmp_path / path))
        assert ran.code == 2
        assert ran.err == f"error: --token-file: {tmp_path / path} {message}{' or directory' if path == 'no' else ''}\n"


def test_the_environment_gives_them_once_for_all_commands(
    secure: ScriptedService,
    certificates: Certificates,
    pdserve: Any,
    token_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PDSERVE_CA", str(certificates.ca))
    monkeypatch.setenv("PDSERVE_TOKEN_FILE", str(token_file))
    monkeypatch.setenv("PDSERVE_TARGET", secure.target)
    for command in (("status",), ("top", "--count", "1"), ("generate", "hello")):
        ran = pdserve(*command)
        assert ran.code == 0, ran.err
    assert set(secure.servicer.authorizations) == {"Bearer the-token"}
    monkeypatch.setenv("PDSERVE_TOKEN_IN_CLEAR", "1")
    refused = pdserve("status", "--target", "127.0.0.1:1")
    assert "unencrypted" not in refused.err


def test_a_token_does_not_leave_this_host_unencrypted(pdserve: Any, token_file: Path) -> None:
    for command in (*COMMANDS, ("chat",)):
        ran = pdserve(*command, "--target", "192.0.2.1:7", "--token-file", str(token_file))
        assert ran.code == 2
        assert ran.err.startswith("error: token: it would travel to 192.0.2.1:7 unencrypted")
        assert "--token-in-clear" in ran.err
        assert "the-token" not in ran.err


def test_token_new_prints_a_token_and_its_entry(pdserve: Any, tmp_path: Path) -> None:
    printed = pdserve("token", "new", "alice").out
    token = next(line for line in printed.splitlines() if line.startswith("token")).split()[-1]
    assert "\n  - name: alice\n    sha256: " in printed, "as docs/security.md shows the file"
    pasted = yaml.safe_load("tokens:\n" + printed[printed.index("  - name") :])
    (entry,) = pasted["tokens"]
    assert token not in printed.replace(token, "", 1), "once"
    limits = ("--requests-per-minute", "60", "--tokens-per-minute", "9000", "--concurrent", "4", "--min-priority", "-5")
    options = ("--expires", "2099-01-01T00:00:00Z", *limits, "--operator")
    bobs = pdserve("token", "new", "bob", *options).out
    limits_told = "{requests_per_minute: 60, tokens_per_minute: 9000, concurrent: 4, min_priority: -5}"
    assert f"\n    expires: 2099-01-01T00:00:00Z\n    limits: {limits_told}\n    operator: true\n" in bobs
    yaml.safe_load("tokens:\n" + bobs[bobs.index("  - name") :])
    other = pdserve("token", "new", "bob", *options, "--json").json

    path = tmp_path / "tokens"
    path.write_text(yaml.safe_dump({"tokens": [entry, other["entry"]]}))
    path.chmod(0o600)
    callers = Callers(path, FakeClock())
    assert callers.identify(f"Bearer {token}").name == "alice"
    bob = callers.identify(f"Bearer {other['token']}")
    assert (bob.name, bob.quota.limits.concurrent, bob.quota.limits.min_priority, bob.sees_all) == ("bob", 4, -5, True)
    assert pdserve("token", "new", "a/b").err.startswith("error: name: String should match pattern")
    assert pdserve("token", "new", "a", "--expires", "soon").err.startswith("error: expires: ")


def test_what_is_wrong_with_a_connection_is_told_apart(
    secure: ScriptedService, service: ScriptedService, certificates: Certificates, pdserve: Any
) -> None:
    def said(target: str, *options: str) -> str:
        ran = pdserve("status", "--target", target, *options)
        assert (ran.code, ran.err.count("\n")) == (1, 1)
        return str(ran.err)

    encrypted = secure.target.removeprefix("https://")
    ca = ("--ca", str(certificates.ca))
    free = free_target()
    assert f"nothing answers at {free} (Connection refused): start the service" in said(free)
    assert f"the server at {encrypted} uses TLS: name it as https://{encrypted}" in said(encrypted)
    assert "does not use TLS: leave out https://" in said(f"https://{service.target}", *ca)
    assert "is not trusted (unable to get local issuer" in said(secure.target)
    pair = [(certificates.server.key.read_bytes(), certificates.server.cert.read_bytes())]
    for_some = grpc.server(futures.ThreadPoolExecutor(1))
    asks_for_one = grpc.ssl_server_credentials(pair, certificates.ca.read_bytes(), require_client_auth=True)
    port = for_some.add_secure_port("localhost:0", asks_for_one)
    for_some.start()
    assert "refuses the client's certificate: name one with its key" in said(f"https://localhost:{port}", *ca)
    for_some.stop(0)
    with http1_server() as other:
        assert f"nothing answers at {other} in gRPC (" in said(other)


@contextlib.contextmanager
def http1_server() -> Iterator[str]:
    """A server that is not pdserve."""

    def answer() -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
