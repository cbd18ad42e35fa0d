"""The options that describe a workload, of ``pdserve bench`` and of experiments. Imports little, as every command of
`pdserve` imports it."""

from __future__ import annotations

from pathlib import Path

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
