"""OLMo 3: OLMo 2 with windows, whose layers are turned by a rope of their own."""

from __future__ import annotations

from checkpoints.families import Family

OLMO3 = Family(
    reads_attention_bias=True,
    qk_norm=True,
    qk_norm_spans_heads=True,
    norms="after",
    rms_norm_eps=1e-5,
    window="pattern",
    window_pattern=4,
    rope_theta=5e5,
    local_rope_theta=5e5,
)
