"""The decoder of all families on CPUs and GPUs: a flat batch of rows in, hidden states out.

`checkpoints.shape.ModelShape` says where families differ: biases, norms, windows, ropes, soft caps, experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from checkpoints.shape import ModelShape, Rope
from engine.model.attention import AttentionStep
from engine.model.kv_pool import KVPool, LayerKV
from engine.model.layers import (
    FixedLinear,
    GatedMLP,
    LoopedExperts,
    PackedLinear,
    Product,
    Products,
    RMSNorm,
    RoutedExperts,
    SpanNorm,
    Summed,
    linear,
)
from engine.model.rope import head_factors, rope_tables, rotate_, spread
from engine.model.share import Ranks, Share
from engine.model.weights import ExpertWeights, LayerWeights, MLPWeights, ModelWeights
from engine.scheduling.batch import LayerHook

ROWS_STEP = 16
"""oneDNN makes new kernels for each number of rows that it has not met lately, which takes as long as a prompt of 100
tokens. So a step of more rows has a multiple of these; the last ones belong to no request."""


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


class DecoderLayer:
    """One layer of a model of ``shape``, for any device.

    ``window`` is its sliding window (None: it sees everything). ``batch_invariant``: what it computes of a row does not
    depend on the other rows. A device with native kernels has a subclass (`engine.kernels.cuda_layer.CUDALayer`).
    """

    scales_queries = True
    """Whether `__call__` wants the angles of every head, with the queries' scale in them (`engine.model.rope.spread`),
    or those of the rope tables."""

    def __init__(
        self, weights: LayerWeights, shape: ModelShape, window: int | None, batch_invariant: bool = False
    ) -> None:
        def norm(weight: torch.Tensor | None) -> RMSNorm | None:
            if weight is None:
                return None
            return RMSNorm(weight, shape.rms_norm_eps, shape.norm_offset, batch_invariant)

        products = self.products(batch_invariant)
        self.heads, self.kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.eps = shape.rms_norm_eps
        self.window = window
        self.scale = 1.0 if self.scales_queries else shape.attention_scale
        self.input_norm = norm(weights.input_norm)
        self.qkv = products(weights.qkv, weights.qkv_bias)
        self.out: Product = products(weights.out, weights.out_bias)
        self.attended_norm = norm(weights.attended_norm)
        self.mlp_norm = norm(weights.mlp_norm)
        self.mlp: Product = self._make_mlp(weights.mlp, shape, batch_invariant)
        self.mlp_out_norm = norm(weights.mlp_out_norm)
        self.qk_norm: torch.Tensor | None = None  # [heads + kv_heads, head_dim]
        self.span_norms: list[tuple[slice, RMSNorm]] = []  # columns of ``qkv``, and their norm
        if weights.qk_norm is not None and shape.qk_norm_spans_heads:
            ends = [self.heads * self.head_dim, (self.heads + self.kv_heads) * self.head_dim]
            self.span_norms = [
                (slice(begin, end), RMSNorm(weights.qk_norm[begin:end], self.eps, shape.norm_offset, batch_invariant))
                for begin, end in zip([0, ends[0]], ends, strict=True)
            ]
        elif weights.qk_norm is not None:
            repeats = torch.tensor([self.heads, self.kv_heads], device=weights.qk_norm.device)
            qk_norm = weights.qk_norm if shape.norm_offset == 0.0 else weights.qk_norm.float() + shape.norm_offset
            self.qk_norm = qk_norm.repeat_interleave(repeats, dim=0)

    def split(self, share: Share, ranks: Ranks) -> None:
        """Have the layer, whose weights are those of ``share``, compute what it is over all ``ranks``."""
        self.out, self.mlp = Summed(self.out, ranks), Summed(self.mlp, ranks)
        heads = (share.whole.num_heads, 1), (share.whole.num_kv_heads, share.key_ranks)
        self.span_norms = [
            (columns, SpanNorm(norm.weight, norm.eps, ranks, count * self.head_dim, copies))
            for (columns, norm), (count, copies) in zip(self.span_norms, heads, strict=False)
        ]

    @staticmethod
    def products(batch_invariant: bool) -> Products:
        """What makes the products of the device; with ``batch_invariant`` from plain weights only."""
        return FixedLinear if batch_invariant else linear

    def _make_mlp(
        self, weights: MLPWeights | ExpertWeights, shape: ModelShape, batch_invariant: bool
    ) -> GatedMLP | RoutedExperts:
        """The MLP of the device."""
        products = self.products(batch_invariant)
        if isinstance(weights, MLPWeights):
            return GatedMLP(weights, shape.activation, products)
        assert shape.experts is not None
        return LoopedExperts(weights, shape.experts, shape.activation, products)

    def _qkv(self, x: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values of normed rows ``x``: ``[rows, heads + 2 * kv_heads, head_dim]``. Norms over all
        heads are applied, those per head are not."""
        qkv = self.qkv(x)
        for columns, norm in self.span_norms:
            qkv[:, columns] = self.normed(qkv[:, columns], norm)
        return qkv.view(x.shape[0], -1, self.head_dim)

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
        ``wanted_attention``. Rows beyond those of ``attention`` attend to nothing and are not written.
        """
        qkv = self._qkv(self.normed(x, self.input_norm))
        query = self._rotate_and_write(qkv, angles, kv, attention.slots)
        if wanted is not None and wanted_attention is not None:
            attention, query, x = wanted_attention, query[wanted], x[wanted]
            if not x.shape[0]:
                return x
        attended = attention.attend(query, kv, self.window, self.scale)
        if attended.shape[0] < x.shape[0]:
            attended = functional.pad(attended, (0, 0, 0, x.shape[0] - attended.shape[0]))
        if self.attended_norm is None:
            x = self.out.plus(attended, x)
        else:
            x = x + self.normed(self.out(attended), self.attended_norm)
        normed = self.normed(x, self.mlp_norm)
        if self.mlp_out_norm is None:
            return self.mlp.plus(normed, x)
        return x + self.normed(self.mlp(normed), self.mlp_out_norm)

    def normed(self, x: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
        """``x`` after ``norm``, if there is one, as the device computes it."""
        return x if norm is None else norm(x)

    def _rotate_and_write(
        self, qkv: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], kv: LayerKV, slots: torch.Tensor
    ) -> torch.Tensor:
        """Norm the heads of queries and keys, turn them, write keys and values to the pool, and return the queries."""
        rotated = self.heads + self.kv_heads
        if self.qk_norm is not None:
            qkv[:, :rotated] = functional.rms_norm(qkv[:, :rotated], (self.head_dim,), eps=self.eps) * self.qk_norm
        rotate_(qkv[:, :rotated], *angles)
        qkv = qkv[: slots.shape[0] // (2 * self.kv_heads)]
        kv.write(slots, qkv[:, self.heads :].reshape(-1, self.head_dim))
        return qkv[:, : self.heads]


class Decoder:
    """Runs the model on a flat batch, at positions below ``max_positions``.

    It empties ``weights.layers``, so that packed weights are not in memory twice. ``layer_type`` is the layer of the
    device. ``long_rope`` selects the long factors of longrope. ``batch_invariant``: what is computed of a row does not
    depend on the other rows of a step, if that is so for the attention. With ``ranks``, the weights are those of a
    ``share``; rank 0 has the logits of all.
    """

    def __init__(
        self,
        weights: ModelWeights,
        max_positions: int,
        layer_type: type[DecoderLayer] = DecoderLayer,
        long_rope: bool = False,
        batch_invariant: bool = False,
        share: Share | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        shape = weights.shape
        self.shape = shape
        self.vocab_size = shape.vocab_size if share is None else share.whole.vocab_size
        self._share, self._ranks = share, ranks
        self._scales_queries = layer_type.scales_queries
        self._embedding = weights.embedding
        self._layers = [
            layer_type(weights.layers.pop(0), shape, window, batch_invariant) for window in shape.layer_windows
        ]
        self._reads_back = any(isinstance(layer.mlp, LoopedExperts) for layer in self._layers)
        if share is not None and ranks is not None:
            for layer in self._layers:
                layer.split(share, ranks)
        self._final_norm = RMSNorm(weights.norm, shape.rms_norm_eps, shape.norm_offset, batch_invariant)
        self._head = layer_type.products(batch_invariant)(weights.head, None)
        self.rounds_rows = isinstance(self._head, PackedLinear) and ranks is None
        """Whether steps have a multiple of `ROWS_STEP` rows. Ranks, which share memory for so many rows, do not."""
        dtype, device = weights.norm.dtype, weights.norm.device
        self._tables = {
            rope: rope_tables(rope, shape, max_positions, long_rope, dtype, device) for rope in set(shape.layer_ropes)
        }
        self.dtype, self.device = dtype, device
        self._ropes = shape.layer_ropes
        self._factors = head_factors(shape.num_heads, shape.num_kv_heads, shape.attention_scale, device)
        self._embedding_scale = torch.tensor(shape.embedding_scale, dtype=dtype).item()

    @property
    def windows(self) -> frozenset[int | None]:
        """The different windows of the layers (None: a layer sees everything). The plan of a step covers all."""
        return frozenset(self.shape.layer_windows)

    @property
    def reads_back(self) -> bool:
        """Whether a step reads numbers back from the device, which a CUDA graph cannot record."""
        return self._reads_back

    def forward(self, step: ModelStep, pool: KVPool, hook: LayerHook | None = None) -> torch.Tensor:
        """Run ``step``, write the keys and values of all rows to ``pool``, and return the hidden states after the last
        norm, ``[wanted rows, hidden]``. Calls ``hook`` when its layers have been run (on a GPU: launched)."""
        token_ids, positions, rows = step.token_ids, step.positions, step.token_ids.shape[0]
        if self.rounds_rows and rows > ROWS_STEP:
            more = (0, -rows % ROWS_STEP)
            token_ids, positions = functional.pad(token_ids, more), functional.pad(positions, more)
        angles = {rope: self._angles(rope, positions) for rope in self._tables}
        x = self._embedded(token_ids)
        if self._embedding_scale != 1.0:
            x.mul_(self._embedding_scale)
        layers = zip(self._layers[:-1], self._ropes[:-1], pool.layers[:-1], strict=True)
        for i, (layer, rope, kv) in enumerate(layers, 1):
            x = layer(x, angles[rope], kv, step.attention)
            if hook is not None and i in hook.after:
                hook.done(i)
        layer, rope, kv = self._layers[-1], self._ropes[-1], pool.layers[-1]
        x = layer(x, angles[rope], kv, step.attention, step.wanted, step.wanted_attention)
        return layer.normed(x[:rows], self._final_norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[rows, vocabulary]`` of hidden states ``[rows, hidden]``, in the model's dtype."""
        logits = self._head(hidden)
        if (cap := self.shape.final_softcap) is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)
        if self._ranks is None or self._share is None:
            return logits
        return self._ranks.gather(logits, self._share.vocabulary)

    def meet(self) -> None:
        """Wait until all ranks have come here, if there are several: their keys and values are in the pool then."""
        if self._ranks is not None:
            self._ranks.meet()

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._ranks is None or self._share is None:
            return functional.embedding(token_ids, self._embedding)
        own = token_ids - self._share.first_token
        absent = (own < 0) | (own >= self._embedding.shape[0])
        x = functional.embedding(own.masked_fill_(absent, 0), self._embedding)
        return self._ranks.sum(x.masked_fill_(absent[:, None], 0.0))

    def _angles(self, rope: Rope, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._tables[rope]
        angles = cos[positions], sin[positions]
        return spread(*angles, self._factors) if self._scales_queries else angles
