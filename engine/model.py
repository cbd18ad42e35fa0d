"""The Llama-family decoder, written once for CPU and CUDA: a flat batch of rows in, hidden states out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from core.model_shape import ModelShape
from engine.attention import AttnMetadata, attention
from engine.kv_pool import KVPool
from engine.linear import Linear, linear
from engine.rope import rope_tables, rotate


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. q, k and v are one matrix, gate and up another: one wide product instead of several."""

    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    out: torch.Tensor  # [hidden, heads * head_dim]
    post_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]


class ModelWeights:
    """All weights of a ``shape``, uninitialised; `tensors` names where each tensor of a checkpoint belongs."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        def empty(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        hidden, inner = shape.hidden_size, shape.intermediate_size
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.shape = shape
        self.embedding = empty(shape.vocab_size, hidden)
        self.layers = [
            LayerWeights(
                input_norm=empty(hidden),
                qkv=empty(q_size + 2 * kv_size, hidden),
                out=empty(hidden, q_size),
                post_norm=empty(hidden),
                gate_up=empty(2 * inner, hidden),
                down=empty(hidden, inner),
            )
            for _ in range(shape.num_layers)
        ]
        self.norm = empty(hidden)
        self.head = self.embedding if shape.tie_word_embeddings else empty(shape.vocab_size, hidden)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views by the names of Hugging Face checkpoints; copying into them fills the model."""
        shape = self.shape
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        named = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not shape.tie_word_embeddings:
            named["lm_head.weight"] = self.head
        for i, layer in enumerate(self.layers):
            q, k, v = torch.split(layer.qkv, [q_size, kv_size, kv_size])
            gate, up = layer.gate_up.chunk(2)
            parts = {
                "input_layernorm": layer.input_norm,
                "self_attn.q_proj": q,
                "self_attn.k_proj": k,
                "self_attn.v_proj": v,
                "self_attn.o_proj": layer.out,
                "post_attention_layernorm": layer.post_norm,
                "mlp.gate_proj": gate,
                "mlp.up_proj": up,
                "mlp.down_proj": layer.down,
            }
            named |= {f"model.layers.{i}.{name}.weight": tensor for name, tensor in parts.items()}
        return named


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Linear
    out: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class LlamaDecoder:
    """Runs the model on a flat batch; positions up to ``max_positions`` - 1. It takes ``weights`` over (their layers
    are gone afterwards), so that packed weights don't stay in memory twice."""

    def __init__(self, weights: ModelWeights, max_positions: int) -> None:
        self._shape = weights.shape
        self._embedding = weights.embedding
        self._layers: list[_Layer] = []
        while weights.layers:
            w = weights.layers.pop(0)
            self._layers.append(
                _Layer(w.input_norm, linear(w.qkv), linear(w.out), w.post_norm, linear(w.gate_up), linear(w.down))
            )
        self._final_norm = weights.norm
        self._head = linear(weights.head)
        self._cos, self._sin = rope_tables(weights.shape, max_positions, weights.norm.dtype, weights.norm.device)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, pool: KVPool, meta: AttnMetadata
    ) -> torch.Tensor:
        """Hidden states ``[rows, hidden]`` after the last norm; the rows' keys and values are in the pool then.
        ``token_ids`` and ``positions`` are ``[rows]`` in the order of ``meta``."""
        heads, kv_heads, head_dim = self._shape.num_heads, self._shape.num_kv_heads, self._shape.head_dim
        rows = token_ids.shape[0]
        cos, sin = self._cos[positions], self._sin[positions]
        x = functional.embedding(token_ids, self._embedding)
        for layer, kv in zip(self._layers, pool.layers, strict=True):
            qkv = layer.qkv(self._norm(x, layer.input_norm)).view(rows, -1, head_dim)
            turned = rotate(qkv[:, : heads + kv_heads], cos, sin)
            attended = attention(turned[:, :heads], turned[:, heads:], qkv[:, heads + kv_heads :], kv, meta)
            x = x + layer.out(attended.reshape(rows, heads * head_dim))
            gate, up = layer.gate_up(self._norm(x, layer.post_norm)).chunk(2, dim=-1)
            x = x + layer.down(functional.silu(gate) * up)
        return self._norm(x, self._final_norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, vocabulary]`` of hidden states ``[rows, hidden]``, in the model's dtype."""
        return self._head(hidden)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._shape.rms_norm_eps)
