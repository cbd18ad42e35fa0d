"""The weights of a decoder of any family, and their names in Hugging Face checkpoints."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from checkpoints.families import family_of
from checkpoints.shape import ModelShape
from pdserve.core.errors import ModelError

_FP8_TYPICAL = 4.0
"""FP8 holds numbers up to 112 times this, and steps of a 2048th."""

_FP8_UNIT = 16
"""FP8 products of GPUs need sizes that are multiples of it."""


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix, or several of the same size: ``values`` (``[..., rows, columns]``, int8 or float8) times ``scales``
    (``[..., rows, groups]``, float32). A scale is shared by ``group`` columns of its row (None: by all)."""

    values: torch.Tensor
    scales: torch.Tensor
    group: int | None

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix in ``dtype``, multiplied in float32."""
        scales = self.scales
        if self.group is not None:
            scales = scales.repeat_interleave(self.group, dim=-1)[..., : self.values.shape[-1]]
        return (self.values.float() * scales).to(dtype)

    @property
    def shape(self) -> torch.Size:
        """The shape of the matrix."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Where the matrix is."""
        return self.values.device

    def split(self, sizes: Sequence[int]) -> tuple[QuantizedTensor, ...]:
        """Views of consecutive rows (of the first dimension)."""
        parts = zip(torch.split(self.values, list(sizes)), torch.split(self.scales, list(sizes)), strict=True)
        return tuple(QuantizedTensor(values, scales, self.group) for values, scales in parts)

    def chunk(self, count: int) -> tuple[QuantizedTensor, ...]:
        """Views of ``count`` equal parts of the rows."""
        return self.split([self.shape[0] // count] * count)


Matrix = torch.Tensor | QuantizedTensor
"""A matrix of weights, plain or quantized."""


def unbind(matrices: Matrix) -> Sequence[Matrix]:
    """The matrices along the first dimension."""
    if isinstance(matrices, torch.Tensor):
        return matrices.unbind()
    parts = zip(matrices.values.unbind(), matrices.scales.unbind(), strict=True)
    return [QuantizedTensor(values, scales, matrices.group) for values, scales in parts]


@dataclass(frozen=True, slots=True)
class MLPWeights:
    """The weights of an MLP. One matrix holds gate and up, for wide products."""

    gate_up: Matrix  # [2 * intermediate, hidden]
    down: Matrix  # [hidden, intermediate]
    gate_up_bias: torch.Tensor | None  # a bias has as many entries as its matrix has rows
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of a mixture of experts."""

    router: torch.Tensor  # [experts, hidden]
    gate_up: Matrix  # [experts, 2 * intermediate, hidden]
    down: Matrix  # [experts, hidden, intermediate]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. One matrix holds q, k and v, for a wide product. None marks weights that the family
    does not have."""

    input_norm: torch.Tensor | None  # [hidden]: norm of attention's input
    qkv: Matrix  # [(heads + 2 * kv_heads) * head_dim, hidden]
    out: Matrix  # [hidden, heads * head_dim]
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
    `named_tensors` to load it, then call `arrange`.

    ``keep_fp8``: matrices of FP8 numbers with scales per row stay so. `ModelError` if parts of one wide product are
    stored differently.
    """

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device, keep_fp8: bool = False) -> None:
        def empty(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        hidden = shape.hidden_size
        self.shape = shape
        self.embedding = empty(shape.vocab_size, hidden)
        self.layers = [
            _layer(shape, i, empty, _matrices(shape, i, dtype, device, keep_fp8)) for i in range(shape.num_layers)
        ]
        self.norm = empty(hidden)
        self.head = self.embedding if shape.tie_word_embeddings else empty(shape.vocab_size, hidden)

    def arrange(self) -> None:
        """Order the dimensions of queries and keys for rope.

        Where rope turns the first r dimensions of a head only, they and the others are interleaved by halves, so that
        each pair is half a head apart, as in models whose rope turns whole heads. Scores do not depend on the order.
        """
        shape = self.shape
        if shape.partial_rotary_dim is None:
            return
        order = rotary_order(shape.head_dim, shape.rotary_dim).to(self.norm.device)
        turned = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
        for layer in self.layers:
            qkv = (layer.qkv.values, layer.qkv.scales) if isinstance(layer.qkv, QuantizedTensor) else (layer.qkv,)
            for rows in (*qkv, layer.qkv_bias):
                if rows is not None:
                    heads = rows[:turned].view(-1, shape.head_dim, *rows.shape[1:])
                    heads.copy_(heads[:, order])

    def scale_kv(self) -> bytes:
        """Scale what makes keys and values so that FP8 can hold them, and undo it where they are used: in queries, and
        in the projection of attention's output. No result changes, as all scales are powers of 2. Returns these.

        A key head, and all value heads of a layer, get a typical size of `_FP8_TYPICAL`, estimated from the weights,
        for inputs as the norm gives them. Keys that a norm of their own gives have a size near 1 already.
        """
        scales: list[float] = []
        shape = self.shape
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        for layer in self.layers:
            gains = torch.ones(shape.hidden_size, dtype=torch.float64, device=self.norm.device)
            if layer.input_norm is not None:
                gains = layer.input_norm.double() + shape.norm_offset
            parts = layer.qkv.split([q_size, kv_size, kv_size])
            biases = (None,) * 3 if layer.qkv_bias is None else torch.split(layer.qkv_bias, [q_size, kv_size, kv_size])
            sizes = [_sizes(part, bias, gains) for part, bias in zip(parts[1:], biases[1:], strict=True)]
            value_scale = _power(sizes[1].mean().sqrt().item())
            _multiply(parts[2], biases[2], 1 / value_scale)
            _multiply(layer.out, None, value_scale)
            scales.append(value_scale)
            if layer.qk_norm is not None:
                continue
            heads = sizes[0].view(shape.num_kv_heads, -1).mean(1).sqrt().tolist()
            queries, keys = (_heads(parts[i], biases[i], shape.num_kv_heads) for i in (0, 1))
            for scale, query, key in zip(map(_power, heads), queries, keys, strict=True):
                _multiply(*query, scale)
                _multiply(*key, 1 / scale)
                scales.append(scale)
        return struct.pack(f"<{len(scales)}d", *scales)


def _heads(matrix: Matrix, bias: torch.Tensor | None, count: int) -> list[tuple[Matrix, torch.Tensor | None]]:
    """The rows of a matrix and its bias, in ``count`` equal parts."""
    return list(zip(matrix.chunk(count), (None,) * count if bias is None else bias.chunk(count), strict=True))


def _sizes(matrix: Matrix, bias: torch.Tensor | None, gains: torch.Tensor) -> torch.Tensor:
    """The mean squares of the results of each row, for independent inputs of the sizes ``gains``, in float64."""
    rows = matrix if isinstance(matrix, torch.Tensor) else matrix.dequantized(torch.float32)
    squares = (rows.double() * gains).square().sum(1)
    return squares if bias is None else squares + bias.double().square()


def _power(size: float) -> float:
    """The power of 2 by which numbers of a ``size`` are divided."""
    return 2.0 ** round(math.log2(size / _FP8_TYPICAL)) if size > 0.0 else 1.0


def _multiply(matrix: Matrix, bias: torch.Tensor | None, factor: float) -> None:
    (matrix if isinstance(matrix, torch.Tensor) else matrix.scales).mul_(factor)
    if bias is not None:
        bias.mul_(factor)


def rotary_order(head_dim: int, rotary_dim: int) -> torch.Tensor:
    """The dimensions of a head in the order of `ModelWeights.arrange`: half of the turned ones, half of the others,
    and the other halves."""
    turned, others = torch.arange(rotary_dim).chunk(2), torch.arange(rotary_dim, head_dim).chunk(2)
    return torch.cat((turned[0], others[0], turned[1], others[1]))


def quantized_parts(shape: ModelShape, layer: int) -> frozenset[str]:
    """The parts of ``layer`` (as `checkpoints.families.Family.modules` names them) that are stored in 8 bits."""
    if shape.quantization is None:
        return frozenset()
    found: set[str] = set()
    for part, modules in family_of(shape.architecture).modules(shape.has_experts(layer)).items():
        covered = [shape.quantization.covers(f"model.layers.{layer}.{module}") for module in modules]
        if any(covered) != all(covered):
            raise ModelError(
                f"'quantization_config' covers only some of {', '.join(modules)} in layer {layer}; they are one product"
            )
        if all(covered):
            found.add(part)
    return frozenset(found)


def _matrices(
    shape: ModelShape, layer: int, dtype: torch.dtype, device: torch.device, keep_fp8: bool
) -> Callable[..., Matrix]:
    """Makes the matrices of a layer: by the name of their part, and their size."""
    kept = frozenset[str]()
    if keep_fp8 and shape.quantization is not None and shape.quantization.fp8_rows:
        kept = quantized_parts(shape, layer)

    def empty(part: str, *size: int) -> Matrix:
        if part not in kept or any(length % _FP8_UNIT for length in size[-2:]):
            return torch.empty(size, dtype=dtype, device=device)
        return QuantizedTensor(
            torch.empty(size, dtype=torch.float8_e4m3fn, device=device),
            torch.empty((*size[:-1], 1), dtype=torch.float32, device=device),
            None,
        )

    return empty


def _layer(
    shape: ModelShape, index: int, empty: Callable[..., torch.Tensor], matrix: Callable[..., Matrix]
) -> LayerWeights:
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
            gate_up=matrix("gate_up", experts.count, 2 * experts.intermediate_size, hidden),
            down=matrix("down", experts.count, hidden, experts.intermediate_size),
        )
    else:
        mlp = MLPWeights(
            gate_up=matrix("gate_up", 2 * inner, hidden),
            down=matrix("down", hidden, inner),
            gate_up_bias=empty_if(shape.mlp_bias, 2 * inner),
            down_bias=empty_if(shape.mlp_bias, hidden),
        )
    qk_norm = None
    if shape.qk_norm:
        qk_norm = empty(q_size + kv_size) if shape.qk_norm_spans_heads else empty(2, shape.head_dim)
    return LayerWeights(
        input_norm=empty_if(before, hidden),
        qkv=matrix("qkv", q_size + 2 * kv_size, hidden),
        out=matrix("out", hidden, q_size),
        attended_norm=empty_if(after, hidden),
        mlp_norm=empty_if(before, hidden),
        mlp=mlp,
        mlp_out_norm=empty_if(after, hidden),
        qkv_bias=empty_if(shape.qkv_bias, q_size + 2 * kv_size),
        out_bias=empty_if(shape.out_bias, hidden),
        qk_norm=qk_norm,
    )


def named_tensors(weights: ModelWeights) -> dict[str, Matrix]:
    """Views of ``weights`` by their names in checkpoints."""
    shape = weights.shape
    named: dict[str, Matrix] = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    if not shape.tie_word_embeddings:
        named["lm_head.weight"] = weights.head
    family = family_of(shape.architecture)
    for i, layer in enumerate(weights.layers):
        parts = _norms(layer, shape) | _products(layer, shape, family.modules(shape.has_experts(i)))
        named |= {f"model.layers.{i}.{name}": tensor for name, tensor in parts.items()}
    return named


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


def _products(layer: LayerWeights, shape: ModelShape, modules: Mapping[str, Sequence[str]]) -> dict[str, Matrix]:
    """The matrices of a layer, their biases, and the norms of queries and keys. ``modules`` are the matrices' names."""
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    mlp, named = layer.mlp, dict[str, Matrix]()
    if layer.qk_norm is not None:
        query, key = torch.split(layer.qk_norm, [q_size, kv_size]) if shape.qk_norm_spans_heads else layer.qk_norm
        named["self_attn.q_norm.weight"], named["self_attn.k_norm.weight"] = query, key
    parts: list[tuple[str, Matrix, torch.Tensor | None, int]] = [  # with the number of the expert, if there are any
        ("qkv", layer.qkv, layer.qkv_bias, 0),
        ("out", layer.out, layer.out_bias, 0),
    ]
    if isinstance(mlp, MLPWeights):
        parts += [("gate_up", mlp.gate_up, mlp.gate_up_bias, 0), ("down", mlp.down, mlp.down_bias, 0)]
    else:
        named[f"{modules['down'][0].partition('.experts')[0]}.gate.weight"] = mlp.router
        for expert, (gate_up, down) in enumerate(zip(unbind(mlp.gate_up), unbind(mlp.down), strict=True)):
            parts += [("gate_up", gate_up, None, expert), ("down", down, None, expert)]
    for part, matrix, bias, expert in parts:
        names = [name.replace("experts.0.", f"experts.{expert}.") for name in modules[part]]
        sizes = [matrix.shape[0] // len(names)] * len(names)
        if part == "qkv" and len(names) > 1:
            sizes = [q_size, kv_size, kv_size]
        for kind, rows in (("weight", matrix), ("bias", bias)):
            if rows is not None:
                named |= {f"{name}.{kind}": own for name, own in zip(names, rows.split(sizes), strict=True)}
    return named
