"""The decoder of all families (Llama, Mistral, Qwen), written once for CPU and CUDA: a flat batch of rows in, hidden
states out. The shape says where a family differs: biases, norms of queries and keys, windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from engine.model.attention import AttentionStep
from engine.model.kv_pool import KVPool, LayerKV
from engine.model.linear import Linear, linear
from engine.model.norm import RMSNorm
from engine.model.rope import head_factors, rope_tables, rotate_, spread
from engine.model.weights import LayerWeights, ModelWeights
from engine.scheduling.batch import LayerHook


@dataclass(frozen=True, slots=True)
class ModelStep:
    """One pass over the model. ``token_ids`` and ``positions`` are ``[rows]``, in the order of ``attention``'s rows.

    ``wanted`` (``[wanted rows]``) are the rows whose hidden state is asked for, None if it is all of them. Of the
    others the last layer computes keys and values alone; ``wanted_attention`` plans what the wanted ones, in their
    order, attend to there.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionStep
    wanted: torch.Tensor | None = None
    wanted_attention: AttentionStep | None = None


class DecoderLayer:
    """One layer, ready to run."""

    def __init__(
        self, weights: LayerWeights, heads: int, kv_heads: int, head_dim: int, window: int | None, eps: float
    ) -> None:
        self.input_norm = RMSNorm(weights.input_norm, eps)
        self.qkv = linear(weights.qkv, weights.qkv_bias)
        self.out = linear(weights.out, weights.out_bias)
        self.post_norm = RMSNorm(weights.post_norm, eps)
        self.gate, self.up = _halves(weights.gate_up, weights.gate_up_bias)
        self.down = linear(weights.down, weights.down_bias)
        self.qk_norm: torch.Tensor | None = None  # [heads + kv_heads, head_dim]
        if weights.qk_norm is not None:
            repeats = torch.tensor([heads, kv_heads], device=weights.qk_norm.device)
            self.qk_norm = weights.qk_norm.repeat_interleave(repeats, dim=0)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.eps = eps
        self.window = window


def decoder_layer(
    x: torch.Tensor,
    layer: DecoderLayer,
    angles: tuple[torch.Tensor, torch.Tensor],
    kv: LayerKV,
    attention: AttentionStep,
    wanted: torch.Tensor | None = None,
    wanted_attention: AttentionStep | None = None,
) -> torch.Tensor:
    """One layer over ``x`` (``[rows, hidden]``), whose keys and values go into ``kv``. ``angles`` turn and scale its
    rows (see `engine.model.rope.spread`). The result has all rows, or those of ``wanted``, which attend by
    ``wanted_attention``. A native kernel may take the place of the whole of it (see `LayerForm`); ``x`` is then its
    own, to be overwritten."""
    rotated = layer.heads + layer.kv_heads
    qkv = layer.qkv(layer.input_norm(x)).view(x.shape[0], -1, layer.head_dim)
    if layer.qk_norm is not None:
        qkv[:, :rotated] = functional.rms_norm(qkv[:, :rotated], (layer.head_dim,), eps=layer.eps) * layer.qk_norm
    rotate_(qkv[:, :rotated], *angles)
    attention.write(qkv[:, layer.heads :], kv)
    query = qkv[:, : layer.heads]
    if wanted is not None and wanted_attention is not None:
        attention, query, x = wanted_attention, query[wanted], x[wanted]
        if not x.shape[0]:
            return x
    x = layer.out.plus(attention.attend(query, kv, layer.window, 1.0), x)
    normed = layer.post_norm(x)
    return layer.down.plus(layer.up.times(normed, layer.gate.silu(normed)), x)


class MakeLayer(Protocol):
    """Makes a layer of its weights, for so many heads and KV heads of a size, a window (None: none) and the norms'
    epsilon."""

    def __call__(
        self, weights: LayerWeights, heads: int, kv_heads: int, head_dim: int, window: int | None, eps: float
    ) -> DecoderLayer:
        """The layer, ready to run."""
        ...


class RunLayer(Protocol):
    """`decoder_layer`, or what takes its place."""

    def __call__(
        self,
        x: torch.Tensor,
        layer: DecoderLayer,
        angles: tuple[torch.Tensor, torch.Tensor],
        kv: LayerKV,
        attention: AttentionStep,
        wanted: torch.Tensor | None = None,
        wanted_attention: AttentionStep | None = None,
    ) -> torch.Tensor:
        """One layer over ``x``."""
        ...


@dataclass(frozen=True, slots=True)
class LayerForm:
    """How a device runs the decoder's layers. ``spread``: whether the angles of a step's rows come for each head, with
    the queries' scale in them (`engine.model.rope.spread`), or as they stand in the tables."""

    make: MakeLayer
    run: RunLayer
    spread: bool


PLAIN_FORM = LayerForm(DecoderLayer, decoder_layer, spread=True)


class LlamaDecoder:
    """Runs the model on a flat batch; positions up to ``max_positions`` - 1. It takes ``weights`` over (their layers
    are gone afterwards), so that packed weights don't stay in memory twice. ``form`` is how its layers run."""

    def __init__(self, weights: ModelWeights, max_positions: int, form: LayerForm = PLAIN_FORM) -> None:
        shape = weights.shape
        self._form = form
        self.shape = shape
        self._embedding = weights.embedding
        self._layers: list[DecoderLayer] = []
        heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
        for window in shape.layer_windows:
            layer = weights.layers.pop(0)
            self._layers.append(form.make(layer, *heads, window, shape.rms_norm_eps))
        self._final_norm = RMSNorm(weights.norm, shape.rms_norm_eps)
        self._head = linear(weights.head)
        device = weights.norm.device
        self._cos, self._sin = rope_tables(shape, max_positions, weights.norm.dtype, device)
        self._factors = head_factors(shape.num_heads, shape.num_kv_heads, shape.head_dim**-0.5, device)

    @property
    def windows(self) -> frozenset[int | None]:
        """The layers' different windows, None for one that sees everything: what a step's plan has to cover."""
        return frozenset(self.shape.layer_windows)

    def forward(self, step: ModelStep, pool: KVPool, hook: LayerHook | None = None) -> torch.Tensor:
        """Hidden states ``[wanted rows, hidden]`` after the last norm; the keys and values of all rows are in the pool
        then. ``hook`` is told of layers when they have been run (on a GPU: launched)."""
        angles = self._cos[step.positions], self._sin[step.positions]
        if self._form.spread:
            angles = spread(*angles, self._factors)
        x = functional.embedding(step.token_ids, self._embedding)
        for i, (layer, kv) in enumerate(zip(self._layers[:-1], pool.layers[:-1], strict=True), 1):
            x = self._form.run(x, layer, angles, kv, step.attention)
            if hook is not None and i in hook.after:
                hook.done(i)
        layer, kv = self._layers[-1], pool.layers[-1]
        x = self._form.run(x, layer, angles, kv, step.attention, step.wanted, step.wanted_attention)
        return self._final_norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, vocabulary]`` of hidden states ``[rows, hidden]``, in the model's dtype."""
        return self._head(hidden)


def _halves(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[Linear, Linear]:
    first, second = weight.chunk(2)
    if bias is None:
        return linear(first), linear(second)
    first_bias, second_bias = bias.chunk(2)
    return linear(first, first_bias), linear(second, second_bias)
