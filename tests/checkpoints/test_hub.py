"""Models by their id on the Hugging Face Hub, from a server on this host that speaks its protocol. Each download runs
in a process of its own, because the hub library reads its variables once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoints.source import resolve_model
from tests.hub_server import Hub, Repo, commit_of, hub_server
from tests.local_cluster import ROOT, free_port
from tests.random_models import save_random

COMMIT, NEWER = commit_of("first"), commit_of("second")
WEIGHTS = "model.safetensors"
RESOLVE = """
import json, sys
from checkpoints import hub
from checkpoints.source import resolve_model
from pdserve.core.errors import ModelError
reports = []
hub._REPORT_EVERY_S = 0.0
try:
    source = resolve_model(sys.argv[1], reports.append if sys.argv[2] == "download" else None)
except ModelError as error:
    print(json.dumps({"error": str(error), "reports": reports}))
else:
    print(json.dumps({"folder": str(source.folder), "name": source.name, "path": source.path, "reports": reports,
                      "hash": source.model_hash()}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 26 MB of weights: the hub library keeps what has arrived in parts of 10 MB."""
    folder = tmp_path_factory.mktemp("repository")
    sizes = {"vocab_size": 6000, "hidden_size": 512, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 128}
    save_random(folder, {"model_type": "llama", **sizes, **heads}, seed=1)
    assert (folder / WEIGHTS).stat().st_size > 25e6
    return folder


@pytest.fixture
def hub(folder: Path, tmp_path: Path) -> Iterator[Hub]:
    repository = Path(shutil.copytree(folder, tmp_path / "repository"))
    (repository / "pytorch_model.bin").write_bytes(b"a pickle")
    (repository / "consolidated.safetensors").write_bytes(b"the same weights in another format")
    (repository / "original").mkdir()
    (repository / "original" / "params.json").write_text("{}")
    with hub_server() as hub:
        hub.repos["org/model"] = Repo({COMMIT: repository}, {"main": COMMIT})
        yield hub


Resolve = Callable[..., dict[str, Any]]


@pytest.fixture
def resolve(hub: Hub, tmp_path: Path) -> Resolve:
    """Resolves a model in another process, whose cache is empty at first."""

    def run(path: str, *, download: bool = True, **variables: str) -> dict[str, Any]:
        env = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "cache"),
            "HOME": str(tmp_path),
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-c", RESOLVE, path, "download" if download else "look"]
        ran = subprocess.run(
            command, env=env | variables, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert ran.returncode == 0, ran.stderr
        return dict(json.loads(ran.stdout))

    return run


def test_a_model_is_downloaded_once_and_pinned_to_its_commit(
    hub: Hub, resolve: Resolve, folder: Path, tmp_path: Path
) -> None:
    here = resolve("org/model", download=False)
    assert "no such model in this host's cache" in here["error"]
    assert "`hf download org/model`" in here["error"]
    assert hub.asked == []

    first = resolve("org/model")
    assert (first["name"], first["path"]) == ("org/model", f"org/model@{COMMIT}")
    begins, *progress, ends = first["reports"]
    assert begins == "looking for org/model on the Hugging Face Hub"
    assert ends == f"org/model is complete at commit {COMMIT}"
    size_mb = sum(each.stat().st_size for each in folder.iterdir()) / 1e6
    assert progress[-1] == f"downloading org/model: {size_mb:.0f} MB, 3 of 3 files complete"
    cached = Path(first["folder"])
    assert {each.name for each in cached.iterdir()} == {"config.json", "generation_config.json", WEIGHTS}
    assert (cached / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    assert first["hash"] == resolve_model(str(folder)).model_hash()

    # The branch moves: the cache is used as it is, and the newer commit only when it is asked for.
    hub.repos["org/model"].commits[NEWER] = folder
    hub.repos["org/model"].branches["main"] = NEWER
    hub.asked.clear()
    for again in ("org/model", first["path"]):
        assert resolve(again) == {**first, "reports": []}
    assert resolve("org/model", HF_HUB_OFFLINE="1") == {**first, "reports": []}
    assert hub.asked == []
    assert resolve(f"org/model@{NEWER}")["path"] == f"org/model@{NEWER}"

    # A folder of that name is preferred, and other processes get its whole path.
    shutil.copytree(folder, tmp_path / "org" / "model")
    local = resolve("org/model")
    assert (local["folder"], local["path"]) == (str(tmp_path / "org" / "model"),) * 2


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_an_interrupted_download_goes_on(hub: Hub, resolve: Resolve, folder: Path, reset: bool) -> None:
    hub.drops[WEIGHTS] = [(15_000_000, reset), (3_000_000, reset)]
    got = resolve("org/model")
    assert (Path(got["folder"]) / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    first, *others = hub.downloads(WEIGHTS)
    assert first == ""
    assert len(others) == 2
    if not reset:  # after a reset the hub library gives up, and the file is downloaded again
        assert all(int(each.removeprefix("bytes=").removesuffix("-")) >= 10_000_000 for each in others)


def test_a_download_that_failed_is_completed_by_the_next_command(hub: Hub, resolve: Resolve, folder: Path) -> None:
    hub.drops[WEIGHTS] = [(15_000_000, True)] * 5
    failed = resolve("org/model")
    assert failed["error"].startswith("org/model: the download was interrupted 5 times"), failed
    assert sum("the download was interrupted" in each for each in failed["reports"]) == 4
    assert "no such model in this host's cache" in resolve("org/model", download=False)["error"]  # not a part of it
    hub.asked.clear()
    got = resolve("org/model")
    assert (Path(got["folder"]) / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    assert (hub.downloads(WEIGHTS), hub.downloads("config.json")) == ([""], [])


def test_a_cache_of_which_only_a_part_is_known_is_completed(hub: Hub, resolve: Resolve, tmp_path: Path) -> None:
    """As other programs leave it, which download single files."""
    got = resolve("org/model")
    snapshot = Path(got["folder"])
    (snapshot / WEIGHTS).unlink()
    shutil.rmtree(snapshot.parents[1] / "trees")
    assert "has no *.safetensors file" in resolve("org/model", download=False)["error"]
    assert resolve("org/model")["hash"] == got["hash"]


def test_a_cache_of_an_older_library_serves_without_a_connection(hub: Hub, resolve: Resolve) -> None:
    """At once: the hub library tries to list a commit again for 23 s."""
    got = resolve("org/model")
    shutil.rmtree(Path(got["folder"]).parents[1] / "trees")
    assert resolve(got["path"], download=False) == {**got, "reports": []}
    nowhere = f"http://127.0.0.1:{free_port()}"
    again = resolve(got["path"], HF_ENDPOINT=nowhere)
    assert again["hash"] == got["hash"]
    assert again["reports"][-1].startswith(f"{nowhere} cannot be reached (")
    assert resolve(got["path"])["reports"][-1] == f"{got['path']} is complete at commit {COMMIT}"


def test_what_is_missing_is_said_with_what_helps(hub: Hub, resolve: Resolve, folder: Path, tmp_path: Path) -> None:
    pickles = tmp_path / "pickles"
    pickles.mkdir()
    shutil.copy(folder / "config.json", pickles)
    (pickles / "pytorch_model.bin").write_bytes(b"a pickle")
    hub.repos["org/pickles"] = Repo({COMMIT: pickles}, {"main": COMMIT})
    hub.repos["org/gated"] = Repo({COMMIT: folder}, {"main": COMMIT}, gated=True)
    hub.repos["org/private"] = Repo({COMMIT: folder}, {"main": COMMIT}, token="hf_right")
    nowhere = f"http://127.0.0.1:{free_port()}"

    def error(path: str, **variables: str) -> str:
        return str(resolve(path, **variables)["error"])

    assert "org/pickles: has no *.safetensors file" in error("org/pickles")
    assert f"access has to be granted at {hub.url}/org/gated; then set HF_TOKEN" in error("org/gated")
    assert "access has to be granted" in error("org/gated", HF_TOKEN="hf_of_another")
    for unknown in (error("org/nothing"), error("org/private"), error("org/private", HF_TOKEN="hf_wrong")):
        assert f"{hub.url} has no such model, or not for you" in unknown
    assert resolve("org/private", HF_TOKEN="hf_right")["name"] == "org/private"
    assert "org/model has no branch, tag or commit v9" in error("org/model@v9")
    assert "HF_HUB_OFFLINE forbids downloads" in error("org/model", HF_HUB_OFFLINE="1")
    unreachable = error("org/model", HF_ENDPOINT=nowhere)
    assert f"{nowhere} cannot be reached" in unreachable
    assert "`hf download org/model --local-dir FOLDER`" in unreachable
