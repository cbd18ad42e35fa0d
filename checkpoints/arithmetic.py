"""What a step of the engine computes and moves, counted from the model's shape.

A step computes some rows of some requests: a part of a prompt, or one row for each request that decodes. Per layer,
with W the weights of its matrices (of them Wqkv make queries, keys and values), H the query heads times their
dimension, K the KV heads times theirs, and b the bytes of a number:

==================== =====================================  ==========================================================
what                 FLOPs                                  bytes
==================== =====================================  ==========================================================
products             2 · W · rows                           b · W, once per step, however many rows
attention            4 · H · (query, key) pairs             b · 2 · K · tokens that were in the cache before the step
new keys and values  counted with the products              b · 2 · K · rows
output head          2 · vocabulary · hidden · sampled rows b · vocabulary · hidden, if a row is sampled
==================== =====================================  ==========================================================

A row at position p makes p + 1 pairs, or as many as its layer's window allows. In the last layer only the sampled rows
go on after their keys and values are written: 2 · Wqkv · rows + 2 · (W − Wqkv) · sampled rows. Activations, norms,
biases and rope are not counted; they are small, and stay in the processor's cache.

The *intensity* of a step is FLOPs per byte. A device with P FLOP/s and B bytes/s does at most min(P, intensity · B)
(the roofline); both limits meet at the *ridge*, P ÷ B. A decode step of n requests has 2 · n · W FLOPs for b · W bytes
of weights, so its intensity is 2 n ÷ b without attention, and the *ridge batch* is P ÷ B · b ÷ 2: in 2-byte numbers
the ridge itself, 312 TFLOP/s ÷ 1.5 TB/s ≈ 208 on an A100.

If reading the weights and computing do not overlap, a step takes bytes ÷ B + FLOPs ÷ P. Without attention it then takes
twice as long as reading alone at the ridge batch. `ModelArithmetic.doubling_batch` is that point with attention's FLOPs
and bytes in it, which come with every request and so pull the point down as the context grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from checkpoints.shape import ModelShape
from pdserve.core.kv_layout import DTYPE_BYTES


class Part(NamedTuple):
    """``rows`` tokens of one request, after ``start`` tokens whose keys and values are in the cache. ``sample``:
    whether the last row gives a token."""

    start: int
    rows: int
    sample: bool


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOPs and bytes of one step or of several."""

    flops: float
    num_bytes: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.num_bytes

    def roof_s(self, flops_per_s: float, bytes_per_s: float) -> float:
        """The least time on such a device: computing and reading overlap perfectly."""
        return max(self.flops / flops_per_s, self.num_bytes / bytes_per_s)

    def added_s(self, flops_per_s: float, bytes_per_s: float) -> float:
        """The time if computing and reading do not overlap."""
        return self.flops / flops_per_s + self.num_bytes / bytes_per_s

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.num_bytes + other.num_bytes)


@dataclass(frozen=True, slots=True)
class ModelArithmetic:
    """The numbers of a model that the counts need. ``windows`` has one entry per layer. ``idle_matrices`` of
    ``layer_matrices`` are those of experts that do not compute a token; a step reads them nevertheless."""

    layer_matrices: int
    qkv_matrices: int
    query_size: int
    kv_size: int
    head_matrix: int
    windows: tuple[int | None, ...]
    dtype_bytes: int
    idle_matrices: int = 0

    @classmethod
    def of(cls, shape: ModelShape, dtype: str) -> ModelArithmetic:
        """Of a model that computes in ``dtype``."""
        query_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        return cls(
            layer_matrices=shape.layer_matrices,
            qkv_matrices=shape.hidden_size * (query_size + 2 * kv_size),
            query_size=query_size,
            kv_size=kv_size,
            head_matrix=shape.vocab_size * shape.hidden_size,
            windows=shape.layer_windows,
            dtype_bytes=DTYPE_BYTES[dtype],
            idle_matrices=shape.layer_matrices - shape.active_layer_matrices,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the facts of a cell."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> ModelArithmetic:
        """What `to_dict` wrote."""
        return msgspec.convert(plain, cls)

    @property
    def weight_bytes(self) -> int:
        """What every step that samples reads of the weights: all layers' matrices and the output head."""
        return (len(self.windows) * self.layer_matrices + self.head_matrix) * self.dtype_bytes

    def step(self, parts: Sequence[Part]) -> Cost:
        """One step over ``parts``."""
        layers = len(self.windows)
        rows, sampled = sum(part.rows for part in parts), sum(part.sample for part in parts)
        active = self.layer_matrices - self.idle_matrices
        last = rows * self.qkv_matrices + sampled * (active - self.qkv_matrices)
        multiplied = rows * (layers - 1) * active + last + sampled * self.head_matrix
        pairs = kv_tokens = 0
        for number, window in enumerate(self.windows, 1):
            for part in parts:
                final = number == layers
                first = part.start + part.rows - 1 if final else part.start
                if part.sample or not final:
                    pairs += _pairs(first, part.start + part.rows, window)
                kv_tokens += part.rows + (part.start if window is None else min(part.start, window - 1))
        weights = layers * self.layer_matrices + (self.head_matrix if sampled else 0)
        return Cost(
            2.0 * multiplied + 4.0 * self.query_size * pairs,
            float(self.dtype_bytes * (weights + 2 * self.kv_size * kv_tokens)),
        )

    def prefill(self, tokens: int, chunk: int, cached: int = 0) -> Cost:
        """The prompt's tokens from ``cached`` on, in steps of at most ``chunk``, and token 1."""
        total = Cost(0.0, 0.0)
        for start in range(cached, tokens, chunk):
            end = min(tokens, start + chunk)
            total += self.step([Part(start, end - start, end == tokens)])
        return total

    def decode(self, batch: int, context: int) -> Cost:
        """One token for each of ``batch`` requests that have ``context`` tokens in the cache."""
        return self.step([Part(context, 1, True)] * batch)

    def ridge_batch(self, flops_per_s: float, bytes_per_s: float) -> float:
        """The batch at which the products of a decode step take as long as reading their weights."""
        return flops_per_s / bytes_per_s * self.dtype_bytes / 2

    def doubling_batch(self, context: int, flops_per_s: float, bytes_per_s: float) -> float:
        """The batch at which a decode step takes twice as long as with one request, if computing and reading do not
        overlap: w + n·r = 2 (w + r), where w is the time of the weights and r that of one request."""
        one = self.decode(1, context)
        request_s = one.flops / flops_per_s + (one.num_bytes - self.weight_bytes) / bytes_per_s
        return self.weight_bytes / bytes_per_s / request_s + 2


def _pairs(first: int, end: int, window: int | None) -> int:
    """Keys that the rows at positions ``first`` to ``end`` - 1 see together."""
    if window is None or end <= window:
        return (end * (end + 1) - first * (first + 1)) // 2
    if first >= window:
        return (end - first) * window
    return _pairs(first, window, None) + (end - window) * window
