"""Hand-offs over links of 100, 500 and 1000 Mbit/s: what of them is exposed, beside what was predicted from the link
that `pdserve doctor` measured, the prompt's bytes, and the prefill's time."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from ops.doctor.handoff_prediction import LinkRate, Overlap, handoff_parts, predict
from pdserve import Client
from pdserve.client.generation import Generation
from pdserve.core.kv_layout import KVLayout
from tests.cluster.ray_cluster import REACHABLE, RayCluster

pytestmark = pytest.mark.cluster

MBITS = (100, 500, 1000)
NETWORK = "10.99.7"
PROMPT_TOKENS = 512
REQUESTS = 5
TOLERANCE = 0.15
NOISE_MS = 3.0
"""What a busy machine of two cores adds now and then, however short the wait."""
CHUNK_TOKENS, LAYER_GROUPS, MAX_INFLIGHT_BYTES = 512, 8, 16 * 2**20
LAYOUT = KVLayout.uniform("", "bfloat16", block_size=64, num_layers=30, num_kv_heads=3, head_dim=64)
OPTIONS = (
    "--address auto --model dummy:135m --set model.dtype=bfloat16 --prefill 1 --decode 1 --placement strict_spread "
    f"--device cpu {REACHABLE}"
)


@dataclass(frozen=True)
class Row:
    """Medians of one link and overlap, in milliseconds."""

    mbit: int
    overlap: Overlap
    prefill_ms: float
    exposed_ms: float
    predicted_ms: float

    @property
    def off(self) -> float:
        """How far the prediction was off."""
        return self.exposed_ms / self.predicted_ms - 1

    def __str__(self) -> str:
        return (
            f"{self.mbit:4} Mbit/s, overlap {self.overlap:5}: {self.exposed_ms:6.1f} ms exposed, "
            f"{self.predicted_ms:6.1f} ms predicted ({self.off:+.0%}), beside {self.prefill_ms:.0f} ms of prefill"
        )


@pytest.fixture
def links(service: RayCluster) -> Iterator[RayCluster]:
    """Nothing is served, and the hosts have a second network, which KV is to take."""
    service.pdserve("down")
    for host in (service.head, *service.workers):
        host.run(f"ip addr add {NETWORK}.{_last(host.address)}/24 dev eth0")
    yield service
    service.hosts.rate(None)
    service.pdserve("down", check=False)
    for host in (service.head, *service.workers):
        host.run(f"ip addr del {NETWORK}.{_last(host.address)}/24 dev eth0")
    service.up_service()


def start(cluster: RayCluster, overlap: Overlap) -> str:
    """A service of one pair on two hosts; returns its options."""
    transfer = f"transfer: {{overlap: {overlap}, interface: {NETWORK}.0/24}}\n"
    (cluster.head.home / "links.yaml").write_text(f"{transfer}engine: {{kv_memory_mb: 128, max_model_len: 2048}}\n")
    options = f"-c ~/links.yaml {OPTIONS}"
    cluster.pdserve(f"up {options} --detach")
    return options


def doctor(cluster: RayCluster, options: str) -> LinkRate:
    """The pair's link as `pdserve doctor` measures it now."""
    report = json.loads(cluster.pdserve(f"doctor {options} --json", check=False).stdout)
    (pair,) = report["pairs"]
    assert pair["transport"] == "tcp", pair
    assert pair["address"].startswith(f"{NETWORK}."), pair
    return LinkRate(pair["gbs"], pair["round_trip_ms"] / 1e3, MAX_INFLIGHT_BYTES)


def ask(client: Client, draw: random.Random) -> Generation:
    """One request whose prompt no cache has."""
    prompt = [draw.randrange(40_000) for _ in range(PROMPT_TOKENS)]
    result = client.generate(prompt, max_tokens=3, mode="pd", ignore_eos=True, timeout_s=60).result()
    assert result.kv_bytes == result.kv_bytes_expected == LAYOUT.expected_bytes(PROMPT_TOKENS)
    return result


def measure(cluster: RayCluster, options: str, mbit: int, overlap: Overlap) -> Row:
    cluster.hosts.rate(mbit)
    link = doctor(cluster, options)
    draw = random.Random(mbit)
    workers = cluster.workers_inside()
    assert workers["decode-0"]["kv_addresses"]["tcp"] == f"{NETWORK}.{_last(workers['decode-0']['node'])}:20007"
    assert workers["prefill-0"]["address"] == f"{workers['prefill-0']['node']}:20001"
    with Client(cluster.target) as client:
        ask(client, draw)
        results = [ask(client, draw) for _ in range(REQUESTS)]
    stages = [result.to_dict()["breakdown_ms"]["ttft_decode"] for result in results]
    prefill_ms = statistics.median(stage["prefill"] for stage in stages)
    parts = handoff_parts(LAYOUT, PROMPT_TOKENS, CHUNK_TOKENS, overlap, LAYER_GROUPS)
    predicted = predict(parts, link, prefill_ms / 1e3)
    exposed_ms = statistics.median(stage["kv_exposed"] for stage in stages)
    return Row(mbit, overlap, prefill_ms, exposed_ms, predicted.exposed_s * 1e3)


def _last(address: str) -> str:
    return address.rpartition(".")[2]


@pytest.mark.timeout(400)
def test_what_is_exposed_is_what_was_predicted(links: RayCluster, remarks: list[str]) -> None:
    rows = []
    for overlap in ("none", "layer"):
        options = start(links, overlap)
        rows += [measure(links, options, mbit, overlap) for mbit in MBITS]
        links.hosts.rate(None)
        links.pdserve("down")
    remarks += map(str, rows)
    late = [
        str(row) for row in rows if abs(row.exposed_ms - row.predicted_ms) > TOLERANCE * row.predicted_ms + NOISE_MS
    ]
    assert not late, late
