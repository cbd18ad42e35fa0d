"""The weights of a decoder of any family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.model.shape import ModelShape


@dataclass(frozen=True, slots=True)
class MLPWeights:
    """The weights of an MLP. One matrix holds gate and up, for wide products."""

    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]
    gate_up_bias: torch.Tensor | None  # a bias has as many entries as its matrix has rows
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of a mixture of experts."""

    router: torch.Tensor  # [experts, hidden]
    gate_up: torch.Tensor  # [experts, 2 * intermediate, hidden]
    down: torch.Tensor  # [experts, hidden, intermediate]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. One matrix holds q, k and v, for a wide product. None marks weights that the family
    does not have."""

    input_norm: torch.Tensor | None  # [hidden]: norm of attention's input
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    out: torch.Tensor  # [hidden, heads * head_dim]
    attended_norm: torch.Tensor | None  # [hidden]: norm of attention's output
    mlp_norm: torch.Tensor | None  # [hidden]: norm of the MLP's input
    mlp: MLPWeights | ExpertWeights
    mlp_out_norm: torch.Tensor | None  # [hidden]: norm of the MLP's output
    qkv_bias: torch.Tensor | None  # a bias has as many entries as its matrix has rows
    out_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None  # [2, head_dim]: weights of queries, then of keys; or, over all heads,
    # [(heads + kv_heads) * head_dim]


class ModelWeights:
    """Uninitialised weights of a ``shape``. Copy a checkpoint into the tensors of
    `engine.model.tensor_names.named_tensors` to load it, then call `arrange`."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        def empty(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        hidden = shape.hidden_size
        self.shape = shape
        self.embedding = empty(shape.vocab_size, hidden)
        self.layers = [_layer(shape, i, empty) for i in range(shape.num_layers)]
        self.norm = empty(hidden)
        self.head = self.embedding if shape.tie_word_embeddings else empty(shape.vocab_size, hidden)

    def arrange(self) -> None:
        """Order the dimensions of queries and keys for rope.

        Where rope turns the first r dimensions of a head only, they and the others are interleaved by halves, so that
        each pair is half a head apart, as in models whose rope turns whole heads. Scores do not depend on the order.
        """
        shape = self.shape
        if shape.rotary_dim is None:
            return
        order = rotary_order(shape.head_dim, shape.rotary_dim).to(self.norm.device)
        turned = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
        for layer in self.layers:
            for rows in (layer.qkv, layer.qkv_bias):
                if rows is not None:
                    heads = rows[:turned].view(-1, shape.head_dim, *rows.shape[1:])
                    heads.copy_(heads[:, order])


def rotary_order(head_dim: int, rotary_dim: int) -> torch.Tensor:
    """The dimensions of a head in the order of `ModelWeights.arrange`: half of the turned ones, half of the others,
    and the other halves."""
    turned, others = torch.arange(rotary_dim).chunk(2), torch.arange(rotary_dim, head_dim).chunk(2)
    return torch.cat((turned[0], others[0], turned[1], others[1]))


def _layer(shape: ModelShape, index: int, empty: Callable[..., torch.Tensor]) -> LayerWeights:
    def empty_if(wanted: bool, *size: int) -> torch.Tensor | None:
        return empty(*size) if wanted else None

    hidden, inner = shape.hidden_size, shape.intermediate_size
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    before, after = shape.norms != "after", shape.norms != "before"
    experts = shape.experts
    mlp: MLPWeights | ExpertWeights
    if experts is not None and shape.has_experts(index):
        mlp = ExpertWeights(
            router=empty(experts.count, hidden),
            gate_up=empty(experts.count, 2 * experts.intermediate_size, hidden),
            down=empty(experts.count, hidden, experts.intermediate_size),
        )
    else:
        mlp = MLPWeights(
            gate_up=empty(2 * inner, hidden),
            down=empty(hidden, inner),
            gate_up_bias=empty_if(shape.mlp_bias, 2 * inner),
            down_bias=empty_if(shape.mlp_bias, hidden),
        )
    qk_norm = None
    if shape.qk_norm:
        qk_norm = empty(q_size + kv_size) if shape.qk_norm_spans_heads else empty(2, shape.head_dim)
    return LayerWeights(
        input_norm=empty_if(before, hidden),
        qkv=empty(q_size + 2 * kv_size, hidden),
        out=empty(hidden, q_size),
        attended_norm=empty_if(after, hidden),
        mlp_norm=empty_if(before, hidden),
        mlp=mlp,
        mlp_out_norm=empty_if(after, hidden),
        qkv_bias=empty_if(shape.qkv_bias, q_size + 2 * kv_size),
        out_bias=empty_if(shape.out_bias, hidden),
        qk_norm=qk_norm,
    )
