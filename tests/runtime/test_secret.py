"""The service's secret, and what a proof of it is worth."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import time

import msgspec
import pytest

from pdserve.core.errors import ConfigError
from runtime import stream_proof
from runtime.logs import LimitedLog
from runtime.secret import SECRET_VARIABLE, AuthenticationFailed, ServiceSecret, Side, new_nonce
from runtime.stream_proof import StreamDialler, StreamListener

SECRET = ServiceSecret(bytes(range(32)))
ADDRESS, HERE = "10.0.0.1:20001", "ipv4:10.0.0.2:40000"
NONCES = bytes(32), b"\1" * 32


def test_a_secret_is_random_and_travels_as_text() -> None:
    one, other = ServiceSecret.new(), ServiceSecret.new()
    assert one.hex() != other.hex()
    assert ServiceSecret.from_hex(one.hex()).hex() == one.hex()
    assert len(bytes.fromhex(one.hex())) == 32


@pytest.mark.parametrize("text", ["", "00", "0" * 63, "0" * 66, "g" * 64])
def test_a_malformed_secret_is_an_error_that_does_not_quote_it(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^PDSERVE_SERVICE_SECRET: ") as refused:
        ServiceSecret.from_hex(text)
    assert not text or text not in str(refused.value)


def test_a_secret_does_not_show_itself() -> None:
    shown = f"{SECRET} {SECRET!r} {[SECRET]} {AuthenticationFailed()}"
    assert "ServiceSecret(…)" in shown
    assert SECRET.hex()[:8] not in shown
    assert not hasattr(SECRET, "__dict__")
    for leave in (pickle.dumps, copy.copy, copy.deepcopy, msgspec.json.encode, msgspec.to_builtins):
        with pytest.raises(TypeError) as refused:
            leave(SECRET)
        assert SECRET.hex()[:8] not in str(refused.value)


def test_the_environment_loses_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRET.environment().items():
        monkeypatch.setenv(name, value)
    assert ServiceSecret.from_environment().hex() == SECRET.hex()
    assert SECRET_VARIABLE not in os.environ
    with pytest.raises(ConfigError, match=r"^PDSERVE_SERVICE_SECRET is not set: .* \(64 random hexadecimal digits, "):
        ServiceSecret.from_environment()


def test_a_proof_belongs_to_one_purpose_side_connection_and_address() -> None:
    right = ("kv tcp", Side.DIALLING, NONCES, ADDRESS)
    proof = SECRET.proof(*right)
    SECRET.verify(proof, *right)
    others: list[tuple[str, Side, tuple[bytes, bytes], str]] = [
        ("kv shm", Side.DIALLING, NONCES, ADDRESS),
        ("kv tcp", Side.LISTENING, NONCES, ADDRESS),  # reflected
        ("kv tcp", Side.DIALLING, (NONCES[1], NONCES[0]), ADDRESS),
        ("kv tcp", Side.DIALLING, (NONCES[0], new_nonce()), ADDRESS),  # replayed on another connection
        ("kv tcp", Side.DIALLING, (new_nonce(), NONCES[1]), ADDRESS),
        ("kv tcp", Side.DIALLING, NONCES, "10.0.0.1:20002"),  # relayed to another port
        # The same bytes, divided otherwise.
        ("kv tc", Side.DIALLING, NONCES, ADDRESS),
        ("kv tcp", Side.DIALLING, (NONCES[0] + NONCES[1][:1], NONCES[1][1:]), ADDRESS),
        ("kv tcp", Side.DIALLING, (NONCES[0], NONCES[1] + ADDRESS[:1].encode()), ADDRESS[1:]),
    ]
    for other in others:
        with pytest.raises(AuthenticationFailed):
            SECRET.verify(proof, *other)
    for wrong in (b"", proof[:-1], proof + b"\0", bytes([proof[0] ^ 1]) + proof[1:]):
        with pytest.raises(AuthenticationFailed):
            SECRET.verify(wrong, *right)
    with pytest.raises(AuthenticationFailed):
        ServiceSecret.new().verify(proof, *right)


def met() -> tuple[StreamListener, StreamDialler, stream_proof.Metadata]:
    """Both ends of a gRPC connection, and the metadata with which the dialling end proves itself."""
    listener, dialler = StreamListener(SECRET, "control", ADDRESS), StreamDialler(SECRET, "control", ADDRESS)
    return listener, dialler, dialler.answer(listener.challenge(dialler.greeting, HERE))


def test_a_proof_of_a_stream_is_worth_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    listener, _, proof = met()
    another, later = "ipv4:10.0.0.3:40000", time.monotonic() + stream_proof.VALID_S + 1
    with pytest.raises(AuthenticationFailed):
        listener.verify(proof, another)
    for other in (
        StreamListener(SECRET, "control", ADDRESS),  # another process
        StreamListener(SECRET, "registry", ADDRESS),
        StreamListener(ServiceSecret.new(), "control", ADDRESS),
    ):
        with pytest.raises(AuthenticationFailed):
            other.verify(proof, HERE)
    for changed in ((), proof[:2], (*proof, proof[0]), *((*proof[:i], (proof[i][0], b"\0" * 32)) for i in range(3))):
        with pytest.raises(AuthenticationFailed):
            listener.verify(changed, HERE)
    assert listener.refused == 1 + 6
    monkeypatch.setattr(time, "monotonic", lambda: later)
    with pytest.raises(AuthenticationFailed):
        listener.verify(proof, HERE)


def test_greetings_of_strangers_leave_nothing_behind() -> None:
    listener, _, proof = met()
    listener.verify(proof, HERE)
    for _ in range(1000):
        listener.challenge(StreamDialler(ServiceSecret.new(), "control", ADDRESS).greeting, HERE)
    assert len(listener._used) == 1
    for wrong in (None, (), (("pdserve-greeting-bin", b"short"),)):
        with pytest.raises(AuthenticationFailed):
            listener.challenge(wrong, HERE)
    assert listener.refused == 3


def test_a_flood_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log = LimitedLog(logging.getLogger("test"))
    for message in [f"stranger {number}" for number in range(100)]:
        log.warning(message)
    assert [record.getMessage() for record in caplog.records] == ["stranger 0"]
    log._last_s -= 60
    log.warning("stranger 100")
    assert caplog.records[-1].getMessage() == "stranger 100 (99 like this were not logged)"
