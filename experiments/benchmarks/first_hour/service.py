"""Steps of whole services, without Ray (gateway and workers are processes of the step), and of the links between two
GPUs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas
import psutil

from experiments.benchmarks.first_hour.step import Findings, Options, last_line
from experiments.benchmarks.frame import load
from experiments.benchmarks.frame import sampling as sampled
from experiments.benchmarks.handoff_pair import handoff_pair
from experiments.benchmarks.transfer import rates_gbs
from experiments.pairs.pair import torch_send
from experiments.workloads.arrivals import ClosedLoop
from experiments.workloads.conversation import Conversation, Turn, random_tokens
from pdserve import AsyncClient, Client
from pdserve.core.request import Mode
from pdserve.core.timeline import Figure
from tests.local_cluster import LocalCluster, leaked_blocks, local_cluster

EXPOSED_GOAL = 0.03
"""Most time of a hand-off that its prefill does not hide, as a share of the prefill."""
RATE_GOAL = 0.80
GPUS = "GPUs"
SLACK_BYTES = 64 * 2**20
_LOGPROB_TOLERANCE = 0.1  # of bfloat16, whose sums depend on the sizes of steps
_VOCABULARY = 300  # of the smallest model


def cluster_of(options: Options, model: str, sections: Mapping[str, Mapping[str, Any]], **roles: Any) -> Any:
    """A service on the device of ``options``. ``gpus`` is the GPU of each worker (None: all share the first)."""
    cluster = {"start_timeout_s": 600.0, **sections.get("cluster", {})}
    roles["gpus"] = roles.get("gpus") if options.on_gpu else None
    return local_cluster({"model": {"path": model}, **sections, "cluster": cluster}, device=options.device, **roles)


# --- hand-offs -------------------------------------------------------------------------------------------------------


def handoff(options: Options) -> Findings:
    """Prompts in bfloat16, disaggregated and colocated: all bytes arrive, as the hash of the device says, token 1 has
    the same log-probability within a tolerance, and tokens differ only where two were as likely."""
    lengths, outputs = ((512, 2048, 8192), 16) if options.on_gpu else ((64, 200), 8)
    model = {"path": options.model, "dtype": "bfloat16" if options.on_gpu else "auto"}
    sections: dict[str, Any] = {"model": model, "transfer": {"checksum": "device"}}
    sections |= {} if options.on_gpu else {"engine": {"num_blocks": 64}}
    findings = Findings()
    with cluster_of(options, options.model, sections) as cluster, Client(cluster.target) as client:
        for length in lengths[: 2 if options.quick else None]:
            prompt = random_tokens(f"hand-off {length}", length, _VOCABULARY)
            sent: dict[str, Any] = {"max_tokens": outputs, "ignore_eos": True, "logprobs": 2}
            pd, whole = (client.generate(prompt, mode=mode, salt=mode, **sent).result() for mode in ("pd", "colocated"))
            name = f"{length} tokens"
            findings.require(pd.kv_bytes == pd.kv_bytes_expected > 0, f"{name}: {pd.kv_bytes} bytes of KV moved")
            findings.require("verified" in pd.transfer.checksum, f"{name}: checksum {pd.transfer.checksum}")
            apart = abs((pd.tokens[0].logprob or 0.0) - (whole.tokens[0].logprob or 0.0))
            findings.figures[f"{name}: difference of log-probabilities"] = round(apart, 4)
            findings.require(apart < _LOGPROB_TOLERANCE, f"{name}: log-probabilities of token 1 differ by {apart:.3f}")
            for number, (ours, theirs) in enumerate(zip(pd.tokens, whole.tokens, strict=True)):
                if ours.token_id != theirs.token_id:
                    first, second = (each.logprob for each in theirs.top_logprobs[:2])
                    findings.figures[f"{name}: margin where token {number + 1} differs"] = round(first - second, 4)
                    close = first - second < _LOGPROB_TOLERANCE
                    findings.require(close, f"{name}: token {number + 1} differs, by a margin of {first - second:.3f}")
                    break
    return findings


# --- bench -----------------------------------------------------------------------------------------------------------


def bench(options: Options) -> Findings:
    """`pdserve bench --mode both` at 4096 and 64 tokens on one GPU, with and without MPS; then what a hand-off costs
    beyond its prefill."""
    findings, added = Findings(), {}
    for mps in ("auto", "off") if options.on_gpu else ("off",):
        added[mps] = _bench(findings, options, mps)
    if options.on_gpu:
        findings.figures["added TTFT_DECODE by MPS, ms"] = added
    return findings


def _bench(findings: Findings, options: Options, mps: str) -> Any:
    input_len, output_len, requests = (4096, 64, 16) if options.on_gpu else (256, 8, 2)
    sections: dict[str, Any] = {"cluster": {"mps": mps}, "engine": {} if options.on_gpu else {"num_blocks": 64}}
    name, shares = f"mps {mps}", []
    with cluster_of(options, options.model, sections) as cluster, Client(cluster.target) as client:
        result = last_line(
            *("-m", "ops.command", "bench", "--target", cluster.target, "--mode", "both", "--json"),
            *("--input-len", str(input_len), "--output-len", str(output_len)),
            *("--requests", str(2 if options.quick else requests), "--warmup", "2"),
        )
        for turn in range(3 if options.quick else 8):
            prompt = random_tokens(f"exposed {turn}", input_len, _VOCABULARY)
            done = client.generate(prompt, max_tokens=3, ignore_eos=True, mode="pd", salt="exposed").result()
            shares.append(done.transfer.exposed_ms / done.breakdowns[Figure.TTFT].stages_ms["prefill"])
    for key, what in (
        ("failed", f"requests failed: {result['failures']}"),
        ("kv_bytes_wrong", "requests moved other KV bytes than expected"),
        ("leaked_blocks", "blocks were not given back"),
    ):
        findings.require(result[key] == 0, f"{name}: {result[key]} {what}")
    findings.figures[name] = {
        mode: {key: round(figures[key]["p50"], 2) for key in ("ttft_ms", "ttft_decode_ms", "itl_ms") if figures[key]}
        for mode, figures in result["by_mode"].items()
    }
    share = statistics.median(shares[1:])  # the first one is warm-up
    findings.aim(f"{name}: exposed / prefill", share, EXPOSED_GOAL, at_most=True, judged=options.has_goals)
    return (result["added_ms"]["ttft_decode"] or {}).get("median")


# --- soak ------------------------------------------------------------------------------------------------------------


def soak(options: Options) -> Findings:
    """2P2D under load: no failure, no leaked block, flat memory. On two or three GPUs 1P1D, because NCCL needs a GPU
    for each worker."""
    usual_s, quick_s = (1800.0, 60.0) if options.on_gpu else (300.0, 20.0)
    seconds = options.soak_s or (quick_s if options.quick else usual_s)
    pairs = 1 if options.num_gpus in (2, 3) else 2
    names = [f"{role}-{number}" for number in range(pairs) for role in ("prefill", "decode")]
    gpus = {name: number % max(1, options.num_gpus) for number, name in enumerate(names)}
    model, findings = "dummy:135m" if options.on_gpu else "tiny", Findings()
    sections: dict[str, Any] = {"engine": {"num_blocks": 256}, "transfer": {"checksum": "device"}}
    with cluster_of(options, model, sections, prefill=pairs, decode=pairs, gpus=gpus) as cluster:
        sent, memory = asyncio.run(_under_load(cluster, seconds, options))
        left = leaked_blocks(cluster.wait_idle())
        transports = {link.transport for worker in cluster.inside().workers for link in worker.links}
    findings.figures |= {"seconds": seconds, "requests": len(sent), "transports": sorted(transports)}
    findings.require(left == 0, f"{left} blocks were not given back")
    wrong = sent[sent.error.isna() & (sent.kv_bytes != sent.kv_bytes_expected)]
    failures = [*sent.error.dropna(), *(f"{each} bytes of KV, and others were expected" for each in wrong.kv_bytes)]
    findings.require(not failures, f"{len(failures)} requests failed: {'; '.join(failures[:3])}")
    findings.require(len(sent) > 0, "no request was answered")
    if options.num_gpus > 1:
        findings.require("torch_dist" in transports, f"the links are {sorted(transports)}, not torch_dist")
    judge_memory(findings, memory, judged=not options.quick)
    return findings


def judge_memory(findings: Findings, samples: Sequence[Mapping[str, int]], *, judged: bool = True) -> None:
    """Memory is flat if the end needs no more than the middle did. ``samples`` are bytes in use: by process of the
    service the resident ones without what processes share (pools on the host, whose pages come with their first use),
    and all of the `GPUS`. Not ``judged``: the run is too short, because heaps grow until each has met its largest
    step."""
    quarter = len(samples) // 4
    if not quarter:
        findings.problems.append(f"{len(samples)} samples of memory are too few")
        return
    frame = pandas.DataFrame(samples).fillna(0)
    every = frame.groupby(frame.index * 4 // len(frame)).max().astype(int) // 2**20
    findings.figures["in each quarter, MiB"] = {name: each.tolist() for name, each in every.items()}
    total = pandas.DataFrame({"resident": frame.drop(columns=GPUS).sum(axis=1), "on_gpus": frame[GPUS]}).astype(int)
    for name, taken in total.items():
        middle, end = int(taken[quarter : 2 * quarter].max()), int(taken[-quarter:].max())
        findings.figures[f"{name}, MiB"] = [middle >> 20, end >> 20]
        findings.require(
            end <= middle + SLACK_BYTES or not judged,
            f"{name} memory grew from {middle >> 20} MiB to {end >> 20} MiB in the second half",
        )
    if not judged:
        findings.notes.append("a quick run is too short to judge whether memory is flat")


async def _under_load(
    cluster: LocalCluster, seconds: float, options: Options
) -> tuple[pandas.DataFrame, list[Mapping[str, int]]]:
    # Few lengths: oneDNN keeps what it prepares for each number of rows, about 4 MiB, which would look like a leak.
    lengths = range(64, 705, 64) if options.on_gpu else range(16, 201, 16)

    def requests() -> Iterator[Conversation]:
        draw = random.Random(1)
        for index in itertools.count():
            yield Conversation((Turn(random_tokens(f"soak {index}", draw.choice(lengths), _VOCABULARY), 24),))

    async with (
        AsyncClient(cluster.target) as client,
        sampled(max(0.5, seconds / 120), lambda: _memory(cluster, options)) as samples,
    ):
        sent = await load([client], [ClosedLoop(8)], [requests()], mode=Mode.PD, duration_s=seconds)
    return sent, samples


def _memory(cluster: LocalCluster, options: Options) -> Mapping[str, int]:
    found = {GPUS: 0}
    for name, popen in cluster.processes.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(popen.pid)
            found[name] = process.memory_full_info().uss
            children = process.children(recursive=True)
            found[f"{name}'s engine"] = sum(each.memory_full_info().uss for each in children)
    if options.on_gpu:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        found[GPUS] = sum(map(int, subprocess.check_output(command, text=True, timeout=30).split())) * 2**20
    return found


# --- links -----------------------------------------------------------------------------------------------------------


def links(options: Options) -> Findings:
    """Hand-offs of the 8b shape's blocks over torch_dist, beside send and recv of the same bytes."""
    num_bytes, turns = (2**30, 10) if options.has_goals else (2**25, 3)
    pairs = [handoff_pair("8b", "torch_dist", checked=False, device=options.device), torch_send(options.device)]
    rates = rates_gbs(pairs, {"": num_bytes}, turns)
    handed, bare = (rates[pair.name][""] for pair in pairs)
    findings = Findings({"bare, GB/s": round(bare, 2), "hand-offs, GB/s": round(handed, 2)})
    findings.aim("hand-offs / bare", handed / bare, RATE_GOAL, judged=options.has_goals)
    return findings
