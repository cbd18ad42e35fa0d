"""Which Ray `--address auto` joins: never one that another service has started for itself."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ops.launch import discovery
from ops.launch.discovery import find_ray, prepare_environment
from ops.launch.leftovers import is_private_ray
from pdserve.core.errors import LaunchError


@contextlib.contextmanager
def raylet(folder: Path, address: str, session: str) -> Iterator[psutil.Process]:
    """A process that looks like the raylet of a Ray: by its name and its arguments."""
    script = Path(tempfile.mkdtemp(dir=folder), "raylet")
    script.write_text("#!/bin/sh\necho\nread _\n")
    script.chmod(0o755)
    arguments = [f"--gcs-address={address}", f"--session_dir={session}/session_2026", "--static_resource_list=CPU,2"]
    process = subprocess.Popen([script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()  # from here on it has its arguments
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[psutil.Process]:
    """The processes that are looked at: other Rays of this host have nothing to do with these tests."""
    looked_at: list[psutil.Process] = []

    def process_iter(attrs: list[str]) -> Iterator[psutil.Process]:
        for process in looked_at:
            process.info = process.as_dict(attrs)
            yield process

    monkeypatch.setattr(psutil, "process_iter", process_iter)
    monkeypatch.setattr(discovery, "CURRENT_CLUSTER", tmp_path / "ray_current_cluster")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return looked_at


def test_a_private_ray_is_not_joined(only: list[psutil.Process], tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"auto: no Ray to join runs on this host; start one with `ray start --head`"):
        find_ray()
    with raylet(tmp_path, "10.0.0.1:6379", "/tmp/pdserve-ray-0a1b2c3d") as private:
        only.append(private)
        with pytest.raises(LaunchError, match=r"1 private Ray\(s\) of other services run here"):
            find_ray()
        with raylet(tmp_path, "10.0.0.1:7000", "/tmp/ray") as other:
            only.append(other)
            assert find_ray() == "10.0.0.1:7000"


def test_several_rays_are_not_guessed_among(
    only: list[psutil.Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with raylet(tmp_path, "10.0.0.1:7000", "/tmp/ray") as one, raylet(tmp_path, "10.0.0.1:8000", "/x/ray") as other:
        only += [one, other]
        with pytest.raises(LaunchError, match=r"several Rays run on this host \(10\.0\.0\.1:7000, 10\.0\.0\.1:8000\)"):
            find_ray()
        discovery.CURRENT_CLUSTER.write_text("10.0.0.1:8000\n")
        assert find_ray() == "10.0.0.1:8000"
        discovery.CURRENT_CLUSTER.write_text("10.0.0.1:9000\n")  # of a Ray that has ended
        with pytest.raises(LaunchError, match="several Rays"):
            find_ray()
        monkeypatch.setenv("RAY_ADDRESS", "head:6379")
        assert find_ray() == "head:6379"


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A token in the home of a user whose environment has no variables of Ray."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.touch(0o600)
    return token


def test_a_token_is_used(token: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_environment("10.0.0.1:6379")
    assert os.environ.pop("RAY_AUTH_MODE") == "token"
    token.rename(tmp_path / "elsewhere")
    prepare_environment("10.0.0.1:6379")
    assert "RAY_AUTH_MODE" not in os.environ
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "elsewhere"))
    prepare_environment("10.0.0.1:6379")
    assert os.environ.pop("RAY_AUTH_MODE") == "token"
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    prepare_environment("auto")
    assert os.environ["RAY_AUTH_MODE"] == "token"


@pytest.mark.parametrize("mode", [0o604, 0o620])
def test_a_token_that_others_can_read_or_change_is_refused(
    token: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    token.chmod(mode)
    with pytest.raises(LaunchError, match=rf"Ray's token {token} \(mode {mode:o}\), .*; chmod 600 {token}$"):
        prepare_environment("auto")
    prepare_environment("local")  # has a token of its own
    for other_source in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE"):
        monkeypatch.setenv(other_source, "disabled")
        prepare_environment("auto")
        monkeypatch.delenv(other_source)


def test_what_is_private() -> None:
    assert is_private_ray("/tmp/pdserve-ray-0a1b2c3d")
    assert is_private_ray("/tmp/pdserve-ray-0a1b2c3d/session_x")
    assert not is_private_ray("/tmp/ray/session_x")
    assert not is_private_ray("/home/me/tmp/pdserve-ray-0a1b2c3d")
    assert not is_private_ray("")
