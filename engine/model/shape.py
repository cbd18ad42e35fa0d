"""The shape of a decoder, and its sizes: parameters, weight bytes, KV bytes per token.

`engine.model.hf_config` reads it, the engine builds the model from it, and `pdserve model-info` prints its sizes. Does
not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.core.kv_layout import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """``kind`` is ``default``, ``linear`` or ``llama3``; the other fields are as in Hugging Face's config."""

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder of the Llama family.

    ``qkv_bias``, ``out_bias``, ``mlp_bias``: which products have biases.
    ``qk_norm``: queries and keys are normed per head before rope.
    ``windows``: one entry per layer, or empty if no layer has a sliding window. With a window of w a token sees itself
    and the w - 1 tokens before it; with None it sees all tokens before it.
    """

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
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()

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
    def layer_matrices(self) -> int:
        """Number of weights in the matrices of one layer."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (q_size + 2 * kv_size) + q_size * self.hidden_size
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def layer_parameters(self) -> int:
        """Number of weights of one layer: matrices, biases and norms."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        vectors = 2 * self.hidden_size
        vectors += (q_size + 2 * kv_size) * self.qkv_bias + self.hidden_size * self.out_bias
        vectors += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        vectors += 2 * self.head_dim * self.qk_norm
        return self.layer_matrices + vectors

    @property
    def num_parameters(self) -> int:
        """Number of all weights; a tied head counts once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * self.layer_parameters + self.hidden_size

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all weights in ``dtype``."""
        return self.num_parameters * DTYPE_BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str, num_kv_heads: int | None = None) -> int:
        """Bytes of one token's keys and values in all layers. ``num_kv_heads`` replaces the model's own number."""
        heads = self.num_kv_heads if num_kv_heads is None else num_kv_heads
        return 2 * self.num_layers * heads * self.head_dim * DTYPE_BYTES[dtype]
