"""What the engine's benchmark measures (prefills, decode steps, and a step that does both) beside pdserve's model
runner: on transformers, and what the machine can do at all."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from checkpoints.arithmetic import ModelArithmetic
from checkpoints.shape import ModelShape
from engine.model.layers import linear
from experiments.engine_alone.ceilings import Ceilings
from experiments.engine_alone.steps import STEPS, WARM_STEPS, StepCase

CPU_CASES = (
    *(StepCase(1, tokens) for tokens in (128, 512, 2048, 4096)),
    *(StepCase(batch, 1, context) for context in (64, 1024) for batch in (1, 4, 16, 32)),
    StepCase(1, 256, 512, beside=8),
)
CUDA_CASES = (
    *(StepCase(1, tokens) for tokens in (512, 2048, 8192)),
    *(StepCase(batch, 1, context) for context in (64, 1024) for batch in (1, 8, 32, 64)),
    *(StepCase(*each) for each in ((256, 1, 64), (1, 1, 7168), (8, 1, 7168), (1, 1, 31_744), (4, 1, 31_744))),
    StepCase(1, 512, 1024, beside=8),
)
QUICK_CASES = (StepCase(1, 128), StepCase(1, 1, 64), StepCase(4, 1, 64), StepCase(1, 64, 64, beside=2))


def name_of(case: StepCase) -> tuple[str, str]:
    """Kind and name of a case in the JSON line."""
    match case.kind:
        case "prompt":
            return "prefill", str(case.tokens)
        case "decode":
            return "decode", f"b{case.batch}_c{case.context}"
        case kind:
            return kind, f"p{case.tokens}_b{case.beside}_c{case.context}"


def _parts(case: StepCase) -> tuple[int, int]:
    """Tokens of a prompt, and requests that decode."""
    return (0, case.batch) if case.kind == "decode" else (case.tokens, case.beside)


def transformers_model(shape: ModelShape, dtype: str) -> Any:
    """transformers' model with random weights of ``shape``."""
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=shape.tie_word_embeddings,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM._from_config(config, dtype=getattr(torch, dtype)).eval()


class TransformersSide:
    """transformers' model: eager, scaled dot product attention, bfloat16. Of a mixed step it does one part after the
    other."""

    def __init__(self, shape: ModelShape, device: str) -> None:
        self._shape, self._device = shape, torch.device(device)
        with self._device:
            self._model = transformers_model(shape, "bfloat16")

    @torch.inference_mode()
    def measure_s(self, case: StepCase) -> float:
        """Seconds that ``case`` takes now."""
        seconds, (prompt, decodes) = 0.0, _parts(case)
        if prompt:
            seconds += self._forward_s(1, prompt, self._cache(1, case.context))
        if decodes:
            cache = self._cache(decodes, case.context)
            times_s = [self._forward_s(decodes, 1, cache) for _ in range(WARM_STEPS + STEPS)]
            seconds += statistics.median(times_s[WARM_STEPS:])
        return seconds

    def _forward_s(self, batch: int, length: int, cache: Any) -> float:
        tokens = torch.randint(0, self._shape.vocab_size, (batch, length), device=self._device)
        started_s = time.perf_counter()
        output = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        output.logits[:, -1].argmax(dim=-1).tolist()
        return time.perf_counter() - started_s

    def _cache(self, batch: int, context: int) -> Any:
        shape, cache = self._shape, DynamicCache()
        for layer in range(shape.num_layers if context else 0):
            kv = torch.randn(
                batch, shape.num_kv_heads, context, shape.head_dim, dtype=torch.bfloat16, device=self._device
            )
            cache.update(kv, kv.clone(), layer)
        return cache


class Floor:
    """The floors of ``shape`` in bfloat16, for prefills in steps of ``chunk`` rows. ``ceilings`` measures the device.

    They are lower bounds of the time on this machine for any engine with the same arithmetic, measured in the same
    run. A decode step has to read all weights and the whole KV cache once: all packed linears at that batch size,
    plus the KV bytes over the measured read bandwidth. A prefill has to compute the packed linears at the rows of its
    steps, plus the attention's operations (of the causal half) at the rate of a bare product. On a GPU a decode
    step's products are bounded by the bytes of the weights over the measured read bandwidth instead: a product of few
    rows is not faster than that."""

    def __init__(self, shape: ModelShape, device: str, chunk: int, ceilings: Ceilings) -> None:
        self._shape = shape
        self._on_gpu = torch.device(device).type == "cuda"
        self._chunk = chunk
        self._ceilings = ceilings
        hidden, inner = shape.hidden_size, shape.intermediate_size
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        sizes = ((q_size + 2 * kv_size, hidden), (hidden, q_size), (2 * inner, hidden), (hidden, inner))
        self._layers = [[linear(self._random(*size)) for size in sizes] for _ in range(shape.num_layers)]
        self._widths = [width for _, width in sizes]
        self._head = linear(self._random(shape.vocab_size, hidden))

    @torch.inference_mode()
    def measure_s(self, case: StepCase) -> float:
        """The floor of ``case`` in seconds, measured now."""
        shape, context, (prompt, decodes) = self._shape, case.context, _parts(case)
        if self._on_gpu and case.kind == "decode":  # launched one by one, products take longer than their bytes
            arithmetic = ModelArithmetic.of(shape, "bfloat16")
            return arithmetic.decode(decodes, context).num_bytes / self._ceilings.read_bytes_per_s()
        chunks = [self._chunk] * (prompt // self._chunk) + [prompt % self._chunk]
        if decodes:  # all in one step
            chunks = [prompt + decodes]
        seconds = sum(chunks.count(rows) * self._linears_s(rows) for rows in set(chunks) - {0})
        hidden = self._random(decodes + bool(prompt), shape.hidden_size)
        seconds += self._ceilings.median_s(lambda: self._head(hidden))
        if prompt:  # two products for each pair of a query and a key in all layers and heads
            pairs = prompt * (context + prompt / 2)
            flops = 4 * pairs * shape.num_heads * shape.head_dim * shape.num_layers
            seconds += flops / self._ceilings.product_flops()
        if kv_bytes := decodes * context * shape.kv_bytes_per_token("bfloat16"):
            seconds += kv_bytes / self._ceilings.read_bytes_per_s()
        return seconds

    def _linears_s(self, rows: int) -> float:
        inputs = [self._random(rows, width) for width in self._widths]

        def all_layers() -> None:
            for layer in self._layers:
                for product, rows_of in zip(layer, inputs, strict=True):
                    product(rows_of)

        return self._ceilings.median_s(all_layers)

    def _random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.bfloat16, device=self._ceilings.device)
