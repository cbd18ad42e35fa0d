"""A whole service whose worker plane uses mutual TLS: real processes, which serve as without it and refuse others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.control import MAX_CONTROL_BYTES
from pdserve import Client
from pdserve.core.errors import PdserveError
from tests.certificates import Certificates, tls_of
from tests.local_cluster import LocalCluster, local_cluster
from tests.random_models import greedy_tokens, save_random_model
from worker.authentication import CONTROL, REGISTRY, open_stream, stream_channel

BLOCK, TOKENS = 16, 8
PROMPT = [7 * i % 307 for i in range(5 * BLOCK + 3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models"), "gqa")


@pytest.fixture(scope="module")
def cluster(model: Path, certificates: Certificates) -> Iterator[LocalCluster]:
    settings = {
        "model": {"path": str(model), "dtype": "float32"},
        "engine": {"block_size": BLOCK, "num_blocks": 64, "prefix_caching": False},
        "transfer": {"transport": "grpc_stream"},
        "cluster": certificates.of_plane(),
    }
    with local_cluster(settings) as started:
        yield started


def check_serving(cluster: LocalCluster, model: Path) -> None:
    """A disaggregated request gets the model's tokens, by as many bytes of KV as predicted."""
    with Client(cluster.target) as client:
        apart = client.generate(PROMPT, max_tokens=TOKENS, mode="pd").result()
    assert apart.token_ids == tuple(greedy_tokens(model, PROMPT, TOKENS))
    assert (apart.mode, apart.attempts) == ("pd", 1)
    assert apart.kv_bytes == apart.kv_bytes_expected > 0


async def test_a_service_serves_and_others_are_refused(
    cluster: LocalCluster, model: Path, certificates: Certificates
) -> None:
    check_serving(cluster, model)
    status = cluster.inside()
    workers = {worker.worker_id: worker for worker in status.workers}
    (link,) = workers["prefill-0"].links
    assert link.transport == "grpc_stream"
    assert "encrypted (TLS)" in link.reason
    tls = tls_of(**certificates.of_plane())
    strange = tls_of(**certificates.of_plane(certificates.strange_worker, certificates.stranger.cert))
    for service, address in ((CONTROL, workers["decode-0"].address), (REGISTRY, cluster.registries[0])):
        for mine, refused in ((None, True), (strange, True), (tls, False)):
            async with stream_channel(address, MAX_CONTROL_BYTES, mine) as channel:
                opening = open_stream(channel, service, cluster.secret, address)
                if refused:
                    with pytest.raises(PdserveError):
                        await opening
                else:
                    (await opening).cancel()
    check_serving(cluster, model)
    cluster.wait_idle()
