"""Processes that die, peers that do not fit, deadlines that pass: requests go on or end with the right error, and every
block comes back."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdserve import AsyncClient, AsyncStream, Client
from pdserve.client.status import ServiceWorker
from pdserve.core.errors import DeadlineExceeded, InvalidRequest, LayoutMismatch, NotReady, TransferError, WorkerLost
from pdserve.core.worker import Role
from tests.local_cluster import LocalCluster, leaked_blocks, local_cluster
from tests.random_models import greedy_tokens, save_random_model

PROMPT = [11, 7, 200, 41, 5, 99, 3] * 12
TOKENS = 60
HAND_OFF_S = 2.0  # how long a planted delay keeps it from being over
LONG = 400  # what takes much longer than to find the worker that does it


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models"), "gqa")


def settings(model: Path, **sections: Any) -> dict[str, Any]:
    """A small configuration; ``sections`` are added to it."""
    engine = {"block_size": 16, "num_blocks": 128, "max_num_batched_tokens": 64}
    return {"model": {"path": str(model), "dtype": "float32"}, "engine": engine, **sections}


def worker_named(cluster: LocalCluster, worker_id: str) -> ServiceWorker:
    return next(w for w in cluster.inside().workers if w.worker_id == worker_id)


def wait_for(
    cluster: LocalCluster, worker_id: str, state: str, timeout_s: float = 120.0, since: ServiceWorker | None = None
) -> ServiceWorker:
    """The worker once it is in that state; with an engine started after it was like ``since``."""
    deadline_s = time.monotonic() + timeout_s
    with Client(cluster.operator) as operator:
        while True:
            workers = operator.status().workers  # one that has not reported yet is not among them
            worker = next((w for w in workers if w.worker_id == worker_id), None)
            if (
                worker is not None
                and worker.state == state
                and (since is None or worker.engine_pid != since.engine_pid)
            ):
                return worker
            assert time.monotonic() < deadline_s, workers
            time.sleep(0.1)


@pytest.mark.parametrize("victim", [pytest.param("engine", marks=pytest.mark.soak), "worker"])
def test_decode_dies_in_mid_stream(model: Path, victim: str) -> None:
    """The client's stream goes on, token for token, whichever worker is there to go on with it."""
    expected = greedy_tokens(model, PROMPT, LONG)
    with (
        local_cluster(settings(model), decode=2) as cluster,
        Client(cluster.target) as client,
        Client(cluster.operator) as operator,
    ):
        for _ in range(20):
            stream = client.generate(PROMPT, max_tokens=LONG, mode="pd", timeout_s=60)
            for _ in range(5):
                next(stream)
            busy = next((w for w in operator.status().workers if w.role == "decode" and w.outstanding_tokens), None)
            if busy is not None:
                psutil.Process(busy.engine_pid if victim == "engine" else busy.pid).kill()
            result = stream.result()
            assert list(result.token_ids) == expected
            if busy is None:
                continue  # the stream was quicker than this test could look
            if victim == "worker":
                cluster.kill(busy.worker_id)  # which reaps it
                assert result.attempts == 1 or result.decode_worker != busy.worker_id
                cluster.start_worker(Role.DECODE, int(busy.worker_id[-1]))
            again = wait_for(cluster, busy.worker_id, "ready", since=busy)
            assert (again.pid == busy.pid) == (victim == "engine")
            assert leaked_blocks(cluster.wait_idle()) == 0
            if result.attempts >= 2:
                break
        else:
            raise AssertionError("every stream was over before its worker died")


def test_prefill_dies_under_a_long_prompt(model: Path) -> None:
    """The prompt is run again by the other prefill worker; the blocks reserved for the first attempt come back."""
    expected = greedy_tokens(model, PROMPT, 4)
    with local_cluster(settings(model), prefill=2, delays_ms={"prefill": 1500.0}) as cluster:

        async def run() -> None:
            async with AsyncClient(cluster.target) as client, AsyncClient(cluster.operator) as operator:
                for _ in range(10):
                    request = asyncio.create_task(client.generate(PROMPT, max_tokens=4, mode="pd").result())
                    busy = None
                    while busy is None and not request.done():
                        workers = (await operator.status()).workers
                        busy = next((w for w in workers if w.role == "prefill" and w.outstanding_tokens), None)
                    if busy is not None:
                        psutil.Process(busy.engine_pid).kill()
                    result = await request
                    assert list(result.token_ids) == expected
                    if busy is not None and result.attempts > 1:
                        break
                else:
                    raise AssertionError("every prompt was through before its engine died")
                assert result.prefill_worker != busy.worker_id
                assert result.kv_bytes == result.kv_bytes_expected > 0

        asyncio.run(run())
        assert leaked_blocks(cluster.wait_idle()) == 0


def test_gateway_starts_again(model: Path) -> None:
    """Its workers abort what it had asked for, and find the new one by their next heartbeat."""
    with local_cluster(settings(model)) as cluster:
        with Client(cluster.target) as client:
            stream = client.generate(PROMPT, max_tokens=400, ignore_eos=True, mode="pd")
            next(stream)
            cluster.kill("gateway")
            with pytest.raises(NotReady):
                stream.result()
        cluster.start_gateway()
        cluster.wait_ready()
        with Client(cluster.target) as client:
            assert list(client.generate(PROMPT, max_tokens=5).result().token_ids) == greedy_tokens(model, PROMPT, 5)
        assert leaked_blocks(cluster.wait_idle()) == 0


def test_a_stopped_worker_is_taken_for_dead_and_comes_back(model: Path) -> None:
    """SIGSTOP for longer than heartbeats may be missing: requests go to the other; afterwards it serves again."""
    quick = settings(model, router={"heartbeat_s": 0.2, "heartbeat_timeout_s": 3.0})
    with local_cluster(quick, decode=2) as cluster, Client(cluster.target) as client:
        cluster.kill("decode-0", signal.SIGSTOP)
        wait_for(cluster, "decode-0", "lost")
        result = client.generate(PROMPT, max_tokens=5, mode="pd", timeout_s=60).result()
        assert result.decode_worker == "decode-1"
        cluster.kill("decode-0", signal.SIGCONT)
        wait_for(cluster, "decode-0", "ready")
        assert leaked_blocks(cluster.wait_idle()) == 0


def test_one_that_was_replaced_while_it_was_cut_off_ends(model: Path) -> None:
    """As after a partition: another has its name by then, and two of one name would take turns at being lost."""
    quick = settings(model, router={"heartbeat_s": 0.2, "heartbeat_timeout_s": 3.0})
    with local_cluster(quick) as cluster, Client(cluster.target) as client:
        old = cluster.processes["decode-0"]
        old_pid = worker_named(cluster, "decode-0").pid
        cluster.kill("decode-0", signal.SIGSTOP)
        wait_for(cluster, "decode-0", "lost")
        cluster.start_worker(Role.DECODE, 0)
        now = wait_for(cluster, "decode-0", "ready")
        assert now.pid != old_pid
        old.send_signal(signal.SIGCONT)
        assert old.wait(60) == 1
        cluster.wait_ready()
        assert worker_named(cluster, "decode-0").pid == now.pid
        assert list(client.generate(PROMPT, max_tokens=5).result().token_ids) == greedy_tokens(model, PROMPT, 5)
        assert leaked_blocks(cluster.wait_idle()) == 0


def test_a_hung_engine_is_noticed(model: Path) -> None:
    """Alive but stopped: it is killed and started again, and the request on it ends as if it had died."""
    watchful = settings(model)
    watchful["engine"] = {**watchful["engine"], "hang_timeout_s": 2.0}
    with local_cluster(watchful) as cluster, Client(cluster.target) as client:
        stream = client.generate(PROMPT, max_tokens=TOKENS, mode="pd", timeout_s=60)
        next(stream)
        hung = worker_named(cluster, "decode-0")
        psutil.Process(hung.engine_pid).send_signal(signal.SIGSTOP)
        assert list(stream.result().token_ids) == greedy_tokens(model, PROMPT, TOKENS)
        now = wait_for(cluster, "decode-0", "ready", since=hung)
        assert now.pid == hung.pid
        assert now.engine_restarts >= 1
        assert leaked_blocks(cluster.wait_idle()) == 0


def test_deadlines_reach_the_workers(model: Path) -> None:
    slow = {"prefill": 1000.0}
    with local_cluster(settings(model), delays_ms=slow) as cluster, Client(cluster.target) as client:
        for mode in ("pd", "colocated"):
            begin_s = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                client.generate(PROMPT, max_tokens=5, mode=mode, timeout_s=0.5).result()
            assert 0.4 < time.monotonic() - begin_s < 10  # without a deadline it would take minutes to give up
        assert leaked_blocks(cluster.wait_idle()) == 0
        assert client.generate(PROMPT, max_tokens=2, timeout_s=30, mode="pd").result().token_ids


def test_a_peer_of_another_layout_is_told_so(model: Path) -> None:
    """The pair never meets: a clear error before any request is tried, and colocated requests are served."""
    with local_cluster(settings(model)) as cluster:
        cluster.kill("decode-0")
        cluster.start_worker(Role.DECODE, 0, engine={"block_size": 32, "num_blocks": 64})
        with Client(cluster.target) as client:
            deadline_s = time.monotonic() + 120
            while time.monotonic() < deadline_s:
                with pytest.raises((NotReady, LayoutMismatch)) as caught:
                    client.generate(PROMPT, max_tokens=3, mode="pd").result()
                if "block_size" in str(caught.value):
                    break
                time.sleep(0.2)
            assert isinstance(caught.value, LayoutMismatch)  # trying again will not help
            assert "block_size" in str(caught.value)
            together = client.generate(PROMPT, max_tokens=3, mode="colocated").result()
        assert list(together.token_ids) == greedy_tokens(model, PROMPT, 3)


def test_a_peer_with_other_end_ids_is_told_so(model: Path, tmp_path: Path) -> None:
    """Prefill's first token may be the last one to decode: such a pair never meets, and no request waits in vain."""
    token = greedy_tokens(model, PROMPT, 1)[0]
    other = tmp_path / "model"
    shutil.copytree(model, other)
    (other / "generation_config.json").write_text(f'{{"eos_token_id": {token}}}')
    with local_cluster(settings(model)) as cluster:
        cluster.kill("decode-0")
        cluster.start_worker(Role.DECODE, 0, model={"path": str(other), "dtype": "float32"})
        with Client(cluster.target) as client:
            deadline_s = time.monotonic() + 90
            while True:
                begin_s = time.monotonic()
                with pytest.raises((NotReady, LayoutMismatch)) as caught:
                    client.generate(PROMPT, max_tokens=3, mode="pd", timeout_s=120).result()
                assert time.monotonic() - begin_s < 40, "long before its deadline"
                if isinstance(caught.value, LayoutMismatch):
                    break
                assert time.monotonic() < deadline_s, caught.value
                time.sleep(0.2)
            assert f"eos_token_ids differ: [{token}] here, [] at the peer" in str(caught.value)
        assert leaked_blocks(cluster.wait_idle()) == 0


def test_nothing_is_ready(model: Path) -> None:
    cluster = LocalCluster(settings(model), prefill=0, decode=0)
    try:
        with Client(cluster.target) as client:
            deadline_s = time.monotonic() + 120
            while True:
                try:
                    client.status()
                    break
                except NotReady:
                    assert time.monotonic() < deadline_s
                    time.sleep(0.1)
            assert not client.ready()
            with pytest.raises(NotReady, match="worker"):
                client.generate(PROMPT, max_tokens=3, mode="pd").result()
    finally:
        cluster.close()


def test_preemption_under_pressure_changes_no_token(model: Path) -> None:
    """Decode has room for two of the six requests at their full length: some are preempted and computed again."""
    tight = settings(model)
    tight["engine"] = {"block_size": 16, "num_blocks": 20, "max_num_batched_tokens": 64}
    draw = random.Random(5)
    prompts = [[draw.randrange(307) for _ in range(40)] for _ in range(6)]
    with local_cluster(tight) as cluster:

        async def run() -> None:
            async with AsyncClient(cluster.target) as client:
                results = await asyncio.gather(
                    *(client.generate(prompt, max_tokens=100, mode="pd").result() for prompt in prompts)
                )
            for prompt, result in zip(prompts, results, strict=True):
                assert list(result.token_ids) == greedy_tokens(model, prompt, 100)

        asyncio.run(run())
        status, deadline_s = cluster.wait_idle(), time.monotonic() + 60
        while not any(worker.preemptions for worker in status.workers):  # until heartbeats tell of them
            assert time.monotonic() < deadline_s, status
            status = cluster.wait_idle()
        assert leaked_blocks(status) == 0
        with Client(cluster.target) as client, pytest.raises(InvalidRequest, match="context"):
            client.generate([1] * 300, max_tokens=100).result()


def test_an_id_that_is_used_again_is_another_request(model: Path) -> None:
    """Even while an engine still computes what was cancelled under it: neither tokens nor cached blocks get mixed."""
    other = [150, 9, 33, 8, 77, 120, 2] * 12
    assert greedy_tokens(model, other, 1) != greedy_tokens(model, PROMPT, 1)

    async def run(target: str) -> None:
        async with AsyncClient(target) as client:

            def ask(prompt: list[int], request_id: str) -> AsyncStream:
                return client.generate(prompt, max_tokens=6, mode="pd", request_id=request_id)

            first = ask(PROMPT, "same")
            waiting = asyncio.create_task(first.result())
            await asyncio.sleep(0.5)  # in its last step now, which takes two seconds
            first.cancel()
            await asyncio.wait({waiting})
            async with asyncio.timeout(60.0):
                while True:
                    with contextlib.suppress(InvalidRequest):  # in use, until the gateway has noticed
                        again = await ask(other, "same").result()
                        break
                    await asyncio.sleep(0.01)
            assert list(again.token_ids) == greedy_tokens(model, other, 6)
            for prompt in (other, PROMPT):
                fresh = await ask(prompt, "").result()
                assert list(fresh.token_ids) == greedy_tokens(model, prompt, 6)

    with local_cluster(settings(model), delays_ms={"prefill": 2000.0}) as cluster:
        asyncio.run(run(cluster.target))
        assert leaked_blocks(cluster.wait_idle()) == 0


@pytest.mark.parametrize("policy", ["retry", "recompute", "fail"])
def test_decode_dies_during_the_hand_off(model: Path, policy: str) -> None:
    """With ``retry``, what the surviving prefill worker has computed is sent again, not computed again."""
    expected = greedy_tokens(model, PROMPT, 8)
    config = settings(model, transfer={"on_kv_failure": policy})
    slow = {"kv_exposed": HAND_OFF_S * 1e3}
    pairs = 2 if policy == "retry" else 1  # the other policies need no second pair
    with (
        local_cluster(config, prefill=pairs, decode=pairs, delays_ms=slow) as cluster,
        Client(cluster.target) as client,
        Client(cluster.operator) as operator,
    ):
        for number in range(10):
            begin_s = time.monotonic()
            stream = client.generate(PROMPT, max_tokens=8, mode="pd", timeout_s=60, salt=str(number))
            assert next(stream).token_id == expected[0]
            busy = next((w for w in operator.status().workers if w.role == "decode" and w.outstanding_tokens), None)
            if busy is not None:
                psutil.Process(busy.engine_pid).kill()
            if busy is not None and time.monotonic() - begin_s < HAND_OFF_S:
                break
            with contextlib.suppress(WorkerLost, TransferError):  # the kill came too late, or only just in time
                assert list(stream.result().token_ids) == expected
            cluster.wait_ready()
        else:
            raise AssertionError("every hand-off was over before its engine died")
        if policy == "fail":
            with pytest.raises((WorkerLost, TransferError)):
                stream.result()
        else:
            result = stream.result()
            assert list(result.token_ids) == expected
            assert result.attempts >= 2
            assert result.mode == ("pd" if policy == "retry" else "colocated")
            assert result.kv_bytes == result.kv_bytes_expected
            if policy == "retry":
                assert result.prefill_cached_tokens >= len(PROMPT) // 16 * 16
        wait_for(cluster, busy.worker_id, "ready", since=busy)
        assert leaked_blocks(cluster.wait_idle()) == 0


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.soak)])
def test_layers_travel_while_others_are_computed(transport: str) -> None:
    """With a model whose blocks are worth it: three chunks in five groups of layers, every byte once, equal tokens."""
    config = {
        "model": {"path": "dummy:135m", "dtype": "float32"},
        "engine": {"num_blocks": 24, "max_num_batched_tokens": 128},
        "transfer": {"transport": transport, "overlap": "layer", "layer_groups": 5},
    }
    prompt = [(31 * i) % 4000 for i in range(300)]
    with local_cluster(config) as cluster, Client(cluster.target) as client:
        pushed = client.generate(prompt, max_tokens=4, ignore_eos=True, mode="pd").result()
        together = client.generate(prompt, max_tokens=4, ignore_eos=True, mode="colocated", salt="x").result()
        assert pushed.token_ids == together.token_ids
        assert (pushed.transport, pushed.kv_bytes) == (transport, pushed.kv_bytes_expected)
        assert pushed.kv_bytes == 5 * 64 * 46_080
        assert pushed.transfer.messages >= 3 * 5
        assert leaked_blocks(cluster.wait_idle()) == 0


@pytest.mark.parametrize("overlap", ["chunk", pytest.param("none", marks=pytest.mark.soak)])
def test_torch_dist_carries_the_blocks_too(model: Path, overlap: str) -> None:
    transfer = {"transport": "torch_dist", "overlap": overlap}
    with local_cluster(settings(model, transfer=transfer)) as cluster, Client(cluster.target) as client:
        for length in (5, 64, 200):
            prompt = PROMPT * 3 if length > len(PROMPT) * 2 else PROMPT[:length]
            result = client.generate(
                prompt, max_tokens=6, salt=str(length), mode="pd"
            ).result()  # all its blocks travel
            assert result.transport == "torch_dist"
            assert result.kv_bytes == result.kv_bytes_expected > 0
        assert list(result.token_ids) == greedy_tokens(model, PROMPT * 3, 6)
        assert leaked_blocks(cluster.wait_idle()) == 0
