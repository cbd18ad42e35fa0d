"""What the engine's benchmark measures (prefills, decode steps, and a step that does both) and on what: pdserve's model
runner, transformers, and what the machine can do at all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from checkpoints.shape import ModelShape
from engine.model.layers import Linear, linear
from experiments.engine_alone.arithmetic import ModelArithmetic
from experiments.engine_alone.bare_engine import BareEngine, blocks_for
from experiments.engine_alone.ceilings import Ceilings

WARM_STEPS = 2
STEPS = 8


class Case(NamedTuple):
    """A step that computes ``chunk`` tokens of a prompt, and one token for each of ``batch`` requests that have
    ``context`` tokens. Without a batch it is the first token of a prompt of ``chunk`` tokens. Without a chunk the
    figure is the median of `STEPS`, as the context grows."""

    chunk: int = 0
    batch: int = 0
    context: int = 0

    @property
    def kind(self) -> str:
        """``prefill``, ``decode`` or ``mixed``."""
        return "decode" if not self.chunk else "mixed" if self.batch else "prefill"

    @property
    def name(self) -> str:
        """As it is called in the JSON line."""
        if not self.batch:
            return str(self.chunk)
        return f"p{self.chunk}_" * bool(self.chunk) + f"b{self.batch}_c{self.context}"


CPU_CASES = (
    *(Case(tokens) for tokens in (128, 512, 2048, 4096)),
    *(Case(0, batch, context) for context in (64, 1024) for batch in (1, 4, 16, 32)),
    Case(256, 8, 512),
)
CUDA_CASES = (
    *(Case(tokens) for tokens in (512, 2048, 8192)),
    *(Case(0, batch, context) for context in (64, 1024) for batch in (1, 8, 32)),
    Case(512, 8, 1024),
)
QUICK_CASES = (Case(128), Case(0, 1, 64), Case(0, 4, 64), Case(64, 2, 64))


class PdserveSide:
    """An engine with random weights of ``model``'s shape in bfloat16, without its process around it, driven as the
    scheduler drives it."""

    def __init__(self, model: str, device: str, cases: Sequence[Case]) -> None:
        num_blocks = max(
            blocks_for(case.batch + bool(case.chunk), case.context + (case.chunk or WARM_STEPS + STEPS))
            for case in cases
        )
        self._engine = BareEngine(model, device, num_blocks=num_blocks, dtype="bfloat16")
        self.chunk = self._engine.chunk

    def measure_s(self, case: Case) -> float:
        """Seconds that ``case`` takes now."""
        if not case.batch:
            return self._engine.prefill_s(case.chunk)
        if not case.chunk:
            return statistics.median(self._engine.decode_steps_s(case.batch, case.context, WARM_STEPS, STEPS))
        return self._engine.mixed_s(case.chunk, case.batch, case.context)


class TransformersSide:
    """transformers' model with random weights of ``shape``: eager, scaled dot product attention, bfloat16. Of a mixed
    step it does one part after the other."""

    def __init__(self, shape: ModelShape, device: str) -> None:
        config = LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.max_position_embeddings,
            tie_word_embeddings=shape.tie_word_embeddings,
            attn_implementation="sdpa",
            dtype=torch.bfloat16,
        )
        self._shape = shape
        self._device = torch.device(device)
        with self._device:
            self._model: Any = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def measure_s(self, case: Case) -> float:
        """Seconds that ``case`` takes now."""
        seconds = 0.0
        if case.chunk:
            seconds += self._forward_s(1, case.chunk, self._cache(1, case.context))
        if case.batch:
            cache = self._cache(case.batch, case.context)
            times_s = [self._forward_s(case.batch, 1, cache) for _ in range(WARM_STEPS + STEPS)]
            seconds += statistics.median(times_s[WARM_STEPS:])
        return seconds

    def _forward_s(self, batch: int, length: int, cache: Any) -> float:
        tokens = torch.randint(0, self._shape.vocab_size, (batch, length), device=self._device)
        started_s = time.perf_counter()
        output = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        output.logits[:, -1].argmax(dim=-1).tolist()
        return time.perf_counter() - started_s

    def _cache(self, batch: int, context: int) -> Any:
        shape, cache = self._shape, DynamicCache()
        for layer in range(shape.num_layers if context else 0):
            kv = torch.randn(
                batch, shape.num_kv_heads, context, shape.head_dim, dtype=torch.bfloat16, device=self._device
            )
            cache.update(kv, kv.clone(), layer)
        return cache


class Floor:
    """The floors of ``shape`` in bfloat16, for prefills in steps of ``chunk`` rows. ``ceilings`` measures the device
    (default: a new one).

    They are lower bounds of the time on this machine for any engine with the same arithmetic, measured in the same
    run. A decode step has to read all weights and the whole KV cache once: all packed linears at that batch size,
    plus the KV bytes over the measured read bandwidth. A prefill has to compute the packed linears at the rows of its
    steps, plus the attention's operations (of the causal half) at the rate of a bare product. On a GPU a decode
    step's products are bounded by the bytes of the weights over the measured read bandwidth instead: a product of few
    rows is not faster than that."""

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
