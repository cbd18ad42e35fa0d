"""The decoder of all families (Llama, Mistral, Qwen), written once for CPU and CUDA: a flat batch of rows in, hidden
states out. The shape says where a family differs: biases, norms of queries and keys, windows."""

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
    """One decoder layer. q, k and v are one matrix, gate and up another: one wide product instead of several. What a
    family has not is None."""

    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    out: torch.Tensor  # [hidden, heads * head_dim]
    post_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]
    qkv_bias: torch.Tensor | None  # each bias is as long as its matrix has rows
    out_bias: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None  # [2, head_dim]: the queries' weights, the keys'


class ModelWeights:
    """All weights of a ``shape``, uninitialised; `tensors` names where each tensor of a checkpoint belongs."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        def empty(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        def empty_if(wanted: bool, *size: int) -> torch.Tensor | None:
            return empty(*size) if wanted else None

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
                qkv_bias=empty_if(shape.qkv_bias, q_size + 2 * kv_size),
                out_bias=empty_if(shape.out_bias, hidden),
                gate_up_bias=empty_if(shape.mlp_bias, 2 * inner),
                down_bias=empty_if(shape.mlp_bias, hidden),
                qk_norm=empty_if(shape.qk_norm, 2, shape.head_dim),
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
            parts: dict[str, torch.Tensor] = {
                "input_layernorm.weight": layer.input_norm,
                "post_attention_layernorm.weight": layer.post_norm,
            }
            for kind, qkv, out, gate_up, down in (
                ("weight", layer.qkv, layer.out, layer.gate_up, layer.down),
                ("bias", layer.qkv_bias, layer.out_bias, layer.gate_up_bias, layer.down_bias),
            ):
                if qkv is not None:
                    q, k, v = torch.split(qkv, [q_size, kv_size, kv_size])
                    parts |= {f"self_attn.{name}_proj.{kind}": part for name, part in (("q", q), ("k", k), ("v", v))}
                if out is not None:
                    parts[f"self_attn.o_proj.{kind}"] = out
                if gate_up is not None:
                    parts[f"mlp.gate_proj.{kind}"], parts[f"mlp.up_proj.{kind}"] = gate_up.chunk(2)
                if down is not None:
                    parts[f"mlp.down_proj.{kind}"] = down
            if layer.qk_norm is not None:
                parts["self_attn.q_norm.weight"], parts["self_attn.k_norm.weight"] = layer.qk_norm
            named |= {f"model.layers.{i}.{name}": tensor for name, tensor in parts.items()}
        return named


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Linear
    out: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    qk_norm: torch.Tensor | None  # [heads + kv_heads, head_dim]
    window: int | None


class LlamaDecoder:
    """Runs the model on a flat batch; positions up to ``max_positions`` - 1. It takes ``weights`` over (their layers
    are gone afterwards), so that packed weights don't stay in memory twice."""

    def __init__(self, weights: ModelWeights, max_positions: int) -> None:
        self._shape = weights.shape
        self._embedding = weights.embedding
        self._layers: list[_Layer] = []
        repeats = torch.tensor([self._shape.num_heads, self._shape.num_kv_heads], device=weights.norm.device)
        for window in self._shape.layer_windows:
            w = weights.layers.pop(0)
            self._layers.append(
                _Layer(
                    input_norm=w.input_norm,
                    qkv=linear(w.qkv, w.qkv_bias),
                    out=linear(w.out, w.out_bias),
                    post_norm=w.post_norm,
                    gate_up=linear(w.gate_up, w.gate_up_bias),
                    down=linear(w.down, w.down_bias),
                    qk_norm=None if w.qk_norm is None else w.qk_norm.repeat_interleave(repeats, dim=0),
                    window=window,
                )
            )
        self._final_norm = weights.norm
        self._head = linear(weights.head)
        self._cos, self._sin = rope_tables(weights.shape, max_positions, weights.norm.dtype, weights.norm.device)

    @property
    def windows(self) -> frozenset[int | None]:
        """The layers' different windows, None for one that sees everything: what a step's metadata has to cover."""
        return frozenset(self._shape.layer_windows)

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
            queries_keys = qkv[:, : heads + kv_heads]
            if layer.qk_norm is not None:
                queries_keys = self._norm_heads(queries_keys, layer.qk_norm)
            turned = rotate(queries_keys, cos, sin)
            values = qkv[:, heads + kv_heads :]
            attended = attention(turned[:, :heads], turned[:, heads:], values, kv, meta, layer.window)
            x = x + layer.out(attended.reshape(rows, heads * head_dim))
            gate, up = layer.gate_up(self._norm(x, layer.post_norm)).chunk(2, dim=-1)
            x = x + layer.down(functional.silu(gate) * up)
        return self._norm(x, self._final_norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, vocabulary]`` of hidden states ``[rows, hidden]``, in the model's dtype."""
        return self._head(hidden)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._shape.rms_norm_eps)

    def _norm_heads(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Each head of ``x`` (``[rows, heads, head_dim]``) normed by itself, times its row of ``weight``."""
        return functional.rms_norm(x, x.shape[-1:], eps=self._shape.rms_norm_eps) * weight
