"""A decoder's shape as arithmetic: parameters, weight bytes, KV bytes per token. Read from a Hugging Face config.

No torch here: the engine builds the model from this, `pdserve model-info` only counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from core.errors import ModelError
from core.kv_layout import DTYPE_BYTES

SUPPORTED = ("LlamaForCausalLM",)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """``kind`` is ``default``, ``linear`` or ``llama3``; the other fields are Hugging Face's of the same meaning."""

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Llama-family decoder."""

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

    @property
    def attention(self) -> str:
        """MHA, GQA or MQA, by the number of KV heads."""
        if self.num_kv_heads == self.num_heads:
            return "MHA"
        return "MQA" if self.num_kv_heads == 1 else "GQA"

    @property
    def layer_parameters(self) -> int:
        """Weights of one decoder layer: attention, MLP, two norms."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (q_size + 2 * kv_size) + q_size * self.hidden_size
        return attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All weights; a tied head counts once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * self.layer_parameters + self.hidden_size

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all weights in ``dtype``."""
        return self.num_parameters * DTYPE_BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str, num_kv_heads: int | None = None) -> int:
        """Bytes of one token's K and V in all layers, as it is or with another number of KV heads."""
        heads = self.num_kv_heads if num_kv_heads is None else num_kv_heads
        return 2 * self.num_layers * heads * self.head_dim * DTYPE_BYTES[dtype]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], origin: str) -> ModelShape:
        """Read a ``config.json``. `ModelError` names ``origin`` and the key that is missing, wrong or unsupported."""

        def need(key: str) -> int:
            value = config.get(key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ModelError(f"{origin}: '{key}' must be a positive whole number, got {value!r}")
            return value

        architecture = (config.get("architectures") or ["?"])[0]
        if architecture not in SUPPORTED:
            raise ModelError(f"{origin}: architecture {architecture!r} is not supported; supported: {list(SUPPORTED)}")
        for key in ("attention_bias", "mlp_bias"):
            if config.get(key):
                raise ModelError(f"{origin}: '{key}' is set; models with biases are not supported yet")
        if config.get("hidden_act", "silu") != "silu":
            raise ModelError(f"{origin}: 'hidden_act' must be 'silu', got {config['hidden_act']!r}")
        num_heads = need("num_attention_heads")
        hidden_size = need("hidden_size")
        num_kv_heads = num_heads if config.get("num_key_value_heads") is None else need("num_key_value_heads")
        if config.get("head_dim") is None and hidden_size % num_heads:
            raise ModelError(
                f"{origin}: 'hidden_size' {hidden_size} is no multiple of {num_heads} heads and there is no 'head_dim'"
            )
        if num_heads % num_kv_heads:
            raise ModelError(f"{origin}: {num_heads} attention heads do not divide by {num_kv_heads} KV heads")
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        eos = config.get("eos_token_id")
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise ModelError(f"{origin}: dtype {dtype!r} is not supported; supported: {sorted(DTYPE_BYTES)}")
        return cls(
            architecture=architecture,
            vocab_size=need("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=need("intermediate_size"),
            num_layers=need("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=hidden_size // num_heads if config.get("head_dim") is None else need("head_dim"),
            max_position_embeddings=need("max_position_embeddings"),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            rope_scaling=_rope_scaling(rope, origin),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            dtype=dtype,
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        )


def _rope_scaling(rope: Mapping[str, Any], origin: str) -> RopeScaling:
    def need(key: str) -> float:
        value = rope.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise ModelError(f"{origin}: '{key}' of {kind} rope scaling must be a positive number, got {value!r}")
        return float(value)

    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind, need("factor"))
    if kind == "llama3":
        return RopeScaling(
            kind,
            need("factor"),
            need("low_freq_factor"),
            need("high_freq_factor"),
            int(need("original_max_position_embeddings")),
        )
    raise ModelError(f"{origin}: rope scaling {kind!r} is not supported; supported: default, linear, llama3")
