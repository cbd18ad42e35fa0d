"""Notes and errors of `up`: a converted dtype, a missing tokenizer, missing weights, and models that are downloaded."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve import Client
from pdserve.client.status import ServiceStatus
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import PdserveError
from pdserve.core.worker import Role
from runtime.dtypes import native_dtypes
from tests.command_line import PDSERVE
from tests.e2e.conftest import Cli
from tests.hub_server import Hub, Repo, commit_of, hub_server
from tests.local_cluster import ROOT, free_port, free_ports, local_cluster
from tests.ray_nodes import RayNode, ray_head, ray_node
from worker.cores import claim_cores
from worker.spec import WorkerSpec

pytestmark = pytest.mark.timeout(300)
NO_BFLOAT16 = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
LFS_POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1\n"


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """A user with an empty home. What other tests have made of this process's Ray and oneDNN settings is left out."""
    (tmp_path / "home").mkdir()
    env = {n: v for n, v in os.environ.items() if not n.endswith("MAX_CPU_ISA") and not n.startswith("RAY_")}
    places = {"XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    return Cli({**env, **places, "COLUMNS": "120"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The embedded model, to be changed."""
    copy = tmp_path / "model"
    shutil.copytree(ROOT / "models" / "tiny", copy)
    return copy


@pytest.fixture
def hub(folder: Path) -> Iterator[Hub]:
    """A hub that has the embedded model."""
    with hub_server() as hub:
        hub.repos["org/model"] = Repo({commit_of("first"): folder}, {"main": commit_of("first")})
        yield hub


@pytest.fixture
def ports(cli: Cli) -> Iterator[list[int]]:
    """The ports of services to take down."""
    taken: list[int] = []
    yield taken
    for port in taken:
        cli.run("down", "--target", f"127.0.0.1:{port}")


def status_of(port: int) -> ServiceStatus:
    with Client(f"127.0.0.1:{port}") as client:
        assert len(client.generate([5, 6, 7, 8], max_tokens=4).result().token_ids) == 4
        return client.status()


@pytest.mark.cluster
@pytest.mark.ray
def test_an_emulated_dtype_a_missing_tokenizer_and_claimed_cores(cli: Cli, folder: Path, ports: list[int]) -> None:
    """`up` and the status show all notes, those on shared cores in one line and as long as they are shared, and token
    ids are served."""
    (folder / "tokenizer.json").unlink()
    other = PdserveConfig.parse({"cluster": {"cores_per_worker": os.cpu_count()}, "gateway": {"port": free_port()}})
    spec = WorkerSpec(
        "prefill-0", Role.PREFILL, "127.0.0.1", "127.0.0.1", "cpu", ("127.0.0.1:1",), "test", config=other
    )
    _, claim = claim_cores(spec)
    ports.append(free_port())
    arguments = ("--model", str(folder), "--oversubscribe", "--port", str(ports[0]), "--detach")
    up = Cli({**cli.env, **NO_BFLOAT16}).run("up", *arguments)
    assert up.returncode == 0, up.stderr
    status = status_of(ports[0])
    assert (status.dtype, status.checkpoint_dtype) == ("float32", "bfloat16")
    for expected in (
        "model.dtype: auto converts the bfloat16 weights to float32: bfloat16 is emulated on this host (a CPU ",
        f"{folder} has no tokenizer.json: prompts must be token ids, and outputs have no text",
    ):
        assert f"note: {expected}" in up.stderr
        assert any(note.startswith(expected) for note in status.notes), status.notes
    holder = rf" with the services? on port [^;]*\b{other.gateway.port}\b"
    for said in (up.stderr.splitlines(), status.notes):
        (line,) = [line for line in said if "share cores" in line]
        (told,) = re.findall(rf"[^;:]*{holder}", line)
        assert re.findall(r"[\w-]+ \(core", told) == ["decode-0 (core", "prefill-0 (core"], said
    claim.close()
    deadline_s = time.monotonic() + 60
    while [note for note in status_of(ports[0]).notes if re.search(holder, note)]:
        assert time.monotonic() < deadline_s, "the other service has ended"
        time.sleep(0.2)


SHARDS = {"weight_map": {"model.norm.weight": "model.safetensors", "lm_head.weight": "model-2-of-2.safetensors"}}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", LFS_POINTER, "is a Git LFS pointer instead of the file; run `git lfs pull`"),
        ("model.safetensors.index.json", json.dumps(SHARDS), "-2-of-2.safetensors: missing, but model.safetensors.i"),
    ],
)
def test_a_model_that_is_not_whole_is_refused_before_anything_starts(
    cli: Cli, folder: Path, name: str, content: str, said: str
) -> None:
    (folder / name).write_text(content)
    up = cli.run("up", "--model", str(folder), "--oversubscribe", "--port", str(free_port()), timeout_s=120)
    assert up.returncode != 0
    assert said in up.stderr
    assert "Traceback" not in up.stderr
    assert "starting Ray" not in up.stderr


def up_on_two_nodes(
    cli: Cli, tmp_path: Path, head: RayNode, ports: list[int], *arguments: str
) -> tuple[str, ServiceStatus]:
    """What `up` says, and the status once it is ready."""
    ports.append(free_port())
    config = tmp_path / "pdserve.yaml"
    config.write_text(f"cluster: {{port_base: {free_ports(12)}, device: cpu}}\n")
    arguments = ("-c", str(config), "--address", head.address, "--nodes", "2", "--placement", "spread", *arguments)
    deadline_s = time.monotonic() + 180
    while (up := cli.run("up", *arguments, "--port", str(ports[0]), "--detach")).returncode:
        assert "Ray" in up.stderr, up.stderr  # the head is still coming up, and says so in one way or another
        assert time.monotonic() < deadline_s, up.stderr
    status = status_of(ports[0])
    assert {worker.state for worker in status.workers} == {"ready"}
    return up.stderr, status


@pytest.mark.cluster
@pytest.mark.ray
def test_workers_of_unlike_hosts_agree_before_they_load(cli: Cli, tmp_path: Path, ports: list[int]) -> None:
    """One node has bfloat16 instructions (as far as this machine has), the other is kept from using them."""
    home = Path(cli.env["HOME"])
    with ray_head(home, "--num-cpus=1") as head, ray_node(home, head.address, env=NO_BFLOAT16):
        said, status = up_on_two_nodes(cli, tmp_path, head, ports)
        assert status.dtype == "float32"
        assert "auto converts the bfloat16 weights to float32: bfloat16 is emulated on " in said
        cli.run("down", "--target", f"127.0.0.1:{ports.pop()}")


@pytest.mark.cluster
@pytest.mark.ray
def test_each_host_downloads_the_commit_that_the_first_one_has(
    cli: Cli, tmp_path: Path, folder: Path, hub: Hub, ports: list[int]
) -> None:
    """The branch has moved since the first host downloaded it. The other one has a cache of its own, without it."""
    home, first, newer = Path(cli.env["HOME"]), commit_of("first"), commit_of("newer")
    cache = f"hub/models--org--model/snapshots/{first}/model.safetensors"
    here, there = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "here")}, str(tmp_path / "there")
    cli = Cli({**cli.env, **here})
    assert cli.run("doctor", "--model", "org/model", "--device", "cpu").returncode in (0, 1)
    assert (tmp_path / "here" / cache).is_file()
    changed = Path(shutil.copytree(folder, tmp_path / "changed"))
    (changed / "model.safetensors").write_bytes(b"other weights")
    hub.repos["org/model"].commits[newer] = changed
    hub.repos["org/model"].branches["main"] = newer
    with (
        ray_head(home, "--num-cpus=1", env=here) as head,
        ray_node(home, head.address, env={**here, "HF_HOME": there}),
    ):
        _, status = up_on_two_nodes(cli, tmp_path, head, ports, "--model", "org/model")
        assert status.model == "org/model"
        assert (Path(there) / cache).read_bytes() == (folder / "model.safetensors").read_bytes()
        cli.run("down", "--target", f"127.0.0.1:{ports.pop()}")


def test_a_start_that_downloads_can_be_interrupted(cli: Cli, folder: Path, hub: Hub, tmp_path: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.truncate(300_000_000)
    hub.pause_s = 0.3
    env = {**cli.env, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache")}
    command = [*PDSERVE, "up", "--model", "org/model", "--port", str(free_port())]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as up:
        assert up.stderr is not None
        lines = []
        for line in up.stderr:
            lines.append(line)
            if "downloading org/model" in line:
                up.send_signal(signal.SIGINT)
        assert up.wait(60) == 130, lines
    assert "looking for org/model on the Hugging Face Hub" in lines[0]
    assert re.search(r"downloading org/model: \d+ MB, \d of \d files complete", "".join(lines)), lines
    assert "the service was asked to stop before it started" in lines[-1]


def test_what_a_model_takes_is_told_from_its_config_alone(cli: Cli, hub: Hub, tmp_path: Path) -> None:
    env = {**cli.env, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache")}
    told = Cli(env).run("model-info", "org/model", "--device", "cpu", "--json")
    assert told.returncode == 0, told.stderr
    facts = json.loads(told.stdout)
    assert (facts["model"], facts["parameters"]) == ("org/model", 4_451_072)
    assert [path for method, path, _ in hub.asked if method == "GET"] == ["config.json"]


def test_without_ray_unlike_workers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker then decides by its own device, and the handshake compares."""
    if native_dtypes("cpu")[0].dtypes == ("float32",):
        pytest.skip("both would take float32 on this CPU")
    with local_cluster({"model": {"path": "tiny"}}) as cluster, Client(cluster.target) as client:
        assert client.status().dtype == "bfloat16"
        cluster.kill("decode-0")
        for name, value in NO_BFLOAT16.items():
            monkeypatch.setenv(name, value)
        cluster.start_worker(Role.DECODE, 0)
        deadline_s = time.monotonic() + 60
        refusal = ""
        while "KV layout differs in dtype: 'float32' here, 'bfloat16' at the peer" not in refusal:
            assert time.monotonic() < deadline_s, refusal
            try:
                client.generate([5, 6, 7, 8], max_tokens=4, mode="pd", timeout_s=5).result()
            except PdserveError as error:
                refusal = str(error)
            time.sleep(0.2)
