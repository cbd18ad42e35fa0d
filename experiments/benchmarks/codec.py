"""What coding KV on the link saves and costs (`transfer.codec`): `python -m experiments.benchmarks.codec`.

First, codecs alone: how fast they are, with numbers of a normal distribution. Then a service for each codec and rate of
the link, which is bounded in user space: prompts of one length, one at a time, disaggregated. Figures are medians.
Each prompt is sent colocated, too: ``same_tokens`` is the share of requests whose greedy tokens are equal, and
``logprob_error`` the mean difference of the log-probabilities of token 2, the first one that depends on coded KV, where
it is the same token."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, get_args

import numpy as np

from experiments.benchmarks.frame import Quick, in_turns, run, service
from experiments.workloads.conversation import random_tokens
from kv_transfer.codec import codec_of
from pdserve import AsyncClient
from pdserve.core.config import CodecName
from pdserve.core.kv_layout import KVLayout

CODECS: tuple[CodecName, ...] = get_args(CodecName)
LAYOUT = KVLayout.uniform("135m", "bfloat16", 64, 30, 3, 64)
MESSAGE_BYTES = 4 * 2**20
TOKENS = 8


def codec(quick: Quick = False) -> dict[str, Any]:
    """Measure."""
    model, length, prompts, rates = ("tiny", 64, 2, (1.0,)) if quick else ("dummy:135m", 512, 8, (0.1, 0.3, 1.0, 3.0))
    served: dict[str, dict[str, Any]] = {}
    for _, (rate, name) in in_turns([(rate, name) for rate in rates for name in CODECS], 1):
        settings = {
            "model.path": model,
            "model.dtype": "bfloat16",
            "transfer.transport": "tcp",
            "transfer.shape_gbps": rate,
            "transfer.codec": name,
        }
        with service(settings) as started:
            served[f"{rate:g} Gbit/s {name}"] = started.client(partial(_measure, length, prompts))
    return {"model": model, "prompt_tokens": length, "alone": _alone(3 if quick else 21), "served": served}


def _alone(rounds: int) -> Mapping[str, Mapping[str, float]]:
    """Of each codec, the rate of coding and of decoding, in 10^9 bytes of KV per second, and how many bytes become
    one."""
    draw = np.random.default_rng(0)
    floats = draw.standard_normal(MESSAGE_BYTES // 2, np.float32)
    data = memoryview((floats.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    found: dict[str, dict[str, float]] = {}
    for name in CODECS:
        coding = codec_of(name, LAYOUT)
        if coding is None:
            continue
        encode_s, decode_s = [], []
        for _ in range(rounds):
            began_s = time.perf_counter()
            coded = coding.encode([data])
            coded_s = time.perf_counter()
            coding.decode(coded, data.nbytes)
            encode_s.append(coded_s - began_s)
            decode_s.append(time.perf_counter() - coded_s)
        rates = {f"{what}_gbs": data.nbytes / statistics.median(each) / 1e9
                 for what, each in (("encode", encode_s), ("decode", decode_s))}  # fmt: skip
        found[name] = {**rates, "ratio": data.nbytes / coded.nbytes}
    return found


async def _measure(length: int, prompts: int, client: AsyncClient) -> dict[str, Any]:
    """Medians, after a warm-up."""
    vocab_size = (await client.status()).vocab_size
    rows: list[dict[str, float]] = []
    for number in range(-2, prompts):
        prompt = random_tokens(f"codec/{number}", length, vocab_size)
        apart, together = [
            await client.generate(prompt, max_tokens=TOKENS, mode=mode, ignore_eos=True, logprobs=0, salt=mode).result()
            for mode in ("pd", "colocated")
        ]
        if number < 0:
            continue
        (one, other) = (each.tokens[1] for each in (apart, together))
        assert one.logprob is not None, "it was asked for"
        assert other.logprob is not None, "it was asked for"
        rows.append(
            {
                "ttft_decode_ms": apart.ttft_decode_ms or 0.0,
                "exposed_ms": apart.transfer.exposed_ms,
                "wire_mb": apart.transfer.wire_bytes / 1e6,
                "ratio": apart.kv_bytes / apart.transfer.wire_bytes,
                "same_tokens": float(apart.token_ids == together.token_ids),
                "logprob_error": abs(one.logprob - other.logprob) if one.token_id == other.token_id else float("nan"),
            }
        )
    means = ("same_tokens", "logprob_error")
    return {
        key: float(np.nanmean([row[key] for row in rows]) if key in means else np.median([row[key] for row in rows]))
        for key in rows[0]
    }


if __name__ == "__main__":
    run(codec)
