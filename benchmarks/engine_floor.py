"""Lower bounds of the time on this machine for any engine with the same arithmetic, measured in the same run.

A decode step has to read all weights and the whole KV cache once: all packed linears at that batch size, plus the KV
bytes over the measured read bandwidth. A prefill has to compute the packed linears at the rows of its steps, plus the
attention's operations (of the causal half) at the rate of a bare product. On a GPU a decode step's products are bounded
by the bytes of the weights over the measured read bandwidth instead: a product of few rows is not faster than that."""

from __future__ import annotations

import torch

from benchmarks.engine_sides import Case
from checkpoints.shape import ModelShape
from engine.model.linear import Linear, linear
from experiments.engine_alone.arithmetic import ModelArithmetic
from experiments.engine_alone.ceilings import Ceilings


class Floor:
    """The floors of ``shape`` in bfloat16, for prefills in steps of ``chunk`` rows. ``ceilings`` measures the device
    (default: a new one)."""

    def __init__(self, shape: ModelShape, device: str, chunk: int, ceilings: Ceilings | None = None) -> None:
        self._shape = shape
        self._on_gpu = torch.device(device).type == "cuda"
        self._chunk = chunk
        self._ceilings = ceilings or Ceilings(torch.device(device))
        self._device = self._ceilings.device
        hidden, inner = shape.hidden_size, shape.intermediate_size
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        sizes = ((q_size + 2 * kv_size, hidden), (hidden, q_size), (2 * inner, hidden), (hidden, inner))
        self._layers: list[list[tuple[Linear, int]]] = [
            [(linear(self._random(*size)), size[1]) for size in sizes] for _ in range(shape.num_layers)
        ]
        self._head = linear(self._random(shape.vocab_size, hidden))

    @torch.inference_mode()
    def measure_s(self, case: Case) -> float:
        """The floor of ``case`` in seconds, measured now."""
        if self._on_gpu and case.kind == "decode":  # launched one by one, products take longer than their bytes
            arithmetic = ModelArithmetic.of(self._shape, "bfloat16")
            return self._read_s(arithmetic.decode(case.batch, case.context).num_bytes)
        chunks = [self._chunk] * (case.chunk // self._chunk) + [case.chunk % self._chunk]
        if case.batch:  # all in one step
            chunks = [case.chunk + case.batch]
        linears_s = sum(chunks.count(rows) * self._linears_s(rows) for rows in set(chunks) - {0})
        head_s = self._head_s(case.batch + bool(case.chunk))
        attention_s = self._attention_s(case.chunk * (case.context + case.chunk / 2)) if case.chunk else 0.0
        kv_bytes = case.batch * case.context * self._shape.kv_bytes_per_token("bfloat16")
        return linears_s + head_s + attention_s + (self._read_s(kv_bytes) if kv_bytes else 0.0)

    def product_flops(self) -> float:
        """Floating point operations per second of a bare product, measured now."""
        return self._ceilings.product_flops()

    def read_bytes_per_s(self) -> float:
        """Bytes per second that a sum over memory reads, measured now."""
        return self._ceilings.read_bytes_per_s()

    def _linears_s(self, rows: int) -> float:
        inputs = {width: self._random(rows, width) for layer in self._layers[:1] for _, width in layer}

        def all_layers() -> None:
            for layer in self._layers:
                for product, width in layer:
                    product(inputs[width])

        return self._ceilings.median_s(all_layers)

    def _head_s(self, rows: int) -> float:
        hidden = self._random(rows, self._shape.hidden_size)
        return self._ceilings.median_s(lambda: self._head(hidden))

    def _attention_s(self, pairs: float) -> float:
        """Seconds for ``pairs`` of a query and a key in all layers and heads: two products each."""
        shape = self._shape
        return 4 * pairs * shape.num_heads * shape.head_dim * shape.num_layers / self.product_flops()

    def _read_s(self, num_bytes: float) -> float:
        return num_bytes / self.read_bytes_per_s()

    def _random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.bfloat16, device=self._device)
