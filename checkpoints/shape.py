"""The shape of a decoder, and its sizes: parameters, weight bytes, KV bytes per token.

`checkpoints.hf_config` reads it, the engine builds the model from it, and `pdserve model-info` prints its sizes. Does
not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from checkpoints.quantization import Quantization
from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import DTYPE_BYTES

Norms = Literal["before", "after", "around"]
"""Where a layer norms: the inputs of attention and MLP (Llama), their outputs (OLMo 2), or both (Gemma)."""

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """``kind`` is ``default``, ``linear``, ``llama3``, ``yarn`` or ``longrope``; the other fields are as in Hugging
    Face's config.

    ``attention_factor`` multiplies cosines and sines. ``short_factors`` and ``long_factors`` (one number per pair of
    dimensions) are those of ``longrope``; `ModelShape.uses_long_rope` tells which of them count.
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embeddings: the base of the frequencies, and their scaling."""

    theta: float
    scaling: RopeScaling = RopeScaling()


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of the MLP: ``per_token`` of ``count`` experts, each an MLP of
    ``intermediate_size``, compute a token. A softmax over all experts weighs them."""

    count: int
    per_token: int
    intermediate_size: int
    normalized: bool = True  # the weights of a token's experts are divided by their sum
    dense_layers: tuple[int, ...] = ()  # the layers with a plain MLP instead


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder of one of `checkpoints.families.architectures`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...] = field(default=())
    # ``qkv_bias``, ``out_bias``, ``mlp_bias``: which products have biases
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    # queries and keys are normed before rope, per head, or over all heads if ``qk_norm_spans_heads``
    qk_norm: bool = False
    # one entry per layer, or empty if no layer has a sliding window. With a window of w a token sees itself and the
    # w - 1 tokens before it; with None it sees all tokens before it.
    windows: tuple[int | None, ...] = ()
    qk_norm_spans_heads: bool = False
    norms: Norms = "before"  # where a layer norms its hidden states
    norm_offset: float = 0.0  # added to the weights of all norms
    activation: Activation = "silu"
    local_rope: Rope | None = None  # the rope of the layers with a window (None: that of all layers)
    partial_rotary_dim: int | None = None  # the first dimensions of each head, which rope turns (None: all)
    score_scale: float | None = None  # factor of attention's scores (None: ``head_dim ** -0.5``)
    # ``attention_softcap``, ``final_softcap``: scores, or logits, x become ``cap * tanh(x / cap)`` (None: they stay)
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0  # factor of the embeddings in the model's input
    experts: Experts | None = None  # the mixture of experts in place of MLPs (None: there is none)
    quantization: Quantization | None = None  # how the checkpoint stores its matrices (None: in ``dtype``)

    @property
    def attention(self) -> str:
        """MHA, GQA or MQA, by the number of KV heads."""
        if self.num_kv_heads == self.num_heads:
            return "MHA"
        return "MQA" if self.num_kv_heads == 1 else "GQA"

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of each layer (None: all tokens are seen)."""
        return self.windows or (None,) * self.num_layers

    @property
    def attention_scale(self) -> float:
        """The factor of attention's scores."""
        return self.head_dim**-0.5 if self.score_scale is None else self.score_scale

    @property
    def rope(self) -> Rope:
        """The rope of the layers without a window, and of the others if they have none of their own."""
        return Rope(self.rope_theta, self.rope_scaling)

    @property
    def layer_ropes(self) -> tuple[Rope, ...]:
        """The rope of each layer."""
        return tuple(self.rope if w is None or self.local_rope is None else self.local_rope for w in self.layer_windows)

    @property
    def rotary_dim(self) -> int:
        """Dimensions of each head that rope turns."""
        return self.head_dim if self.partial_rotary_dim is None else self.partial_rotary_dim

    def check_context(self, max_model_len: int | None) -> None:
        """`ConfigError` if a service is to accept longer requests than the model was made for."""
        if max_model_len is not None and max_model_len > self.max_position_embeddings:
            raise ConfigError(
                f"engine.max_model_len: {max_model_len} exceeds the model's context of {self.max_position_embeddings} "
                "tokens"
            )

    def uses_long_rope(self, max_model_len: int) -> bool:
        """Whether a service of requests of up to ``max_model_len`` tokens takes longrope's long factors, for all
        positions of all requests."""
        scaling = self.rope_scaling
        return scaling.kind == "longrope" and max_model_len > scaling.original_max_position_embeddings

    def has_experts(self, layer: int) -> bool:
        """Whether ``layer`` has a mixture of experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def layer_matrices(self) -> int:
        """Number of weights in the matrices of one layer; with experts, the mean over the layers."""
        return self._attention_matrices + self._mlps() // self.num_layers

    @property
    def active_layer_matrices(self) -> int:
        """Number of weights that one token is multiplied with in a layer: as `layer_matrices`, with the experts of one
        token only."""
        return self._attention_matrices + self._mlps(active=True) // self.num_layers

    @property
    def num_parameters(self) -> int:
        """Number of all weights; a tied head counts once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return (
            embeddings + self._mlps() + self.num_layers * (self._attention_matrices + self._vectors) + self.hidden_size
        )

    @property
    def active_parameters(self) -> int:
        """Number of weights that compute one token: `num_parameters` without the experts that it does not use."""
        return self.num_parameters - self._mlps() + self._mlps(active=True)

    @property
    def _attention_matrices(self) -> int:
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return self.hidden_size * (q_size + 2 * kv_size) + q_size * self.hidden_size

    @property
    def _vectors(self) -> int:
        """Weights of the biases and norms of one layer."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        vectors = (4 if self.norms == "around" else 2) * self.hidden_size
        vectors += (q_size + 2 * kv_size) * self.qkv_bias + self.hidden_size * self.out_bias
        vectors += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        return vectors + (q_size + kv_size if self.qk_norm_spans_heads else 2 * self.head_dim) * self.qk_norm

    @property
    def _expert_layers(self) -> int:
        return sum(map(self.has_experts, range(self.num_layers)))

    def _mlps(self, active: bool = False) -> int:
        """Weights of all MLPs; of experts all, or those that are ``active`` for one token."""
        plain = 3 * self.hidden_size * self.intermediate_size
        mixed = 0
        if self.experts is not None:
            computing = self.experts.per_token if active else self.experts.count
            mixed = self.hidden_size * (self.experts.count + 3 * computing * self.experts.intermediate_size)
        return (self.num_layers - self._expert_layers) * plain + self._expert_layers * mixed

    def weight_bytes(self, dtype: str, keep_fp8: bool = False) -> int:
        """Bytes of all weights in ``dtype``. With ``keep_fp8`` those that the checkpoint stores in FP8, with scales per
        row, take one byte each, and their scales four; all layers count as quantized, whatever the checkpoint
        ignores."""
        if not keep_fp8 or self.quantization is None or not self.quantization.fp8_rows:
            return self.num_parameters * DTYPE_BYTES[dtype]
        routers = 0
        if self.experts is not None:
            routers = self._expert_layers * self.experts.count * self.hidden_size
        quantized = self.num_layers * self._attention_matrices - routers + self._mlps()
        scales = quantized // self.hidden_size
        return (self.num_parameters - quantized) * DTYPE_BYTES[dtype] + quantized + 4 * scales

    def kv_bytes_per_token(self, dtype: str, num_kv_heads: int | None = None) -> int:
        """Bytes of one token's keys and values in all layers. ``num_kv_heads`` replaces the model's own number."""
        heads = self.num_kv_heads if num_kv_heads is None else num_kv_heads
        return 2 * self.num_layers * heads * self.head_dim * DTYPE_BYTES[dtype]
