"""transformers' side of the engine's benchmark: eager, scaled dot product attention, bfloat16."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.engine_cases import STEPS, WARM_STEPS, Case, Decode, Mixed, Prefill
from checkpoints.shape import ModelShape


class TransformersSide:
    """A model with random weights of ``shape``."""

    def __init__(self, shape: ModelShape, device: str) -> None:
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
            dtype=torch.bfloat16,
        )
        self._shape = shape
        self._device = torch.device(device)
        with self._device:
            self._model: Any = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def measure_s(self, case: Case) -> float:
        """Seconds that ``case`` takes now."""
        match case:
            case Prefill():
                return self._forward_s(self._tokens(1, case.tokens), DynamicCache())
            case Decode():
                return self._decode_s(case.batch, case.context)
            case Mixed():
                chunk_s = self._forward_s(self._tokens(1, case.chunk), self._cache(1, case.context))
                return chunk_s + self._decode_s(case.batch, case.context)

    def _decode_s(self, batch: int, context: int) -> float:
        cache = self._cache(batch, context)
        times = [self._forward_s(self._tokens(batch, 1), cache) for _ in range(WARM_STEPS + STEPS)]
        return statistics.median(times[WARM_STEPS:])

    def _forward_s(self, tokens: torch.Tensor, cache: Any) -> float:
        started_s = time.perf_counter()
        output = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        output.logits[:, -1].argmax(dim=-1).tolist()
        return time.perf_counter() - started_s

    def _tokens(self, batch: int, length: int) -> torch.Tensor:
        return torch.randint(0, self._shape.vocab_size, (batch, length), device=self._device)

    def _cache(self, batch: int, context: int) -> Any:
        shape, cache = self._shape, DynamicCache()
        for layer in range(shape.num_layers):
            kv = torch.randn(
                batch, shape.num_kv_heads, context, shape.head_dim, dtype=torch.bfloat16, device=self._device
            )
            cache.update(kv, kv.clone(), layer)
        return cache
