"""What `up` tells before anything goes wrong: a dtype that is converted, a tokenizer or weights that are missing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve import Client
from pdserve.client.status import ServiceStatus
from tests.e2e.conftest import Cli
from tests.local_cluster import ROOT, free_port, local_cluster
from tests.ray_nodes import ray_head, ray_node

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
NO_BFLOAT16 = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
LFS_POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1\n"


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    (tmp_path / "home").mkdir()
    env = {name: value for name, value in os.environ.items() if not name.endswith("MAX_CPU_ISA")}
    places = {"XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    return Cli({**env, **places, "COLUMNS": "120"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The embedded model, to be changed."""
    copy = tmp_path / "model"
    shutil.copytree(ROOT / "models" / "tiny", copy)
    return copy


@pytest.fixture
def ports(cli: Cli) -> Iterator[list[int]]:
    """The ports of services to take down."""
    taken: list[int] = []
    yield taken
    for port in taken:
        cli.run("down", "--target", f"127.0.0.1:{port}")


def status_of(port: int) -> ServiceStatus:
    with Client(f"127.0.0.1:{port}") as client:
        assert len(client.generate(token_ids=[5, 6, 7, 8], max_tokens=4).result().token_ids) == 4
        return client.status()


def test_a_host_without_bfloat16_and_a_folder_without_a_tokenizer(cli: Cli, folder: Path, ports: list[int]) -> None:
    """Both are told by `up` and by the status, and token ids are served."""
    (folder / "tokenizer.json").unlink()
    ports.append(free_port())
    arguments = ("--model", str(folder), "--oversubscribe", "--port", str(ports[0]), "--detach")
    up = Cli({**cli.env, **NO_BFLOAT16}).run("up", *arguments)
    assert up.returncode == 0, up.stderr
    status = status_of(ports[0])
    assert (status.dtype, status.checkpoint_dtype) == ("float32", "bfloat16")
    for expected in (
        "model.dtype: auto converts the bfloat16 weights to float32: bfloat16 is emulated on this host (a CPU limited",
        f"{folder} has no tokenizer.json: prompts must be token ids, and outputs have no text",
    ):
        assert f"note: {expected}" in up.stderr
        assert any(note.startswith(expected) for note in status.notes), status.notes


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_git_lfs_pointer_is_refused_before_anything_starts(cli: Cli, folder: Path, name: str) -> None:
    (folder / name).write_text(LFS_POINTER)
    up = cli.run("up", "--model", str(folder), "--oversubscribe", "--port", str(free_port()), timeout_s=30)
    assert up.returncode != 0
    assert f"{folder / name}: is a Git LFS pointer instead of the file; run `git lfs pull`" in up.stderr
    assert "Traceback" not in up.stderr
    assert "starting Ray" not in up.stderr


def test_a_missing_shard_is_refused_before_anything_starts(cli: Cli, folder: Path) -> None:
    shards = {"weight_map": {"model.norm.weight": "model.safetensors", "lm_head.weight": "model-2-of-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(shards))
    up = cli.run("up", "--model", str(folder), "--oversubscribe", "--port", str(free_port()), timeout_s=30)
    assert up.returncode != 0
    assert "model-2-of-2.safetensors: missing, but model.safetensors.index.json names it" in up.stderr
    assert "starting Ray" not in up.stderr


def test_workers_of_unlike_hosts_agree_before_they_load(cli: Cli, tmp_path: Path, ports: list[int]) -> None:
    """One node has bfloat16 instructions (as far as this machine has), the other is kept from using them."""
    home = Path(cli.env["HOME"])
    with ray_head(home, "--num-cpus=1") as head, ray_node(home, head.address, env=NO_BFLOAT16):
        ports.append(free_port())
        config = tmp_path / "pdserve.yaml"
        config.write_text(f"cluster: {{port_base: {free_port() % 20_000 + 30_000}, device: cpu}}\n")
        arguments = ("--address", head.address, "--nodes", "2", "--placement", "strict_spread")
        up = cli.run("up", "-c", str(config), *arguments, "--port", str(ports[0]), "--detach")
        assert up.returncode == 0, up.stderr
        status = status_of(ports[0])
        assert status.dtype == "float32"
        assert {worker.state for worker in status.workers} == {"ready"}
        assert "(a CPU limited by ONEDNN_MAX_CPU_ISA=AVX2)" in up.stderr
        cli.run("down", "--target", f"127.0.0.1:{ports.pop()}")


def test_without_ray_unlike_layouts_are_refused(tmp_path: Path) -> None:
    """Each worker then decides by its own device, and the handshake compares."""
    if "avx512_bf16" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no bfloat16 instructions, so that both would take float32")

    def keep_from_bfloat16() -> None:
        os.environ.update(NO_BFLOAT16)

    with (
        pytest.raises(AssertionError, match="not ready within"),
        local_cluster({"model": {"path": "tiny"}}, in_worker={"decode-0": keep_from_bfloat16}),
    ):
        pass
