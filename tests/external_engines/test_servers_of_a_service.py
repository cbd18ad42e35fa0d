"""`pdserve doctor`, `up` and the other commands with servers of another engine as workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops.doctor.examine import diagnose
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import ConfigError
from tests.e2e.conftest import Cli
from tests.external_engines.recorded_vllm import RecordedVLLM, running
from tests.external_engines.test_started_servers import config_of
from tests.local_cluster import free_port


def pair() -> tuple[RecordedVLLM, RecordedVLLM]:
    prefill, decode = RecordedVLLM("engine-p"), RecordedVLLM("engine-d")
    decode.peers = {"engine-p": prefill}
    return prefill, decode


def examined(prefill: str, decode: str) -> list[tuple[str, str]]:
    config = PdserveConfig.load(None, {"cluster.prefill_urls": [prefill], "cluster.decode_urls": [decode]})
    return [(finding.level, finding.what) for finding in diagnose(config).findings]


def test_the_doctor_asks_the_servers() -> None:
    prefill, decode = pair()
    with running(prefill, decode):
        assert [level for level, _ in examined(prefill.url, decode.url)] == ["ok", "ok"]
        decode.version = "0.31.0"
        assert examined(prefill.url, decode.url)[-1] == (
            "fail",
            "they cannot hand KV over: version is '0.32.0' and '0.31.0'",
        )
        decode.has_connector = False
        assert any("no metrics of a KV connector" in what for _, what in examined(prefill.url, decode.url))
        assert ("fail", "All connection attempts failed") in examined(prefill.url, "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("connector", "kv_memory_mb", "failing", "links"), [("nixl", 10**9, ["memory"], 0), ("pdserve", 64, [], 1)]
)
def test_the_doctor_examines_hosts_that_would_start_servers(
    tmp_path: Path, connector: str, kv_memory_mb: int, failing: list[str], links: int
) -> None:
    """Their memory, and the links if pdserve moves the KV."""
    settings = {"worker.connector": connector, "engine.kv_memory_mb": kv_memory_mb}
    config = config_of(tmp_path, **settings, **{"cluster.oversubscribe": True, "cluster.address": "local"})
    report = diagnose(config)
    assert [finding.check for finding in report.findings if finding.level == "fail"] == failing
    assert [bool(pair.meeting.figures) for pair in report.pairs] == [True] * links


@pytest.mark.parametrize("url", ["localhost:8100", "ftp://localhost", "http://localhost/v1", "http://"])
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster.prefill_urls.0: .*such as http://host:8100"):
        PdserveConfig.load(None, {"cluster.prefill_urls": [url]})


def test_servers_are_all_workers() -> None:
    with pytest.raises(ConfigError, match="leave out prefill and decode"):
        PdserveConfig.load(None, {"cluster.prefill_urls": ["http://localhost:1"], "cluster.decode": 1})


@pytest.mark.ray
@pytest.mark.cluster
@pytest.mark.timeout(200)
def test_a_service_before_servers(tmp_path: Path) -> None:
    prefill, decode = pair()
    cli, port = Cli.of(tmp_path), free_port()
    with running(prefill, decode):
        urls = ("--prefill-url", prefill.url, "--decode-url", decode.url)
        try:
            up = cli.done("up", *urls, "--port", str(port), "--detach")
            assert "1P1D" in up.stderr
            result = json.loads(cli.done("generate", "Hello", "--port", str(port), "--mode", "pd", "--json").stdout)
            assert (result["prefill_worker"], result["decode_worker"]) == ("prefill-0", "decode-0")
            assert result["kv_bytes"] == result["kv_bytes_expected"] > 0
            assert decode.url in cli.done("status", "--port", str(port)).stdout
            for arguments, error in (
                (("--prefill", "2"), "servers that pdserve does not start"),
                (("--prefill-url", "localhost"), "cluster.prefill_urls.0"),
                (("--decode-url", "http://127.0.0.1:9"), "decode-1: does not answer"),
            ):
                assert error in cli.run("scale", *arguments, "--port", str(port)).stderr
            _scale(cli, port, prefill)
        finally:
            cli.run("down", "--port", str(port), "--now")


def _scale(cli: Cli, port: int, prefill: RecordedVLLM) -> None:
    """Another decode server takes the place of the first."""
    other = RecordedVLLM("engine-e")
    other.peers = {"engine-p": prefill}
    with running(other):
        scaled = cli.done("scale", "--decode-url", other.url, "--port", str(port))
        assert "scaled: 1P1D" in scaled.stderr
        status = json.loads(cli.done("status", "--json", "--port", str(port)).stdout)
        assert [worker["address"] for worker in status["workers"]] == [other.url, prefill.url]
        result = json.loads(cli.done("generate", "Hello", "--port", str(port), "--mode", "pd", "--json").stdout)
        assert (result["prefill_worker"], result["decode_worker"]) == ("prefill-0", "decode-1")
        assert "1P1D" in cli.done("list").stdout
