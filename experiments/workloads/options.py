"""The options that describe a workload and a load, of ``pdserve bench`` and of experiments. Imports little, as every
command of `pdserve` imports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, Field


class WorkloadOptions(BaseModel):
    """Lengths are written ``128`` or ``128:1024``; `experiments.workloads.catalog.workload_of` checks them."""

    dataset: str = Field(
        "random",
        description="random, sharegpt, sonnet (lines of a text), jsonl (your prompts), trace (Mooncake's format), or "
        "the lengths of a published one: azure-code, azure-conv, mooncake-conv, sharegpt-like, arxiv-summarization",
    )
    dataset_path: Path | None = Field(None, description="file of sharegpt, sonnet, jsonl, trace")
    input_len: str = Field("256", description="tokens of each prompt, N or LOW:HIGH")
    output_len: str | None = Field(None, description="tokens to generate for each, N or LOW:HIGH (none: 32)")
    prefix_len: int = Field(0, description="tokens that random prompts share, before their own")
    num_prefixes: int = Field(1, description="how many different prefixes")
    turns: int = Field(1, description="turns of a conversation (random, sharegpt)")
    pause_s: float = Field(0.0, description="seconds between an answer and the next turn")
    scale: str = Field("1", description="factor on the lengths of a published dataset, or INPUT:OUTPUT factors")
    block_size: int = Field(512, description="tokens of a hash id of the trace; below 512 scales its lengths")


class LoadOptions(BaseModel):
    """What `pdserve bench` sends of its workload, and how it judges the answers; `experiments.bench_plan.BenchPlan`
    checks that the options go together."""

    requests: int | None = Field(
        None, ge=1, description="how many requests (conversations with --turns; prompts with --mode both) (default: 64)"
    )
    duration: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="seconds after which nothing more is sent"
    )
    warmup: int = Field(0, ge=0, description="requests sent before the measurement, in each mode")
    concurrency: int | None = Field(
        None, ge=1, description="closed loop: requests running at a time (default: 8; 1 with --mode both)"
    )
    rate: float | None = Field(
        None, gt=0, description="open loop: requests per second (Poisson arrivals; inf: all at once)"
    )
    ramp: str | None = Field(None, description="open loop: a rate that changes from A to B (A:B)")
    speed: float | None = Field(
        None, gt=0, description="open loop: the arrivals of the trace, so many times as fast (default: 1)"
    )
    burstiness: float | None = Field(
        None, gt=0, description="gamma shape of the gaps of --rate, --ramp; below 1 is burstier (default: 1)"
    )
    max_concurrency: int | None = Field(
        None, ge=1, description="open loop: most requests running at a time; others wait in the client"
    )
    mode: str = Field("auto", description="auto, pd, colocated, or both (see above)")
    timeout: float | None = Field(None, gt=0, allow_inf_nan=False, description="deadline of each request in seconds")
    seed: int = Field(0, description="seed of prompts and arrivals")
    slo: str | None = Field(None, description="limits in ms for goodput: ttft=200,itl=50 (ttft_decode, tpot, e2e)")
    percentiles: str = Field("50,90,99", description="percentiles to report")


def declared(options: type[BaseModel]) -> dict[str, tuple[Any, str]]:
    """Type and help of each option, for `ops.cli.options.with_options`."""
    found = {}
    for name, field in options.model_fields.items():
        kind = next(iter(get_args(field.annotation)), field.annotation)
        default = "" if field.default is None else f" (default: {field.default})"
        found[name] = kind, f"{field.description}{default}"
    return found
