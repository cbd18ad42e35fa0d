"""The file with tokens: what is refused in it, and how callers are known by it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.callers import Callers
from gateway.token_file import digest_of, new_token
from pdserve.core.clock import FakeClock
from pdserve.core.errors import CapacityExceeded, ConfigError, Unauthenticated

EXPIRES = datetime(2027, 1, 1, tzinfo=UTC)


def entry(name: str, token: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "sha256": digest_of(token).hex(), **more}


def save(path: Path, *entries: dict[str, Any], mode: int = 0o600, **more: Any) -> Path:
    path.write_text(yaml.safe_dump({"tokens": list(entries), **more}))
    path.chmod(mode)
    return path


def knows(callers: Callers, token: str) -> str | None:
    """The name of the token's bearer; None if it is refused."""
    try:
        return callers.identify(f"Bearer {token}").name
    except Unauthenticated:
        return None


def test_new_tokens_are_long_and_random() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(token) > 45 and token.startswith("pdserve_") for token in tokens)


def test_a_caller_is_known_by_its_token_alone(tmp_path: Path) -> None:
    path = save(tmp_path / "tokens", entry("a", "secret-a"), entry("b", "secret-b"))
    callers = Callers(path, FakeClock())
    assert [knows(callers, token) for token in ("secret-a", "secret-b")] == ["a", "b"]
    assert callers.identify("bearer  secret-a ").name == "a"
    for wrong in ("", "Bearer", "Bearer ", "Bearer secret-c", "Basic secret-a", "secret-a", "Bearer secret-aa"):
        with pytest.raises(Unauthenticated) as caught:
            callers.identify(wrong)
        assert "secret" not in str(caught.value)
        assert str(caught.value).startswith("authorization: ")


def test_without_a_file_anyone_calls() -> None:
    callers = Callers(None, FakeClock())
    for authorization in ("", "Bearer none"):
        caller = callers.identify(authorization)
        assert (caller.name, caller.salt_of("s")) == ("", "s")


def test_an_expired_token_is_unknown(tmp_path: Path) -> None:
    now_s = EXPIRES.timestamp() - 1
    path = save(tmp_path / "tokens", entry("a", "x", expires="2027-01-01T00:00:00"), entry("b", "y", expires=EXPIRES))
    callers = Callers(path, FakeClock(), lambda: now_s)
    assert [knows(callers, token) for token in "xy"] == ["a", "b"]
    now_s += 1
    assert [knows(callers, token) for token in "xy"] == [None, None]


def test_salts_of_two_callers_never_meet(tmp_path: Path) -> None:
    path = save(tmp_path / "tokens", entry("a", "x"), entry("b", "y"))
    apart = Callers(path, FakeClock())
    salts = [apart.identify(f"Bearer {token}").salt_of(salt) for token in "xy" for salt in ("", "b/", "/")]
    assert len(set(salts)) == len(salts)
    shared = Callers(save(tmp_path / "shared", entry("a", "x"), entry("b", "y"), shared_cache=True), FakeClock())
    assert {shared.identify(f"Bearer {token}").salt_of("s") for token in "xy"} == {"s"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_text("tokens: ["), "line 1: not valid YAML"),
        (lambda path: path.write_bytes(b"\xff"), "not valid"),
        (lambda path: path.write_text("[]"), "Input should be a valid dictionary"),
        (lambda path: save(path, {"name": "a", "token": "SECRET"}), "tokens.0.sha256: Field required"),
        (lambda path: save(path, {**entry("a", "x"), "token": "SECRET"}), "tokens.0.token: Extra inputs"),
        (lambda path: save(path, entry("a/b", "x")), "tokens.0.name: String should match"),
        (lambda path: save(path, entry("a", "")), "tokens.0.sha256: it is the hash of an empty token"),
        (lambda path: save(path, entry("a", "x"), entry("a", "y")), "tokens.1.name: an entry before has the same"),
        (lambda path: save(path, entry("a", "x"), entry("b", "x")), "tokens.1.sha256: an entry before has the same"),
        (lambda path: save(path, entry("a", "x", expires="soon")), "tokens.0.expires: "),
        (lambda path: save(path, entry("a", "x", limits={"rpm": 1})), "tokens.0.limits.rpm: Extra inputs"),
        (lambda path: save(path, entry("a", "x"), mode=0o644), "every user of this host can read or change"),
        (lambda path: path.unlink(), "cannot be read: No such file"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, change: Callable[[Path], object], message: str) -> None:
    path = tmp_path / "tokens"
    path.touch(mode=0o600)
    change(path)
    with pytest.raises(ConfigError) as caught:
        Callers(path, FakeClock())
    assert str(caught.value).startswith("gateway.tokens: ")
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert "SECRET" not in str(caught.value)


def replaced(path: Path, *entries: dict[str, Any], **more: Any) -> None:
    """Put another file in the place of ``path`` at once, as careful editors do."""
    os.replace(save(path.with_suffix(".new"), *entries, **more), path)


def test_a_changed_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = FakeClock()
    path = save(tmp_path / "tokens", entry("a", "x", limits={"requests_per_minute": 1}), entry("b", "y"))
    callers = Callers(path, clock)
    callers.identify("Bearer x").quota.take(1)

    replaced(path, entry("a", "x2", limits={"requests_per_minute": 1}), entry("c", "z"))
    assert [knows(callers, token) for token in ("x", "x2", "y", "z")] == [None, "a", None, "c"]
    with pytest.raises(CapacityExceeded):  # a new token of the same name goes on with what is left
        callers.identify("Bearer x2").quota.take(1)
    assert "was read again: 2 tokens" in caplog.text

    caplog.clear()
    for broken in (lambda: path.write_text("tokens: [}"), lambda: path.chmod(0o644), path.unlink):
        broken()
        assert [knows(callers, token) for token in ("x2", "z", "y")] == ["a", "c", None]
        knows(callers, "x2")
        assert callers.problem().endswith("the tokens of before stay valid")
    records = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(records) == 3, "each version once"
    assert all("the tokens of before stay valid" in record.getMessage() for record in records)

    save(path, entry("b", "y"))
    assert callers.problem() == ""
    assert [knows(callers, token) for token in ("x2", "y")] == [None, "b"]
