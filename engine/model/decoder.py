"""The decoder of all families (Llama, Mistral, Qwen) on CPUs and GPUs: a flat batch of rows in, hidden states out.

`engine.model.shape.ModelShape` says where families differ: biases, norms of queries and keys, windows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.model.attention import AttentionStep
from engine.model.kv_pool import KVPool, LayerKV
from engine.model.linear import Linear, linear
from engine.model.rope import head_factors, rope_tables, rotate_, spread
from engine.model.shape import ModelShape
from engine.model.weights import LayerWeights, ModelWeights
from engine.scheduling.batch import LayerHook


@dataclass(frozen=True, slots=True)
class ModelStep:
    """One pass over the model. ``token_ids`` and ``positions`` are ``[rows]``, in the row order of ``attention``.

    ``wanted`` (``[wanted rows]``) are the rows whose hidden states are returned; None means all. The last layer
    computes only keys and values for the other rows, and the wanted rows attend by ``wanted_attention`` there.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionStep
    wanted: torch.Tensor | None = None
    wanted_attention: AttentionStep | None = None


class RMSNorm:
    """Divides each row of ``x`` (``[rows, hidden]``) by its root mean square and multiplies it by ``weight``
    (``[hidden]``).

    In bfloat16 the arithmetic is in float32 and the result is rounded once, in as few passes as possible:
    ``x / hypot(|x|, sqrt(hidden * eps)) * (weight * sqrt(hidden))`` is the same number. For a single row on a CPU the
    number of calls dominates, so it uses a layer norm: ``(x, -x)`` has mean 0 and the mean square of ``x``.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        if weight.dtype is torch.bfloat16:
            hidden = weight.shape[0]
            self._weight_twice = torch.cat((weight, weight))
            self._scaled_weight = weight.float() * hidden**0.5
            self._least = torch.tensor((hidden * eps) ** 0.5, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.bfloat16:
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        if x.shape[0] == 1 and x.device.type == "cpu":
            twice = torch.cat((x, -x), dim=-1)
            return functional.layer_norm(twice, self._weight_twice.shape, self._weight_twice, None, self.eps)[
                :, : x.shape[1]
            ]
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return wide.div_(torch.hypot(length, self._least)).mul_(self._scaled_weight).to(x.dtype)


class DecoderLayer:
    """One layer of a model of ``shape``, for any device.

    ``window`` is its sliding window (None: it sees everything). A device with native kernels has a subclass
    (`engine.kernels.cuda_layer.CUDALayer`).
    """

    scales_queries = True
    """Whether `__call__` wants the angles of every head, with the queries' scale in them (`engine.model.rope.spread`),
    or those of the rope tables."""

    def __init__(self, weights: LayerWeights, shape: ModelShape, window: int | None) -> None:
        self.heads, self.kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.eps = shape.rms_norm_eps
        self.window = window
        self.input_norm = RMSNorm(weights.input_norm, self.eps)
        self.qkv = linear(weights.qkv, weights.qkv_bias)
        self.out = linear(weights.out, weights.out_bias)
        self.post_norm = RMSNorm(weights.post_norm, self.eps)
        self.gate, self.up = _halves(weights.gate_up, weights.gate_up_bias)
        self.down = linear(weights.down, weights.down_bias)
        self.qk_norm: torch.Tensor | None = None  # [heads + kv_heads, head_dim]
        if weights.qk_norm is not None:
            repeats = torch.tensor([self.heads, self.kv_heads], device=weights.qk_norm.device)
            self.qk_norm = weights.qk_norm.repeat_interleave(repeats, dim=0)

    def __call__(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        kv: LayerKV,
        attention: AttentionStep,
        wanted: torch.Tensor | None = None,
        wanted_attention: AttentionStep | None = None,
    ) -> torch.Tensor:
        """Run the layer over ``x`` (``[rows, hidden]``, which it may overwrite) and write keys and values to ``kv``.

        ``angles`` turn the rows (see `scales_queries`). Returns all rows, or only those of ``wanted``, which attend by
        ``wanted_attention``.
        """
        rotated = self.heads + self.kv_heads
        qkv = self.qkv(self.input_norm(x)).view(x.shape[0], -1, self.head_dim)
        if self.qk_norm is not None:
            qkv[:, :rotated] = functional.rms_norm(qkv[:, :rotated], (self.head_dim,), eps=self.eps) * self.qk_norm
        rotate_(qkv[:, :rotated], *angles)
        kv.vectors.index_copy_(0, attention.slots, qkv[:, self.heads :].reshape(-1, self.head_dim))
        query = qkv[:, : self.heads]
        if wanted is not None and wanted_attention is not None:
            attention, query, x = wanted_attention, query[wanted], x[wanted]
            if not x.shape[0]:
                return x
        x = self.out.plus(attention.attend(query, kv, self.window, 1.0), x)
        normed = self.post_norm(x)
        return self.down.plus(self.up.times(normed, self.gate.silu(normed)), x)


class LlamaDecoder:
    """Runs the model on a flat batch, at positions below ``max_positions``.

    It empties ``weights.layers``, so that packed weights are not in memory twice. ``layer_type`` is the layer of the
    device.
    """

    def __init__(
        self, weights: ModelWeights, max_positions: int, layer_type: type[DecoderLayer] = DecoderLayer
    ) -> None:
        shape = weights.shape
        self.shape = shape
        self._scales_queries = layer_type.scales_queries
        self._embedding = weights.embedding
        self._layers = [layer_type(weights.layers.pop(0), shape, window) for window in shape.layer_windows]
        self._final_norm = RMSNorm(weights.norm, shape.rms_norm_eps)
        self._head = linear(weights.head)
        device = weights.norm.device
        self._cos, self._sin = rope_tables(shape, max_positions, weights.norm.dtype, device)
        self._factors = head_factors(shape.num_heads, shape.num_kv_heads, shape.head_dim**-0.5, device)

    @property
    def windows(self) -> frozenset[int | None]:
        """The different windows of the layers (None: a layer sees everything). The plan of a step covers all."""
        return frozenset(self.shape.layer_windows)

    def forward(self, step: ModelStep, pool: KVPool, hook: LayerHook | None = None) -> torch.Tensor:
        """Run ``step``, write the keys and values of all rows to ``pool``, and return the hidden states after the last
        norm, ``[wanted rows, hidden]``. Calls ``hook`` when its layers have been run (on a GPU: launched)."""
        angles = self._cos[step.positions], self._sin[step.positions]
        if self._scales_queries:
            angles = spread(*angles, self._factors)
        x = functional.embedding(step.token_ids, self._embedding)
        for i, (layer, kv) in enumerate(zip(self._layers[:-1], pool.layers[:-1], strict=True), 1):
            x = layer(x, angles, kv, step.attention)
            if hook is not None and i in hook.after:
                hook.done(i)
        layer, kv = self._layers[-1], pool.layers[-1]
        x = layer(x, angles, kv, step.attention, step.wanted, step.wanted_attention)
        return self._final_norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[rows, vocabulary]`` of hidden states ``[rows, hidden]``, in the model's dtype."""
        return self._head(hidden)


def _halves(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[Linear, Linear]:
    first, second = weight.chunk(2)
    if bias is None:
        return linear(first), linear(second)
    first_bias, second_bias = bias.chunk(2)
    return linear(first, first_bias), linear(second, second_bias)
