"""A package that is installed outside of the repository (`tests/plugin`) adds a transport, a routing policy, a model
family and an experiment."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from checkpoints.families import architectures, family_of
from experiments.experiment import Experiment
from kv_transfer.factory import offered_transports
from ops.cli.config import documented_defaults
from pdserve import Client
from pdserve.core import plugins
from pdserve.core.config import PdserveConfig, RouterConfig
from pdserve.core.errors import ConfigError
from router.policies import policy
from tests.local_cluster import ROOT, LocalCluster, local_cluster
from tests.random_models import greedy_tokens, save_random

SOURCE = ROOT / "tests" / "plugin"
PROJECT = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
WINDOW = 24
OLMO3 = {
    "model_type": "olmo3", "vocab_size": 307, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512, "sliding_window": WINDOW,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
    },
}  # fmt: skip


def describe(folder: Path, name: str, version: str, groups: Mapping[str, Mapping[str, str]]) -> None:
    """Write into ``folder`` what an installed package says of itself, with these entry points."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(
        "".join(f"[{group}]\n" + "".join(f"{n} = {at}\n" for n, at in added.items()) for group, added in groups.items())
    )
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    (info / "RECORD").touch()


@contextmanager
def installed_in(folder: Path) -> Iterator[None]:
    """This process, and those that it starts, find what is installed in ``folder``."""
    caches = plugins.installed, plugins.load
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        for cache in caches:
            cache.cache_clear()
        yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture(scope="module")
def carrier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The package of `tests/plugin`, installed from its wheel."""
    folder = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(SOURCE / "pdserve_carrier", folder / "built" / "pdserve_carrier")
    describe(folder / "built", PROJECT["name"], PROJECT["version"], PROJECT["entry-points"])
    archive = shutil.make_archive(str(folder / "pdserve_carrier-1.0-py3-none-any"), "zip", folder / "built")
    wheel = Path(archive).rename(Path(archive).with_suffix(".whl"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", folder / "site", wheel], check=True, timeout=120)
    with installed_in(folder / "site"):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model of the package's family."""
    folder = tmp_path_factory.mktemp("olmo3")
    save_random(folder, OLMO3, seed=3)
    return folder


@pytest.fixture(scope="module")
def cluster(carrier: None, model: Path) -> Iterator[LocalCluster]:
    """A service with everything that the package adds."""
    settings = {
        "model": {"path": str(model), "dtype": "float32"},
        "engine": {"block_size": 16, "num_blocks": 64},
        "transfer": {"transport": "carrier"},
        "router": {"policy": "last_name"},
    }
    with local_cluster(settings, decode=2) as cluster:
        yield cluster


def test_a_model_of_its_family_is_served_over_its_transport_as_its_policy_says(
    cluster: LocalCluster, model: Path
) -> None:
    with Client(cluster.target) as client:
        for length in (70, 2 * WINDOW):
            prompt = [(length + 7 * place) % 307 for place in range(length)]
            result = client.generate(prompt, mode="pd", max_tokens=10, ignore_eos=True).result()
            assert list(result.token_ids) == greedy_tokens(model, prompt, 10)
            assert (result.transport, result.decode_worker) == ("carrier", "decode-1")
            assert result.kv_bytes == result.kv_bytes_expected > 0
            assert "the last name" in result.placements[0]
        (link, _) = next(worker.links for worker in client.status().workers if worker.role == "prefill")
    assert (link.transport, link.reason) == (
        "carrier",
        "the only one that is configured or possible here, of a plug-in",
    )


def test_its_experiment_is_a_command(cluster: LocalCluster, tmp_path: Path) -> None:
    arguments = ["experiment", "carrier", "--quick", "--target", cluster.target, "--output", str(tmp_path), "--json"]
    command = [sys.executable, "-m", "ops.command", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    summary = json.loads(run.stdout)
    assert (summary["transports"], summary["decode_workers"]) == (["carrier"], ["decode-1"])
    assert summary["answer"].endswith("2 requests by carrier.")  # other load stands before it


def test_its_names_are_among_those_that_are_known(carrier: None) -> None:
    for name in ("carrier", "last_name"):
        assert f" | {name}]" in documented_defaults()
    assert "Olmo3ForCausalLM" in architectures()
    with pytest.raises(ConfigError, match=r"^transfer\.transport: .* nixl, carrier \(got 'pigeon'\)"):
        PdserveConfig.parse({"transfer": {"transport": "pigeon"}})
    with pytest.raises(ConfigError, match=r"^router\.policy: .* nearest_link, last_name \(got "):
        PdserveConfig.parse({"router": {"policy": {"decode": "pigeon"}}})


@pytest.mark.parametrize(
    ("group", "at", "use", "why"),
    [
        (plugins.TRANSPORTS, "no_such_module:Pigeon", lambda: offered_transports("pigeon", device="cpu"),
         "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
        (plugins.TRANSPORTS, "json:dumps", lambda: offered_transports("pigeon", device="cpu"), "not of kind KVTransp"),
        (plugins.POLICIES, "json:pigeon", lambda: policy("pigeon"), "cannot be loaded: AttributeError: "),
        (plugins.MODEL_FAMILIES, "json:dumps", lambda: family_of("pigeon"), "not of kind Family"),
        (plugins.EXPERIMENTS, "experiments.sweep:Sweep", lambda: plugins.load_all(plugins.EXPERIMENTS, Experiment),
         "its own name is sweep"),
    ],
)  # fmt: skip
def test_a_plugin_that_cannot_be_used_is_named_with_its_package(
    tmp_path: Path, group: str, at: str, use: Callable[[], object], why: str
) -> None:
    describe(tmp_path, "broken", "2.0", {group: {"pigeon": at}})
    with installed_in(tmp_path), pytest.raises(ConfigError, match=f"^{group}: pigeon of package broken 2.0 .*{why}"):
        use()


def test_a_command_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    describe(tmp_path, "broken", "2.0", {plugins.COMMANDS: {"pigeon": "no_such_module:add"}})
    with installed_in(tmp_path):
        command = [sys.executable, "-m", "ops.command", "list"]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 1
    assert run.stderr.startswith("error: pdserve.commands: pigeon of package broken 2.0 cannot be loaded: ")


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    describe(tmp_path, "first", "1.0", {plugins.TRANSPORTS: {"tcp": "json:dumps"}, plugins.POLICIES: {"same": "a:b"}})
    describe(tmp_path, "second", "2.0", {plugins.POLICIES: {"same": "a:b"}})
    with installed_in(tmp_path):
        with pytest.raises(ConfigError, match=r"^pdserve\.transports: package first 1\.0 has tcp, which is a name of"):
            PdserveConfig.parse({"transfer": {"transport": "tcp"}})
        with pytest.raises(ConfigError, match=r"^pdserve\.policies: package .* and package .* both have same"):
            RouterConfig(policy="same")
