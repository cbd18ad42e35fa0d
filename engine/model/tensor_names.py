"""The names of weights in Hugging Face checkpoints."""

from __future__ import annotations

import torch

from checkpoints.families import FAMILIES, Family
from checkpoints.shape import ModelShape
from engine.model.quantized import Matrix, unbind
from engine.model.weights import ExpertWeights, LayerWeights, MLPWeights, ModelWeights


def named_tensors(weights: ModelWeights) -> dict[str, Matrix]:
    """Views of ``weights`` by their names in checkpoints."""
    shape = weights.shape
    named: dict[str, Matrix] = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    if not shape.tie_word_embeddings:
        named["lm_head.weight"] = weights.head
    family = FAMILIES[shape.architecture]
    for i, layer in enumerate(weights.layers):
        parts = _norms(layer, shape) | _attention(layer, shape, family)
        parts |= _mlp(layer.mlp, family) if isinstance(layer.mlp, MLPWeights) else _experts(layer.mlp, family)
        named |= {f"model.layers.{i}.{name}": tensor for name, tensor in parts.items()}
    return named


_PARTS = (
    (("q_proj", "k_proj", "v_proj", "qkv_proj"), "qkv"),
    (("o_proj",), "out"),
    (("gate_proj", "up_proj", "gate_up_proj", "w1", "w3"), "gate_up"),
    (("down_proj", "w2"), "down"),
)


def part_of(name: str) -> tuple[int, str] | None:
    """The layer of a matrix, and its part (as `checkpoints.families.Family.modules` names it), by its name in
    checkpoints. None for other weights."""
    pieces = name.split(".")
    if not name.startswith("model.layers.") or pieces[-1] != "weight":
        return None
    part = next((part for modules, part in _PARTS if pieces[-2] in modules), None)
    return None if part is None else (int(pieces[2]), part)


def _norms(layer: LayerWeights, shape: ModelShape) -> dict[str, Matrix]:
    after_attention = layer.mlp_norm if shape.norms == "before" else layer.attended_norm
    before_mlp = layer.mlp_norm if shape.norms == "around" else None
    norms = {
        "input_layernorm": layer.input_norm,
        "post_attention_layernorm": after_attention,
        "pre_feedforward_layernorm": before_mlp,
        "post_feedforward_layernorm": layer.mlp_out_norm,
    }
    return {f"{name}.weight": norm for name, norm in norms.items() if norm is not None}


def _attention(layer: LayerWeights, shape: ModelShape, family: Family) -> dict[str, Matrix]:
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    parts: dict[str, Matrix] = {}
    for kind, qkv, out in (("weight", layer.qkv, layer.out), ("bias", layer.qkv_bias, layer.out_bias)):
        if qkv is not None and family.fused_projections:
            parts[f"self_attn.qkv_proj.{kind}"] = qkv
        elif qkv is not None:
            q, k, v = qkv.split([q_size, kv_size, kv_size])
            parts |= {f"self_attn.{name}_proj.{kind}": part for name, part in (("q", q), ("k", k), ("v", v))}
        if out is not None:
            parts[f"self_attn.o_proj.{kind}"] = out
    if layer.qk_norm is not None:
        query, key = torch.split(layer.qk_norm, [q_size, kv_size]) if shape.qk_norm_spans_heads else layer.qk_norm
        parts["self_attn.q_norm.weight"], parts["self_attn.k_norm.weight"] = query, key
    return parts


def _mlp(mlp: MLPWeights, family: Family) -> dict[str, Matrix]:
    parts: dict[str, Matrix] = {}
    for kind, gate_up, down in (("weight", mlp.gate_up, mlp.down), ("bias", mlp.gate_up_bias, mlp.down_bias)):
        if gate_up is not None and family.fused_projections:
            parts[f"mlp.gate_up_proj.{kind}"] = gate_up
        elif gate_up is not None:
            parts[f"mlp.gate_proj.{kind}"], parts[f"mlp.up_proj.{kind}"] = gate_up.chunk(2)
        if down is not None:
            parts[f"mlp.down_proj.{kind}"] = down
    return parts


def _experts(mlp: ExpertWeights, family: Family) -> dict[str, Matrix]:
    mixtral = family.experts == "mixtral"
    prefix = "block_sparse_moe" if mixtral else "mlp"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    parts: dict[str, Matrix] = {f"{prefix}.gate.weight": mlp.router}
    for i, (gate_up, out) in enumerate(zip(unbind(mlp.gate_up), unbind(mlp.down), strict=True)):
        expert = f"{prefix}.experts.{i}"
        parts[f"{expert}.{gate}.weight"], parts[f"{expert}.{up}.weight"] = gate_up.chunk(2)
        parts[f"{expert}.{down}.weight"] = out
    return parts
