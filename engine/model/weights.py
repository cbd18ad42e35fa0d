"""The weights of a decoder of any family (Llama, Mistral, Qwen)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.model.shape import ModelShape


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. One matrix holds q, k and v, and another gate and up, for wide products. None marks
    weights that the family does not have."""

    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    out: torch.Tensor  # [hidden, heads * head_dim]
    post_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]
    qkv_bias: torch.Tensor | None  # a bias has as many entries as its matrix has rows
    out_bias: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None  # [2, head_dim]: weights of queries, then of keys


class ModelWeights:
    """Uninitialised weights of a ``shape``. Copy a checkpoint into `tensors` to load it."""

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
        """Views of the weights by their names in Hugging Face checkpoints."""
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
