"""Steps of whole services, without Ray (gateway and workers are processes of the step), and of the links between two
GPUs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import psutil

from experiments.benchmarks.first_hour.engine import model_for
from experiments.benchmarks.first_hour.step import Findings, Options, last_line
from experiments.benchmarks.handoff_pair import handoff_pair
from experiments.load import Outcome, run_load
from experiments.pairs.pair import Turns, torch_send
from experiments.workloads.arrivals import ClosedLoop
from experiments.workloads.conversation import Conversation, Turn
from pdserve import AsyncClient, Client, Generation
from pdserve.core.request import Mode
from pdserve.core.timeline import Figure
from pdserve.core.worker import Role
from tests.local_cluster import LocalCluster, leaked_blocks, local_cluster

EXPOSED_GOAL = 0.03
"""Most time of a hand-off that its prefill does not hide, as a share of the prefill."""
_TINY_IDS = range(5, 300)
_START_S = 600.0


@contextlib.contextmanager
def cluster_of(
    settings: Mapping[str, Any], options: Options, *, prefill: int = 1, decode: int = 1, gpus: Mapping[str, int] | None
) -> Iterator[LocalCluster]:
    """A service on the device of ``options``. ``gpus`` is the GPU of each worker (None: all share the first)."""
    settings = {**settings, "cluster": {"start_timeout_s": _START_S, **settings.get("cluster", {})}}
    with local_cluster(
        settings,
        prefill=prefill,
        decode=decode,
        device=options.device,
        gpus=gpus if options.on_gpu else None,
    ) as cluster:
        yield cluster


# --- hand-offs -------------------------------------------------------------------------------------------------------


def handoff(options: Options) -> Findings:
    """1P1D on one device, over its own transport and over tcp: tokens and bytes."""
    findings = Findings()
    for transport, taken in (("auto", "cuda_ipc" if options.on_gpu else "shm"), ("tcp", "tcp")):
        _check_handoffs(findings, options, transport, taken, None)
    return findings


def handoff_two(options: Options) -> Findings:
    """The same between two GPUs over NCCL (on CPUs: over Gloo)."""
    findings = Findings()
    configured = "auto" if options.on_gpu else "torch_dist"
    _check_handoffs(findings, options, configured, "torch_dist", {"prefill-0": 0, "decode-0": 1})
    return findings


def _check_handoffs(
    findings: Findings, options: Options, configured: str, taken: str, gpus: Mapping[str, int] | None
) -> None:
    """Hand-offs have the tokens of one worker, every byte of the prompt's blocks, and leave no block behind."""
    settings = {
        "model": {"path": "tiny", "dtype": "float32"},
        "engine": {"num_blocks": 128, "max_num_batched_tokens": 128},
        "transfer": {"transport": configured},
    }
    with cluster_of(settings, options, gpus=gpus) as cluster, Client(cluster.target) as client:
        exposed_ms: list[float] = []
        for tokens in (1, 63, 64, 65, 200, 500):
            prompt = _prompt(tokens, "hand-off")
            alone, handed = (
                client.generate(prompt, max_tokens=16, mode=mode, ignore_eos=True, salt=mode).result()
                for mode in ("colocated", "pd")
            )
            for good, what in (
                (handed.token_ids == alone.token_ids, f"tokens {handed.token_ids} instead of {alone.token_ids}"),
                (handed.transport == taken, f"went over {handed.transport}"),
                (
                    handed.kv_bytes == handed.kv_bytes_expected > 0,
                    f"{handed.kv_bytes} bytes of KV instead of {handed.kv_bytes_expected}",
                ),
            ):
                findings.require(good, f"{taken}, {tokens} tokens: {what}")
            exposed_ms.append(round(handed.transfer.exposed_ms, 2))
        findings.figures[f"{taken}: exposed, ms"] = exposed_ms
        _require_no_leak(findings, cluster)


def _require_no_leak(findings: Findings, cluster: LocalCluster) -> None:
    left = leaked_blocks(cluster.wait_idle())
    findings.require(left == 0, f"{left} blocks were not given back")


def _prompt(tokens: int, seed: object) -> list[int]:
    draw = random.Random(f"{seed}/{tokens}")
    return [draw.choice(_TINY_IDS) for _ in range(tokens)]


# --- bench -----------------------------------------------------------------------------------------------------------


class BenchLine(msgspec.Struct):
    """What is judged of the JSON line of `pdserve bench`: spreads of figures by mode, and what is added by figure."""

    failed: int
    failures: dict[str, int]
    kv_bytes_wrong: int
    leaked_blocks: int | None
    by_mode: dict[str, dict[str, dict[str, float] | None]]
    added_ms: dict[str, dict[str, Any] | None]


def bench(options: Options) -> Findings:
    """`pdserve bench --mode both` at 4096 and 64 tokens on one GPU, with and without MPS; then what a hand-off costs
    beyond its prefill."""
    findings = Findings()
    added: dict[str, float] = {}
    for mps in ("auto", "off") if options.on_gpu else ("off",):
        added[mps] = _bench(findings, options, mps)
    if "auto" in added:
        findings.figures["added TTFT_DECODE by MPS, ms"] = {name: round(ms, 2) for name, ms in added.items()}
    return findings


def _bench(findings: Findings, options: Options, mps: str) -> float:
    input_len, output_len, requests = (4096, 64, 16) if options.on_gpu else (256, 8, 2)
    if options.quick:
        requests = 2
    settings: dict[str, Any] = {"model": {"path": model_for(options)}, "cluster": {"mps": mps}}
    if not options.on_gpu:
        settings["engine"] = {"num_blocks": 64}
    name = f"mps {mps}"
    with cluster_of(settings, options, gpus=None) as cluster:
        result = last_line(
            BenchLine,
            *("-m", "ops.command", "bench", "--target", cluster.target, "--mode", "both", "--json"),
            *("--input-len", str(input_len), "--output-len", str(output_len)),
            *("--requests", str(requests), "--warmup", "2"),
        )
        shares: list[float] = []
        with Client(cluster.target) as client:
            for turn in range(3 if options.quick else 8):
                prompt = _prompt(input_len, turn)
                done = client.generate(prompt, max_tokens=3, ignore_eos=True, mode="pd", salt="exposed").result()
                shares.append(done.transfer.exposed_ms / done.breakdowns[Figure.TTFT].stages_ms["prefill"])
    findings.require(result.failed == 0, f"{name}: {result.failed} requests failed: {result.failures}")
    findings.require(
        not result.kv_bytes_wrong, f"{name}: {result.kv_bytes_wrong} requests moved other KV bytes than expected"
    )
    findings.require(result.leaked_blocks == 0, f"{name}: {result.leaked_blocks} blocks were not given back")
    findings.figures[name] = {
        mode: {
            key: round(spread["p50"], 2)
            for key in ("ttft_ms", "ttft_decode_ms", "itl_ms")
            if (spread := figures.get(key))
        }
        for mode, figures in result.by_mode.items()
    }
    share = statistics.median(shares[1:])  # the first one is warm-up
    findings.aim(f"{name}: exposed / prefill", share, EXPOSED_GOAL, at_most=True, judged=options.has_goals)
    added = result.added_ms[Figure.TTFT_DECODE.value]
    return (added and added["median"]) or 0.0


# --- losses ----------------------------------------------------------------------------------------------------------


def loss(options: Options) -> Findings:
    """Workers are killed mid-transfer, and started again: every request ends with the tokens that it has without."""
    settings = {
        "model": {"path": "tiny", "dtype": "float32"},
        "engine": {"num_blocks": 256, "max_num_batched_tokens": 128},
        "router": {"patience_s": 120.0},
    }
    rounds = 2 if options.quick else 6
    findings = Findings()
    prompts = [_prompt(480, number) for number in range(4)]
    with cluster_of(settings, options, gpus=None) as cluster:
        expected = asyncio.run(_answers(cluster.target, prompts, "calm"))
        attempts = 0
        for turn in range(rounds):
            name = ("decode-0", "prefill-0")[turn % 2]
            answers = asyncio.run(_answers(cluster.target, prompts, f"loss{turn}", partial(_lose, cluster, name)))
            for number, (got, wanted) in enumerate(zip(answers, expected, strict=True)):
                what = f"{name} killed in round {turn}, request {number}"
                findings.require(got.token_ids == wanted.token_ids, f"{what}: other tokens")
                attempts += got.attempts - 1
            cluster.wait_ready(_START_S)
        _require_no_leak(findings, cluster)
    findings.figures |= {"kills": rounds, "requests": rounds * len(prompts), "retries": attempts}
    findings.require(attempts > 0, "no kill met a request")
    return findings


def _lose(cluster: LocalCluster, name: str) -> None:
    """Kill a worker, and start it again as Ray would."""
    cluster.kill(name)
    role, _, index = name.partition("-")
    cluster.start_worker(Role(role), int(index))


async def _answers(
    target: str, prompts: Sequence[list[int]], salt: str, lose: Callable[[], None] | None = None
) -> Sequence[Generation]:
    """The answers to all prompts at once. ``lose`` is called when the first of them has its first token: the KV of the
    others is on its way, or theirs is computed."""
    async with AsyncClient(target) as client:
        first = asyncio.Event()

        async def answer(number: int) -> Generation:
            stream = client.generate(
                prompts[number], max_tokens=24, ignore_eos=True, mode="pd", salt=f"{salt}{number}", timeout_s=300.0
            )
            async for _ in stream:
                first.set()
            return await stream.result()

        answering = [asyncio.create_task(answer(number)) for number in range(len(prompts))]
        if lose is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(first.wait(), 60.0)
            lose()  # on this thread: a worker ends with the thread that started it
        return await asyncio.gather(*answering)


# --- soak ------------------------------------------------------------------------------------------------------------


GPUS = "GPUs"
MemorySample = Mapping[str, int]
"""Bytes in use: by process of the service the resident ones without what processes share (pools on the host, whose
pages come with their first use), and all of the `GPUS`."""
SLACK_BYTES = 64 * 2**20


def soak(options: Options) -> Findings:
    """2P2D under load: no failure, no leaked block, flat memory. On two or three GPUs 1P1D, because NCCL needs a GPU
    for each worker."""
    seconds = 1800.0 if options.on_gpu else 300.0
    if options.quick:
        seconds = 60.0 if options.on_gpu else 20.0
    seconds = options.soak_s or seconds
    model = "dummy:135m" if options.on_gpu else "tiny"
    settings: dict[str, Any] = {"model": {"path": model}, "engine": {"num_blocks": 256}}
    pairs = 1 if options.num_gpus in (2, 3) else 2
    names = [f"{role}-{number}" for number in range(pairs) for role in ("prefill", "decode")]
    gpus = {name: number % max(1, options.num_gpus) for number, name in enumerate(names)}
    findings = Findings()
    with cluster_of(settings, options, prefill=pairs, decode=pairs, gpus=gpus) as cluster:
        outcomes, samples = asyncio.run(_under_load(cluster, seconds, options))
        _require_no_leak(findings, cluster)
        transports = {link.transport for worker in cluster.inside().workers for link in worker.links}
    failures = [str(each.error) for each in outcomes if each.error is not None]
    done = [each.generation for each in outcomes if each.generation is not None]
    wrong = [each for each in done if each.kv_bytes != each.kv_bytes_expected]
    failures += [f"{each.kv_bytes} bytes of KV instead of {each.kv_bytes_expected}" for each in wrong]
    findings.figures |= {"seconds": seconds, "requests": len(outcomes), "transports": sorted(transports)}
    findings.require(not failures, f"{len(failures)} requests failed: {'; '.join(failures[:3])}")
    findings.require(bool(outcomes), "no request was answered")
    if options.num_gpus > 1:
        findings.require("torch_dist" in transports, f"the links are {sorted(transports)}, not torch_dist")
    judge_memory(findings, samples, judged=not options.quick)
    return findings


def judge_memory(findings: Findings, samples: Sequence[MemorySample], *, judged: bool = True) -> None:
    """Memory is flat if the end needs no more than the middle did. Not ``judged``: the run is too short, because heaps
    grow until each has met its largest step."""
    quarter = len(samples) // 4
    if not quarter:
        findings.problems.append(f"{len(samples)} samples of memory are too few")
        return
    resident = [sum(each.values()) - each[GPUS] for each in samples]
    figures = findings.figures
    eighths = [resident[len(samples) * part // 8 : len(samples) * (part + 1) // 8] for part in range(8)]
    figures["resident in each eighth, MiB"] = [max(part) >> 20 for part in eighths if part]
    figures["resident by process, MiB"] = {
        name: [samples[at].get(name, 0) >> 20 for at in (quarter, 2 * quarter, 3 * quarter, -1)]
        for name in samples[-1]
        if name != GPUS
    }
    for name, taken in (("resident", resident), ("on_gpus", [each[GPUS] for each in samples])):
        middle, end = max(taken[quarter : 2 * quarter]), max(taken[-quarter:])
        figures[f"{name}, MiB"] = [middle >> 20, end >> 20]
        findings.require(
            end <= middle + SLACK_BYTES or not judged,
            f"{name} memory grew from {middle >> 20} MiB to {end >> 20} MiB in the second half",
        )
    if not judged:
        findings.notes.append("a quick run is too short to judge whether memory is flat")


async def _under_load(
    cluster: LocalCluster, seconds: float, options: Options
) -> tuple[Sequence[Outcome], list[MemorySample]]:
    # Few lengths: oneDNN keeps what it prepares for each number of rows, about 4 MiB, which would look like a leak.
    lengths = range(64, 705, 64) if options.on_gpu else range(16, 201, 16)
    draw, samples = random.Random(1), list[MemorySample]()
    requests = (Conversation((Turn(tuple(_prompt(draw.choice(lengths), number)), 24),)) for number in itertools.count())

    async def sample() -> None:
        while True:
            samples.append(await asyncio.to_thread(_memory, cluster, options))
            await asyncio.sleep(max(0.5, seconds / 120))

    async with AsyncClient(cluster.target) as client:
        sampling = asyncio.create_task(sample())
        load = await run_load(client, requests, ClosedLoop(8), mode=Mode.PD, duration_s=seconds)
        sampling.cancel()
    return load.outcomes, samples


def _memory(cluster: LocalCluster, options: Options) -> MemorySample:
    found = {GPUS: 0}
    for name, popen in cluster.processes.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(popen.pid)
            found[name] = process.memory_full_info().uss
            children = process.children(recursive=True)
            found[f"{name}'s engine"] = sum(each.memory_full_info().uss for each in children)
    if options.on_gpu:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        found[GPUS] = sum(map(int, asked.stdout.split())) * 2**20
    return found


# --- links -----------------------------------------------------------------------------------------------------------

RATE_GOAL = 0.80


def links(options: Options) -> Findings:
    """Hand-offs of the 8b shape's blocks over torch_dist, beside send and recv of the same bytes."""
    num_bytes, turns = (2**30, 10) if options.has_goals else (2**25, 3)
    pairs = [handoff_pair("8b", "torch_dist", checked=False, device=options.device), torch_send(options.device)]
    taken = Turns(pairs, [num_bytes])
    list(taken.run(turns, may_fail=lambda pair: False))
    handed, bare = (num_bytes / statistics.median(taken.seconds[pair.name][num_bytes]) / 1e9 for pair in pairs)
    findings = Findings(figures={"bare, GB/s": round(bare, 2), "hand-offs, GB/s": round(handed, 2)})
    findings.aim("hand-offs / bare", handed / bare, RATE_GOAL, judged=options.has_goals)
    return findings
