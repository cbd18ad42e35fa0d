"""Reads the rope settings of a Hugging Face ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from checkpoints.config_fields import ConfigFields
from checkpoints.families import Family
from checkpoints.shape import Rope, RopeScaling

KINDS = ("default", "linear", "llama3", "yarn", "longrope")
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_ropes(fields: ConfigFields, family: Family) -> tuple[Rope, Rope | None]:
    """The rope of the model, and that of its layers with a window if the family has one of its own for them."""
    key = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    given = dict(fields.object(key))
    nested = [name for name, value in given.items() if isinstance(value, Mapping)]
    if family.local_rope_theta is None:
        if nested:
            raise fields.error(f"'{key}' has settings of its own for {nested[0]!r}; all layers must have the same rope")
        return _rope(given, fields, family, family.rope_theta), None
    local_theta = fields.values.get("rope_local_base_freq") or family.local_rope_theta
    main, local = (given.get(_FULL) or {}, given.get(_SLIDING) or {}) if nested else (given, {})
    return (
        _rope(dict(main), fields, family, family.rope_theta),
        _rope({"rope_theta": local_theta, **local}, fields, family, family.local_rope_theta),
    )


def read_rotary_dim(fields: ConfigFields, family: Family, head_dim: int) -> int | None:
    """The dimensions of each head that rope turns; None: all of them."""
    key = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    factor = fields.object(key).get("partial_rotary_factor", fields.values.get("partial_rotary_factor"))
    if factor in (None, 1):
        return None
    if not family.partial_rope:
        raise fields.error(f"'partial_rotary_factor' {factor!r} is not supported; rope turns whole heads")
    rotary_dim = int(head_dim * fields.as_positive(factor, "'partial_rotary_factor'"))
    if rotary_dim % 2 or not 0 < rotary_dim < head_dim:
        raise fields.error(
            f"'partial_rotary_factor' {factor!r} makes rope turn {rotary_dim} of {head_dim} dimensions of a head; it "
            "must be an even number of them"
        )
    return rotary_dim


def _rope(rope: dict[str, Any], fields: ConfigFields, family: Family, theta: float) -> Rope:
    if "original_max_position_embeddings" in fields.values:
        rope["original_max_position_embeddings"] = fields.values["original_max_position_embeddings"]
    theta = fields.as_positive(rope.get("rope_theta") or fields.values.get("rope_theta") or theta, "'rope_theta'")
    return Rope(theta, _scaling(rope, fields, family))


def _scaling(rope: Mapping[str, Any], fields: ConfigFields, family: Family) -> RopeScaling:
    def need(key: str, default: float | None = None) -> float:
        return fields.as_positive(rope.get(key, default), f"'{key}' of {kind} rope scaling")

    kind = rope.get("rope_type") or rope.get("type") or "default"
    if family.partial_rope and kind in ("su", "yarn"):  # Phi-3's first names
        kind = "longrope"
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
    if kind == "yarn":
        return _yarn(rope, fields)
    if kind == "longrope" and family.partial_rope:
        return _longrope(rope, fields)
    raise fields.error(
        f"'rope_type': rope scaling {kind!r} is not supported; supported: {', '.join(KINDS[:-1])} (longrope for Phi-3)"
    )


def _yarn(rope: Mapping[str, Any], fields: ConfigFields) -> RopeScaling:
    def need(key: str, default: float | None = None) -> float:
        return fields.as_positive(rope.get(key) or default, f"'{key}' of yarn rope scaling")

    def magnitude(scale: float, mscale: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0

    factor = need("factor")
    factor_of_attention = magnitude(factor, 1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        factor_of_attention = magnitude(factor, need("mscale")) / magnitude(factor, need("mscale_all_dim"))
    truncate = rope.get("truncate", True)
    if not isinstance(truncate, bool):
        raise fields.error(f"'truncate' of yarn rope scaling must be true or false, got {truncate!r}")
    return RopeScaling(
        "yarn",
        factor,
        original_max_position_embeddings=int(
            need("original_max_position_embeddings", fields.count("max_position_embeddings"))
        ),
        attention_factor=need("attention_factor", factor_of_attention),
        beta_fast=need("beta_fast", 32.0),
        beta_slow=need("beta_slow", 1.0),
        truncate=truncate,
    )


def _longrope(rope: Mapping[str, Any], fields: ConfigFields) -> RopeScaling:
    longest = fields.count("max_position_embeddings")
    original = int(
        fields.as_positive(
            rope.get("original_max_position_embeddings") or 4096,
            "'original_max_position_embeddings' of longrope rope scaling",
        )
    )
    factor = fields.as_positive(rope.get("factor") or longest / original, "'factor' of longrope rope scaling")
    default = 1.0 if factor <= 1 or original <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    attention_factor = fields.as_positive(
        rope.get("attention_factor") or default, "'attention_factor' of longrope rope scaling"
    )
    factors: list[tuple[float, ...]] = []
    for key in ("short_factor", "long_factor"):
        given = rope.get(key)
        if not isinstance(given, list) or not given:
            raise fields.error(f"'{key}' of longrope rope scaling must be a list of numbers, got {given!r}")
        factors.append(tuple(fields.as_positive(value, f"'{key}' of longrope rope scaling") for value in given))
    return RopeScaling(
        "longrope",
        factor,
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
        short_factors=factors[0],
        long_factors=factors[1],
    )
